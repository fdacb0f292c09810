"""Labeled tasks: special tokens, truncation, tags on first tokens with every tokenizer, answers in windows."""

import itertools
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clearhead.config.data import Corpus, DataConfig, TokenizerConfig
from clearhead.data import IGNORED, Batch, Dataset, prepare
from clearhead.data.labeled_tasks import first_token_words, window_starts
from clearhead.errors import UserError
from clearhead.text import KINDS, Kind
from tests.data.helpers import dataset, samples_of, sentences, tokenizer


def full_batch(data: Dataset) -> Batch:
    return data.batch(np.arange(data.num_samples(0)), 0, 0)


def ids_of(text: str, kind: Kind = "byte-bpe") -> list[int]:
    return tokenizer(kind).encode(text)


CLS, SEP = tokenizer().id("class"), tokenizer().id("separator")


@pytest.mark.parametrize("packed", [False, True])
def test_texts_and_pairs_get_berts_special_tokens(packed: bool) -> None:
    batch = full_batch(
        dataset("classification", [("a cat", "x"), ("dog", "y"), ("", "x")], labels=("y", "x"), packed=packed)
    )
    assert samples_of(batch, "ids") == [[CLS, *ids_of(text), SEP] for text in ("a cat", "dog")]
    assert batch["labels"].tolist() == [1, 0]
    assert not batch["segments"].any()
    rows = [("a cat", "sat", "x"), ("a", "dog", "y"), ("a", "", "y")]
    batch = full_batch(dataset("classification", rows, labels=("y", "x"), text_pairs=True, packed=packed))
    expected = [[CLS, *ids_of(a), SEP, *ids_of(b), SEP] for a, b, _ in rows[:2]]
    assert samples_of(batch, "ids") == expected
    for (a, b, _), segments in zip(rows, samples_of(batch, "segments"), strict=False):
        assert segments == [0] * (len(ids_of(a)) + 2) + [1] * (len(ids_of(b)) + 1)


def test_labels_may_be_numbers_and_values_any_finite_number() -> None:
    batch = full_batch(dataset("classification", [("a", 1), ("b", "0")], labels=("0", "1")))
    assert batch["labels"].tolist() == [1, 0]
    batch = full_batch(dataset("regression", [("a", "1.5"), ("b", -2)]))
    assert batch["labels"].tolist() == [1.5, -2.0]
    assert batch["labels"].dtype.is_floating_point
    batch = full_batch(dataset("regression", [("a", "b", 0.25)], text_pairs=True))
    assert batch["segments"].any()
    assert batch["labels"].tolist() == [0.25]


@pytest.mark.parametrize("packed", [False, True])
def test_similarity_encodes_each_text_separately(packed: bool) -> None:
    rows = [("a cat", "the dog sat", 4.0), ("bird", "fox", "0.5"), ("", "fox", 1)]
    batch = full_batch(dataset("similarity", rows, packed=packed, max_score=8.0))
    for side, name in enumerate(("first", "second")):
        assert samples_of(batch, name) == [[CLS, *ids_of(row[side]), SEP] for row in rows[:2]]
    assert batch["labels"].tolist() == [0.5, 0.0625]
    pairs = full_batch(dataset("similarity", [row[:2] for row in rows], packed=packed, contrastive=True))
    assert samples_of(pairs, "first") == samples_of(batch, "first")
    assert pairs["labels"].tolist() == [1.0, 1.0]
    with pytest.raises(UserError, match=r"record 1: a score of 4, but data.max_score is 1"):
        dataset("similarity", rows)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(5, 40))
