"""ONNX files give our outputs in onnxruntime, for every family and every choice that changes the graph."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.formats import export_model
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model import build
from tests.checkpoint.small import tokenizer

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnx", reason="onnx is not installed")

SIZES: dict[str, Any] = {"dim": 32, "heads": 4, "ff_dim": 48, "vocab_size": 300, "max_positions": 24}
DECODER = SIZES | {"family": "decoder", "decoder_layers": 3}
ENCODER = SIZES | {"family": "encoder", "encoder_layers": 2, "embedding_norm": True, "position": "learned"}
BOTH = SIZES | {"family": "encoder-decoder", "encoder_layers": 2, "decoder_layers": 3}
LLAMA = DECODER | {"activation": "swiglu", "norm": "rms", "bias": False, "position": "rotary"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt": DECODER | {"position": "learned", "activation": "gelu_tanh", "tie": "output"},
    "gpt-post": DECODER | {"norm_position": "post", "activation": "silu", "output_bias": True},
    "llama": LLAMA | {"kv_heads": 2, "head_dim": 10, "rope_scaling": {"factor": 8.0, "original_positions": 12}},
    "mistral": LLAMA | {"kv_heads": 1, "attention": ["window", "full"], "window": 4},
    "translator": BOTH | {"norm_position": "post", "tie": "all", "scale_embedding": True},
    "translator-pre": BOTH | {"sinusoid": "halves", "norm": "batch"},
    "no-positions": BOTH | {"position": "none"},
    "bert": ENCODER
    | {
        "norm_position": "post",
        "segments": 2,
        "pooler": True,
        "outputs": ["lm", "next-sentence"],
        "activation": "gelu",
    },
    "classes": ENCODER | {"pooler": True, "outputs": ["classes"], "labels": 3, "attention": "window", "window": 5},
    "tags": ENCODER | {"outputs": ["tags", "span"], "labels": 5, "norm": "batch"},
}


def exported(settings: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """A network with noise on every weight and statistic, and its session."""
    network = build(ModelConfig.build(settings)).eval()
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor.add_(torch.rand_like(tensor), alpha=0.3)
    save_model(folder / "ours", network, tokenizer())
    export_model(load_model(folder / "ours"), folder / "onnx", "onnx")
    return load_model(folder / "ours").network, onnxruntime.InferenceSession(folder / "onnx" / "model.onnx")


@pytest.mark.parametrize("name", CONFIGS)
def test_onnxruntime_gives_our_outputs(name: str, tmp_path: Path) -> None:
    network, session = exported(CONFIGS[name], tmp_path)
    for rows, tokens in ((3, 17), (1, 1), (2, 24)):
        check(network, session, rows, tokens)


@torch.no_grad()
def check(network: Any, session: Any, rows: int, tokens: int) -> None:
    ids, lengths = torch.randint(300, (rows, tokens)), torch.randint(1, tokens + 1, (rows,))
    names = [output.name for output in session.get_outputs()]
    family = network.config.family
    if family == "encoder-decoder":
        target = torch.randint(300, (rows, 11))
        given = {"source": ids, "source_lengths": lengths, "target": target}
        expected = {"words": network(ids, target, lengths)}
    elif family == "decoder":
        given, expected = {"ids": ids}, {"words": network(ids)}
    else:
        given = {"ids": ids, "lengths": lengths}
        segments = torch.randint(2, (rows, tokens)) if network.config.segments else None
        given |= {} if segments is None else {"segments": segments}
        expected = of_encoder(network, ids, lengths, segments)
    found = dict(zip(names, session.run(None, {key: value.numpy() for key, value in given.items()}), strict=True))
    assert found.keys() == expected.keys()
    real = np.arange(tokens) < lengths.numpy()[:, None] if family == "encoder" else None
    for key, value in expected.items():
        mine, other = value.numpy(), found[key]
        assert mine.shape == other.shape
        assert mine.std() > 0.01 or mine.size < 10
        if real is not None and mine.ndim == 3:
            mine, other = mine[real], other[real]  # padded positions mean nothing
        np.testing.assert_allclose(other, mine, atol=1e-4 * np.abs(mine).max(), rtol=0)


def of_encoder(network: Any, ids: torch.Tensor, lengths: torch.Tensor, segments: Any) -> dict[str, torch.Tensor]:
    heads, hidden = network.heads, network.encode(ids, lengths, segments=segments)
    pooled = heads.pool(hidden, lengths)
    found = {"hidden": hidden} | ({"pooled": pooled} if network.config.pooler else {})
    reads = {
        "words": lambda: network.logits(hidden),
        "next-sentence": lambda: heads.next_sentence(pooled),
        "classes": lambda: heads.classes(pooled),
        "tags": lambda: heads.tags(hidden),
        "span": lambda: heads.span(hidden),
    }
    return found | {name: reads[name]() for name in network.config.outputs}


def test_sparse_patterns_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ONNX has no place for attention: strided"):
        exported(DECODER | {"attention": "strided", "stride": 4}, tmp_path)


@pytest.mark.parametrize("settings", [{"outputs": ["classes"], "labels": 3}, {"outputs": ["lm"], "pooler": True}])
def test_the_mean_of_tokens_is_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ONNX has no place for pooling: mean"):
        exported(ENCODER | settings | {"pooling": "mean"}, tmp_path)
