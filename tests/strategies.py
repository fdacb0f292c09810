"""Hypothesis strategies: random small models of every family, for property tests."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.model import Network, build
from clearhead.model.norms import BatchNorm

VOCABULARY = 23


@st.composite
def configs(
    draw: st.DrawFn, families: tuple[str, ...] = ("encoder-decoder", "encoder", "decoder"), norms: tuple[str, ...] = ()
) -> ModelConfig:
    """Draw a valid config of one of the families, and seed torch, so that an example is reproducible."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    family = draw(st.sampled_from(families))
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([2, 4, 6]))
    norm = draw(st.sampled_from(norms or ("layer", "rms", "batch")))
    position = draw(st.sampled_from(["sinusoidal", "learned", "rotary", "none"]))
    settings: dict[str, Any] = {
        "family": family,
        "dim": draw(st.sampled_from([8, 12])),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ff_dim": draw(st.sampled_from([8, 17])),
        "activation": draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"])),
        "norm": norm,
        "norm_position": draw(st.sampled_from(["pre", "post"])),
        "position": position,
        "max_positions": 64,
        "bias": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "scale_embedding": draw(st.booleans()),
        "embedding_norm": draw(st.booleans()),
        "output_bias": draw(st.booleans()),
        "init": draw(st.sampled_from(["xavier", "truncated", "normal", "scaled"])),
        "vocab_size": VOCABULARY,
    }
    if position == "sinusoidal":
        settings["sinusoid"] = draw(st.sampled_from(["interleaved", "halves", "fairseq"]))
    if position in ("sinusoidal", "learned"):
        settings["position_offset"] = draw(st.sampled_from([0, 2]))
    if position == "rotary" and draw(st.booleans()):
        settings["rope_scaling"] = {"factor": 4.0, "original_positions": 16}
    layers = draw(st.integers(1, 4))
    if family != "decoder":
        settings["encoder_layers"] = layers
    if family != "encoder":
        settings["decoder_layers"] = layers
    ties = ["none", "output", "all"] if family == "encoder-decoder" else ["none", "output"]
    settings["tie"] = draw(st.sampled_from(ties))
    if family == "encoder":
        settings["segments"] = draw(st.sampled_from([0, 2]))
        if settings["norm_position"] == "pre" and settings["embedding_norm"]:
            settings["first_norm"] = draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from(["full", "window", "strided", "fixed"]), min_size=1, max_size=layers))
    settings["attention"] = kinds
    if "window" in kinds:
        settings["window"] = draw(st.integers(1, 6))
        if (position, family) == ("rotary", "encoder"):
            settings["local_rope_theta"] = draw(st.sampled_from([None, 100.0]))
    if {"strided", "fixed"} & set(kinds):
        settings["stride"] = draw(st.integers(1, 6))
    if "fixed" in kinds:
        settings["summary"] = draw(st.integers(1, settings["stride"]))
    return ModelConfig.build(settings)


def network_of(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Network:
    """Build a network with noise on every weight, so that no bias is 0 and no norm weight 1; float64 by default."""
    network = build(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    norms = [module for module in network.modules() if isinstance(module, BatchNorm)]
    if norms:  # running statistics of a real batch, as after training
        for module in norms:
            module.momentum = 1.0
        with torch.no_grad():
            logits(network.train(), tokens(6, 12))
    return network.eval()


def tokens(*shape: int) -> Tensor:
    """Return random ids."""
    return torch.randint(VOCABULARY, shape)


def logits(network: Network, ids: Tensor, **options: Any) -> Tensor:
    """Return the logits of a network of any family; an encoder-decoder gets the same fixed source in every row."""
    if network.config.family != "encoder-decoder":
        out = network(ids, **options)
    else:
        source = torch.arange(5)[None].expand(len(ids), -1)
        out = network(source, ids, **{"target_" + name: value for name, value in options.items()})
    assert network.training or out.abs().max() < 1e6, "logits this large hide every error"
    return out
