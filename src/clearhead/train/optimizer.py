"""Gradients to updates: which parameters learn, which decay, and how far one step may go."""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from clearhead.config.train import OptimizerConfig
from clearhead.errors import UserError


def build_optimizer(network: nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer of all parameters that learn; its rate is 0 until `set_rate`.

    Matrices decay, embeddings among them, biases and norms do not; a tied matrix is one parameter. Without decay,
    AdamW is Adam. The fused form updates all tensors in one pass, 4 to 6 times as fast as the others on a CPU.
    """
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    on_gpu = learning[0].device.type == "cuda"  # there the rate is a tensor, which a recorded step reads anew
    return torch.optim.AdamW(
        [
            {"params": [p for p in learning if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in learning if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=torch.zeros((), device=learning[0].device) if on_gpu else 0.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
        capturable=on_gpu,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Make the next update one at this learning rate."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def freeze(network: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Stop the parameters that match a pattern (`encoder.*`, `*.embedding.*`) from learning; returns their names.

    A tied matrix goes by each of its names, and freezing it under one freezes it under all.
    """
    named = dict(network.named_parameters(remove_duplicate=False))
    chosen: dict[str, nn.Parameter] = {}
    for pattern in patterns:
        found = {name: parameter for name, parameter in named.items() if fnmatchcase(name, pattern)}
        if not found:
            raise UserError(f"freeze: {pattern!r} matches no parameter; {_near(pattern, network)}")
        chosen |= found
    frozen = set(chosen.values())
    if not any(parameter.requires_grad and parameter not in frozen for parameter in named.values()):
        raise UserError("freeze: nothing would be left to train; remove a pattern")
    for parameter in frozen:
        parameter.requires_grad_(False)
    return list(chosen)


def _near(pattern: str, network: nn.Module) -> str:
    """What the user may have meant: parameters, and whole parts as `part.*`."""
    known = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    known += [f"{name}.*" for name, part in network.named_modules() if name and any(True for _ in part.parameters())]
    close = difflib.get_close_matches(pattern, known, n=3)
    parts = [f"{name}.*" for name, _ in network.named_children()]
    return f"did you mean {' or '.join(close)}?" if close else f"the largest parts are {', '.join(parts)}"


def clip_grad_norm(parameters: Iterable[nn.Parameter], norm: float | None) -> Tensor:
    """Shorten all gradients together to a length of at most `norm`; returns the length they had, a scalar tensor.

    A length that is not finite says that the update must not be made; None shortens nothing. Gradients spread over
    processes count whole.
    """
    learning = [parameter for parameter in parameters if parameter.grad is not None]
    total = get_total_norm([parameter.grad for parameter in learning if parameter.grad is not None])
    if isinstance(total, DTensor):
        total = total.full_tensor()
    # Most gradients are short enough, and times 1 is all the same; a GPU would have to be waited for to know.
    if norm is not None and (total.device.type != "cpu" or not norm / (total + 1e-6) >= 1):
        clip_grads_with_norm_(learning, norm, total)
    return total
