"""llama.cpp generates the same greedy text from our exports, in F16 and Q8_0, with both kinds of tokenizers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.formats import export_model, import_model
from clearhead.config import ModelConfig
from clearhead.model import build
from clearhead.predict import load
from clearhead.text import train
from tests.corpora import corpus

xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp (llama.cpp) is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

STORY = "the cat sat on the mat and saw 1234 birds; die Katze saß auf der Matte — 猫坐在垫子上, don't you know?\n" * 2
LLAMA = {"family": "decoder", "decoder_layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ff_dim": 96}
LLAMA |= {"activation": "swiglu", "norm": "rms", "bias": False, "position": "rotary", "max_positions": 256}
MODELS: dict[str, dict[str, Any]] = {
    "tied": LLAMA | {"tie": "output"},
    "head_dim": LLAMA | {"head_dim": 32, "rope_theta": 500.0, "norm_eps": 1e-3},
    "qwen2": LLAMA | {"qkv_bias": True, "tie": "output"},
    "qwen3": LLAMA | {"qk_norm": True, "head_dim": 32},
    "Llama 3": LLAMA | {"rope_scaling": {"factor": 8.0, "original_positions": 64}},
}


def llama_cpp_text(path: Path, prompt: str, count: int) -> str:
    """Return llama.cpp's completion of a prompt."""
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(path), 256, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.warmup, settings.verbosity = False, -1
    response = xllamacpp.Server(settings).handle_completions(
        {"prompt": prompt, "max_tokens": count, "temperature": 0.0}
    )
    return response["choices"][0]["text"]


def assert_same_text(ours: Path, prompt: str, count: int, folder: Path) -> None:
    expected = load(ours, device="cpu").generate(prompt, max_new_tokens=count, temperature=0.0)
    assert len(set(expected.text)) > 10, "a constant output proves nothing"
    for to in ("gguf", "gguf-q8_0"):
        export_model(load_model(ours), folder / to, to)
        assert llama_cpp_text(folder / to / "model.gguf", prompt, count) == expected.text


@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_generates_the_same_text_in_llama_cpp(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = train([STORY], "byte-bpe", 280)
    network = build(ModelConfig.build(MODELS[name] | {"vocab_size": len(tokens) + 8}))  # more rows than tokens
    ids = torch.tensor([[tokens.id("begin"), *tokens.encode(STORY), tokens.id("end")]])
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    for _ in range(60):
        loss = cross_entropy(network(ids[:, :-1])[0], ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_model(tmp_path / "ours", network.eval(), tokens)
    assert_same_text(tmp_path / "ours", STORY[:20], 60, tmp_path)


def test_a_sentencepiece_model_generates_the_same_text_in_llama_cpp(tmp_path: Path) -> None:
    import_model(corpus("weights/stories260K/stories260K.bin"), tmp_path / "ours")
    assert_same_text(tmp_path / "ours", "Once upon a time", 100, tmp_path)
