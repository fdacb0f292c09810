"""BLEU and chrF: cases worked out by hand, signatures, and what the tokenizers do."""

import math
import subprocess
import sys

import pytest

from clearhead.evaluate import bleu, chrf, tokenized_bleu

TRUE = ["The cat sat on the mat.", "It rained all day."]


def test_a_perfect_translation_has_all_points() -> None:
    assert bleu(TRUE, TRUE).value == pytest.approx(100)
    assert chrf(TRUE, TRUE).value == pytest.approx(100)


def test_bleu_is_the_formula_of_the_paper() -> None:
    # Of 7 tokens 6 are right, of 6 pairs 4, of 5 triples 2, of 4 quadruples 1; as long as the reference.
    found = bleu(["The cat sat on a mat."], [TRUE[0]])
    assert found.value == pytest.approx(100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25)
    # All of 5 tokens are right, but 7 were due: the brevity penalty.
    assert bleu(["The cat sat on the"], [TRUE[0]]).value == pytest.approx(100 * math.exp(1 - 7 / 5))


def test_bleu_is_of_the_corpus_and_not_a_mean_of_sentences() -> None:
    said = [TRUE[0], "dry"]
    assert bleu(said, TRUE).value == pytest.approx(100 * (7 / 8) ** 0.25 * math.exp(1 - 12 / 8))


def test_signatures_say_how_a_score_came_about() -> None:
    name, _, signature = bleu(TRUE, TRUE)
    assert name == "BLEU"
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert "|case:lc|" in bleu(TRUE, TRUE, lowercase=True).signature
    assert "|tok:zh|" in bleu(TRUE, TRUE, tokenize="zh").signature
    assert chrf(TRUE, TRUE).name == "chrF2"
    assert chrf(TRUE, TRUE).signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
    assert "|tok:none|" in tokenized_bleu([["a"]], [["a"]]).signature


def test_lowercase_forgets_case() -> None:
    said = [text.upper() for text in TRUE]
    assert bleu(said, TRUE).value < 20
    assert bleu(said, TRUE, lowercase=True).value == pytest.approx(100)


def test_chinese_is_counted_by_character() -> None:
    said, true = ["我喜欢喝绿茶。"], ["我喜欢喝红茶。"]
    # Of 7 characters 6 are right, of 6 pairs 4, of 5 triples 2, of 4 quadruples 1.
    expected = 100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25
    assert bleu(said, true, tokenize="zh").value == pytest.approx(expected)
    assert bleu(said, true).value == 0, "without spaces, the whole line is one word"


def test_tokens_are_taken_as_they_are() -> None:
    said, true = ["a", "b", "c-d", ",", "e"], ["a", "b", "c-d", ",", "f"]
    assert tokenized_bleu([said], [true]).value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert tokenized_bleu([["A", "B", "C", "D"]], [["a", "b", "c", "d"]], lowercase=True).value == pytest.approx(100)


def test_tokenized_text_is_no_cause_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenized_bleu([["yes", "."]] * 200, [["yes", "."]] * 200)
    assert not caplog.records


@pytest.mark.parametrize("score", [bleu, chrf])
def test_wrong_use_is_refused(score) -> None:
    for sides, message in (((["a"], []), "1 outputs and 0"), (([], []), "0 outputs"), (("a", "a"), "lists of texts")):
        with pytest.raises(ValueError, match=message):
            score(*sides)


@pytest.mark.parametrize("tokens", ["ab", ["a b"], [""]])
def test_tokens_that_would_fall_apart_are_refused(tokens) -> None:
    with pytest.raises(ValueError, match="list of tokens"):
        tokenized_bleu([["a"]], [tokens])


def test_sacrebleu_is_imported_when_it_is_needed() -> None:
    code = "import sys, clearhead.evaluate; assert not {'sacrebleu', 'torch', 'numpy'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
