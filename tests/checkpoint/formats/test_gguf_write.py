"""GGUF export: transformers and our importer read it back, and what llama.cpp would read differently is refused."""

import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Engine
from tokenizers import models, normalizers, pre_tokenizers

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.formats import export_model, import_model, read_foreign
from clearhead.checkpoint.formats.bpe import sentencepiece_bpe
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.gguf import _tokenizer
from clearhead.checkpoint.model_folder import build_with_weights
from clearhead.checkpoint.tensors import named_tensors
from clearhead.config import ModelConfig
from clearhead.config.load import preset
from clearhead.errors import UserError
from clearhead.model import build
from clearhead.text import Tokenizer, train
from tests.checkpoint.formats.test_gguf import (
    SAMPLES,
    TOKENS,
    VOCABULARY,
    assert_same_logits,
    gguf,
    peer,
    read_with_transformers,
    write_gguf,
)
from tests.checkpoint.small_models import TEXTS, tokenizer
from tests.corpora import corpus


@pytest.mark.parametrize("to", ["gguf", "gguf-q8_0"])
@pytest.mark.parametrize("scaled", [{}, {"factor": 8.0}, {"factor": 3.3, "original_positions": 40}])
def test_an_export_is_read_by_transformers_and_by_us(to: str, scaled: dict[str, float], tmp_path: Path) -> None:
    settings = {"family": "decoder", "decoder_layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ff_dim": 96}
    settings |= {"activation": "swiglu", "norm": "rms", "bias": False, "position": "rotary", "max_positions": 64}
    settings |= {"vocab_size": VOCABULARY, "rope_theta": 500_000.0, "norm_eps": 1e-5}
    settings |= {"rope_scaling": scaled} if scaled else {}
    network = build(ModelConfig.build(settings))
    network.half().float()  # values that F16 represents exactly
    save_model(tmp_path / "ours", network, TOKENS, {"chat_template": "{{ messages }}"})
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", to)
    imported = read_foreign(tmp_path / "out")  # a folder with one file
    assert imported.config.model_dump() == network.config.model_dump()
    again, before = (
        build_with_weights(imported.config, imported.weights),
        {name: tensor.detach() for name, tensor in named_tensors(network).items()},
    )
    for name, tensor in imported.weights.items():
        if to == "gguf":
            assert torch.equal(tensor, before[name])
        else:
            torch.testing.assert_close(tensor, before[name], atol=float(before[name].abs().max()) / 220, rtol=0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        )
    )
    if not scaled:  # their reader of GGUF ignores rope scaling
        assert_same_logits(again, read_with_transformers(tmp_path / "out" / "model.gguf", theirs))
    assert [imported.tokenizers[0].encode(text) for text in SAMPLES] == [TOKENS.encode(text) for text in SAMPLES]
    assert imported.extra["begin"] == [TOKENS.id("begin")]
    assert imported.extra["eos_ids"] == [TOKENS.id("end")]
    assert imported.extra["chat_template"] == "{{ messages }}"


CLASSIFIER: dict[str, Any] = {"preset": "tiny-llama", "outputs": ["classes"], "labels": 2, "tie": "none"}


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"preset": "tiny-llama", "norm": "layer"}, "byte-bpe", "norm is layer in this model, but rms there"),
        ({"preset": "tiny-gpt"}, "byte-bpe", r"export: GPT-2 has no GGUF export here; export it to hf or ctranslate2$"),
        (CLASSIFIER, "byte-bpe", "outputs: classes cannot be exported to GGUF; only one with lm can$"),
        ({"preset": "tiny-llama", "attention": "window", "window": 5}, "byte-bpe", "attention has a window"),
        ({"preset": "tiny-llama"}, "wordpiece", "does not support a WordPiece tokenizer"),
        ({"preset": "tiny-llama"}, "bpe", "tokenizer's pre-tokenizer"),
    ],
)
def test_unsupported_models_and_tokenizers_are_named(
    settings: dict[str, Any], kind: Any, message: str, tmp_path: Path
) -> None:
    tokens = train(TEXTS, kind, 280)
    data = preset(settings["preset"]).model_dump() | {"vocab_size": 300} | settings
    del data["preset"]
    save_model(tmp_path / "ours", build(ModelConfig.build(data)), tokens)
    with pytest.raises(UserError, match=message):
        export_model(load_model(tmp_path / "ours"), tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_llama_cpp_would_read_differently_is_refused(tmp_path: Path) -> None:
    network = build(ModelConfig.build(preset("tiny-llama").model_dump() | {"vocab_size": 300}))
    tokens, extra = tokenizer(), {"eos_ids": []}
    save_model(tmp_path / "endless", network, tokens, extra)
    merging = tokens.engine.to_str().replace('"ignore_merges":false', '"ignore_merges":true')
    save_model(tmp_path / "ignore-merges", network, Tokenizer(tokens.engine.from_str(merging)))
    for name, message in (("endless", "one to three end tokens"), ("ignore-merges", "tokenizer's pre-tokenizer")):
        with pytest.raises(UserError, match=message):
            export_model(load_model(tmp_path / name), tmp_path / "out", "gguf")


def sentencepiece_tokenizer(normalizer: Any, pre_tokenizer: Any = None) -> Tokenizer:
    """Return a SentencePiece BPE with this normalizer and pre-tokenizer."""
    bytewise = {f"<0x{n:02X}>": n + 3 for n in range(256)}
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | bytewise | {"▁": 259, "a": 260, "▁a": 261}
    engine = Engine(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    engine.normalizer, engine.pre_tokenizer = normalizer, pre_tokenizer
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(engine)


SPACES = normalizers.Replace(" ", "▁")


@pytest.mark.parametrize("normalizer", [SPACES, normalizers.Sequence([normalizers.Prepend("▁"), SPACES])])
def test_sentencepiece_normalizers_are_preserved(normalizer: Any, tmp_path: Path) -> None:
    tokens = sentencepiece_tokenizer(normalizer)
    network = build(ModelConfig.build(preset("tiny-llama").model_dump() | {"vocab_size": 300}))
    save_model(tmp_path / "ours", network, tokens)
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", "gguf")
    imported = read_foreign(tmp_path / "out" / "model.gguf").tokenizers[0]
    for text in ("a a", " a", "b", "a  a"):
        assert imported.encode(text) == tokens.encode(text)


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, pre_tokenizers.Metaspace(split=False)),
        (None, None),
        (normalizers.Sequence([normalizers.Lowercase(), normalizers.Prepend("▁"), SPACES]), None),
        (normalizers.Sequence([SPACES, normalizers.Prepend("▁")]), None),
        (SPACES, pre_tokenizers.Whitespace()),
    ],
)
def test_sentencepiece_tokenizers_that_llama_cpp_would_read_differently_are_refused(
    normalizer: Any, pre_tokenizer: Any, tmp_path: Path
) -> None:
    network = build(ModelConfig.build(preset("tiny-llama").model_dump() | {"vocab_size": 300}))
    save_model(tmp_path / "ours", network, sentencepiece_tokenizer(normalizer, pre_tokenizer))
    with pytest.raises(UserError, match="pre-tokenizer or normalizer"):
        export_model(load_model(tmp_path / "ours"), tmp_path / "out", "gguf")


