"""LoRA adapters as peft reads them.   R rank · N outputs · K inputs"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.checkpoint import disk
from clearhead.checkpoint.formats.huggingface import PEFT_CONFIG, matching_adapter
from clearhead.checkpoint.formats.name_table import SAME, TRANSPOSED, find_entry
from clearhead.checkpoint.tensors import save_tensors
from clearhead.config import ModelConfig
from clearhead.config.train import LoraConfig
from clearhead.errors import UserError

WEIGHTS = "adapter_model.safetensors"
TASK_TYPES = {"lm": "CAUSAL_LM", "classes": "SEQ_CLS", "tags": "TOKEN_CLS", "span": "QUESTION_ANS"}


class LoraAdapter(NamedTuple):
    """Low-rank updates by our names of their layers, A (R, K) and B (N, R), and weights trained as a whole."""

    settings: LoraConfig
    base: str
    source: str  # hf:organization/name@commit, where the base was downloaded
    imported: str  # the class of the base in transformers
    updates: dict[str, tuple[Tensor, Tensor]]
    whole: dict[str, Tensor]


def write_adapter(folder: Path, config: ModelConfig, adapter: LoraAdapter) -> None:
    """Write the folder of an adapter; the base must have an architecture of transformers."""
    table = matching_adapter(config, adapter.imported).table(config)
    parts: dict[str, dict[int, tuple[Tensor, Tensor]]] = defaultdict(dict)
    transposed = False
    for name, pair in adapter.updates.items():
        entry = find_entry(f"{name}.weight", table)
        if entry is None or entry.layout not in (SAME, TRANSPOSED):
            raise UserError(f"{name}: an update of this layer has no form in peft")
        parts[entry.name.removesuffix(".weight")][entry.part] = pair
        transposed |= entry.layout is TRANSPOSED
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for module, pairs in parts.items():
        a, b = _fused([pairs[number] for number in sorted(pairs)])
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        ranks[module] = len(a)
    whole = {_foreign_name(name, table): tensor for name, tensor in adapter.whole.items()}
    tensors |= {f"base_model.model.{name}": tensor for name, tensor in whole.items()}
    rank, alpha = adapter.settings.rank, adapter.settings.alpha
    patterns = {module: count for module, count in ranks.items() if count != rank}  # of fused layers
    repository, _, commit = adapter.source.removeprefix("hf:").partition("@")
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": next((TASK_TYPES[name] for name in config.outputs if name in TASK_TYPES), None),
        "base_model_name_or_path": repository or adapter.base,
        "revision": commit or None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": adapter.settings.dropout,
        "rank_pattern": patterns,
        "alpha_pattern": {module: alpha / rank * count for module, count in patterns.items()},  # the same scale
        "target_modules": sorted(ranks),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in whole}) or None,
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
    }
    if config.family != "decoder" and settings["task_type"] == "CAUSAL_LM":
        settings["task_type"] = "SEQ_2_SEQ_LM" if config.family == "encoder-decoder" else None
    with disk.atomic_folder(folder) as temporary:
        disk.write_json(temporary / PEFT_CONFIG, settings)
        save_tensors(temporary / WEIGHTS, {name: tensor.contiguous() for name, tensor in tensors.items()})


def _fused(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the update of a fused layer: its parts share the input, and each has its own rows of the output."""
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([a for a, _ in pairs]), torch.block_diag(*[b for _, b in pairs])


def _foreign_name(name: str, table: Mapping[str, Any]) -> str:
    entry = find_entry(name, dict(table))
    if entry is None or entry.layout is not SAME:
        raise UserError(f"{name}: this weight has no form in peft")
    return entry.name
