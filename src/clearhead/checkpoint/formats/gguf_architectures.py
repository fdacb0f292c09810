"""Architectures of GGUF files: tensor names, and the settings that only one of them has."""

from __future__ import annotations

from typing import Any, NamedTuple

from clearhead.checkpoint.formats.llama import LLAMA_SETTINGS
from clearhead.checkpoint.formats.name_table import SAME, Entry, NameTable, interleaved, with_prefix
from clearhead.config import ModelConfig

LAYER: NameTable = {
    "attention_norm.weight": "attn_norm.weight",
    "attention.query.weight": "attn_q.weight",
    "attention.key.weight": "attn_k.weight",
    "attention.value.weight": "attn_v.weight",
    "attention.output.weight": "attn_output.weight",
    "feed_forward_norm.weight": "ffn_norm.weight",
    "feed_forward.gate.weight": "ffn_gate.weight",
    "feed_forward.up.weight": "ffn_up.weight",
    "feed_forward.down.weight": "ffn_down.weight",
}
QWEN2: NameTable = {
    "attention.query.bias": "attn_q.bias",
    "attention.key.bias": "attn_k.bias",
    "attention.value.bias": "attn_v.bias",
}
QWEN3: NameTable = {
    "attention.query_norm.weight": "attn_q_norm.weight",
    "attention.key_norm.weight": "attn_k_norm.weight",
}
PHI3: NameTable = {
    "attention.query.weight": Entry("attn_qkv.weight", SAME, 0),
    "attention.key.weight": Entry("attn_qkv.weight", SAME, 1),
    "attention.value.weight": Entry("attn_qkv.weight", SAME, 2),
    "feed_forward.gate.weight": Entry("ffn_up.weight", SAME, 0),
    "feed_forward.up.weight": Entry("ffn_up.weight", SAME, 1),
}


class Architecture(NamedTuple):
    """A value of general.architecture."""

    name: str  # for people
    layer: NameTable  # of a layer, beyond LAYER
    settings: dict[str, Any]
    interleaved: bool = False  # llama.cpp stores rotary pairs next to each other


ARCHITECTURES = {
    "llama": Architecture("Llama", {}, LLAMA_SETTINGS, interleaved=True),
    "qwen2": Architecture("Qwen2", QWEN2, LLAMA_SETTINGS | {"qkv_bias": True}),
    "qwen3": Architecture("Qwen3", QWEN3, LLAMA_SETTINGS | {"qk_norm": True}),
    "phi3": Architecture("Phi-3", PHI3, LLAMA_SETTINGS),
}


def table(config: ModelConfig, architecture: str = "llama") -> NameTable:
    """Return the table of tensor names."""
    found = ARCHITECTURES[architecture]
    layer = LAYER | found.layer
    if found.interleaved:
        layer["attention.query.weight"] = Entry("attn_q.weight", interleaved(config.heads))
        layer["attention.key.weight"] = Entry("attn_k.weight", interleaved(config.kv_heads))
    return {
        "decoder.embedding.tokens.weight": "token_embd.weight",
        **with_prefix("decoder.layers.*", "blk.*", layer),
        "decoder.norm.weight": "output_norm.weight",
        "heads.lm_head.proj.weight": "output.weight",
    }


def architecture_of(config: ModelConfig) -> str:
    """Return the architecture to export a config as."""
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.qkv_bias and not config.bias else "llama"
