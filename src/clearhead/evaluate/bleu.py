"""Corpus BLEU and chrF by sacreBLEU, from 0 to 100, with the signature that makes scores comparable.

There is one reference for each output.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple


class CorpusScore(NamedTuple):
    """The name and value of a metric, and sacreBLEU's signature of how it was computed."""

    name: str
    value: float
    signature: str


def bleu(
    outputs: Sequence[str], references: Sequence[str], lowercase: bool = False, tokenize: Literal["13a", "zh"] = "13a"
) -> CorpusScore:
    """Return BLEU of plain text, tokenized by sacreBLEU; use tokenize="zh" for Chinese."""
    from sacrebleu.metrics.bleu import BLEU  # imported late, here and below: slow, and --help does not need it

    return _corpus_score(BLEU(lowercase=lowercase, tokenize=tokenize), outputs, references)


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
