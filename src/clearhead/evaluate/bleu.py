"""Corpus BLEU and chrF by sacreBLEU, from 0 to 100, with the signature that makes scores comparable.

There is one reference for each output.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

# Scripts without spaces between words, and Korean, whose words between spaces are long
SCRIPTS = {
    "zh": "\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff",  # also in Japanese, beside kana
    "ja": "\u3041-\u30ff",
    "ko": "\uac00-\ud7af",
    "th": "\u0e01-\u0e7f",
    "lo": "\u0e80-\u0eff",
    "my": "\u1000-\u109f",
    "km": "\u1780-\u17ff",
}
CHARACTERS = SCRIPTS.keys() - {"zh", "ja", "ko"}  # no tokenizer of words in sacreBLEU
MIN_KANA = 0.1  # fraction of Han characters and kana that are kana in Japanese


class CorpusScore(NamedTuple):
    """The name and value of a metric, and sacreBLEU's signature of how it was computed."""

    name: str
    value: float
    signature: str


def bleu(outputs: Sequence[str], references: Sequence[str], lowercase: bool = False, language: str = "") -> CorpusScore:
    """Return BLEU of plain text, tokenized by sacreBLEU for the language, by default guessed from the references.

    The signature names the tokenizer: 13a, or zh, ja-mecab or ko-mecab; char where MeCab is missing, and for other
    scripts without spaces.
    """
    from sacrebleu.metrics.bleu import BLEU  # imported late, here and below: slow, and --help does not need it

    language = language or guess_language(references)
    try:
        metric = BLEU(lowercase=lowercase, trg_lang=language, tokenize="char" if language in CHARACTERS else None)
    except RuntimeError:  # MeCab is not installed
        metric = BLEU(lowercase=lowercase, tokenize="char")
    return _corpus_score(metric, outputs, references)


def guess_language(texts: Sequence[str]) -> str:
    """Return the language whose script most words and characters of the texts have, if it is one of SCRIPTS."""
    text = "\n".join(texts)
    counts = {language: len(re.findall(f"[{script}]", text)) for language, script in SCRIPTS.items()}
    words = len(re.findall(rf"[^\W\d_{''.join(SCRIPTS.values())}]+", text))  # of other scripts
    han, kana = counts["zh"], counts["ja"]
    counts |= {"zh": 0, "ja": han + kana} if kana > MIN_KANA * (han + kana) else {"zh": han + kana, "ja": 0}
    language = max(counts, key=lambda each: counts[each])
    return language if counts[language] > (sum(counts.values()) + words) / 2 else ""


def chrf(outputs: Sequence[str], references: Sequence[str], lowercase: bool = False) -> CorpusScore:
    """Return chrF2 of plain text: the F-score of character n-grams up to length six."""
    from sacrebleu.metrics.chrf import CHRF

    return _corpus_score(CHRF(lowercase=lowercase), outputs, references)


def tokenized_bleu(
    outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]], lowercase: bool = False
) -> CorpusScore:
    """Return BLEU of given tokens, to compare with papers that used their own tokenization."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(lowercase=lowercase, tokenize="none", force=True)  # force: no warning about tokenized periods
    return _corpus_score(metric, [_join(tokens) for tokens in outputs], [_join(tokens) for tokens in references])


def _corpus_score(metric: Any, outputs: Sequence[str], references: Sequence[str]) -> CorpusScore:
    if isinstance(outputs, str) or isinstance(references, str):
        raise ValueError("outputs and references are lists of texts, not one text")
    if not outputs or len(outputs) != len(references):
        raise ValueError(f"{len(outputs)} outputs and {len(references)} references; give one reference for each output")
    score = metric.corpus_score(list(outputs), [list(references)])
    return CorpusScore(score.name, float(score.score), str(metric.get_signature()))


def _join(tokens: Sequence[str]) -> str:
    if isinstance(tokens, str) or any(token.split() != [token] for token in tokens):
        raise ValueError(f"{tokens!r:.80}: give a list of tokens, none of them empty or with a space inside")
    return " ".join(tokens)
