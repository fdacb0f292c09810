"""BLEU and chrF: hand-computed cases, signatures, tokenization."""

import math
import subprocess
import sys

import pytest

from clearhead.evaluate import bleu, chrf, tokenized_bleu
from clearhead.evaluate.bleu import guess_language

REFERENCES = ["The cat sat on the mat.", "It rained all day."]


def test_perfect_translations_score_100() -> None:
    assert bleu(REFERENCES, REFERENCES).value == pytest.approx(100)
    assert chrf(REFERENCES, REFERENCES).value == pytest.approx(100)


def test_bleu_is_the_formula_of_the_paper() -> None:
    # Correct: 6 of 7 unigrams, 4 of 6 bigrams, 2 of 5 trigrams, 1 of 4 4-grams; as long as the reference.
    score = bleu(["The cat sat on a mat."], [REFERENCES[0]])
    assert score.value == pytest.approx(100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25)
    # All of 5 tokens are correct, but the reference has 7: brevity penalty.
    assert bleu(["The cat sat on the"], [REFERENCES[0]]).value == pytest.approx(100 * math.exp(1 - 7 / 5))


def test_bleu_is_computed_over_the_corpus_not_averaged_over_sentences() -> None:
    outputs = [REFERENCES[0], "dry"]
    assert bleu(outputs, REFERENCES).value == pytest.approx(100 * (7 / 8) ** 0.25 * math.exp(1 - 12 / 8))


def test_signatures_record_how_a_score_was_computed() -> None:
    name, _, signature = bleu(REFERENCES, REFERENCES)
    assert name == "BLEU"
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert "|case:lc|" in bleu(REFERENCES, REFERENCES, lowercase=True).signature
    assert "|tok:zh|" in bleu(REFERENCES, REFERENCES, language="zh").signature
    assert chrf(REFERENCES, REFERENCES).name == "chrF2"
    assert chrf(REFERENCES, REFERENCES).signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
    assert "|tok:none|" in tokenized_bleu([["a"]], [["a"]]).signature


def test_lowercase_ignores_case() -> None:
    outputs = [text.upper() for text in REFERENCES]
    assert bleu(outputs, REFERENCES).value < 20
    assert bleu(outputs, REFERENCES, lowercase=True).value == pytest.approx(100)


def test_chinese_is_tokenized_by_character() -> None:
    outputs, references = ["我喜欢喝绿茶。"], ["我喜欢喝红茶。"]
    # Correct: 6 of 7 characters, 4 of 6 bigrams, 2 of 5 trigrams, 1 of 4 4-grams.
    expected = 100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25
    score = bleu(outputs, references)
    assert score.value == pytest.approx(expected)
    assert "|tok:zh|" in score.signature
    assert bleu(outputs, references, language="en").value == 0, "without spaces, the whole line is one word"


SENTENCES = {
    "": "Er kommt aus dem Dorf 大理 und heißt 李明.",
    "zh": "我们用 PyTorch 和 Python 训练了 Transformer 模型。",
    "ja": "私は東京の大学で機械翻訳を研究しています。",
    "ko": "저는 서울에 있는 대학교에서 공부합니다.",
    "th": "ฉันเรียนอยู่ที่มหาวิทยาลัย",
    "my": "ကျွန်တော် ကျောင်းသွားတယ်",
}


@pytest.mark.parametrize(("language", "text"), SENTENCES.items(), ids=[name or "latin" for name in SENTENCES])
def test_the_language_is_guessed_from_the_script(language: str, text: str) -> None:
    assert guess_language([text]) == language
    assert guess_language(["", "1984 + 2 = 1986"]) == ""


@pytest.mark.parametrize(
    ("language", "installed"), [("ja", "tok:ja-mecab"), ("ko", "tok:ko-mecab"), ("th", "tok:char")]
)
def test_a_script_without_a_tokenizer_is_scored_by_character(language: str, installed: str) -> None:
    sentence = SENTENCES[language]
    score = bleu([sentence[:-1] + "x"], [sentence])
    assert 50 < score.value < 100
    assert any(f"|{tokenizer}|" in score.signature for tokenizer in ("tok:char", installed))


def test_without_mecab_the_signature_names_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    from sacrebleu.tokenizers import tokenizer_ja_mecab

    monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
    assert "|tok:char|" in bleu(["私は学生です。"], ["私は学生です。"]).signature


def test_given_tokens_are_not_tokenized_again() -> None:
    output, reference = ["a", "b", "c-d", ",", "e"], ["a", "b", "c-d", ",", "f"]
    assert tokenized_bleu([output], [reference]).value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert tokenized_bleu([["A", "B", "C", "D"]], [["a", "b", "c", "d"]], lowercase=True).value == pytest.approx(100)


def test_tokenized_text_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenized_bleu([["yes", "."]] * 200, [["yes", "."]] * 200)
    assert not caplog.records


@pytest.mark.parametrize("metric", [bleu, chrf])
def test_invalid_arguments_are_refused(metric) -> None:
    for sides, message in (((["a"], []), "1 outputs and 0"), (([], []), "0 outputs"), (("a", "a"), "lists of texts")):
        with pytest.raises(ValueError, match=message):
            metric(*sides)


@pytest.mark.parametrize("tokens", ["ab", ["a b"], [""]])
def test_tokens_with_spaces_and_empty_tokens_are_refused(tokens) -> None:
    with pytest.raises(ValueError, match="list of tokens"):
        tokenized_bleu([["a"]], [tokens])


def test_sacrebleu_is_imported_lazily() -> None:
    code = "import sys, clearhead.evaluate; assert not {'sacrebleu', 'torch', 'numpy'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
