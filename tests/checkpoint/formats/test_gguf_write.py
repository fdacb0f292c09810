"""GGUF out: transformers and we read what we write, and what llama.cpp would read in another way is refused by name."""

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
from clearhead.checkpoint.folder import with_weights
from clearhead.checkpoint.formats import export_model, import_model, read_foreign
from clearhead.checkpoint.formats.fields import Fields
from clearhead.checkpoint.formats.gguf import _tokenizer
from clearhead.checkpoint.formats.vocabularies import pieces_with_scores
from clearhead.checkpoint.tensors import tensors_of
from clearhead.config import ModelConfig
from clearhead.config.load import preset
from clearhead.errors import UserError
from clearhead.model import build
from clearhead.text import Tokenizer, train
from tests.checkpoint.formats.test_gguf import (
    SAMPLES,
    TOKENS,
    WORDS,
    as_transformers_reads,
    gguf,
    peer,
    same_logits,
    written,
)
from tests.checkpoint.small import TEXTS, tokenizer
from tests.corpora import corpus


@pytest.mark.parametrize("to", ["gguf", "gguf-q8_0"])
@pytest.mark.parametrize("scaled", [{}, {"factor": 8.0}, {"factor": 3.3, "original_positions": 40}])
def test_what_we_write_transformers_and_we_read_alike(to: str, scaled: dict[str, float], tmp_path: Path) -> None:
    settings = {"family": "decoder", "decoder_layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ff_dim": 96}
    settings |= {"activation": "swiglu", "norm": "rms", "bias": False, "position": "rotary", "max_positions": 64}
    settings |= {"vocab_size": WORDS, "rope_theta": 500_000.0, "norm_eps": 1e-5}
    settings |= {"rope_scaling": scaled} if scaled else {}
    network = build(ModelConfig.build(settings))
    network.half().float()  # numbers that F16 holds
    save_model(tmp_path / "ours", network, TOKENS, {"chat_template": "{{ messages }}"})
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", to)
    found = read_foreign(tmp_path / "out" / "model.gguf")
    assert found.config.model_dump() == network.config.model_dump()
    again, before = (
        with_weights(found.config, found.weights),
        {name: tensor.detach() for name, tensor in tensors_of(network).items()},
    )
    for name, tensor in found.weights.items():
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
            vocab_size=WORDS,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        )
    )
    if not scaled:  # their reader of GGUF leaves the stretch out
        same_logits(again, as_transformers_reads(tmp_path / "out" / "model.gguf", theirs))
    assert [found.tokenizers[0].encode(text) for text in SAMPLES] == [TOKENS.encode(text) for text in SAMPLES]
    assert found.extra["begin"] == [TOKENS.id("begin")]
    assert found.extra["ends"] == [TOKENS.id("end")]
    assert found.extra["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("settings", "kind", "named"),
    [
        ({"preset": "tiny-gpt"}, "byte-bpe", "norm is rms there, layer here"),
        ({"preset": "tiny-llama", "attention": "window", "window": 5}, "byte-bpe", "attention has a window"),
        ({"preset": "tiny-llama"}, "wordpiece", "tokenizer of kind WordPiece"),
        ({"preset": "tiny-llama"}, "bpe", "way to cut words"),
    ],
)
def test_export_refuses_by_name(settings: dict[str, Any], kind: Any, named: str, tmp_path: Path) -> None:
    tokens = train(TEXTS, kind, 280)
    data = preset(settings["preset"]).model_dump() | {"vocab_size": 300} | settings
    del data["preset"]
    save_model(tmp_path / "ours", build(ModelConfig.build(data)), tokens)
    with pytest.raises(UserError, match=named):
        export_model(load_model(tmp_path / "ours"), tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_export_refuses_a_tokenizer_that_llama_cpp_would_cut_or_end_in_another_way(tmp_path: Path) -> None:
    network = build(ModelConfig.build(preset("tiny-llama").model_dump() | {"vocab_size": 300}))
    tokens, extra = tokenizer(), {"ends": []}
    save_model(tmp_path / "endless", network, tokens, extra)
    merging = tokens.engine.to_str().replace('"ignore_merges":false', '"ignore_merges":true')
    save_model(tmp_path / "whole", network, Tokenizer(tokens.engine.from_str(merging)))
    for name, named in (("endless", "one to three that end it"), ("whole", "way to cut words")):
        with pytest.raises(UserError, match=named):
            export_model(load_model(tmp_path / name), tmp_path / "out", "gguf")


def pieces(normalizer: Any, cut: Any = None) -> Tokenizer:
    """SentencePiece's kind of BPE, with its spaces written in this way."""
    bytewise = {f"<0x{n:02X}>": n + 3 for n in range(256)}
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | bytewise | {"▁": 259, "a": 260, "▁a": 261}
    engine = Engine(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    engine.normalizer, engine.pre_tokenizer = normalizer, cut
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(engine)


SPACES = normalizers.Replace(" ", "▁")


@pytest.mark.parametrize("normalizer", [SPACES, normalizers.Sequence([normalizers.Prepend("▁"), SPACES])])
def test_pieces_keep_their_way_of_writing_spaces(normalizer: Any, tmp_path: Path) -> None:
    tokens = pieces(normalizer)
    network = build(ModelConfig.build(preset("tiny-llama").model_dump() | {"vocab_size": 300}))
    save_model(tmp_path / "ours", network, tokens)
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", "gguf")
    found = read_foreign(tmp_path / "out" / "model.gguf").tokenizers[0]
    for text in ("a a", " a", "b", "a  a"):
        assert found.encode(text) == tokens.encode(text)


@pytest.mark.parametrize(
    ("normalizer", "cut"),
    [
        (None, pre_tokenizers.Metaspace(split=False)),
        (None, None),
        (normalizers.Sequence([normalizers.Lowercase(), normalizers.Prepend("▁"), SPACES]), None),
        (normalizers.Sequence([SPACES, normalizers.Prepend("▁")]), None),
        (SPACES, pre_tokenizers.Whitespace()),
    ],
)
def test_pieces_that_llama_cpp_would_cut_in_another_way_are_refused(normalizer: Any, cut: Any, tmp_path: Path) -> None:
    network = build(ModelConfig.build(preset("tiny-llama").model_dump() | {"vocab_size": 300}))
    save_model(tmp_path / "ours", network, pieces(normalizer, cut))
    with pytest.raises(UserError, match="way to cut words or write spaces"):
        export_model(load_model(tmp_path / "ours"), tmp_path / "out", "gguf")


@pytest.mark.parametrize(("name", "begins"), [("llama-bpe", True), ("smollm", False)])
def test_a_file_that_is_silent_on_the_first_token_is_read_as_llama_cpp_does(
    name: str, begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts one in front where words are cut as Llama 3 does, and before pieces with scores."""
    writer, pre = gguf.GGUFWriter, gguf.GGUFWriter.add_tokenizer_pre
    monkeypatch.setattr(writer, "add_tokenizer_pre", lambda self, _: pre(self, name))
    monkeypatch.setattr(writer, "add_add_bos_token", lambda self, _: None)
    found = read_foreign(written(peer(), tmp_path / "model.gguf", "F16"))
    assert found.extra["begin"] == ([TOKENS.id("begin")] if begins else [])


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5])
def test_a_rule_that_makes_no_sense_is_refused(value: float, tmp_path: Path) -> None:
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


def test_pieces_that_are_too_long_or_have_no_score_are_refused() -> None:
    for tokens, scores, named in (
        (["<unk>", "x" * 513], [0.0, 0.0], "a token of 513 characters"),
        (["<unk>", "x"], [0.0, math.nan], "scores are not a number for each token"),
        (["<unk>", "x", "y"], [0.0, 0.0, 0.0], "3 tokens for 2 rows"),
    ):
        said = {"model": "llama", "tokens": tokens, "scores": scores}
        with pytest.raises(UserError, match=named):
            _tokenizer(Fields({f"tokenizer.ggml.{key}": value for key, value in said.items()}, "a file"), 2)


def test_no_text_becomes_a_control_token() -> None:
    tokens = ["<unk>", "<s>", "<", "s>", "s", ">"]
    found = pieces_with_scores(tokens, [0.0] * 6, 0, [0, 1], [], False, "a file")
    assert found.encode("<s>") == [2, 3]
    assert found.encode("<s>", specials=True) == [1]


def test_every_token_that_ends_a_text_goes_there_and_back(tmp_path: Path) -> None:
    settings = preset("tiny-llama").model_dump() | {"vocab_size": 300}
    save_model(tmp_path / "ours", build(ModelConfig.build(settings)), TOKENS, {"ends": [TOKENS.id("end"), 7, 9]})
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", "gguf")
    assert read_foreign(tmp_path / "out" / "model.gguf").extra["ends"] == [TOKENS.id("end"), 7, 9]
    save_model(tmp_path / "four", build(ModelConfig.build(settings)), TOKENS, {"ends": [3, 5, 7, 9]})
    with pytest.raises(UserError, match="one to three that end it"):
        export_model(load_model(tmp_path / "four"), tmp_path / "again", "gguf")


def test_pieces_with_scores_survive_the_way_there_and_back(tmp_path: Path) -> None:
    import_model(corpus("weights/stories260K/stories260K.bin"), tmp_path / "ours")
    loaded = load_model(tmp_path / "ours")
    export_model(loaded, tmp_path / "out", "gguf")
    found, before = read_foreign(tmp_path / "out" / "model.gguf"), loaded.tokenizers[0]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    for text in [*SAMPLES, 'Once upon a time, there was a little girl named Lily.\nShe said, "Hello!"']:
        assert found.tokenizers[0].encode(text) == before.encode(text)
        if text and not text.startswith(" "):  # there, no second space is put in front of a first
            assert theirs(text, add_special_tokens=False).input_ids == before.encode(text)
            assert before.decode(before.encode(text)) == text
    assert found.extra["begin"] == [1]
