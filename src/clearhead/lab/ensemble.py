"""Train many small models at once: every seed and every learning rate of a variant, stacked with `torch.func.vmap`.

M members (learning rates × seeds) · S seeds · B batch · T tokens · V vocabulary

The model is the reference model of the package, with replaced parts where an experiment needs them; only the weights
have a leading dimension M. On a GPU one training step is a CUDA graph.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from clearhead.config import ModelConfig
from clearhead.model import build
from clearhead.ops.attention import attention_backend

log = logging.getLogger("clearhead")

IGNORE = -100
Batch = dict[str, Tensor]  # ids or source and target, their lengths, labels; first dimension: examples
Forward = Callable[[Batch], Tensor]
EVALUATION_TOKENS = 1 << 18  # tokens of all members evaluated at once


@dataclass(frozen=True)
class Variant:
    """One way to build and train the model: settings that differ from the base, or parts replaced by `change`."""

    name: str
    model: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], None] | None = None
    lrs: tuple[float, ...] | None = None  # None: those of the comparison
    warmup: float | None = None
    label_smoothing: float = 0.0
    build: Callable[[], nn.Module] | None = None  # instead of a model of the package
    inputs: Callable[[Forward, Batch], Batch] | None = None  # changes a training batch with the model's own output


@dataclass(frozen=True)
class Training:
    """Settings shared by the variants of a comparison."""

    steps: int
    batch: int = 32
    lrs: tuple[float, ...] = (1e-3, 3e-3)
    warmup: float = 0.1  # share of the steps
    grad_clip: float = 1.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)


def forward(network: nn.Module, batch: Batch) -> Tensor:
    """Return the logits (B, T, V) of a batch."""
    if "source" in batch:
        return network(batch["source"], batch["ids"], batch["source_lengths"], batch.get("lengths"))
    return network(batch["ids"], batch["lengths"]) if "lengths" in batch else network(batch["ids"])


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy over the labels that are not IGNORE."""
    counted = labels != IGNORE
    logprobs = logits.float().log_softmax(-1)
    loss = -logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    if label_smoothing:  # the target distribution is (1 - ε) · one-hot + ε / V
        loss = (1 - label_smoothing) * loss - label_smoothing * logprobs.mean(-1)
    return (loss * counted).sum() / counted.sum().clamp(min=1)


