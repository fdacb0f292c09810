"""Extractive question answering over contexts of any length.   N tokens of a context · L tokens of an answer"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.data.labeled_tasks import is_empty, special_prefix_suffix, window_starts
from clearhead.errors import UserError
from clearhead.model import Documents
from clearhead.predict.check_arguments import check_number
from clearhead.predict.encode_batch import (
    InvalidText,
    Row,
    check_text,
    encode_packed,
    get_head,
    max_length,
    normalize_texts,
)
from clearhead.predict.results import Answer, ranked

if TYPE_CHECKING:
    from clearhead.predict.model import Model

MAX_ANSWER_TOKENS = 30
STRIDE = 128  # tokens that neighboring windows share, for a model without data settings
Token = tuple[int, int, int]  # id, first character, end


def answer(
    model: Model,
    questions: Sequence[str],
    contexts: Sequence[str],
    top: int = 1,
    require_answer: bool = False,
    truncate: bool = False,
) -> list[Answer]:
    """The best answer to each question, holding the `top` that do not overlap; with `require_answer`, never none.

    A context may have any length; a question longer than half of what the model reads must be shortened or truncated.
    """
    check_number("top", top, 1)
    if len(questions) != len(contexts):
        raise UserError(f"answer: {len(questions)} questions, but {len(contexts)} contexts; give one for each")
    span_head = get_head(model, "span", "answer", "answering")
    question_ids = model.tokenizer.encode_batch(normalize_texts(model, questions))
    for number, context in enumerate(contexts):
        check_text(number, context, "the context: ")
    unique = list(dict.fromkeys(contexts))  # many questions may share a long one
    tokens_of = dict(zip(unique, model.tokenizer.offsets_batch(unique), strict=True))
    context_tokens = [tokens_of[context] for context in contexts]
    rows: list[Row] = []
    starts: list[list[int]] = []
    for number, (question, tokens) in enumerate(zip(question_ids, context_tokens, strict=True)):
        for name, text, ids in (("question", questions[number], question), ("context", contexts[number], tokens)):
            if is_empty(text, ids):
                raise InvalidText(number, f"the {name} is empty; give some text")
        half = max_length(model) // 2
        if len(question) > half and not truncate:
            problem = f"the question has {len(question):,} tokens, but half of what the model reads is {half:,}"
            raise InvalidText(number, f"{problem}; shorten it, or use truncate=True")
        starts.append(_add_windows(model, question[:half], tokens, rows))

    def predict(hidden: Tensor, documents: Documents, numbers: list[int]) -> list[Tensor]:
        return list(span_head(hidden[0]).float().cpu().split(documents.lengths.tolist()))  # (T, 2) each

    logits = iter(encode_packed(model, rows, predict))
    row = iter(rows)
    results = []
    for context, tokens, begins in zip(contexts, context_tokens, starts, strict=True):
        log_odds = _log_odds(tokens, [(begin, next(row).boundary, next(logits)) for begin in begins])
        results.append(ranked(_best(context, tokens, log_odds, top, require_answer)))
    return results


def _add_windows(model: Model, question: list[int], tokens: list[Token], rows: list[Row]) -> list[int]:
    """Append the windows of one context to `rows`; return the first token of each."""
    opens, closes = special_prefix_suffix(model.tokenizer)
    prefix = [*opens, *question, *closes]
    room = max_length(model) - len(prefix) - len(closes)
    stride = STRIDE if model.data is None else model.data.stride
    begins = window_starts(len(tokens), room, min(stride, room // 2))
    for begin in begins:
        ids = [token for token, _, _ in tokens[begin : begin + room]]
        rows.append(Row([*prefix, *ids, *closes], len(prefix)))
    return begins


def _log_odds(tokens: list[Token], window_logits: list[tuple[int, int, Tensor]]) -> Tensor:
    """Log odds (N, L) against no answer of the span of l + 1 tokens from token n.

    Each window compares with its own first token, which stands for no answer; a span in several windows takes the
    highest odds.
    """
    log_odds = torch.full((len(tokens), MAX_ANSWER_TOKENS), -torch.inf)
    nonempty = torch.tensor([end > start for _, start, end in tokens])
    for begin, boundary, logits in window_logits:
        size = min(len(logits) - boundary, len(tokens) - begin)
        window = logits[boundary : boundary + size].masked_fill(~nonempty[begin : begin + size, None], -torch.inf)
        ends = F.pad(window[:, 1], (0, MAX_ANSWER_TOKENS - 1), value=-torch.inf).unfold(0, MAX_ANSWER_TOKENS, 1)
        margin = window[:, :1] + ends - logits[0].sum()  # (T, L)
        log_odds[begin : begin + size] = log_odds[begin : begin + size].maximum(margin)
    return log_odds


def _best(context: str, tokens: list[Token], log_odds: Tensor, top: int, require_answer: bool) -> list[Answer]:
    none = torch.tensor([-torch.inf if require_answer else 0.0])
    probs = torch.cat([none, log_odds.flatten()]).softmax(0)
    results: list[Answer] = []
    taken = bytearray(len(context))  # 1 for a character that is part of an answer
    for index in probs.argsort(descending=True, stable=True).tolist():
        score = float(probs[index])
        if len(results) == top or not score > 0:
            break
        if not index:
            results.append(Answer("", 0, 0, score))
            continue
        begin, extra = divmod(index - 1, MAX_ANSWER_TOKENS)
        start, end = tokens[begin][1], tokens[begin + extra][2]
        text = context[start:end]
        start, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
        if start < end and not any(taken[start:end]):
            taken[start:end] = b"\1" * (end - start)
            results.append(Answer(context[start:end], start, end, score))
    return results or [Answer("", 0, 0, 0.0)]
