"""Word vectors: neighbors, analogies and correlations computed by hand, exact file round trips."""

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import UserError
from clearhead.text.correlation import ranks, spearman
from clearhead.text.tensors import save_tensors
from clearhead.text.word_similarity import score_analogies, score_pairs
from clearhead.text.word_vectors import WordVectors

WORDS = ["king", "queen", "man", "woman", "apple"]


def five_vectors() -> WordVectors:
    rows = [[1.0, 1, 0], [1, -1, 0], [0, 2, 0], [0, -2, 0], [0, 0, 3]]
    return WordVectors(WORDS, torch.tensor(rows))


def test_neighbors_are_sorted_by_cosine_without_the_word_itself() -> None:
    neighbors = five_vectors().neighbors("man", 2)
    assert neighbors[0] == ("king", pytest.approx(math.sqrt(0.5)))
    assert neighbors[1] == ("apple", pytest.approx(0))
    assert len(five_vectors().neighbors("man", 99)) == 4


def test_an_analogy_excludes_its_own_words() -> None:
    vectors = five_vectors()
    assert vectors.analogy("man", "woman", "king", 1)[0][0] == "queen"
    assert {word for word, _ in vectors.analogy("man", "man", "king", 99)} == {"queen", "woman", "apple"}


def test_lookup_ignores_case_and_unknown_words_suggest_similar_ones() -> None:
    assert five_vectors().id("King") == 0
    with pytest.raises(UserError, match="'quen' is not in the vocabulary of 5 words; did you mean queen"):
        five_vectors().neighbors("quen")
    with pytest.raises(UserError, match="too rare"):
        five_vectors()["zebra"]


def test_ties_share_their_mean_rank() -> None:
    assert ranks([3.0, 1, 3, 7, 3]) == [3, 1, 3, 5, 3]


def test_spearman_equals_the_formula() -> None:
    first = [86.0, 97, 99, 100, 101, 103, 106, 110, 112, 113]
    second = [0.0, 20, 28, 27, 50, 29, 7, 17, 6, 12]
    assert spearman(first, second) == pytest.approx(-29 / 165)  # 1 - 6 · 194 / (10 · 99)
    assert spearman([1.0, 2, 2], [1.0, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert spearman(first, [each**3 for each in first]) == pytest.approx(1)
    assert math.isnan(spearman([1.0, 1, 1], [0.0, 1, 2]))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12))
def test_ranks_sum_to_the_triangular_number_and_keep_the_order(values: list[int]) -> None:
    result = ranks(values)
    assert sum(result) == len(values) * (len(values) + 1) / 2
    assert all(
        (a < b) == (x < y) for a, x in zip(values, result, strict=True) for b, y in zip(values, result, strict=True)
    )


def test_pairs_with_unknown_words_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("# a comment\nKing\tman\t9\nking\tapple\t1\nman\twoman\t0\nking\tzebra\t5\n", encoding="utf-8")
    score = score_pairs(five_vectors(), file)
    assert (score.spearman, score.pairs, score.unknown) == (pytest.approx(1), 3, 1)
    file.write_text("king man 9\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 1: expected two words and a score"):
        score_pairs(five_vectors(), file)
    file.write_text("king\tzebra\t9\n", encoding="utf-8")
    with pytest.raises(UserError, match="0 of 1 pairs"):
        score_pairs(five_vectors(), file)


def test_analogies_are_scored_by_section(tmp_path: Path) -> None:
    file = tmp_path / "questions.txt"
    file.write_text(
        ": royal\nMan woman king queen\nman woman king apple\n: none\nman woman king zebra\n", encoding="utf-8"
    )
    royal, none = score_analogies(five_vectors(), file)
    assert (royal.name, royal.correct, royal.total, royal.unknown, royal.accuracy) == ("royal", 1, 2, 0, 0.5)
    assert (none.name, none.total, none.unknown, none.accuracy) == ("none", 0, 1, 0)
    file.write_text("man woman king\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 1: expected four words"):
        score_analogies(five_vectors(), file)