@pytest.mark.parametrize(("name", "has_begin"), [("llama-bpe", True), ("smollm", False)])
def test_a_missing_add_bos_token_has_the_default_of_llama_cpp(
    name: str, has_begin: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds one for Llama 3's pre-tokenizer and for SentencePiece."""
    writer, pre = gguf.GGUFWriter, gguf.GGUFWriter.add_tokenizer_pre
    monkeypatch.setattr(writer, "add_tokenizer_pre", lambda self, _: pre(self, name))
    monkeypatch.setattr(writer, "add_add_bos_token", lambda self, _: None)
    imported = read_foreign(write_gguf(peer(), tmp_path / "model.gguf", "F16"))
    assert imported.extra["begin"] == ([TOKENS.id("begin")] if has_begin else [])


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5])
def test_invalid_rope_scaling_is_refused(value: float, tmp_path: Path) -> None:
    data = preset("tiny-llama").model_dump() | {"vocab_size": 300, "rope_scaling": {"factor": 8.0}}
    save_model(tmp_path / "ours", build(ModelConfig.build(data)), TOKENS)
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", "gguf")
    path = tmp_path / "out" / "model.gguf"
    key = b"clearhead.rope_scaling.original_positions"
    before = key + struct.pack("<If", 6, 8192.0)
    assert path.read_bytes().count(before) == 1
    path.write_bytes(path.read_bytes().replace(before, key + struct.pack("<If", 6, value)))
    with pytest.raises(UserError, match=r"original_positions: .* is not a whole number"):
        read_foreign(path)


def test_tokens_that_are_too_long_or_without_score_are_refused() -> None:
    for tokens, scores, message in (
        (["<unk>", "x" * 513], [0.0, 0.0], "a token of 513 characters"),
        (["<unk>", "x"], [0.0, math.nan], "scores must have a finite number for each token"),
        (["<unk>", "x", "y"], [0.0, 0.0, 0.0], "3 tokens, but a vocabulary of 2"),
    ):
        settings = {"model": "llama", "tokens": tokens, "scores": scores}
        with pytest.raises(UserError, match=message):
            _tokenizer(Fields({f"tokenizer.ggml.{key}": value for key, value in settings.items()}, "a file"), 2)


def test_no_text_becomes_a_control_token() -> None:
    tokens = ["<unk>", "<s>", "<", "s>", "s", ">"]
    imported = sentencepiece_bpe(tokens, [0.0] * 6, 0, [0, 1], [], False, "a file")
    assert imported.encode("<s>") == [2, 3]
    assert imported.encode("<s>", special_tokens=True) == [1]


def test_every_end_token_survives_a_round_trip(tmp_path: Path) -> None:
    settings = preset("tiny-llama").model_dump() | {"vocab_size": 300}
    save_model(tmp_path / "ours", build(ModelConfig.build(settings)), TOKENS, {"eos_ids": [TOKENS.id("end"), 7, 9]})
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", "gguf")
    assert read_foreign(tmp_path / "out" / "model.gguf").extra["eos_ids"] == [TOKENS.id("end"), 7, 9]
    save_model(tmp_path / "four", build(ModelConfig.build(settings)), TOKENS, {"eos_ids": [3, 5, 7, 9]})
    with pytest.raises(UserError, match="one to three end tokens"):
        export_model(load_model(tmp_path / "four"), tmp_path / "again", "gguf")


def test_a_sentencepiece_tokenizer_survives_a_round_trip(tmp_path: Path) -> None:
    import_model(corpus("weights/stories260K/stories260K.bin"), tmp_path / "ours")
    loaded = load_model(tmp_path / "ours")
    export_model(loaded, tmp_path / "out", "gguf")
    imported, before = read_foreign(tmp_path / "out" / "model.gguf"), loaded.tokenizers[0]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    for text in [*SAMPLES, 'Once upon a time, there was a little girl named Lily.\nShe said, "Hello!"']:
        assert imported.tokenizers[0].encode(text) == before.encode(text)
        if text and not text.startswith(" "):  # transformers adds no second space before a first
            assert theirs(text, add_special_tokens=False).input_ids == before.encode(text)
            assert before.decode(before.encode(text)) == text
    assert imported.extra["begin"] == [1]
