"""Masked language modeling and next-sentence prediction: mask rates, whole words, second segments, lengths."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.data import IGNORED, Batch, Dataset
from clearhead.data.masked_lm import MaskedLanguageModel
from clearhead.text import KINDS, Kind, from_bert, from_gpt2
from tests.corpora import corpus
from tests.data.helpers import LINES, WORDS, dataset, prepared, samples_of, sentences, tokenizer, write


def full_batch(data: Dataset, epoch: int = 0, seed: int = 1) -> Batch:
    """Return all samples in one batch."""
    return data.batch(np.arange(data.num_samples(epoch)), epoch, seed)


@pytest.fixture(scope="module")
def long_documents() -> Dataset:
    return dataset("masked-language-model", [(" ".join(sentences(300)),) for _ in range(8)], max_length=128)


def original(batch: Batch) -> torch.Tensor:
    """Return the ids before masking."""
    return torch.where(batch["labels"] == IGNORED, batch["ids"], batch["labels"])


def test_rows_are_the_text_between_cls_and_sep(long_documents: Dataset) -> None:
    tokens = tokenizer()
    ids = tokens.encode(" ".join(sentences(300)))
    rows = [row.tolist() for row in original(full_batch(long_documents))]
    expected = [[tokens.id("class"), *ids[n : n + 126], tokens.id("separator")] for n in range(0, len(ids), 126)]
    expected = [row + [tokens.id("pad")] * (128 - len(row)) for row in expected] * 8
    assert rows == expected
    assert not full_batch(long_documents)["segments"].any()


def test_15_percent_are_chosen_and_80_10_10_are_masked_replaced_kept(long_documents: Dataset) -> None:
    tokens, counts = tokenizer(), Counter[str]()
    replaced = Counter[int]()
    for epoch in range(3):
        batch = full_batch(long_documents, epoch)
        chosen = batch["labels"] != IGNORED
        counts["tokens"] += batch.num_tokens - 2 * len(batch["ids"])
        counts["chosen"] += int(chosen.sum())
        now, before = batch["ids"][chosen], batch["labels"][chosen]
        counts["masked"] += int((now == tokens.id("mask")).sum())
        counts["kept"] += int((now == before).sum())
        other = now[(now != before) & (now != tokens.id("mask"))]
        counts["other"] += len(other)
        replaced.update(other.tolist())
        assert (batch["ids"][~chosen] != tokens.id("mask")).all()

    def is_near(part: str, of: str, fraction: float) -> bool:
        deviation = (fraction * (1 - fraction) / counts[of]) ** 0.5
        return (
            abs(counts[part] / counts[of] - fraction) < 5 * deviation + 0.002
        )  # 0.002: a random token may equal the original

    assert counts["chosen"] > 5000
    assert is_near("chosen", "tokens", 0.15)
    assert is_near("masked", "chosen", 0.8)
    assert is_near("other", "chosen", 0.1)
    assert is_near("kept", "chosen", 0.1)
    assert not set(replaced) & set(tokens.roles.values())
    assert len(replaced) > 0.7 * (len(tokens) - len(tokens.roles))


def test_mask_prob_sets_the_fraction(long_documents: Dataset) -> None:
    half = Dataset(
        MaskedLanguageModel(long_documents.task.config.model_copy(update={"mask_prob": 0.5}), [tokenizer()]),
        long_documents.stores,
    )
    batch = full_batch(half)
    assert int((batch["labels"] != IGNORED).sum()) / batch.num_tokens == pytest.approx(0.5, abs=0.02)


def test_every_sample_has_a_token_to_predict() -> None:
    data = dataset("masked-language-model", [(" ".join(WORDS[n % 9 : n % 9 + 2]),) for n in range(200)])
    assert ((full_batch(data)["labels"] != IGNORED).sum(1) > 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", [False, True])
def test_special_tokens_are_never_predicted(kind: Kind, pair: bool) -> None:
    lines = [("zebra <mask> ☃☃ [SEP] " + line,) for line in LINES] * 3
    data = dataset("masked-language-model", lines, kind, mask_prob=0.9, next_sentence=pair, max_length=32)
    batch = full_batch(data)
    predicted = set(batch["labels"].unique().tolist()) - {IGNORED}
    assert predicted
    assert not predicted & set(tokenizer(kind).roles.values())


def words_of(kind: Kind, ids: list[int]) -> list[list[int]]:
    """Return the token positions of each word, from character offsets."""
    tokens = tokenizer(kind)
    spans = tokens.offsets(TEXT)
    assert [token for token, _, _ in spans] == ids
    positions, last = list[list[int]](), -2
    for index, (_, start, end) in enumerate(spans):
        word = next((n for n, (a, b) in enumerate(WORD_SPANS) if a < end and start < b), None)
        if word is not None and word == last:
            positions[-1].append(index)
        elif word is not None:
            positions.append([index])
        last = -2 if word is None else word
    return positions


TEXT = "schön zebra überaus cat naïve quagmire jumping"
WORD_SPANS = [(n, n + len(word)) for word in TEXT.split() for n in [TEXT.index(word)]]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_word_masking_masks_all_tokens_of_a_word(kind: Kind) -> None:
    tokens = tokenizer(kind)
    data = dataset("masked-language-model", [(TEXT,)] * 100, kind, whole_word_masking=True, max_length=100)
    batch = full_batch(data)
    unknown = tokens.roles.get("unknown")
    ids = tokens.encode(TEXT)
    words = [word for word in words_of(kind, ids) if unknown not in [ids[n] for n in word]]
    assert any(len(word) > 1 for word in words) or kind == "word"
    chosen = (batch["labels"] != IGNORED)[:, 1 : 1 + len(ids)]
    masked = (batch["ids"] == tokens.id("mask"))[:, 1 : 1 + len(ids)]
    for word in words:
        for table in (chosen, masked):
            assert (table[:, word].all(1) == table[:, word].any(1)).all(), [tokens.id_to_token(ids[n]) for n in word]
    assert 0.05 < chosen.float().mean() < 0.4


def test_continuation_tokens_of_gpt2_and_bert() -> None:
    gpt2, bert = from_gpt2(corpus("tokenizers/gpt2")), from_bert(corpus("tokenizers/bert_uncased"))
    for tokens, continuing, starting in (
        (gpt2, ["ing", "s", "Ã", "©", "7"], ["Ġthe", "Ġ", "##", "Ċ", ".", "Ġ(", "ĠÃ©"]),
        (bert, ["##ing", "##s"], ["the", "s", ".", "[MASK]"]),
    ):
        flags = tokens.continuation_flags()
        assert [flags[tokens.vocabulary[token]] for token in continuing] == [True] * len(continuing)
        assert [flags[tokens.vocabulary[token]] for token in starting] == [False] * len(starting)


@pytest.fixture(scope="module")
def paired() -> Dataset:
    """Documents without common words, so that a segment identifies its document."""
    texts = [(" ".join(f"{WORDS[n]}" for _ in range(60 + n)),) for n in range(20)]
    return dataset("masked-language-model", texts, max_length=30, next_sentence=True)


def test_half_of_the_second_segments_come_from_another_document(paired: Dataset) -> None:
    tokens, labels = tokenizer(), list[int]()
    separator = tokens.id("separator")
    labels_by_epoch: list[tuple[int, ...]] = []
    for epoch in range(6):
        batch = full_batch(paired, epoch)
        unmasked = original(batch)
        for row, ids in enumerate(unmasked.tolist()):
            ids = ids[: int(batch["ids_lengths"][row])]
            assert len(ids) <= 30
            assert ids[0] == tokens.id("class")
            assert ids[-1] == separator
            assert ids.count(separator) == 2
            cut = ids.index(separator)
            first, second = tokens.decode(ids[1:cut]), tokens.decode(ids[cut + 1 : -1])
            assert first.split()
            assert second.split()
            if len(first.split()) > 2 and len(second.split()) > 2:  # words at the cut may be incomplete
                same = first.split()[1] == second.split()[1]
                assert bool(batch["next_sentence"][row]) != same, (first, second)
            segments = batch["segments"][row].tolist()
            assert segments == [0] * (cut + 1) + [1] * (len(ids) - cut - 1) + [0] * (len(segments) - len(ids))
            labels.append(int(batch["next_sentence"][row]))
        labels_by_epoch.append(tuple(batch["next_sentence"].tolist()))
    assert len(set(labels_by_epoch)) == 6, "drawn anew in every epoch"
    for number in range(6, 60):
        labels += full_batch(paired, number)["next_sentence"].tolist()
    assert len(labels) > 3000
    assert np.mean(labels) == pytest.approx(0.5, abs=4 * 0.5 / len(labels) ** 0.5)


def test_without_another_document_no_segment_is_swapped() -> None:
    rows = [(" ".join(sentences(60)),), ("the other document",)]
    for records, max_fraction in ((rows[:1], 0.0), (rows, 0.45)):  # the short one of two is often missed
        data = dataset("masked-language-model", records, max_length=20, next_sentence=True)
        documents = data.stores[0].fields["document"][0]
        ids = tokenizer().encode(rows[0][0])
        swapped = []
        for epoch in range(5):
            batch = full_batch(data, epoch)
            unmasked = Batch({**batch.tensors, "ids": original(batch)}, 0)
            for sample, (row, label) in enumerate(
                zip(samples_of(unmasked, "ids"), batch["next_sentence"], strict=True)
            ):
                cut = row.index(tokenizer().id("separator"))
                joined = row[1:cut] + row[cut + 1 : -1]
                inside = any(joined == ids[n : n + len(joined)] for n in range(len(ids)))
                assert bool(label) == (not inside) or documents[sample] != documents[0]
                swapped.append(bool(label))
        assert np.mean(swapped) <= max_fraction


def test_masks_differ_between_epochs_samples_and_seeds(long_documents: Dataset) -> None:
    chosen = [(full_batch(long_documents, *key)["labels"] != IGNORED)[:, :100] for key in ((0, 1), (1, 1), (0, 2))]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float((chosen[one] == chosen[other]).float().mean()) == pytest.approx(0.15**2 + 0.85**2, abs=0.03)
    rows = len(chosen[0]) // 8  # the documents are the same
    assert (chosen[0][:rows] != chosen[0][rows : 2 * rows]).any()
    masks = [full_batch(long_documents, *key)["ids"] for key in ((0, 1), (1, 1), (0, 2))]
    both = (chosen[0] & chosen[1], 0, 1), (chosen[0] & chosen[2], 0, 2)
    for table, one, other in both:  # the action on a chosen token differs, too
        assert (masks[one][:, :100][table] != masks[other][:, :100][table]).any()


def test_an_unswapped_second_segment_follows_the_first(tmp_path: Path) -> None:
    files = [write(tmp_path / name, sentences(40)[start::2]) for start, name in enumerate(("a", "b"))]
    data = prepared(tmp_path, "masked-language-model", train={"files": files}, next_sentence=True, max_length=25).train
    texts = [tokenizer().encode("\n".join(sentences(40)[start::2])) for start in (0, 1)]
    batch = full_batch(data)
    joined: dict[bool, int] = Counter()
    for ids, swapped in zip(
        samples_of(Batch({**batch.tensors, "ids": original(batch)}, 0), "ids"), batch["next_sentence"], strict=True
    ):
        cut = ids.index(tokenizer().id("separator"))
        row = ids[1:cut] + ids[cut + 1 : -1]
        inside = any(row == text[n : n + len(row)] for text in texts for n in range(len(text)))
        joined[bool(swapped)] += inside
        assert inside or swapped
    assert joined[False] > 5 > joined[True]


def test_sample_length_does_not_reveal_the_label(paired: Dataset) -> None:
    batch = full_batch(paired)
    swapped = batch["next_sentence"] == 1
    full = batch["ids_lengths"] == 30
    assert full[swapped].float().mean() == pytest.approx(float(full[~swapped].float().mean()), abs=0.25)
    assert full[swapped].float().mean() > 0.5
    sizes = paired.lengths(np.arange(paired.num_samples(0)), 0)[:, 0]
    assert (batch["ids_lengths"].numpy() <= sizes).all()


def test_the_end_of_the_stream_is_held_out(tmp_path: Path) -> None:
    files = [write(tmp_path / f"text{n}", sentences(100)) for n in range(3)]
    settings: dict[str, Any] = {"train": {"files": files}, "held_out": 0.2, "max_length": 30, "next_sentence": True}
    data = prepared(tmp_path, "masked-language-model", **settings)
    assert data.valid is not None
    rows = len(data.train.stores[0])
    assert (data.train.num_samples(0), data.valid.num_samples(0)) == (int(0.8 * rows), rows - int(0.8 * rows))
    for part, first in ((data.train, 0), (data.valid, int(0.8 * rows))):
        ids = data.train.stores[0].gather("ids", np.array([first]))[0]
        assert original(part.batch(np.array([0]), 0, 0))[0, 1].item() == ids[0]
