"""MarianMT translators of Hugging Face: post-norm, sines and cosines in halves, one shared vocabulary or two."""

import re
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint.formats.adapter import TO_HF_ACTIVATION, Adapter, Renames, read_activation
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.name_table import ROW, Entry, NameTable, with_prefix
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model.positions import sinusoidal_positions

ATTENTION: NameTable = {
    "query.*": "q_proj.*",
    "key.*": "k_proj.*",
    "value.*": "v_proj.*",
    "output.*": "out_proj.*",
}
TABLE: NameTable = {
    **with_prefix("*.layers.*.attention", "model.*.layers.*.self_attn", ATTENTION),
    "*.layers.*.attention_norm.*": "model.*.layers.*.self_attn_layer_norm.*",
    **with_prefix("*.layers.*.cross_attention", "model.*.layers.*.encoder_attn", ATTENTION),
    "*.layers.*.cross_norm.*": "model.*.layers.*.encoder_attn_layer_norm.*",
    "*.layers.*.feed_forward.up.*": "model.*.layers.*.fc1.*",
    "*.layers.*.feed_forward.down.*": "model.*.layers.*.fc2.*",
    "*.layers.*.feed_forward_norm.*": "model.*.layers.*.final_layer_norm.*",
    "heads.lm_head.proj.weight": "lm_head.weight",
    "heads.lm_head.proj.bias": Entry("final_logits_bias", ROW),
}
SHARED_EMBEDDING: NameTable = {
    f"{stack}.embedding.tokens.weight": "model.shared.weight" for stack in ("encoder", "decoder")
}
SEPARATE_EMBEDDINGS: NameTable = {"*.embedding.tokens.weight": "model.*.embed_tokens.weight"}


def table(config: ModelConfig) -> NameTable:
    """Return the table; a shared embedding has its own name."""
    return {**(SHARED_EMBEDDING if config.tie == "all" else SEPARATE_EMBEDDINGS), **TABLE}


def from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings of a MarianMT translator."""
    fields.require("pre-norm", "normalize_before", False)
    fields.require("a final norm", "add_final_layer_norm", False)
    size = fields.integer("vocab_size")
    vocabulary: dict[str, Any] = {"vocab_size": size, "tie": "all"}
    target = fields.integer("decoder_vocab_size", size)
    if not fields.flag("share_encoder_decoder_embeddings", True):
        vocabulary = {"source_vocab_size": size, "target_vocab_size": target, "tie": "output"}
    settings = read_settings(fields) | {"norm_position": "post"} | vocabulary
    return ModelConfig.build(settings, where=str(fields.where))


def read_settings(fields: Fields) -> dict[str, Any]:
    """Read what Marian and Pegasus share."""
    settings = stack_settings(fields)
    fields.require("learned positions", "static_position_embeddings", True)
    fields.require("an embedding norm", "normalize_embedding", False)
    fields.require("an untied output matrix", "tie_word_embeddings", True)
    return settings | {
        "position": "sinusoidal",
        "sinusoid": "halves",
        "max_positions": fields.integer("max_position_embeddings", 1024),
        "output_bias": True,
    }


def stack_settings(fields: Fields) -> dict[str, Any]:
    """Read the settings of both stacks, which must have the same dimensions, as in ours."""
    for key in ("attention_heads", "ffn_dim"):
        if fields.integer(f"encoder_{key}") != fields.integer(f"decoder_{key}"):
            raise UserError(f"{fields.where}: decoder_{key}: must equal encoder_{key}; other models are not supported")
    fields.require("add_bias_logits", "add_bias_logits", False)
    fields.require("a causal encoder", "is_decoder", False)
    fields.ignore("activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std", "num_hidden_layers")
    fields.ignore("classif_dropout", "classifier_dropout", "extra_pos_embeddings", "force_bos_token_to_be_generated")
    fields.ignore("num_beams", "max_length", "id2label", "label2id", "num_labels", "bad_words_ids")
    fields.ignore("forced_bos_token_id")  # see hf_tokenizer.special_ids
    return {
        "family": "encoder-decoder",
        "encoder_layers": fields.integer("encoder_layers"),
        "decoder_layers": fields.integer("decoder_layers"),
        "dim": fields.integer("d_model"),
        "heads": fields.integer("encoder_attention_heads"),
        "ff_dim": fields.integer("encoder_ffn_dim"),
        "activation": read_activation(fields, "activation_function", "gelu"),
        "norm_eps": 1e-5,  # the default of torch.nn.LayerNorm; not in their config
        "dropout": fields.number("dropout", 0.1),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "scale_embedding": fields.flag("scale_embedding", False),
        "init": "xavier",
    }


TWO_VOCABULARIES = ("decoder_vocab_size", "share_encoder_decoder_embeddings")  # keys that only Marian has


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    both = {"attention_heads": config.heads, "ffn_dim": config.ff_dim}
    return {f"{stack}_{key}": value for key, value in both.items() for stack in ("encoder", "decoder")} | {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": config.source_vocab,
        "decoder_vocab_size": config.target_vocab,
        "share_encoder_decoder_embeddings": config.tie == "all",
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "d_model": config.dim,
        "activation_function": TO_HF_ACTIVATION.get(config.activation, "gelu"),
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "max_position_embeddings": config.max_positions,
        "scale_embedding": config.scale_embedding,
    }


def to_halves(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reorder the hidden dimensions: interleaved sinusoids become halves, and the network computes the same."""
    if config.sinusoid == "halves":
        return tensors
    order = torch.arange(config.dim).view(-1, 2).t().flatten()  # the even dimensions, then the odd ones
    inputs = r".*(tokens|query|key|value|up|gate|lm_head\.proj)\.weight"  # the hidden dimension is their last one
    outputs = r".*((output|down)\.(weight|bias)|norm\.(weight|bias))"  # their first one
    reordered = {}
    for name, tensor in tensors.items():
        axis = 1 if re.fullmatch(inputs, name) else 0 if re.fullmatch(outputs, name) else None
        reordered[name] = tensor if axis is None else tensor.index_select(axis, order.to(tensor.device))
    return reordered


def renames(config: ModelConfig) -> Renames:
    """Older files repeat the shared embedding under the names of both stacks."""
    return ((r"^model\.(encoder|decoder)\.embed_tokens\.", "model.shared."),) if config.tie == "all" else ()


def check_positions(config: ModelConfig, tensors: Mapping[str, Tensor], where: object) -> None:
    """Check that position embeddings in older files are the sinusoids that we compute."""
    for name, tensor in tensors.items():
        if not re.fullmatch(POSITIONS, name):
            continue
        rows = tensor.numel() // config.dim  # the shape of an empty tensor may claim more
        expected = sinusoidal_positions(torch.arange(rows), config.dim, config.sinusoid)
        if tensor.shape != expected.shape or not torch.allclose(tensor.float(), expected, atol=POSITION_TOLERANCE):
            raise UserError(f"{where}: {name}: positions other than sinusoids are not supported")


POSITIONS = r"model\.(encoder|decoder)\.embed_positions\.weight"
POSITION_TOLERANCE = 0.01  # rounding of large angles, and of fp16
MARIAN = Adapter("MarianMT", ("marian",), "encoder-decoder", table, from_hf, to_hf, renames, (POSITIONS,))
