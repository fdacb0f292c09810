"""CTranslate2 export: translators and decoders in fp32, through the library's own specification."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint.export_advice import train_with
from clearhead.checkpoint.formats.ctranslate2 import TABLE
from clearhead.checkpoint.formats.hf_tokenizer import bos_ids, eos_ids, vocabulary_list
from clearhead.checkpoint.formats.name_table import NameTable, to_foreign
from clearhead.checkpoint.formats.optional_import import import_optional
from clearhead.checkpoint.model_folder import LoadedModel, write_tokenizers
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model.positions import sinusoidal_positions

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
ACTIVATIONS |= {"swiglu": ACTIVATIONS["silu"], "geglu": ACTIVATIONS["gelu"]}
GATED_TABLE: NameTable = {
    "*.layers.*.feed_forward.gate.*": "*/layer_*/ffn/linear_0/*",
    "*.layers.*.feed_forward.up.*": "*/layer_*/ffn/linear_0_noact/*",
}
BANNED_BIAS = -1e9  # output bias of tokens that are never generated


def write(loaded: LoadedModel, folder: Path) -> None:
    """Write a folder for ctranslate2.Translator or Generator, with our tokenizers."""
    config = loaded.config
    _check(config)
    if not loaded.tokenizers:
        raise UserError("export: CTranslate2 needs a tokenizer, which this model does not have")
    spec = _specification(config)
    tensors: dict[str, Tensor] = {name: tensor.float() for name, tensor in loaded.network.state_dict().items()}
    tensors |= _position_tables(config) | _banned_bias(loaded, tensors)
    for name in [name for name in tensors if name.endswith("embedding.positions.weight")]:
        tensors[name] = tensors[name][-config.max_positions :]
    table = {"encoder.embedding.tokens.weight": "encoder/embeddings_0/weight", **TABLE}
    table |= GATED_TABLE if config.is_gated else {}
    for name, tensor in to_foreign(table, tensors).items():
        _set_variable(spec, name, tensor)
    for stack in _stacks(spec, config):
        stack.scale_embeddings = config.scale_embedding
    _vocabulary(spec, loaded)
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(str(folder))
    write_tokenizers(folder, [tokenizer.engine for tokenizer in loaded.tokenizers])


def _check(config: ModelConfig) -> None:
    """Refuse models with settings that CTranslate2 does not support, naming them."""
    translator = config.family == "encoder-decoder"
    problems = {  # setting of this model: whether it is a problem, and the setting that is none
        f"family: {config.family}": (config.family == "encoder", ""),
        f"norm: {config.norm}": (config.norm == "batch", "model.norm=layer"),
        "bias: false, with layer norms": (not config.bias and config.norm == "layer", "model.bias=true"),
        "qk_norm: true": (config.qk_norm, "model.qk_norm=false"),
        f"qkv_bias: {str(config.qkv_bias).lower()}": (config.qkv_bias != config.bias, f"model.bias={config.qkv_bias}"),
        f"attention: {', '.join(config.attention)}": (config.attention != ("full",), "model.attention=full"),
        f"outputs: {', '.join(config.outputs)}": (config.outputs != ("lm",), "model.outputs=lm"),
        "embedding_norm: true": (config.embedding_norm, "model.embedding_norm=false"),
        "rope_scaling (it computes Llama 3's rule differently)": (config.rope_scaling is not None, ""),
        "position: rotary, in a translator": (translator and config.position == "rotary", "model.position=sinusoidal"),
        f"kv_heads: {config.kv_heads} of {config.heads}, in a translator": (
            translator and config.kv_heads != config.heads,
            f"model.kv_heads={config.heads}",
        ),
        f"head_dim: {config.head_dim}, not dim / heads": (
            config.heads * config.head_dim != config.dim,
            f"model.head_dim={config.dim // config.heads}",
        ),
    }
    if found := {name: change for name, (applies, change) in problems.items() if applies}:
        raise UserError(f"export: CTranslate2 does not support {'; '.join(found)}" + train_with([*found.values()]))


def _specification(config: ModelConfig) -> Any:
    specs = import_optional("ctranslate2.specs")
    activations = import_optional("ctranslate2.specs.common_spec").Activation
    common: dict[str, Any] = {
        "pre_norm": config.norm_position == "pre",
        "activation": getattr(activations, ACTIVATIONS[config.activation]),
        "ffn_glu": config.is_gated,
        "rms_norm": config.norm == "rms",
    }
    if config.family == "encoder-decoder":
        layers = (config.encoder_layers, config.decoder_layers)
        return specs.TransformerSpec.from_config(layers, config.heads, **common)
    if config.kv_heads != config.heads:
        common["num_heads_kv"] = config.kv_heads
    if config.position == "rotary":
        common |= {"rotary_dim": 0, "rotary_interleave": False, "rotary_base": config.rope_theta}
    return specs.TransformerDecoderModelSpec.from_config(config.decoder_layers, config.heads, **common)


def _stacks(spec: Any, config: ModelConfig) -> list[Any]:
    return [spec.encoder, spec.decoder] if config.family == "encoder-decoder" else [spec.decoder]


def _position_tables(config: ModelConfig) -> dict[str, Tensor]:
    """Return sinusoids as a table, since theirs differ; zeros for a model without positions."""
    if config.position in ("learned", "rotary"):
        return {}
    table = torch.zeros(config.max_positions, config.dim)
    if config.position == "sinusoidal":
        positions = torch.arange(config.max_positions) + config.position_offset
        table = sinusoidal_positions(positions, config.dim, config.sinusoid)
    stacks = ("encoder", "decoder") if config.family == "encoder-decoder" else ("decoder",)
    return {f"{stack}.embedding.positions.weight": table for stack in stacks}


def _banned_bias(loaded: LoadedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the output bias with banned tokens at a large negative value."""
    sequences = loaded.extra.get("banned_ids", ())
    if any(len(sequence) > 1 for sequence in sequences):
        raise UserError("export: CTranslate2 does not support banned_ids: sequences of several tokens")
    banned = [sequence[0] for sequence in sequences]
    if not banned:
        return {}
    name = "heads.lm_head.proj.bias"
    bias = tensors[name].clone() if name in tensors else torch.zeros(loaded.config.target_vocab)
    bias[banned] = BANNED_BIAS
    return {name: bias}


