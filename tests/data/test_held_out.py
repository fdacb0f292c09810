"""The held-out pairs of translation data: none has a near-duplicate in the training data."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.overlap import pair_sets
from clearhead.config.data import Corpus, DataConfig
from clearhead.data import prepare
from clearhead.data.build_datasets import raw_records
from clearhead.data.cleaning import hash_fraction
from clearhead.data.formats import TRANSLATION, Location, Record
from clearhead.data.held_out import held_out_pairs, near_hashes
from clearhead.errors import UserError
from clearhead.evaluate.model import pairs
from tests.data.helpers import config, tokenizer, write

Pair = tuple[str, str]
FILE = Corpus.build({"format": "tsv", "files": "pairs"})
sentences = st.lists(st.sampled_from("abcde"), min_size=1, max_size=6).map(" ".join)


def held_out(pairs: list[Pair], fraction: float = 0.5, parts: int = 1, **options: Any) -> list[Pair]:
    """Return the held-out pairs of corpora that have the pairs between them."""
    data = DataConfig.build({"task": "translation", "held_out": fraction, "train": [FILE.model_dump()] * parts})
    corpora = iter([pairs[part::parts] for part in range(parts)] * 2)  # read twice
    read = lambda corpus: iter([Record(Location("file", 1), pair) for pair in next(corpora)])  # noqa: E731
    return [record.values for records in held_out_pairs(data, read, **options) for record in records]  # type: ignore[misc]


def split_off(pair: Pair, fraction: float = 0.5) -> bool:
    return hash_fraction(pair[0]) < fraction


def near(left: str, right: str) -> bool:
    """Whether two texts of lowercase words are near-duplicates, by comparing their words."""
    one, other = Counter(left.split()), Counter(right.split())
    missing, added = (one - other).total(), (other - one).total()
    if min(one.total() if missing else 4, other.total() if added else 4) < 4:
        return False
    return max(missing, added) <= 1


@given(sentences, sentences)
def test_near_duplicates_share_a_hash(left: str, right: str) -> None:
    hashes, owners = near_hashes([left, right])
    one, other = ({int(h) for h, owner in zip(hashes, owners, strict=True) if owner == text} for text in (0, 1))
    assert bool(one & other) == near(left, right)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("I'm fine.", "i'm  FINE!", True),
        ("Ich gehe heute.", "Heute gehe ich", True),
        ("Tom is here.", "Mary is here.", False),
        ("Tom is not here.", "Mary is not here.", True),
        ("我明天来。", "我今天来。", True),
        ("你好", "你 好！", True),
        ("ｆｉｎｅ", "fine", True),
        ("?", "!", False),
        ("?", "?", True),
    ],
)
def test_case_punctuation_and_order_do_not_matter(left: str, right: str, expected: bool) -> None:
    hashes, owners = near_hashes([left, right])
    assert bool({*hashes[owners == 0].tolist()} & {*hashes[owners == 1].tolist()}) == expected


@settings(deadline=None)
@given(st.lists(st.tuples(sentences, sentences), min_size=1, max_size=30), st.integers(1, 3))
def test_no_held_out_pair_has_a_near_duplicate_in_training(pairs: list[Pair], parts: int) -> None:
    training = [pair for pair in pairs if not split_off(pair)]
    expected = [
        pair
        for part in range(parts)
        for pair in pairs[part::parts]
        if split_off(pair) and not any(near(pair[side], other[side]) for other in training for side in (0, 1))
    ]
    candidates = sum(map(split_off, pairs))
    if len(expected) >= 0.1 * candidates:
        assert held_out(pairs, parts=parts) == expected


def test_a_pair_whose_target_was_trained_on_is_not_held_out() -> None:
    rows = [(f"source {n}", f"target {n}") for n in range(400)]
    rows += [(f"source {n}", "Yes.") for n in range(400, 500)] + [("source 500", "yes")]
    kept = held_out(rows)
    assert kept == [pair for pair in rows[:400] if split_off(pair)]
    assert 150 < len(kept) < 250


def test_templates_are_split_by_source_alone() -> None:
    rows = [(f"set the alarm to {n} please", f"ALARM ( TIME = {n} )") for n in range(200)]
    log: list[str] = []
    assert held_out(rows, log=log.append) == [pair for pair in rows if split_off(pair)]
    [line] = log
    assert line.endswith("pairs, nearly all of them with a near-duplicate in the training data")


def test_nothing_is_held_out_of_no_pairs() -> None:
    assert held_out([("a", "b")], fraction=0.0) == []


def test_training_and_evaluation_hold_out_the_same_pairs(tmp_path: Path) -> None:
    rows = [(f"S{n}", f"T{n % 150}") for n in range(200)]
    files = [write(tmp_path / "a", map("\t".join, rows[:100])), write(tmp_path / "b", map("\t".join, rows[100:]))]
    corpora = [{"format": "tsv", "files": file} for file in files]
    log: list[str] = []
    options: dict[str, Any] = {"held_out": 0.3, "lowercase": True, "deduplicate": True}
    settings = config(tmp_path, "translation", train=corpora, **options)
    data = prepare(settings, [tokenizer()], log=log.append)
    sources, references = pairs(settings)
    training = [row for row in rows if not hash_fraction(row[0].lower()) < 0.3]
    targets = {target for _, target in training}
    assert list(zip(sources, references, strict=True)) == [
        row for row in rows if row not in training and row[1] not in targets
    ]
    assert data.valid is not None
    assert data.valid.num_samples(0) == len(sources)
    assert data.train.num_samples(0) == len(training), "pairs near the training data are in neither part"
    others = len(rows) - len(training) - len(sources)
    assert others > 5
    assert f"held out {len(sources)} pairs; {others} others have a near-duplicate in the training data" in log
    one_file = prepare(config(tmp_path, "translation", train=corpora[0], **options), [tokenizer()])
    assert one_file.valid is not None
    assert one_file.valid.stores[0].folder != data.valid.stores[0].folder, "the other file decides, too"
    assert one_file.train.stores[0].folder == data.train.stores[0].folder


def test_the_overlap_with_the_training_data_is_counted(tmp_path: Path) -> None:
    rows = [(f"S{n}", f"T{n}" if n < 100 else "Yes") for n in range(200)]
    rows.append(next((f"S{n}", "yes!") for n in range(200, 300) if split_off((f"S{n}", ""))))
    file = write(tmp_path / "pairs", map("\t".join, rows))
    sets = pair_sets(config(tmp_path, "translation", train={"format": "tsv", "files": file}, held_out=0.5))
    every = [row for row in rows if split_off(row)]
    new = [row for row in every if row[1] != "Yes"]
    assert list(sets.values()) == [every, new, new[:-1]]
    assert list(sets)[1] == f"target not in training ({1 - len(new) / len(every):.1%} are)"


def test_a_text_that_is_none_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ['{"source": "a", "target": "b"}', '{"source": "c", "target": 5}'])
    settings = config(tmp_path, "translation", train={"format": "jsonl", "files": file}, held_out=0.5)
    with pytest.raises(UserError, match=r"rows.jsonl, line 2: 5 is int, not a text"):
        held_out_pairs(settings, lambda corpus: raw_records(corpus, TRANSLATION))