def token_metrics(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Loss, share of right tokens and share of rows that are right at every label."""
    counted = labels != IGNORE
    right = (logits.argmax(-1) == labels) & counted
    return {
        "loss": cross_entropy(logits, labels),
        "accuracy": right.sum() / counted.sum().clamp(min=1),
        "exact": (right | ~counted).all(-1).float().mean(),
    }


class Ensemble:
    """Models of one variant: stacked weights (M, …), one row for each learning rate and seed."""

    def __init__(self, config: ModelConfig | None, variant: Variant, seeds: Sequence[int], device: str):
        members = []
        for seed in seeds:
            torch.manual_seed(seed)
            if variant.build is not None:
                network = variant.build()
            else:
                assert config is not None
                network = build(config, "cpu")
            if variant.change is not None:
                variant.change(network)
            members.append(network)
        self.device, self.seeds = device, len(seeds)
        self.template = copy.deepcopy(members[0]).to(device)
        weights, buffers = stack_module_state(members)
        self.weights = {name: weight.detach().to(device) for name, weight in weights.items()}
        self.buffers = {name: buffer.to(device) for name, buffer in buffers.items()}
        self.parameters = sum(weight[0].numel() for weight in self.weights.values())

    def map(self, function: Callable[[Forward, Batch], Any], batch: Batch, shared: bool = True) -> Any:
        """Apply a function of (forward, batch) to every member, in evaluation mode; outputs get a dimension M."""
        self.template.eval()

        def apply(weights: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch) -> Any:
            return function(lambda inputs: self._call(weights, buffers, inputs), batch)

        with torch.no_grad(), attention_backend("reference"):
            return vmap(apply, (0, 0, None if shared else 0), randomness="different")(self.weights, self.buffers, batch)

    def _call(self, weights: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch) -> Tensor:
        return functional_call(_Forward(self.template), (_prefixed(weights), _prefixed(buffers)), (batch,))

    def evaluate(self, data: Batch) -> dict[str, list[float]]:
        """Loss, accuracy and exact rows of every member on a batch of any size."""
        data = to_device(data, self.device)
        rows, members = len(data["labels"]), len(next(iter(self.weights.values())))
        size = max(1, EVALUATION_TOKENS // (members * data["labels"].shape[1]))
        totals: dict[str, Tensor] = {}
        count = 0
        for start in range(0, rows, size):
            batch = {name: values[start : start + size] for name, values in data.items()}
            metrics = self.map(lambda forward, batch: token_metrics(forward(batch), batch["labels"]), batch)
            weight = len(batch["labels"])
            for name, values in metrics.items():
                totals[name] = totals.get(name, 0) + values.double() * weight
            count += weight
        means = {name: (total / count) for name, total in totals.items()}
        means["loss"] = means["loss"].nan_to_num(math.inf).clamp(max=100)  # diverged
        return {name: values.tolist() for name, values in means.items()}

    def select(self, learning_rate: int) -> None:
        """Keep the members of one learning rate."""
        rows = slice(learning_rate * self.seeds, (learning_rate + 1) * self.seeds)
        self.weights = {name: weight[rows].clone() for name, weight in self.weights.items()}
        self.buffers = {name: buffer[rows].clone() for name, buffer in self.buffers.items()}

    def network(self, seed: int) -> nn.Module:
        """Return the model of one seed as an ordinary module."""
        network = copy.deepcopy(self.template)
        with torch.no_grad():
            tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
            for name, values in {**self.weights, **self.buffers}.items():
                tensors[name].copy_(values[seed])
        return network.eval()

    def train(self, data: Batch, training: Training, variant: Variant, seeds: Sequence[int]) -> list[float]:
        """Train all members; seeds draw their own order of the data, and learning rates share it.

        Return the seconds of one member, measured as often as there are seeds: over successive parts of the steps.
        """
        lrs = variant.lrs or training.lrs
        self.weights = {name: _repeat(weight, len(lrs)) for name, weight in self.weights.items()}
        self.buffers = {name: _repeat(buffer, len(lrs)) for name, buffer in self.buffers.items()}
        data = to_device(data, self.device)
        order = torch.stack([_order(len(data["labels"]), training, seed) for seed in seeds], 1).to(self.device)
        lr = torch.tensor(lrs, device=self.device).repeat_interleave(self.seeds)  # (M,)
        warmup = training.warmup if variant.warmup is None else variant.warmup
        step = _Step(self, data, order.repeat(1, len(lrs), 1), lr, training, warmup, variant)
        self.template.train()
        torch.manual_seed(seeds[0])  # of dropout
        precision = torch.get_float32_matmul_precision()
        if order.is_cuda:  # TF32 for training; evaluation stays in fp32
            torch.set_float32_matmul_precision("high")
        try:
            with attention_backend("reference"):
                seconds = step.run(training.steps, self.seeds)
        finally:
            torch.set_float32_matmul_precision(precision)
        self.weights = {name: weight.detach() for name, weight in self.weights.items()}
        return [training.steps * each / len(lr) for each in seconds]


class _Step:
    """One AdamW step of all members, with everything it reads on the device, so that CUDA can replay it."""

    def __init__(
        self,
        ensemble: Ensemble,
        data: Batch,
        order: Tensor,
        lr: Tensor,
        training: Training,
        warmup: float,
        variant: Variant,
    ):
        self.ensemble, self.data, self.order, self.training = ensemble, data, order, training
        self.label_smoothing, self.inputs = variant.label_smoothing, variant.inputs
        members, device = len(lr), order.device
        sizes = {name: weight.numel() for name, weight in ensemble.weights.items()}
        self.flat = torch.cat([weight.flatten() for weight in ensemble.weights.values()])  # one tensor to update
        pieces = zip(ensemble.weights.items(), self.flat.split(list(sizes.values())), strict=True)
        ensemble.weights = {name: piece.view(weight.shape).requires_grad_() for (name, weight), piece in pieces}
        self.weights = list(ensemble.weights.values())
        self.member = torch.cat([torch.arange(members).repeat_interleave(size // members) for size in sizes.values()])
        self.member = self.member.int().to(device)
        self.lr = lr[self.member]
        matrix = [float(weight.dim() > 2) for weight in self.weights]  # (M, …, …): weight decay for these only
        decayed = torch.tensor(matrix).repeat_interleave(torch.tensor(list(sizes.values()))).to(device)
        self.decay = training.weight_decay * self.lr * decayed
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.schedule = _schedule(training, warmup).to(device)
        self.index = torch.zeros((), dtype=torch.long, device=device)

    def run(self, steps: int, parts: int) -> list[float]:
        """Run all steps; on a GPU as replays of a CUDA graph. Return the seconds of a step in each part of the run."""
        device = self.order.device
        first = 0 if device.type != "cuda" else min(steps, 3)
        for _ in range(first):
            self()
        advance: Callable[[], None] = self
        if 0 < first < steps:
            advance = self._captured()
        seconds = []
        for part in range(parts):
            begin, end = (first + (steps - first) * edge // parts for edge in (part, part + 1))
            start = time.perf_counter()
            for _ in range(begin, end):
                advance()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append((time.perf_counter() - start) / max(1, end - begin))
        return seconds

    def _captured(self) -> Callable[[], None]:
        """Return one step as a CUDA graph, or as it is if it cannot be captured."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self()
        except RuntimeError as error:
            log.warning("CUDA graph of the training step failed (%s); training without", str(error).splitlines()[0])
            torch.cuda.synchronize()
            return self
        return graph.replay

    def __call__(self) -> None:
        rows = self.order.index_select(0, self.index[None])[0]  # (M, B)
        batch = {name: values[rows] for name, values in self.data.items()}  # (M, B, …)

        def loss(weights: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch) -> Tensor:
            if self.inputs is not None:
                with torch.no_grad():
                    batch = self.inputs(lambda inputs: self.ensemble._call(weights, buffers, inputs), batch)
            return cross_entropy(self.ensemble._call(weights, buffers, batch), batch["labels"], self.label_smoothing)

        losses = vmap(loss, randomness="different")(self.ensemble.weights, self.ensemble.buffers, batch)
        gradients = list(torch.autograd.grad(losses.sum(), self.weights, materialize_grads=True))
        with torch.no_grad():
            self._update(gradients)
            self.index += 1

    def _update(self, gradients: list[Tensor]) -> None:
        beta1, beta2 = self.training.betas
        norms = torch._foreach_norm([row for gradient in gradients for row in gradient.unbind()])
        norm = torch.stack(norms).view(len(gradients), -1).norm(dim=0)  # (M,)
        scale = (self.training.grad_clip / norm.clamp(min=1e-6)).clamp(max=1)
        gradient = torch.cat([gradient.flatten() for gradient in gradients]).mul_(scale[self.member])
        self.mean.lerp_(gradient, 1 - beta1)
        self.square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        factor = self.schedule.index_select(0, self.index[None])[0]  # (3,)
        denominator = self.square.sqrt().mul_(factor[2]).add_(1e-8)
        self.flat.mul_(1 - self.decay * factor[1])
        self.flat.sub_((self.mean / denominator).mul_(self.lr).mul_(factor[0]))


class _Forward(nn.Module):
    """A module around a network, because `functional_call` calls modules."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> Tensor:
        return forward(self.network, batch)


def _prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"network.{name}": tensor for name, tensor in tensors.items()}


def _repeat(tensor: Tensor, times: int) -> Tensor:
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))


def _order(examples: int, training: Training, seed: int) -> Tensor:
    """Return the examples of each batch, (steps, B): epoch after epoch in an order drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)
    needed = training.steps * training.batch
    epochs = [torch.randperm(examples, generator=generator) for _ in range(-(-needed // examples))]
    return torch.cat(epochs)[:needed].view(training.steps, training.batch)


def _schedule(training: Training, warmup: float) -> Tensor:
    """Return of each step: the lr over the bias correction of the mean, the lr, and that of the square (steps, 3).

    The lr rises linearly and decays with a cosine to a tenth.
    """
    step = torch.arange(1, training.steps + 1, dtype=torch.float64)
    rise = (step / max(1.0, warmup * training.steps)).clamp(max=1)
    lr = rise * (0.55 + 0.45 * torch.cos(math.pi * step / training.steps))
    beta1, beta2 = training.betas
    return torch.stack([lr / (1 - beta1**step), lr, (1 - beta2**step).rsqrt()], 1).float()


def to_device(batch: Batch, device: str) -> Batch:
    """Move a batch to a device."""
    return {name: values.to(device) for name, values in batch.items()}


def greedy(forward: Forward, batch: Batch, start: int, length: int) -> Tensor:
    """Generate `length` tokens for every source of a batch, the most likely one at each step: (B, length)."""
    source = batch["source"]
    ids = torch.full((source.shape[0], length + 1), start, device=source.device)
    inputs = {name: batch[name] for name in ("source", "source_lengths")}
    for position in range(length):
        following = forward(inputs | {"ids": ids[:, :length]})[:, position].argmax(-1)
        ids = torch.cat([ids[:, : position + 1], following[:, None], ids[:, position + 2 :]], 1)
    return ids[:, 1:]


def one_hot(ids: Tensor, size: int) -> Tensor:
    """One-hot vectors in fp32."""
    return F.one_hot(ids, size).float()
