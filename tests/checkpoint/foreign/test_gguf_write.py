"""GGUF out: transformers and we read what we write, and what llama.cpp would read in another way is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.folder import with_weights
from clearhead.checkpoint.foreign import export_model, import_model, read_foreign
from clearhead.checkpoint.tensors import tensors_of
from clearhead.config import ModelConfig
from clearhead.config.load import preset
from clearhead.errors import UserError
from clearhead.model import build
from clearhead.text import Tokenizer, train
from tests.checkpoint.foreign.test_gguf import SAMPLES, TOKENS, WORDS, as_transformers_reads, same_logits
from tests.checkpoint.small import TEXTS, tokenizer
from tests.corpora import corpus


@pytest.mark.parametrize("to", ["gguf", "gguf-q8_0"])
@pytest.mark.parametrize("scaled", [{}, {"factor": 8.0}, {"factor": 3.3, "original_positions": 40}])
def test_what_we_write_transformers_and_we_read_alike(to: str, scaled: dict[str, float], tmp_path: Path) -> None:
    settings = {"family": "decoder", "decoder_layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ff_width": 96}
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
    for name, named in (("endless", "one that ends it"), ("whole", "way to cut words")):
        with pytest.raises(UserError, match=named):
            export_model(load_model(tmp_path / name), tmp_path / "out", "gguf")


def test_every_token_that_ends_a_text_goes_there_and_back(tmp_path: Path) -> None:
    settings = preset("tiny-llama").model_dump() | {"vocab_size": 300}
    save_model(tmp_path / "ours", build(ModelConfig.build(settings)), TOKENS, {"ends": [TOKENS.id("end"), 7, 9]})
    export_model(load_model(tmp_path / "ours"), tmp_path / "out", "gguf")
    assert read_foreign(tmp_path / "out" / "model.gguf").extra["ends"] == [TOKENS.id("end"), 7, 9]


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
