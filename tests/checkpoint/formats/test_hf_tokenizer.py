"""Tokenizers of Hugging Face folders, imported and exported with their special tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Engine
from tokenizers.models import WordLevel, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.processors import ByteLevel, RobertaProcessing, Sequence, TemplateProcessing

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.formats import export_model, import_model, read_foreign
from clearhead.config import ModelConfig
from clearhead.config.load import preset
from clearhead.errors import UserError
from clearhead.model import build
from clearhead.text import train
from tests.checkpoint.formats.peers import saved
from tests.checkpoint.small_models import tokenizer


def test_an_exported_tokenizer_adds_the_same_special_tokens_in_transformers(tmp_path: Path) -> None:
    tokens = tokenizer()
    config = preset("tiny-llama").model_dump() | {"vocab_size": len(tokens)}
    save_model(tmp_path / "ours", build(ModelConfig.build(config)), tokens)
    export_model(load_model(tmp_path / "ours"), tmp_path / "hf", "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the cat sat 猫 <begin>"
    assert theirs(text, split_special_tokens=True).input_ids == [tokens.id("begin"), *tokens.encode(text)]
    assert theirs.eos_token_id == tokens.id("end")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.generation_config.eos_token_id == tokens.id("end")
    assert model.generation_config.bos_token_id == tokens.id("begin")
    import_model(tmp_path / "hf", tmp_path / "again")
    assert load_model(tmp_path / "again").extra["begin"] == [tokens.id("begin")]
    assert load_model(tmp_path / "again").extra["eos_ids"] == [tokens.id("end")]


def test_a_bert_vocabulary_is_read_cased_or_uncased(tmp_path: Path) -> None:
    saved("bert", tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\nThe\ncat\n##s\n")
    assert read_foreign(tmp_path).tokenizers[0].encode("The cats") == [4, 6, 7]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert read_foreign(tmp_path).tokenizers[0].encode("The cats") == [5, 6, 7]


def test_files_that_contradict_each_other_on_case_are_refused(tmp_path: Path) -> None:
    """transformers prefers tokenizer_config.json if the class is BERT's."""
    saved("bert", tmp_path)
    engine = Engine(WordPiece({"[UNK]": 0, "the": 1, "The": 2}, unk_token="[UNK]"))
    for lowercase, lowercase_setting, tokenizer_class, agree in (
        (True, True, "BertTokenizer", True),
        (True, False, "BertTokenizer", False),
        (False, True, "BertTokenizerFast", False),
        (False, True, "PreTrainedTokenizerFast", True),
    ):
        engine.normalizer = BertNormalizer(lowercase=lowercase)
        engine.save(str(tmp_path / "tokenizer.json"))
        settings = {"do_lower_case": lowercase_setting, "tokenizer_class": tokenizer_class}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        if agree:
            assert read_foreign(tmp_path).tokenizers[0].encode("The") == [1 if lowercase else 2]
            continue
        with pytest.raises(UserError, match=r"do_lower_case: .* another value than in tokenizer\.json"):
            read_foreign(tmp_path)


def test_only_tokens_before_a_text_are_begin_tokens(tmp_path: Path) -> None:
    saved("llama2", tmp_path)
    tokens = train(["a b", "b a"], "char", 20)
    begin, end = tokens.id("begin"), tokens.id("end")
    special = [("<begin>", begin), ("<end>", end)]
    for template, expected in (("<begin> $A <end>", [begin]), ("$A <end>", []), ("<begin> <begin> $A", [begin, begin])):
        tokens.engine.post_processor = TemplateProcessing(single=template, special_tokens=special)
        tokens.save(tmp_path)
        assert read_foreign(tmp_path).extra["begin"] == expected


def test_begin_tokens_are_read_from_any_post_processor(tmp_path: Path) -> None:
    """Also if `a` is not in the vocabulary, or encoded as the begin token."""
    saved("llama2", tmp_path)
    template = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    for model in (WordLevel({"<s>": 0, "</s>": 1, "b": 2}), WordLevel({"<s>": 0, "</s>": 1, "b": 2}, unk_token="<s>")):
        for processor in (template, RobertaProcessing(("</s>", 1), ("<s>", 0)), Sequence([ByteLevel(), template])):
            engine = Engine(model)
            engine.post_processor = processor
            engine.save(str(tmp_path / "tokenizer.json"))
            assert read_foreign(tmp_path).extra["begin"] == [0]


@pytest.mark.parametrize(
    ("special", "message"),
    [
        ({}, "'<s>' is not one of its special tokens"),
        ({"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}}, "outside the vocabulary"),
    ],
)
def test_a_post_processor_with_unknown_tokens_is_refused(special: Any, message: str, tmp_path: Path) -> None:
    saved("llama2", tmp_path)
    engine = Engine(WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    engine.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    serialized = json.loads(engine.to_str())
    serialized["post_processor"]["special_tokens"] = special
    (tmp_path / "tokenizer.json").write_text(json.dumps(serialized))
    with pytest.raises(UserError, match=f"post_processor: .*{message}"):
        read_foreign(tmp_path)


def test_begin_and_end_tokens_survive_a_round_trip(tmp_path: Path) -> None:
    """The ids in config.json are used, whatever roles the tokenizer has."""
    tokens = tokenizer()
    begin, end = tokens.encode("cat")[0], tokens.encode("mat")[0]
    config = preset("tiny-llama").model_dump() | {"vocab_size": len(tokens)}
    extra = {"begin": [begin], "eos_ids": [end, tokens.id("end")]}
    save_model(tmp_path / "ours", build(ModelConfig.build(config)), tokens, extra)
    export_model(load_model(tmp_path / "ours"), tmp_path / "hf", "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (begin, end)
    assert theirs("the cat").input_ids == [begin, *tokens.encode("the cat")]
    again = read_foreign(tmp_path / "hf").extra
    assert {key: again[key] for key in extra} == extra


def test_banned_sequences_survive_a_round_trip(tmp_path: Path) -> None:
    saved("marian", tmp_path / "theirs")
    generation = tmp_path / "theirs" / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"bad_words_ids": [[3, 4], "x", [1 << 40]]}))
    import_model(tmp_path / "theirs", tmp_path / "ours")
    export_model(load_model(tmp_path / "ours"), tmp_path / "back", "hf")
    model = transformers.MarianMTModel.from_pretrained(tmp_path / "back")
    assert (
        model.generation_config.bad_words_ids == [[3, 4], [96]] == read_foreign(tmp_path / "back").extra["banned_ids"]
    )
