"""Tokenizers: ids equal those of transformers, round trips, streams that never split a character."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clearhead.errors import UserError
from clearhead.text import KINDS, ROLES, Kind, Tokenizer, from_bert, from_gpt2, train, train_files
from tests.corpora import corpus, mixed_lines

TEXTS = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "Die Katze saß auf der Matte. Ärger über Öl!",
    "猫坐在垫子上。狗坐在猫上。",
    "It isn't 3.14159; it's 2.71828…",
] * 20
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return train(TEXTS, "byte-bpe", 400)


@pytest.fixture(scope="module")
def tokenizers() -> dict[Kind, Tokenizer]:
    return {kind: train(TEXTS, kind, 400, roles=ROLES) for kind in KINDS}


@given(any_text)
@settings(max_examples=300)
def test_byte_level_round_trip_holds_for_any_text(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text


@given(any_text)
def test_streamed_text_equals_decoded_text(tokenizers: dict[Kind, Tokenizer], text: str) -> None:
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode(text)
        pieces = list(tokenizer.stream(ids))
        assert "".join(pieces) == tokenizer.decode(ids)
        assert all("�" not in piece for piece in pieces[:-1]) or "�" in text


def test_a_stream_that_ends_inside_a_character_equals_decode(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("cat 🐈")[:-1]
    assert "".join(byte_level.stream(ids)) == byte_level.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_text_are_plain_text_by_default(kind: Kind, tokenizers: dict[Kind, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    for role in tokenizer.roles:
        token = tokenizer.id_to_token(tokenizer.id(role))
        assert tokenizer.id(role) not in tokenizer.encode(f"a {token} b") or role == "unknown"
        assert tokenizer.id(role) in tokenizer.encode(f"a {token} b", special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_saves_and_loads_as_one_file(kind: Kind, tokenizers: dict[Kind, Tokenizer], tmp_path: Path) -> None:
    tokenizers[kind].save(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["tokenizer.json"]
    loaded = Tokenizer.load(tmp_path / "model")
    assert len(loaded) == len(tokenizers[kind])
    assert loaded.roles == tokenizers[kind].roles
    for text in TEXTS[:4]:
        assert loaded.encode(text) == tokenizers[kind].encode(text)


def test_known_text_round_trips_in_every_kind(tokenizers: dict[Kind, Tokenizer]) -> None:
    text = "The cat sat on the mat"
    for kind, tokenizer in tokenizers.items():
        assert tokenizer.decode(tokenizer.encode(text)) == text, kind


def test_a_byte_level_tokenizer_has_no_unknown_token(byte_level: Tokenizer) -> None:
    assert "unknown" not in byte_level.roles
    with pytest.raises(UserError, match="has no unknown token"):
        byte_level.id("unknown")


def test_offsets_cover_the_characters_of_the_text(tokenizers: dict[Kind, Tokenizer]) -> None:
    text = "Die Katze saß, 猫坐在"
    spans = [(start, end) for _, start, end in tokenizers["byte-bpe"].offsets(text)]
    assert "".join(text[start:end] for start, end in dict.fromkeys(spans)) == text


def test_lone_surrogates_are_refused_with_their_position(byte_level: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"text 2, character 3: lone surrogate \(U\+D83D\)"):
        byte_level.encode_batch(["fine", "ab\ud83d"])


def test_ids_outside_the_vocabulary_are_refused(byte_level: Tokenizer) -> None:
    for wrong in (-1, len(byte_level)):
        with pytest.raises(UserError, match="is not in the vocabulary; ids range from 0"):
            byte_level.decode([wrong])


def test_invalid_training_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size: 100 is too small for byte-bpe; it needs 259"):
        train(TEXTS, "byte-bpe", 100)
    with pytest.raises(UserError, match="no text to train"):
        train([], "word", 100)
    with pytest.raises(UserError, match="kind: 'bytes' is not allowed"):
        train(TEXTS, "bytes", 100)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="does not exist"):
        train_files([tmp_path / "none.txt"], "word", 100)


def test_invalid_tokenizer_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    for text in ("", "{}", "[1]", '{"model": {"type": "BPE"}}', "\0" * 50):
        file.write_text(text)
        with pytest.raises(UserError, match=r"not a supported tokenizer\.json"):
            Tokenizer.load(tmp_path)


def test_inconsistent_gpt2_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "encoder.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\na c\n")
    with pytest.raises(UserError, match=r"vocab\.bpe, line 3"):
        from_gpt2(tmp_path)
    for vocabulary in (["a"], {"a": 0, "b": 2}, {"a": True, "b": 0}, {"a": 0, "b": 1 << 70}, {"a": -1, "b": 0}):
        (tmp_path / "encoder.json").write_text(json.dumps(vocabulary))
        with pytest.raises(UserError, match="not a vocabulary; expected an object of tokens and the ids from 0 on"):
            from_gpt2(tmp_path)
    (tmp_path / "encoder.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        from_gpt2(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match=r"no line \[UNK\]"):
        from_bert(tmp_path)


def test_gpt2_and_bert_ids_equal_those_of_transformers_on_real_text() -> None:
    from transformers import BertTokenizer, GPT2Tokenizer

    lines = mixed_lines(100_000)
    assert len(lines) == 100_000
    folder = corpus("tokenizers/gpt2")
    theirs = GPT2Tokenizer(vocab=str(folder / "encoder.json"), merges=str(folder / "vocab.bpe"))
    assert from_gpt2(folder).encode_batch(lines) == theirs(lines, add_special_tokens=False)["input_ids"]
    folder = corpus("tokenizers/bert_uncased")
    theirs = BertTokenizer(vocab=str(folder / "vocab.txt"))
    assert from_bert(folder).encode_batch(lines) == theirs(lines, add_special_tokens=False)["input_ids"]


@given(st.lists(any_text, min_size=1, max_size=20))
@example(["[SEP] <|endoftext|>"])
def test_gpt2_and_bert_ids_equal_those_of_transformers_on_any_text(texts: list[str]) -> None:
    ours_gpt2, theirs_gpt2, ours_bert, theirs_bert = _load_both()
    options = {"add_special_tokens": False, "split_special_tokens": True}
    assert ours_gpt2.encode_batch(texts) == theirs_gpt2(texts, **options)["input_ids"]
    assert ours_bert.encode_batch(texts) == theirs_bert(texts, **options)["input_ids"]


@cache
def _load_both() -> tuple[Any, ...]:
    from transformers import BertTokenizer, GPT2Tokenizer

    gpt2, bert = corpus("tokenizers/gpt2"), corpus("tokenizers/bert_uncased")
    return (
        from_gpt2(gpt2),
        GPT2Tokenizer(vocab=str(gpt2 / "encoder.json"), merges=str(gpt2 / "vocab.bpe")),
        from_bert(bert),
        BertTokenizer(vocab=str(bert / "vocab.txt")),
    )


@pytest.mark.parametrize(("texts", "size"), [(["a b c d"], 8), (["hello world foo bar"] * 50, 12)])
def test_unigram_with_too_few_tokens_for_the_alphabet_is_refused(texts: list[str], size: int) -> None:
    with pytest.raises(UserError, match="letters of this text"):
        train(texts, "unigram", size)


def test_saving_never_overwrites_a_text_file(tmp_path: Path) -> None:
    tokenizer = train(["one two"] * 9, "word", 20)
    tokenizer.save(tmp_path / "v1.2")
    assert Tokenizer.load(tmp_path / "v1.2").vocabulary == tokenizer.vocabulary
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("text", encoding="utf-8")
    with pytest.raises(UserError, match="is a file"):
        tokenizer.save(corpus)
    assert corpus.read_text(encoding="utf-8") == "text"


def test_punctuation_is_a_token_of_its_own_and_decodes_without_a_space() -> None:
    texts = ["The dog sleeps, the cat too.", "Is the dog here?"] * 20
    word_level = train(texts, "word", 50)
    assert word_level.decode(word_level.encode(texts[0])) == texts[0]
    for kind in ("bpe", "unigram"):
        tokenizer = train(texts, kind, 60)
        pieces = [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode(texts[0])]
        assert pieces[-1] == "."
        assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]
