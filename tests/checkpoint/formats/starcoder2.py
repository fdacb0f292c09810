"""An example of a new architecture: StarCoder2, a Llama with LayerNorm, biases and a plain feed-forward layer.

A file like this one, in src/clearhead/checkpoint/formats/, and a place in `ADAPTERS` of huggingface.py add import and
export; lines in `PEERS` of peers.py test them. docs/formats.md says more.
"""

from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats.adapter import TO_HF_ACTIVATION, Adapter, read_activation
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.llama import NAMES, renames, rope_settings
from clearhead.checkpoint.formats.name_table import NameTable, with_prefix
from clearhead.config import ModelConfig

# Our tensor names to theirs: `*` stands for one part of a name, such as a layer's number, or weight and bias.
TABLE: NameTable = {
    "decoder.embedding.tokens.weight": "model.embed_tokens.weight",
    **with_prefix(
        "decoder.layers.*",
        "model.layers.*",
        {
            "attention_norm.*": "input_layernorm.*",
            "attention.query.*": "self_attn.q_proj.*",
            "attention.key.*": "self_attn.k_proj.*",
            "attention.value.*": "self_attn.v_proj.*",
            "attention.output.*": "self_attn.o_proj.*",
            "feed_forward_norm.*": "post_attention_layernorm.*",
            "feed_forward.up.*": "mlp.c_fc.*",
            "feed_forward.down.*": "mlp.c_proj.*",
        },
    ),
    "decoder.norm.*": "model.norm.*",
    "heads.lm_head.proj.weight": "lm_head.weight",
}


def from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read their config.json. Every key is type-checked as it is read; what we do not support is refused by name."""
    fields.require("a model without biases", "use_bias", True)
    fields.require("another norm", "norm_type", "layer_norm")
    fields.ignore("residual_dropout", "embedding_dropout", "mlp_type")  # without effect on what a model computes
    settings: dict[str, Any] = {ours: fields.integer(theirs) for theirs, ours in NAMES.items()} | {
        "family": "decoder",
        "kv_heads": fields.integer("num_key_value_heads", 2),
        "activation": read_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        "norm_eps": fields.number("norm_epsilon", 1e-5),
        "position": "rotary",
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "tie": "output" if fields.flag("tie_word_embeddings", True) else "none",
    }
    if fields.has("sliding_window"):
        settings |= {"attention": "window", "window": fields.integer("sliding_window")}
    fields.ignore("sliding_window")
    return ModelConfig.build(settings | rope_settings(fields), where=str(fields.where))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return their config.json; whatever it cannot say is found by reading it back, and named in the error."""
    return {theirs: getattr(config, ours) for theirs, ours in NAMES.items()} | {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "num_key_value_heads": config.kv_heads,
        "hidden_act": TO_HF_ACTIVATION.get(config.activation, "gelu"),
        "norm_epsilon": config.norm_eps,
        "attention_dropout": config.attention_dropout,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta or 10_000.0},
        "sliding_window": config.window,
        "tie_word_embeddings": config.tie == "output",
        "use_bias": True,
    }


STARCODER2 = Adapter("Starcoder2", ("starcoder2",), "decoder", lambda _: TABLE, from_hf, to_hf, renames)
