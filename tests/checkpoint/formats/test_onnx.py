"""ONNX exports give our outputs in onnxruntime, for every family and every setting that changes the graph."""

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
from tests.checkpoint.small_models import tokenizer

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnx", reason="onnx is not installed")

SIZES: dict[str, Any] = {"dim": 32, "heads": 4, "ff_dim": 48, "vocab_size": 300, "max_positions": 24}
DECODER = SIZES | {"family": "decoder", "decoder_layers": 3}
ENCODER = SIZES | {"family": "encoder", "encoder_layers": 2, "embedding_norm": True, "position": "learned"}
TRANSLATOR = SIZES | {"family": "encoder-decoder", "encoder_layers": 2, "decoder_layers": 3}
LLAMA = DECODER | {"activation": "swiglu", "norm": "rms", "bias": False, "position": "rotary"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt": DECODER | {"position": "learned", "activation": "gelu_tanh", "tie": "output"},
    "gpt-post": DECODER | {"norm_position": "post", "activation": "silu", "output_bias": True},
    "llama": LLAMA | {"kv_heads": 2, "head_dim": 10, "rope_scaling": {"factor": 8.0, "original_positions": 12}},
    "mistral": LLAMA | {"kv_heads": 1, "attention": ["window", "full"], "window": 4},
    "qwen2": LLAMA | {"qkv_bias": True},
    "qwen3": LLAMA | {"qk_norm": True, "head_dim": 12, "kv_heads": 2},
    "roberta": ENCODER | {"norm_position": "post", "position_offset": 2, "activation": "gelu"},
    "distilbert": ENCODER | {"pooler": True, "pooler_activation": "relu", "outputs": ["classes"], "labels": 3},
    "modernbert": ENCODER
    | {"bias": False, "activation": "geglu", "first_norm": False, "position": "rotary", "local_rope_theta": 100.0}
    | {"encoder_layers": 3, "attention": ["full", "window", "window"], "window": 4},
    "bart": TRANSLATOR
    | {"norm_position": "post", "embedding_norm": True, "position": "learned", "position_offset": 2, "tie": "all"},
    "m2m100": TRANSLATOR | {"sinusoid": "fairseq", "position_offset": 2, "scale_embedding": True},
    "translator": TRANSLATOR | {"norm_position": "post", "tie": "all", "scale_embedding": True},
    "translator-pre": TRANSLATOR | {"sinusoid": "halves", "norm": "batch"},
    "no-positions": TRANSLATOR | {"position": "none"},
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
    """Return a network with noise on every weight and statistic, and its onnxruntime session."""
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
    for batch, tokens in ((3, 17), (1, 1), (2, 24)):
        check(network, session, batch, tokens)


@torch.no_grad()
def check(network: Any, session: Any, batch: int, tokens: int) -> None:
    ids, lengths = torch.randint(300, (batch, tokens)), torch.randint(1, tokens + 1, (batch,))
    names = [output.name for output in session.get_outputs()]
    family = network.config.family
    if family == "encoder-decoder":
        target = torch.randint(300, (batch, 11))
        inputs = {"input_ids": ids, "lengths": lengths, "decoder_input_ids": target}
        expected = {"logits": network(ids, target, lengths)}
    elif family == "decoder":
        inputs, expected = {"input_ids": ids}, {"logits": network(ids)}
    else:
        inputs = {"input_ids": ids, "lengths": lengths}
        segments = torch.randint(2, (batch, tokens)) if network.config.segments else None
        inputs |= {} if segments is None else {"token_type_ids": segments}
        expected = encoder_outputs(network, ids, lengths, segments)
    results = dict(zip(names, session.run(None, {name: value.numpy() for name, value in inputs.items()}), strict=True))
    assert results.keys() == expected.keys()
    padding_mask = np.arange(tokens) < lengths.numpy()[:, None] if family == "encoder" else None
    for name, value in expected.items():
        expected_values, values = value.numpy(), results[name]
        assert expected_values.shape == values.shape
        assert expected_values.std() > 0.01 or expected_values.size < 10
        if padding_mask is not None and expected_values.ndim == 3:
            expected_values, values = expected_values[padding_mask], values[padding_mask]  # skip padding
        np.testing.assert_allclose(values, expected_values, atol=1e-4 * np.abs(expected_values).max(), rtol=0)


def encoder_outputs(network: Any, ids: torch.Tensor, lengths: torch.Tensor, segments: Any) -> dict[str, torch.Tensor]:
    heads, hidden = network.heads, network.encode(ids, lengths, segments=segments)
    pooled = heads.pool(hidden, lengths)
    results = {"last_hidden_state": hidden} | ({"pooler_output": pooled} if network.config.pooler else {})
    heads_by_name = {
        "lm": ("logits", lambda: network.logits(hidden)),
        "next-sentence": ("next_sentence_logits", lambda: heads.next_sentence(pooled)),
        "classes": ("class_logits", lambda: heads.classes(pooled)),
        "tags": ("tag_logits", lambda: heads.tags(hidden)),
        "span": ("span_logits", lambda: heads.span(hidden)),
    }
    selected = [heads_by_name[name] for name in network.config.outputs]
    return results | {name: head() for name, head in selected}


def test_sparse_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ONNX does not support attention: strided"):
        exported(DECODER | {"attention": "strided", "stride": 4}, tmp_path)


@pytest.mark.parametrize("settings", [{"outputs": ["classes"], "labels": 3}, {"outputs": ["lm"], "pooler": True}])
def test_mean_pooling_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ONNX does not support pooling: mean"):
        exported(ENCODER | settings | {"pooling": "mean"}, tmp_path)