def _set_variable(spec: Any, name: str, tensor: Tensor) -> None:
    """Set a variable of the specification by its path; `layer_3` is the fourth of a list."""
    *path, last = name.split("/")
    for part in path:
        if hasattr(spec, part):
            spec = getattr(spec, part)
        else:
            parts, _, number = part.rpartition("_")
            spec = getattr(spec, parts)[int(number)]
    setattr(spec, last, tensor.contiguous().numpy())


def _vocabulary(spec: Any, loaded: LoadedModel) -> None:
    config, tokenizers = loaded.config, loaded.tokenizers
    begin, end = bos_ids(loaded), eos_ids(loaded)
    if config.family == "decoder":
        begin = begin or end  # used for empty prompts only: prompts already include their first token
    if not begin or not end:
        raise UserError("export: CTranslate2 needs a begin and an end token, which this tokenizer does not have")
    target = vocabulary_list(tokenizers[-1], config.target_vocab)
    spec.config.bos_token, spec.config.eos_token = target[begin[0]], target[end[0]]
    unknown = tokenizers[-1].roles.get("unknown", end[0])
    spec.config.unk_token = target[unknown]
    spec.config.layer_norm_epsilon = config.norm_eps
    if config.family == "decoder":
        spec.register_vocabulary(target)
        return
    spec.config.decoder_start_token = target[begin[0]]
    if source_begin := loaded.extra.get("source_begin"):
        spec.config.bos_token, spec.config.add_source_bos = target[source_begin[0]], True
    spec.config.add_source_eos = loaded.extra.get("source_end", True)
    spec.register_source_vocabulary(vocabulary_list(tokenizers[0], config.source_vocab))
    spec.register_target_vocabulary(target)
