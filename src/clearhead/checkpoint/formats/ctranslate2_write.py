"""CTranslate2 out: translators and decoders, through the library's own specification, in fp32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint.folder import Loaded, write_tokenizers
from clearhead.checkpoint.formats.ctranslate2 import TABLE
from clearhead.checkpoint.formats.extras import library
from clearhead.checkpoint.formats.tables import Table, to_theirs
from clearhead.checkpoint.formats.tokens import begin_ids, end_ids, every_token
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model.positions import sinusoidal_positions

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH", "swiglu": "SWISH"}
GATED: Table = {
    "*.layers.*.feed_forward.gate.*": "*/layer_*/ffn/linear_0/*",
    "*.layers.*.feed_forward.up.*": "*/layer_*/ffn/linear_0_noact/*",
}
NEVER = -1e9  # the bias of a word that is not to be written


def write(loaded: Loaded, draft: Path) -> None:
    """A folder that ctranslate2.Translator or Generator opens; our tokenizers lie beside."""
    config = loaded.config
    _check(config)
    if not loaded.tokenizers:
        raise UserError("export: CTranslate2 needs a model with its tokenizer")
    spec = _specification(config)
    tensors: dict[str, Tensor] = {name: tensor.float() for name, tensor in loaded.network.state_dict().items()}
    tensors |= _positions(config) | _without(loaded, tensors)
    table = {"encoder.embedding.tokens.weight": "encoder/embeddings_0/weight", **TABLE}
    table |= GATED if config.activation == "swiglu" else {}
    for name, tensor in to_theirs(table, tensors).items():
        _put(spec, name, tensor)
    for stack in _stacks(spec, config):
        stack.scale_embeddings = config.scale_embedding
    _vocabulary(spec, loaded)
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(str(draft))
    write_tokenizers(draft, [tokenizer.engine for tokenizer in loaded.tokenizers])


def _check(config: ModelConfig) -> None:
    """What its Transformers have no place for, by name."""
    translator = config.family == "encoder-decoder"
    problems = {
        f"family: {config.family}": config.family == "encoder",
        f"norm: {config.norm}": config.norm == "batch",
        "bias: false, with layer norms": not config.bias and config.norm == "layer",
        f"attention: {', '.join(config.attention)}": config.attention != ("full",),
        f"outputs: {', '.join(config.outputs)}": config.outputs != ("lm",),
        "embedding_norm: true": config.embedding_norm,
        "rope_scaling (it computes Llama 3's rule differently)": config.rope_scaling is not None,
        "position: rotary, in a translator": translator and config.position == "rotary",
        f"kv_heads: {config.kv_heads} of {config.heads}, in a translator": translator
        and config.kv_heads != config.heads,
        f"head_dim: {config.head_dim}, not width / heads": config.heads * config.head_dim != config.dim,
    }
    if found := [what for what, so in problems.items() if so]:
        raise UserError(f"export: CTranslate2 has no place for {'; '.join(found)}")


def _specification(config: ModelConfig) -> Any:
    specs = library("ctranslate2.specs")
    common: dict[str, Any] = {
        "pre_norm": config.norm_position == "pre",
        "activation": getattr(library("ctranslate2.specs.common_spec").Activation, ACTIVATIONS[config.activation]),
        "ffn_glu": config.activation == "swiglu",
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


def _positions(config: ModelConfig) -> dict[str, Tensor]:
    """Sinusoids as a table, for theirs are others; zeros where there are no positions."""
    if config.position in ("learned", "rotary"):
        return {}
    table = torch.zeros(config.max_positions, config.dim)
    if config.position == "sinusoidal":
        table = sinusoidal_positions(torch.arange(config.max_positions), config.dim, config.sinusoid)
    stacks = ("encoder", "decoder") if config.family == "encoder-decoder" else ("decoder",)
    return {f"{stack}.embedding.positions.weight": table for stack in stacks}


def _without(loaded: Loaded, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is never to be written gets a bias that sees to it."""
    rows = loaded.extra.get("banned", ())
    if any(len(row) > 1 for row in rows):
        raise UserError("export: CTranslate2 has no place for banned: rows of several tokens")
    banned = [row[0] for row in rows]
    if not banned:
        return {}
    name = "heads.lm_head.proj.bias"
    bias = tensors[name].clone() if name in tensors else torch.zeros(loaded.config.target_vocab)
    bias[banned] = NEVER
    return {name: bias}


def _put(spec: Any, name: str, tensor: Tensor) -> None:
    """Set a part of the specification by its path; `layer_3` is the fourth of a list."""
    *path, last = name.split("/")
    for part in path:
        if hasattr(spec, part):
            spec = getattr(spec, part)
        else:
            each, _, number = part.rpartition("_")
            spec = getattr(spec, each)[int(number)]
    setattr(spec, last, tensor.contiguous().numpy())


def _vocabulary(spec: Any, loaded: Loaded) -> None:
    config, tokenizers = loaded.config, loaded.tokenizers
    begins, ends = begin_ids(loaded), end_ids(loaded)
    if config.family == "decoder":
        begins = begins or ends  # a prompt is given there with what begins it; this stands for an empty one
    if not begins or not ends:
        raise UserError(
            "export: CTranslate2 needs a token that begins and one that ends a text; this tokenizer has none"
        )
    target = every_token(tokenizers[-1], config.target_vocab)
    spec.config.bos_token, spec.config.eos_token = target[begins[0]], target[ends[0]]
    unknown = tokenizers[-1].roles.get("unknown", ends[0])
    spec.config.unk_token = target[unknown]
    spec.config.layer_norm_epsilon = config.norm_eps
    if config.family == "decoder":
        spec.register_vocabulary(target)
        return
    spec.config.decoder_start_token = target[begins[0]]
    spec.config.add_source_eos = loaded.extra.get("source_end", True)
    spec.register_source_vocabulary(every_token(tokenizers[0], config.source_vocab))
    spec.register_target_vocabulary(target)
