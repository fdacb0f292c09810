"""Word vectors: neighbors, analogies and correlations counted by hand, files that come back exactly."""

import gzip
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import UserError
from clearhead.text.correlation import ranks, spearman
from clearhead.text.similarity import score_analogies, score_pairs
from clearhead.text.tensors import save_tensors
from clearhead.text.vectors import WordVectors

WORDS = ["king", "queen", "man", "woman", "apple"]


def small() -> WordVectors:
    rows = [[1.0, 1, 0], [1, -1, 0], [0, 2, 0], [0, -2, 0], [0, 0, 3]]
    return WordVectors(WORDS, torch.tensor(rows))


def test_neighbors_are_by_cosine_without_the_word() -> None:
    found = small().neighbors("man", 2)
    assert found[0] == ("king", pytest.approx(math.sqrt(0.5)))
    assert found[1] == ("apple", pytest.approx(0))
    assert len(small().neighbors("man", 99)) == 4


def test_an_analogy_never_answers_with_its_own_words() -> None:
    vectors = small()
    assert vectors.analogy("man", "woman", "king", 1)[0][0] == "queen"
    assert {word for word, _ in vectors.analogy("man", "man", "king", 99)} == {"queen", "woman", "apple"}


def test_upper_case_finds_the_lower_and_unknown_words_name_near_ones() -> None:
    assert small().number("King") == 0
    with pytest.raises(UserError, match="'quen' is not among the 5 words; near it: queen"):
        small().neighbors("quen")
    with pytest.raises(UserError, match="too rare"):
        small()["zebra"]


def test_equal_values_share_their_ranks() -> None:
    assert ranks([3.0, 1, 3, 7, 3]) == [3, 1, 3, 5, 3]


def test_spearman_is_the_hand_computed_one() -> None:
    first = [86.0, 97, 99, 100, 101, 103, 106, 110, 112, 113]
    second = [0.0, 20, 28, 27, 50, 29, 7, 17, 6, 12]
    assert spearman(first, second) == pytest.approx(-29 / 165)  # 1 - 6 · 194 / (10 · 99)
    assert spearman([1.0, 2, 2], [1.0, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert spearman(first, [each**3 for each in first]) == pytest.approx(1)
    assert math.isnan(spearman([1.0, 1, 1], [0.0, 1, 2]))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12))
def test_ranks_add_up_and_keep_the_order(values: list[int]) -> None:
    found = ranks(values)
    assert sum(found) == len(values) * (len(values) + 1) / 2
    assert all(
        (a < b) == (x < y) for a, x in zip(values, found, strict=True) for b, y in zip(values, found, strict=True)
    )


def test_pairs_are_scored_without_the_unknown(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("# a comment\nKing\tman\t9\nking\tapple\t1\nman\twoman\t0\nking\tzebra\t5\n", encoding="utf-8")
    score = score_pairs(small(), file)
    assert (score.spearman, score.pairs, score.unknown) == (pytest.approx(1), 3, 1)
    file.write_text("king man 9\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 1: expected two words and a score"):
        score_pairs(small(), file)
    file.write_text("king\tzebra\t9\n", encoding="utf-8")
    with pytest.raises(UserError, match="0 of 1 pairs"):
        score_pairs(small(), file)


def test_analogies_are_scored_by_section(tmp_path: Path) -> None:
    file = tmp_path / "questions.txt"
    file.write_text(
        ": royal\nMan woman king queen\nman woman king apple\n: none\nman woman king zebra\n", encoding="utf-8"
    )
    royal, none = score_analogies(small(), file)
    assert (royal.name, royal.right, royal.asked, royal.unknown, royal.accuracy) == ("royal", 1, 2, 0, 0.5)
    assert (none.name, none.asked, none.unknown, none.accuracy) == ("none", 0, 1, 0)
    file.write_text("man woman king\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 1: expected four words"):
        score_analogies(small(), file)


def random_vectors() -> WordVectors:
    return WordVectors(["a", "ö", "猫", "it's"], torch.randn(4, 7) * 10.0 ** torch.randint(-20, 20, (4, 7)))


def test_folder_comes_back_exactly(tmp_path: Path) -> None:
    vectors = random_vectors()
    vectors.save(tmp_path / "new" / "vectors")
    back = WordVectors.load(tmp_path / "new" / "vectors")
    assert list(back.words) == list(vectors.words)
    assert torch.equal(back.vectors, vectors.vectors)


def test_text_format_comes_back_exactly_plain_or_gzip(tmp_path: Path) -> None:
    vectors, file, zipped = random_vectors(), tmp_path / "vectors.txt", tmp_path / "vectors.txt.gz"
    vectors.save_text(file)
    assert file.read_text(encoding="utf-8").splitlines()[0] == "4 7"
    zipped.write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    for path in (file, zipped):
        back = WordVectors.load(path)
        assert list(back.words) == list(vectors.words)
        assert torch.equal(back.vectors, vectors.vectors)
    with pytest.raises(UserError, match="has a space in it"):
        WordVectors(["new york"], torch.ones(1, 2)).save_text(file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: expected the number of words"),
        ("king 1 2\n", "line 1: expected the number of words"),
        ("1 2\nking 1\n", "line 2: expected a word and 2 numbers"),
        ("1 2\nking 1 x\n", "line 2: expected a word and 2 numbers"),
        ("2 2\nking 1 2\n", "promises 2 words, found 1"),
        ("2 2\nking 1 2\nking 1 2\n", "a word stands twice"),
        ("1 2\nking nan 2\n", "not finite"),
    ],
)
def test_wrong_text_files_are_refused_with_the_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "vectors.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=says):
        WordVectors.load(file)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    small().save(tmp_path)
    (tmp_path / "vocabulary.json").write_text('{"words": ["a"]}', encoding="utf-8")
    with pytest.raises(UserError, match="do not belong together"):
        WordVectors.load(tmp_path)
    (tmp_path / "vocabulary.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="not valid JSON"):
        WordVectors.load(tmp_path)
    save_tensors(tmp_path / "vectors.safetensors", {"vectors": torch.ones(5)})
    with pytest.raises(UserError, match="expected a tensor vectors of 2 dimensions"):
        WordVectors.load(tmp_path)
    (tmp_path / "vectors.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="no safetensors file"):
        WordVectors.load(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        WordVectors.load(tmp_path / "nowhere")