def test_truncation_keeps_the_beginning_of_both_texts(n: int, m: int, max_length: int) -> None:
    data = dataset("classification", [], labels=("x",), text_pairs=True, max_length=max_length)
    first, second = list(range(1000, 1000 + n)), list(range(2000, 2000 + m))
    ids, boundary = data.task.add_special_tokens(first, second)  # type: ignore[attr-defined]
    kept = [number for number in ids if 1000 <= number < 2000], [number for number in ids if number >= 2000]
    assert ids == [CLS, *kept[0], SEP, *kept[1], SEP]
    assert kept == (first[: len(kept[0])], second[: len(kept[1])])
    assert boundary == len(kept[0]) + 2
    assert len(ids) == min(max_length, n + m + 3)
    if n + m + 3 > max_length:  # each keeps at least half of the room
        room = max_length - 3
        assert len(kept[0]) >= min(n, room // 2)
        assert len(kept[1]) >= min(m, room // 2)
    alone, end = data.task.add_special_tokens(first)  # type: ignore[attr-defined]
    assert alone == [CLS, *first[: max_length - 2], SEP]
    assert end == len(alone)


def test_without_cls_and_sep_a_text_gets_begin_and_end() -> None:
    from clearhead.data import from_records
    from clearhead.text import train

    gpt = train(sentences(20), "byte-bpe", 300, roles=("pad", "begin", "end"))
    data = from_records(DataConfig(task="classification", text_pairs=True), [("a", "b", "x")], [gpt], ["x"])
    assert full_batch(data)["ids"].tolist() == [
        [gpt.id("begin"), *gpt.encode("a"), gpt.id("end"), *gpt.encode("b"), gpt.id("end")]
    ]


letters = st.sampled_from("abtheo.,'🐈猫坐ßÄé\u0301\u0308ñ1-#…")
words = st.lists(st.text(letters, min_size=1, max_size=6), min_size=1, max_size=8)


def normalized(text: str) -> str:
    """Return a text as a normalizing tokenizer decodes it."""
    return unicodedata.normalize("NFKC", text).replace(" ", "")


@pytest.mark.parametrize("kind", KINDS)
@given(words)
@example(["zebra", "cat"])
@example(["🐈", "\u0301a", "猫坐"])
@example(["e\u0301t\u0308", "x"])
def test_the_first_token_of_each_word_carries_its_tag(kind: Kind, words: list[str]) -> None:
    tokens = tokenizer(kind)
    text = " ".join(words)
    spans = tokens.offsets(text)
    word_ids = first_token_words(words, spans)
    assert len(word_ids) == len(spans)
    carriers = [word for word in word_ids if word is not None]
    assert carriers == sorted(set(carriers)), "each word at most once, in order"
    starts = [sum(len(word) + 1 for word in words[:n]) for n in range(len(words))]
    for index, ((token, start, end), word) in enumerate(zip(spans, word_ids, strict=True)):
        if word is None:
            continue
        assert tokens.id_to_token(token) not in ("▁", "Ġ", " "), "a space carries no tag"
        assert start < starts[word] + len(words[word]), "the token overlaps its word"
        assert end > starts[word]
        for _, _, earlier in spans[:index]:  # no earlier token is part of the word
            assert earlier <= starts[word] or text[starts[word] : earlier].strip() == "" or earlier == end
    if kind in ("byte-bpe", "char", "word"):  # these never drop a word
        assert carriers == list(range(len(words)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_word_of_real_sentences_keeps_its_tag(kind: Kind) -> None:
    rows = [(line.split(), [str(n % 3) for n in range(len(line.split()))]) for line in sentences(30)]
    rows.append((["Die", "Katze", "saß", ",", "auf", "猫坐", "’", "quagmire", "isn't"], [str(n % 3) for n in range(9)]))
    for packed in (False, True):
        batch = full_batch(dataset("tagging", rows, kind, labels=("0", "1", "2"), packed=packed))
        for (_, tags), ids, labels in zip(rows, samples_of(batch, "ids"), samples_of(batch, "labels"), strict=True):
            assert [str(label) for label in labels if label != IGNORED] == tags
            assert labels[0] == labels[-1] == IGNORED
            assert ids[0] == tokenizer(kind).id("class")
            assert ids[-1] == tokenizer(kind).id("separator")


def test_tags_are_truncated_with_their_tokens() -> None:
    rows = [(["cat"] * 30, ["0"] * 29 + ["1"])]
    batch = full_batch(dataset("tagging", rows, labels=("0", "1"), max_length=10))
    assert batch["ids"].shape == (1, 10)
    labels = batch["labels"][0].tolist()
    assert labels[0] == labels[-1] == IGNORED
    assert set(labels[1:-1]) <= {0, IGNORED}


@given(st.integers(0, 60), st.integers(2, 20), st.integers(1, 19))
def test_windows_cover_the_context_and_overlap_by_stride(length: int, size: int, stride: int) -> None:
    if size <= stride:
        with pytest.raises(UserError, match="stride: "):
            window_starts(length, size, stride)
        return
    starts = window_starts(length, size, stride)
    assert starts[0] == 0
    assert starts[-1] + size >= length
    assert all(b - a == size - stride for a, b in itertools.pairwise(starts))
    assert len(starts) == 1 or starts[-2] + size < length, "no superfluous window"


PAIR_OF_TEXTS, PAIRS = ("a cat", "a dog"), {"text_pairs": True, "labels": ("x",)}
CONTEXT = "The old cat 🐈 sat on the mät. Zoë's quagmire, née 猫坐在垫子上, sang in the garden behind our house " * 2


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(st.data())
def test_every_window_with_the_whole_answer_has_its_span(kind: Kind, data: st.DataObject) -> None:
    first = data.draw(st.sampled_from([n for n in range(len(CONTEXT)) if not CONTEXT[n].isspace()]))
    last = data.draw(st.integers(first, min(first + 25, len(CONTEXT) - 1)).filter(lambda n: not CONTEXT[n].isspace()))
    answer, question, tokens = CONTEXT[first : last + 1], "who sat?", tokenizer(kind)
    stride = data.draw(st.integers(1, 9))
    answers = dataset("answering", [(CONTEXT, question, answer, first)], kind, max_length=40, stride=stride)
    batch = full_batch(answers)
    offset = len(tokens.encode(question)) + 2
    spans = tokens.offsets(CONTEXT)
    context = [token for token, _, _ in spans]
    covered, start_token, complete_answers = list[int](), 0, 0
    answer_tokens = [n for n, (_, a, b) in enumerate(spans) if a <= last and b > first and b > a]
    ends = zip(batch["first_token"].tolist(), batch["last_token"].tolist(), strict=True)
    rows = zip(samples_of(batch, "ids"), samples_of(batch, "segments"), ends, strict=True)
    for number, (ids, segments, (start, end)) in enumerate(rows):
        assert len(ids) <= 40
        assert segments == [0] * offset + [1] * (len(ids) - offset)
        window = ids[offset:-1]
        if number:
            start_token += 40 - offset - 1 - stride
        assert window == context[start_token : start_token + 40 - offset - 1]
        covered[start_token:] = window
        inside = start_token <= answer_tokens[0] and answer_tokens[-1] < start_token + len(window)
        complete_answers += inside
        shift = offset - start_token
        assert (start, end) == ((answer_tokens[0] + shift, answer_tokens[-1] + shift) if inside else (0, 0))
        if inside and tokens.roles.get("unknown") not in ids[start : end + 1] and kind not in ("word", "wordpiece"):
            assert (
                normalized(answer) in normalized(tokens.decode(ids[start : end + 1])).replace("�", "") or "🐈" in answer
            )
    assert covered == context
    assert complete_answers or len(answer_tokens) > stride


def test_no_answer_points_to_cls() -> None:
    batch = full_batch(dataset("answering", [("a cat sat", "why?", "", 0)], max_length=40, stride=5))
    assert batch["first_token"].tolist() == batch["last_token"].tolist() == [0]


def test_empty_texts_are_dropped_in_every_task() -> None:
    empty = [("", "a cat"), ("a cat", " \u00a0"), ("\t", "\n")]
    assert (
        dataset("answering", [(*each, "", 0) for each in [*empty, PAIR_OF_TEXTS]], max_length=40, stride=5).num_samples(
            0
        )
        == 1
    )
    assert dataset("classification", [(*each, "x") for each in [*empty, PAIR_OF_TEXTS]], **PAIRS).num_samples(0) == 1
    assert dataset("similarity", [(*each, 1.0) for each in [*empty, PAIR_OF_TEXTS]]).num_samples(0) == 1


def test_truncated_rows_are_counted_in_every_task() -> None:
    short, long = "a cat sat on", "a cat sat on the mat and saw a dog"
    size = len(ids_of(short))
    single = {"max_length": size + 2}
    cases = [
        dataset("classification", [(short, "x"), (long, "x"), (long, "x")], labels=("x",), **single),
        dataset("similarity", [(short, short, 1.0), (short, long, 1.0), (long, long, 1.0)], **single),
        dataset(
            "tagging",
            [(text.split(), ["O"] * len(text.split())) for text in (short, long, long)],
            labels=("O",),
            **single,
        ),
        dataset("answering", [(long, text, "", 0) for text in (short, long, long)], max_length=12, stride=1),
    ]
    for data in cases:
        assert [store.truncated for store in data.stores] == [2]
        assert [store.dropped for store in data.stores] == [{}]
    exact = dataset("classification", [(short, short, "x")], **{**PAIRS, "max_length": 2 * size + 3})
    assert exact.stores[0].truncated == 0


def test_a_long_question_leaves_room_for_the_context() -> None:
    rows: list[Any] = [("the cat sat", "why " * 100, "cat", 4)]
    batch = full_batch(dataset("answering", rows, max_length=40, stride=5))
    (ids,), (first,), (last,) = samples_of(batch, "ids"), batch["first_token"].tolist(), batch["last_token"].tolist()
    assert len(ids) <= 40
    assert tokenizer().decode(ids[first : last + 1]).strip() == "cat"
    with pytest.raises(UserError, match=r"stride: 30, but max_length leaves only \d+ tokens for the context; lower it"):
        dataset("answering", rows, max_length=40, stride=30)


def test_an_unknown_tag_is_reported_with_its_line(tmp_path: Path) -> None:
    lines = [f"word{n} O" for n in range(41)] + ["bad B-XX"]
    (tmp_path / "tags.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    corpus = Corpus(format="conll", files=(str(tmp_path / "tags.txt"),))
    config = DataConfig(task="tagging", train=(corpus,), labels=("O", "B-X"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"tags.txt, line 42: label 'B-XX'"):
        prepare(config, TokenizerConfig(kind="word", vocab_size=100))


def test_labels_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.tsv").write_text("good film\tpos\nbad film\tneg\n", encoding="utf-8")
    corpus = Corpus(format="tsv", files=(str(tmp_path / "rows.tsv"),))
    config = DataConfig(task="classification", train=(corpus,), cache_dir=str(tmp_path / "cache"))
    first = prepare(config, TokenizerConfig(kind="word", vocab_size=100))
    monkeypatch.setattr(
        sys.modules["clearhead.data.build_datasets"], "read_corpus", lambda *_: pytest.fail("read again")
    )
    assert prepare(config, TokenizerConfig(kind="word", vocab_size=100)).labels == first.labels == ("neg", "pos")
