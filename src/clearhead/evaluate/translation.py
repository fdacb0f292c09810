"""stub"""

from typing import NamedTuple


class Score(NamedTuple):
    name: str
    value: float
    signature: str


def bleu(o, r):
    import sacrebleu

    m = sacrebleu.BLEU()
    return Score("bleu", m.corpus_score(o, [r]).score, str(m.get_signature()))


def chrf(o, r):
    import sacrebleu

    m = sacrebleu.CHRF()
    return Score("chrf", m.corpus_score(o, [r]).score, str(m.get_signature()))
