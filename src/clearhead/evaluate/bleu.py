"""How close translations are to references: BLEU and chrF by sacreBLEU, with the signature that lets others compare.

A score is of the whole corpus, from 0 to 100; there is one reference for each output.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple


class Score(NamedTuple):
    """A metric's name, its value, and how it was computed."""

    name: str
    value: float
    signature: str


def bleu(
    outputs: Sequence[str], references: Sequence[str], lowercase: bool = False, tokenize: Literal["13a", "zh"] = "13a"
) -> Score:
    """BLEU of plain text, which sacreBLEU takes apart itself; use tokenize="zh" where the target is Chinese."""
    from sacrebleu.metrics.bleu import BLEU  # here and below: --help has no need of it

    return _corpus(BLEU(lowercase=lowercase, tokenize=tokenize), outputs, references)


def chrf(outputs: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Score:
    """chrF2 of plain text: what it shares in pieces of one to six characters, in any language."""
    from sacrebleu.metrics.chrf import CHRF

    return _corpus(CHRF(lowercase=lowercase), outputs, references)


def tokenized_bleu(
    outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]], lowercase: bool = False
) -> Score:
    """BLEU of tokens as they are, to compare with papers that tokenized in their own way (say how)."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(lowercase=lowercase, tokenize="none", force=True)  # force: a full stop of its own is meant
    return _corpus(metric, [_joined(tokens) for tokens in outputs], [_joined(tokens) for tokens in references])


def _corpus(metric: Any, outputs: Sequence[str], references: Sequence[str]) -> Score:
    if isinstance(outputs, str) or isinstance(references, str):
        raise ValueError("outputs and references are lists of texts, not one text")
    if not outputs or len(outputs) != len(references):
        raise ValueError(f"{len(outputs)} outputs and {len(references)} references; give one reference for each output")
    score = metric.corpus_score(list(outputs), [list(references)])
    return Score(score.name, float(score.score), str(metric.get_signature()))


def _joined(tokens: Sequence[str]) -> str:
    if isinstance(tokens, str) or any(token.split() != [token] for token in tokens):
        raise ValueError(f"{tokens!r:.80}: give a list of tokens, none of them empty or with a space inside")
    return " ".join(tokens)
