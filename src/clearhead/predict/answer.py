"""Answers to questions, as places in a context of any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.data.labeled_tasks import frame, is_empty, windows
from clearhead.model import Documents
from clearhead.predict.encode_batch import InvalidText, Row, check_text, clean, head, limit, read

if TYPE_CHECKING:
    from clearhead.predict.model import Model

LONGEST = 30  # tokens of an answer
Token = tuple[int, int, int]


class Answer(NamedTuple):
    """A part of the context, `first` to before `behind`, or nothing (0 to 0) where it holds no answer.

    The score is the share of all the answers that were possible, none being one of them.
    """

    text: str
    start: int
    end: int
    score: float


def answer(
    model: Model,
    questions: Sequence[str],
    contexts: Sequence[str],
    top: int = 1,
    must: bool = False,
    cut: bool = False,
) -> list[list[Answer]]:
    """The `top` answers to each question in its context, none overlapping another; with `must`, never none.

    A context may have any length; a question that takes more than half of what the model reads may be `cut`.
    """
    if len(questions) != len(contexts):
        raise ValueError(f"{len(questions)} questions, but {len(contexts)} contexts")
    span = head(model, "span", "answer", "answering")
    asked = model.tokenizer.encode_batch(clean(model, questions))
    for number, context in enumerate(contexts):
        check_text(number, context, "the context: ")
    different = list(dict.fromkeys(contexts))  # many questions may share a long one
    tokens_of = dict(zip(different, model.tokenizer.offsets_batch(different), strict=True))
    given = [tokens_of[context] for context in contexts]
    rows: list[Row] = []
    starts: list[list[int]] = []
    for number, (question, tokens) in enumerate(zip(asked, given, strict=True)):
        for name, text, ids in (("question", questions[number], question), ("context", contexts[number], tokens)):
            if is_empty(text, ids):
                raise InvalidText(number, f"the {name} is empty; give some text")
        half = limit(model) // 2
        if len(question) > half and not cut:
            problem = f"the question has {len(question):,} tokens, but half of what the model reads is {half:,}"
            raise InvalidText(number, f"{problem}; shorten it, or let it be cut")
        starts.append(_cut(model, question[:half], tokens, rows))

    def each(hidden: Tensor, documents: Documents, chosen: list[int]) -> list[Tensor]:
        return list(span(hidden[0]).float().cpu().split(documents.lengths.tolist()))  # (T, 2) each

    scores = iter(read(model, rows, each))
    inside = iter(rows)
    found = []
    for context, tokens, begins in zip(contexts, given, starts, strict=True):
        odds = _odds(tokens, [(begin, next(inside).boundary, next(scores)) for begin in begins])
        found.append(_best(context, tokens, odds, top, must))
    return found


def _cut(model: Model, question: list[int], tokens: list[Token], rows: list[Row]) -> list[int]:
    """Adds the windows of one context to `rows`; returns the token that each begins with."""
    opens, closes = frame(model.tokenizer)
    num_draft_tokens = [*opens, *question, *closes]
    room = limit(model) - len(num_draft_tokens) - len(closes)
    shared = 128 if model.data is None else model.data.stride
    begins = windows(len(tokens), room, min(shared, room // 2))
    rows += [
        Row(
            [*num_draft_tokens, *(token for token, _, _ in tokens[begin : begin + room]), *closes],
            len(num_draft_tokens),
        )
        for begin in begins
    ]
    return begins


def _odds(tokens: list[Token], scored: list[tuple[int, int, Tensor]]) -> Tensor:
    """How the answer of l + 1 tokens from token n on compares with no answer: (N, LONGEST), logarithms of odds.

    Each window says how it compares with the window's first token, which stands for no answer there; of several
    windows, the one that is surest of it counts.
    """
    found = torch.full((len(tokens), LONGEST), -torch.inf)
    real = torch.tensor([behind > first for _, first, behind in tokens])
    for begin, boundary, scores in scored:
        size = min(len(scores) - boundary, len(tokens) - begin)
        here = scores[boundary : boundary + size].masked_fill(~real[begin : begin + size, None], -torch.inf)
        ends = F.pad(here[:, 1], (0, LONGEST - 1), value=-torch.inf).unfold(0, LONGEST, 1)  # (T, LONGEST)
        margin = here[:, :1] + ends - scores[0].sum()
        found[begin : begin + size] = found[begin : begin + size].maximum(margin)
    return found


def _best(context: str, tokens: list[Token], odds: Tensor, top: int, must: bool) -> list[Answer]:
    none = torch.tensor([-torch.inf if must else 0.0])
    shares = torch.cat([none, odds.flatten()]).softmax(0)
    order = shares.argsort(descending=True, stable=True)
    found: list[Answer] = []
    taken = bytearray(len(context))  # 1 for a character that is part of an answer
    for place in order.tolist():
        score = float(shares[place])
        if len(found) == top or not score > 0:
            break
        if not place:
            found.append(Answer("", 0, 0, score))
            continue
        begin, more = divmod(place - 1, LONGEST)
        first, behind = tokens[begin][1], tokens[begin + more][2]
        text = context[first:behind]
        first, behind = first + len(text) - len(text.lstrip()), first + len(text.rstrip())
        if first < behind and not any(taken[first:behind]):
            taken[first:behind] = b"\1" * (behind - first)
            found.append(Answer(context[first:behind], first, behind, score))
    return found or [Answer("", 0, 0, 0.0)]
