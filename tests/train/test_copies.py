"""Weight copies that replace a network's own in captured steps, and the choice of the current GPU."""

from typing import Any

import pytest
import torch

from clearhead.config import preset
from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.data import Batch
from clearhead.model import build
from clearhead.ops.adamw import FusedAdamW
from clearhead.train.cuda_graph import linear_parameters
from clearhead.train.distributed import DistContext, dist_context
from clearhead.train.objective import Objective
from clearhead.train.optimizer import build_optimizer, freeze
from clearhead.train.updater import Updater

SMALL = ["vocab_size=20", "dim=8", "heads=2", "ff_dim=12", "max_positions=16"]
SMALL += ["dropout=0.0", "attention_dropout=0.0"]
IDS = torch.arange(24).reshape(2, 12) % 19 + 1
SOURCE = {"source": IDS, "source_lengths": torch.tensor([12, 7]), "target_lengths": torch.tensor([9, 12])}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-gpt": ("language-model", {"ids": IDS, "labels": IDS.roll(-1, 1)}),
    "tiny-llama": ("language-model", {"ids": IDS, "labels": IDS.roll(-1, 1)}),
    "tiny-translator": ("translation", SOURCE | {"target": IDS, "labels": IDS.roll(-1, 1)}),
}


@pytest.mark.parametrize("name", CASES)
def test_weight_copies_receive_the_gradients_of_the_weights(name: str) -> None:
    task, tensors = CASES[name]
    torch.manual_seed(0)
    network = build(preset(name, SMALL)).double()
    settings = TrainConfig(steps=5, lr=0.1)
    objective = Objective(network, DataConfig(task=task, max_length=16, batch_tokens=64), settings).train()
    dist = DistContext(torch.device("cpu"))
    updater = Updater(objective, objective, build_optimizer(network, settings), settings, dist, torch.float64)
    batch, weights = Batch(tensors, 24), dict(objective.named_parameters())
    losses = updater.forward_backward(batch, {"lm": 24.0}, None)
    expected = {key: weight.grad.clone() for key, weight in weights.items() if weight.grad is not None}
    network.zero_grad()

    linear = linear_parameters(objective)
    layers = sum(len(stack.layers) for stack in (getattr(network, "encoder", None), network.decoder) if stack)
    assert len(linear) >= 6 * layers
    assert not any("norm" in key or "embedding" in key or "heads" in key for key in linear)
    copies = {key: weight.detach().clone().requires_grad_() for key, weight in linear.items()}
    again = updater.forward_backward(batch, {"lm": 24.0}, None, copies)
    torch.testing.assert_close(again["lm"].total, losses["lm"].total, atol=0, rtol=0)
    for key, weight in weights.items():
        assert key not in copies or weight.grad is None
        torch.testing.assert_close(copies.get(key, weight).grad, expected.get(key), atol=0, rtol=0)
    assert all(weights[key] is weight for key, weight in objective.named_parameters())


@pytest.mark.parametrize("frozen", [(), ("decoder.layers.*",)])
def test_refresh_copies_changed_weights(frozen: tuple[str, ...]) -> None:
    network = build(preset("tiny-gpt", SMALL))
    freeze(network, frozen)
    settings = TrainConfig(steps=5, lr=0.1)
    objective = Objective(network, DataConfig(task="language-model", max_length=16, batch_tokens=64), settings)
    adam = FusedAdamW(build_optimizer(network, settings), linear_parameters(objective), torch.bfloat16)
    assert bool(adam.bf16_weights) != bool(frozen)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    adam.refresh_copies()
    weights = dict(objective.named_parameters())
    assert all(torch.equal(copy, weights[name].bfloat16()) for name, copy in adam.bf16_weights.items())


def test_a_single_process_sets_the_current_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds, CUDA graphs and Triton kernels use the current device."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with dist_context("cuda:1") as dist:
        assert chosen == [dist.device] == [torch.device("cuda:1")]