def random_vectors() -> WordVectors:
    return WordVectors(["a", "ö", "猫", "it's"], torch.randn(4, 7) * 10.0 ** torch.randint(-20, 20, (4, 7)))


def test_folder_round_trip_is_exact(tmp_path: Path) -> None:
    vectors = random_vectors()
    vectors.save(tmp_path / "new" / "vectors")
    loaded = WordVectors.load(tmp_path / "new" / "vectors")
    assert list(loaded.words) == list(vectors.words)
    assert torch.equal(loaded.vectors, vectors.vectors)


def test_two_files_of_earlier_versions_are_read_and_replaced_by_one(tmp_path: Path) -> None:
    save_tensors(tmp_path / "vectors.safetensors", {"vectors": five_vectors().vectors})
    (tmp_path / "vocabulary.json").write_text(json.dumps({"words": WORDS}), encoding="utf-8")
    loaded = WordVectors.load(tmp_path)
    assert list(loaded.words) == WORDS
    loaded.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.safetensors"], "a kill cannot mix two saves"
    assert list(WordVectors.load(tmp_path).words) == WORDS


def test_text_format_round_trip_is_exact_plain_and_gzip(tmp_path: Path) -> None:
    vectors, file, zipped = random_vectors(), tmp_path / "vectors.txt", tmp_path / "vectors.txt.gz"
    vectors.save_text(file)
    assert file.read_text(encoding="utf-8").splitlines()[0] == "4 7"
    zipped.write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    for path in (file, zipped):
        loaded = WordVectors.load(path)
        assert list(loaded.words) == list(vectors.words)
        assert torch.equal(loaded.vectors, vectors.vectors)
    with pytest.raises(UserError, match="contains a space"):
        WordVectors(["new york"], torch.ones(1, 2)).save_text(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected the number of words"),
        ("king 1 2\n", "line 1: expected the number of words"),
        ("1 2\nking 1\n", "line 2: expected a word and 2 numbers"),
        ("1 2\nking 1 x\n", "line 2: expected a word and 2 numbers"),
        ("2 2\nking 1 2\n", "declares 2 words, found 1"),
        ("2 2\nking 1 2\nking 1 2\n", "duplicate word"),
        ("1 1\nking 1\n\nqueen 2\n", "line 4: the header declares 1 words, but there are more"),
        ("1 2\nking nan 2\n", "not finite"),
        ("1 2\nking 1e39 2\n", "not finite"),
    ],
)
def test_invalid_text_files_are_refused_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "vectors.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        WordVectors.load(file)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    file, tensors = tmp_path / "vectors.safetensors", {"vectors": torch.ones(5, 2)}
    for words in (["a"], ["a"] * 5, [1, 2, 3, 4, 5], "abcde", None, ["\ud800", *"abcd"]):
        save_tensors(file, tensors, {"words": words})
        with pytest.raises(UserError, match=r"not belong together|duplicate|not a list of|not valid JSON"):
            WordVectors.load(tmp_path)
    save_tensors(file, tensors | {"json": torch.zeros(2, 2)})
    with pytest.raises(UserError, match="json is not text"):
        WordVectors.load(tmp_path)
    save_tensors(file, {"vectors": torch.full((5, 2), torch.inf)}, {"words": WORDS})
    with pytest.raises(UserError, match="vectors holds NaN or infinity"):
        WordVectors.load(tmp_path)
    save_tensors(tmp_path / "vectors.safetensors", {"vectors": torch.ones(5)})
    with pytest.raises(UserError, match="expected a floating-point tensor vectors of 2 dimensions"):
        WordVectors.load(tmp_path)
    (tmp_path / "vectors.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        WordVectors.load(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        WordVectors.load(tmp_path / "nowhere")
