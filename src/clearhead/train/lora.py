"""LoRA: low-rank updates of frozen linear layers (Hu et al. 2021).   R rank · N outputs · K inputs

A layer computes x (W + s·B·A)ᵀ with W (N, K) frozen and A (R, K) and B (N, R) trained; s is alpha / R. A saved model
has the update added to W, so that it is a model like any other; the adapter is saved beside it, for peft.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.checkpoint import LoadedModel
from clearhead.checkpoint.formats.peft_adapter import LoraAdapter, write_adapter
from clearhead.config import ModelConfig
from clearhead.config.train import LoraConfig
from clearhead.errors import UserError
from clearhead.model import Network
from clearhead.model.attention import Attention
from clearhead.model.feedforward import FeedForward

KINDS: dict[str, type[nn.Module]] = {"attention": Attention, "feed_forward": FeedForward}
A, B = "lora_a", "lora_b"


class LoraLinear(nn.Linear):
    """A linear layer with frozen weights and a low-rank update."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float
    lora_dropout: float

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N)."""
        update = F.linear(F.linear(F.dropout(x, self.lora_dropout, self.training), self.lora_a), self.lora_b)
        return F.linear(x, self.weight, self.bias) + self.lora_scale * update


@dataclass(frozen=True)
class Lora:
    """LoRA of a run: its settings, the model that it starts from, and the weights that are new and trained whole."""

    settings: LoraConfig
    base: str  # model.init_from
    source: str  # where the base was downloaded, with its commit
    imported: str  # its class in transformers
    fresh: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor of the updates."""
        return self.settings.alpha / self.settings.rank

    def merge(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of the plain network: every update is added to its matrix."""
        merged = {name: tensor for name, tensor in weights.items() if not name.endswith((A, B))}
        for name in _updated(weights):
            update = weights[f"{name}.{B}"].double() @ weights[f"{name}.{A}"].double() * self.scale
            weight = merged[f"{name}.weight"]
            merged[f"{name}.weight"] = (weight.double() + update).to(weight.dtype)
        return merged

    def save(self, folder: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        """Write the adapter as peft reads it."""
        pairs = {name: (weights[f"{name}.{A}"], weights[f"{name}.{B}"]) for name in _updated(weights)}
        whole = {name: weights[name] for name in self.fresh if name in weights}
        write_adapter(folder, config, LoraAdapter(self.settings, self.base, self.source, self.imported, pairs, whole))


def apply_lora(network: Network, settings: LoraConfig, initial: LoadedModel, base: str, fresh: Iterable[str]) -> Lora:
    """Freeze all weights but the fresh ones, and give the targeted layers a low-rank update, which starts at zero."""
    fresh = tuple(fresh)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in fresh)
    targets = tuple(KINDS[name] for name in settings.targets)
    for module in [module for module in network.modules() if isinstance(module, targets)]:
        for linear in [child for child in module.children() if isinstance(child, nn.Linear)]:
            _add_update(linear, settings)
    extra = initial.extra
    return Lora(settings, base, str(extra.get("source") or ""), str(extra.get("imported") or ""), fresh)


def _add_update(linear: nn.Linear, settings: LoraConfig) -> None:
    if settings.rank > min(linear.in_features, linear.out_features):
        raise UserError(
            f"train.lora.rank: {settings.rank} is more than the {min(linear.in_features, linear.out_features)} of the "
            "smallest layer; lower it"
        )
    linear.__class__ = LoraLinear
    assert isinstance(linear, LoraLinear)
    linear.lora_a = nn.Parameter(linear.weight.new_empty(settings.rank, linear.in_features))
    linear.lora_b = nn.Parameter(linear.weight.new_zeros(linear.out_features, settings.rank))
    nn.init.kaiming_uniform_(linear.lora_a, a=math.sqrt(5))
    linear.lora_scale, linear.lora_dropout = settings.alpha / settings.rank, settings.dropout


def _updated(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the layers that have an update."""
    return [name.removesuffix(f".{A}") for name in weights if name.endswith(f".{A}")]
