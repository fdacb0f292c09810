"""MarianMT translators as Hugging Face keeps them: post-norm, sinusoids in halves, with one vocabulary or two."""

import re
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint.formats.adapter import ACTIVATIONS, Adapter, Renames, spelt
from clearhead.checkpoint.formats.fields import Fields
from clearhead.checkpoint.formats.tables import ROW, Entry, Table, under
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model.positions import sinusoidal_positions

ATTENTION: Table = {
    "query.*": "q_proj.*",
    "key.*": "k_proj.*",
    "value.*": "v_proj.*",
    "output.*": "out_proj.*",
}
TABLE: Table = {
    **under("*.layers.*.attention", "model.*.layers.*.self_attn", ATTENTION),
    "*.layers.*.attention_norm.*": "model.*.layers.*.self_attn_layer_norm.*",
    **under("*.layers.*.cross_attention", "model.*.layers.*.encoder_attn", ATTENTION),
    "*.layers.*.cross_norm.*": "model.*.layers.*.encoder_attn_layer_norm.*",
    "*.layers.*.feed_forward.up.*": "model.*.layers.*.fc1.*",
    "*.layers.*.feed_forward.down.*": "model.*.layers.*.fc2.*",
    "*.layers.*.feed_forward_norm.*": "model.*.layers.*.final_layer_norm.*",
    "heads.lm_head.proj.weight": "lm_head.weight",
    "heads.lm_head.proj.bias": Entry("final_logits_bias", ROW),
}
SHARED: Table = {f"{stack}.embedding.tokens.weight": "model.shared.weight" for stack in ("encoder", "decoder")}
APART: Table = {"*.embedding.tokens.weight": "model.*.embed_tokens.weight"}


def table(config: ModelConfig) -> Table:
    """One matrix for both languages has a name of its own."""
    return {**(SHARED if config.tie == "all" else APART), **TABLE}


def ours(fields: Fields, names: Set[str]) -> ModelConfig:
    """Both stacks must be of one shape, as ours are."""
    for key in ("attention_heads", "ffn_dim"):
        if fields.whole(f"encoder_{key}") != fields.whole(f"decoder_{key}"):
            raise UserError(f"{fields.where}: decoder_{key}: stacks that differ in it cannot be represented here")
    fields.must("static positions that are learned", "static_position_embeddings", True)
    fields.must("another place of the norm", "normalize_before", False)
    fields.must("a norm behind the embedding", "normalize_embedding", False)
    fields.must("a closing norm", "add_final_layer_norm", False)
    fields.must("biases of its own", "add_bias_logits", False)
    fields.must("an encoder that looks back only", "is_decoder", False)
    fields.ignore("activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std", "num_hidden_layers")
    fields.ignore("classif_dropout", "classifier_dropout", "extra_pos_embeddings", "force_bos_token_to_be_generated")
    fields.ignore("num_beams", "max_length", "id2label", "label2id", "num_labels", "bad_words_ids")
    fields.must("an output matrix of its own", "tie_word_embeddings", True)
    fields.must("a first word that is given", "forced_bos_token_id")
    size = fields.whole("vocab_size")
    vocabulary: dict[str, Any] = {"vocab_size": size, "tie": "all"}
    target = fields.whole("decoder_vocab_size", size)
    if not fields.flag("share_encoder_decoder_embeddings", True):
        vocabulary = {"source_vocab_size": size, "target_vocab_size": target, "tie": "output"}
    settings: dict[str, Any] = {
        "family": "encoder-decoder",
        "encoder_layers": fields.whole("encoder_layers"),
        "decoder_layers": fields.whole("decoder_layers"),
        "dim": fields.whole("d_model"),
        "heads": fields.whole("encoder_attention_heads"),
        "ff_dim": fields.whole("encoder_ffn_dim"),
        "activation": spelt(fields, "activation_function", "gelu"),
        "norm_position": "post",
        "norm_eps": 1e-5,  # the default of torch.nn.LayerNorm; their config does not say
        "dropout": fields.number("dropout", 0.1),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "position": "sinusoidal",
        "sinusoid": "halves",
        "max_positions": fields.whole("max_position_embeddings", 1024),
        "scale_embedding": fields.flag("scale_embedding", False),
        "output_bias": True,
        "init": "xavier",
    }
    return ModelConfig.build(settings | vocabulary, where=str(fields.where))


def theirs(config: ModelConfig) -> dict[str, Any]:
    """The same in their words."""
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
        "activation_function": ACTIVATIONS.get(config.activation, "gelu"),
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "max_position_embeddings": config.max_positions,
        "scale_embedding": config.scale_embedding,
    }


def renames(config: ModelConfig) -> Renames:
    """Older files repeat the shared matrix under the name of each stack."""
    return ((r"^model\.(encoder|decoder)\.embed_tokens\.", "model.shared."),) if config.tie == "all" else ()


def check_positions(config: ModelConfig, found: Mapping[str, Tensor], where: object) -> None:
    """Older files hold the positions, which we compute: they must be the sinusoids."""
    for name, tensor in found.items():
        if not re.fullmatch(POSITIONS, name):
            continue
        expected = sinusoidal_positions(
            torch.arange(tensor.shape[0] if tensor.dim() else 0), config.dim, config.sinusoid
        )
        if tensor.shape != expected.shape or not torch.allclose(tensor.float(), expected, atol=ROUNDING):
            raise UserError(f"{where}: {name}: positions other than sinusoids cannot be represented here")


POSITIONS = r"model\.(encoder|decoder)\.embed_positions\.weight"
ROUNDING = 0.01  # of the angles of far positions, and of half precision
MARIAN = Adapter("MarianMT", ("marian",), "encoder-decoder", table, ours, theirs, renames, (POSITIONS,))
