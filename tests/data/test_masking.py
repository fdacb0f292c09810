"""BERT's tasks: what is masked and how often, whole words, segments of other documents, lengths."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.data import IGNORED, Batch, Dataset
from clearhead.data.masking import MaskedLanguageModel
from clearhead.text import KINDS, Kind, from_bert, from_gpt2
from tests.corpora import corpus
from tests.data.helpers import LINES, WORDS, dataset, prepared, samples_of, sentences, tokenizer, write


def whole(data: Dataset, epoch: int = 0, seed: int = 1) -> Batch:
    """All samples in one batch."""
    return data.batch(np.arange(data.size(epoch)), epoch, seed)


@pytest.fixture(scope="module")
def long() -> Dataset:
    return dataset("masked-language-model", [(" ".join(sentences(300)),) for _ in range(8)], max_length=128)


def original(batch: Batch) -> torch.Tensor:
    """What the ids were before masking."""
    return torch.where(batch["labels"] == IGNORED, batch["ids"], batch["labels"])


def test_rows_are_the_text_between_class_and_separator(long: Dataset) -> None:
    tokens = tokenizer()
    ids = tokens.encode(" ".join(sentences(300)))
    rows = [row.tolist() for row in original(whole(long))]
    wanted = [[tokens.id("class"), *ids[n : n + 126], tokens.id("separator")] for n in range(0, len(ids), 126)]
    wanted = [row + [tokens.id("pad")] * (128 - len(row)) for row in wanted] * 8
    assert rows == wanted
    assert not whole(long)["segments"].any()


def test_fifteen_in_a_hundred_are_chosen_and_eighty_ten_ten_is_done_with_them(long: Dataset) -> None:
    tokens, counts = tokenizer(), Counter[str]()
    replaced = Counter[int]()
    for epoch in range(3):
        batch = whole(long, epoch)
        chosen = batch["labels"] != IGNORED
        counts["tokens"] += batch.tokens - 2 * len(batch["ids"])
        counts["chosen"] += int(chosen.sum())
        now, before = batch["ids"][chosen], batch["labels"][chosen]
        counts["masked"] += int((now == tokens.id("mask")).sum())
        counts["kept"] += int((now == before).sum())
        other = now[(now != before) & (now != tokens.id("mask"))]
        counts["other"] += len(other)
        replaced.update(other.tolist())
        assert (batch["ids"][~chosen] != tokens.id("mask")).all()

    def near(part: str, of: str, share: float) -> bool:
        deviation = (share * (1 - share) / counts[of]) ** 0.5
        return (
            abs(counts[part] / counts[of] - share) < 5 * deviation + 0.002
        )  # 0.002: another may be the same by chance

    assert counts["chosen"] > 5000
    assert near("chosen", "tokens", 0.15)
    assert near("masked", "chosen", 0.8)
    assert near("other", "chosen", 0.1)
    assert near("kept", "chosen", 0.1)
    assert not set(replaced) & set(tokens.roles.values())
    assert len(replaced) > 0.7 * (len(tokens) - len(tokens.roles))


def test_the_share_can_be_chosen(long: Dataset) -> None:
    half = Dataset(
        MaskedLanguageModel(long.task.config.model_copy(update={"mask_prob": 0.5}), [tokenizer()]), long.stores
    )
    batch = whole(half)
    assert int((batch["labels"] != IGNORED).sum()) / batch.tokens == pytest.approx(0.5, abs=0.02)


def test_something_is_asked_for_in_every_sample() -> None:
    data = dataset("masked-language-model", [(" ".join(WORDS[n % 9 : n % 9 + 2]),) for n in range(200)])
    assert ((whole(data)["labels"] != IGNORED).sum(1) > 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", [False, True])
def test_special_tokens_are_never_asked_for(kind: Kind, pair: bool) -> None:
    lines = [("zebra <mask> ☃☃ [SEP] " + line,) for line in LINES] * 3
    data = dataset("masked-language-model", lines, kind, mask_prob=0.9, next_sentence=pair, max_length=32)
    batch = whole(data)
    asked = set(batch["labels"].unique().tolist()) - {IGNORED}
    assert asked
    assert not asked & set(tokenizer(kind).roles.values())


def words_of(kind: Kind, ids: list[int]) -> list[list[int]]:
    """The places of the tokens of each word, found by decoding: a word goes on until a space or a mark."""
    tokens = tokenizer(kind)
    spans = tokens.offsets(TEXT)
    assert [token for token, _, _ in spans] == ids
    found, last = list[list[int]](), -2
    for place, (_, first, behind) in enumerate(spans):
        word = next((n for n, (a, b) in enumerate(PLACES) if a < behind and first < b), None)
        if word is not None and word == last:
            found[-1].append(place)
        elif word is not None:
            found.append([place])
        last = -2 if word is None else word
    return found


TEXT = "schön zebra überaus cat naïve quagmire jumping"
PLACES = [(n, n + len(word)) for word in TEXT.split() for n in [TEXT.index(word)]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_a_word_are_chosen_together(kind: Kind) -> None:
    tokens = tokenizer(kind)
    data = dataset("masked-language-model", [(TEXT,)] * 100, kind, whole_word_masking=True, max_length=100)
    batch = whole(data)
    unknown = tokens.roles.get("unknown")
    ids = tokens.encode(TEXT)
    words = [word for word in words_of(kind, ids) if unknown not in [ids[place] for place in word]]
    assert any(len(word) > 1 for word in words) or kind == "word"
    chosen = (batch["labels"] != IGNORED)[:, 1 : 1 + len(ids)]
    masked = (batch["ids"] == tokens.id("mask"))[:, 1 : 1 + len(ids)]
    for word in words:
        for table in (chosen, masked):
            assert (table[:, word].all(1) == table[:, word].any(1)).all(), [tokens.token(ids[place]) for place in word]
    assert 0.05 < chosen.float().mean() < 0.4


def test_gpt2_and_bert_say_which_tokens_go_on_with_a_word() -> None:
    gpt2, bert = from_gpt2(corpus("tokenizers/gpt2")), from_bert(corpus("tokenizers/bert_uncased"))
    for tokens, going_on, beginning in (
        (gpt2, ["ing", "s", "Ã", "©", "7"], ["Ġthe", "Ġ", "##", "Ċ", ".", "Ġ(", "ĠÃ©"]),
        (bert, ["##ing", "##s"], ["the", "s", ".", "[MASK]"]),
    ):
        found = tokens.continues()
        assert [found[tokens.vocabulary[token]] for token in going_on] == [True] * len(going_on)
        assert [found[tokens.vocabulary[token]] for token in beginning] == [False] * len(beginning)


@pytest.fixture(scope="module")
def paired() -> Dataset:
    """Documents that never share a word, so that a segment tells where it is from."""
    texts = [(" ".join(f"{WORDS[n]}" for _ in range(60 + n)),) for n in range(20)]
    return dataset("masked-language-model", texts, max_length=30, next_sentence=True)


def test_half_of_the_second_segments_come_from_another_document(paired: Dataset) -> None:
    tokens, labels = tokenizer(), list[int]()
    separator = tokens.id("separator")
    seen: list[tuple[int, ...]] = []
    for epoch in range(6):
        batch = whole(paired, epoch)
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
            if len(first.split()) > 2 and len(second.split()) > 2:  # the words at the cut may be halves
                same = first.split()[1] == second.split()[1]
                assert bool(batch["next_sentence"][row]) != same, (first, second)
            segments = batch["segments"][row].tolist()
            assert segments == [0] * (cut + 1) + [1] * (len(ids) - cut - 1) + [0] * (len(segments) - len(ids))
            labels.append(int(batch["next_sentence"][row]))
        seen.append(tuple(batch["next_sentence"].tolist()))
    assert len(set(seen)) == 6, "drawn anew in every epoch"
    for number in range(6, 60):
        labels += whole(paired, number)["next_sentence"].tolist()
    assert len(labels) > 3000
    assert np.mean(labels) == pytest.approx(0.5, abs=4 * 0.5 / len(labels) ** 0.5)


def test_where_there_is_no_other_document_nothing_is_called_swapped() -> None:
    rows = [(" ".join(sentences(60)),), ("the other document",)]
    for records, most in ((rows[:1], 0.0), (rows, 0.45)):  # of two, the short one is often not found
        data = dataset("masked-language-model", records, max_length=20, next_sentence=True)
        documents = data.stores[0].fields["document"][0]
        ids = tokenizer().encode(rows[0][0])
        swapped = []
        for epoch in range(5):
            batch = whole(data, epoch)
            unmasked = Batch({**batch.tensors, "ids": original(batch)}, 0)
            for sample, (row, label) in enumerate(
                zip(samples_of(unmasked, "ids"), batch["next_sentence"], strict=True)
            ):
                cut = row.index(tokenizer().id("separator"))
                joined = row[1:cut] + row[cut + 1 : -1]
                inside = any(joined == ids[n : n + len(joined)] for n in range(len(ids)))
                assert bool(label) == (not inside) or documents[sample] != documents[0]
                swapped.append(bool(label))
        assert np.mean(swapped) <= most


def test_masks_are_drawn_anew_for_every_epoch_sample_and_seed(long: Dataset) -> None:
    chosen = [(whole(long, *key)["labels"] != IGNORED)[:, :100] for key in ((0, 1), (1, 1), (0, 2))]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float((chosen[one] == chosen[other]).float().mean()) == pytest.approx(0.15**2 + 0.85**2, abs=0.03)
    rows = len(chosen[0]) // 8  # the documents are the same
    assert (chosen[0][:rows] != chosen[0][rows : 2 * rows]).any()
    masks = [whole(long, *key)["ids"] for key in ((0, 1), (1, 1), (0, 2))]
    both = (chosen[0] & chosen[1], 0, 1), (chosen[0] & chosen[2], 0, 2)
    for table, one, other in both:  # what is done with a chosen token is drawn anew, too
        assert (masks[one][:, :100][table] != masks[other][:, :100][table]).any()


def test_a_true_second_segment_follows_the_first(tmp_path: Path) -> None:
    files = [write(tmp_path / name, sentences(40)[start::2]) for start, name in enumerate(("a", "b"))]
    data = prepared(tmp_path, "masked-language-model", train={"files": files}, next_sentence=True, max_length=25).train
    texts = [tokenizer().encode("\n".join(sentences(40)[start::2])) for start in (0, 1)]
    batch = whole(data)
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


def test_the_length_of_a_sample_does_not_tell_whether_it_was_swapped(paired: Dataset) -> None:
    batch = whole(paired)
    swapped = batch["next_sentence"] == 1
    full = batch["ids_lengths"] == 30
    assert full[swapped].float().mean() == pytest.approx(float(full[~swapped].float().mean()), abs=0.25)
    assert full[swapped].float().mean() > 0.5
    sizes = paired.lengths(np.arange(paired.size(0)), 0)[:, 0]
    assert (batch["ids_lengths"].numpy() <= sizes).all()


def test_the_end_is_held_out_for_masked_text_as_well(tmp_path: Path) -> None:
    files = [write(tmp_path / f"text{n}", sentences(100)) for n in range(3)]
    settings: dict[str, Any] = {"train": {"files": files}, "held_out": 0.2, "max_length": 30, "next_sentence": True}
    data = prepared(tmp_path, "masked-language-model", **settings)
    assert data.valid is not None
    rows = len(data.train.stores[0])
    assert (data.train.size(0), data.valid.size(0)) == (int(0.8 * rows), rows - int(0.8 * rows))
    for part, first in ((data.train, 0), (data.valid, int(0.8 * rows))):
        ids = data.train.stores[0].take("ids", np.array([first]))[0]
        assert original(part.batch(np.array([0]), 0, 0))[0, 1].item() == ids[0]
