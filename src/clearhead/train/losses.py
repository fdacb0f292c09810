"""What training makes small: the loss of words, classes, tags, spans, similarity.

B rows · T tokens · D width · V words · C classes

Labels are int64, and −100 stands where nothing counts. Every loss is a sum with its count, so that a large batch in
several parts, or over several processes, gives the update of the whole: add the sums, divide by the sum of the counts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.data import IGNORED
from clearhead.model.heads import LMHead
from clearhead.ops.cross_entropy import (
    Chunk,
    ChunkedCrossEntropy,
    cross_entropy_chunk,
    matmul_dtype,
    to_fp32,
    torch_smoothing,
)

LIMIT = 1 << 30  # bytes of word scores that may be in memory at once; a batch that has more goes in pieces


class Loss(NamedTuple):
    """Sums over what counts, all scalars that stay on the device."""

    total: Tensor  # what to differentiate, fp32 or float64
    count: Tensor  # type: ignore[assignment]  # int64: how many items count (a tuple has a method of this name)
    unsmoothed: Tensor  # without smoothing and class weights: perplexity is exp(plain / count)
    correct: Tensor  # int64: how many of them were predicted right; 0 where the answer is a number


def lm_loss(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor,
    smoothing: float = 0.0,
    limit: int = LIMIT,
    compiled: Callable[..., Chunk] | None = None,
) -> Loss:
    """Cross entropy of the words that `head` reads off hidden (…, D), against labels (…).

    Smoothing ε puts 1 − ε on the right word and ε / (V − 1) on every other (section 5.4). A masked model has a layer
    before its scores and few words that count: only those go through (finding them waits for the GPU, once).
    Where the scores would exceed `limit` bytes, or there is a `compiled` form of `piece`, they are never whole.
    """
    x, answers = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if head.transform is not None:
        places = (answers != IGNORED).nonzero().squeeze(1)
        x, answers = head.transform(x[places]), answers[places]
    scores, rows = head.proj, _rows(head, limit)
    if not torch.is_grad_enabled():
        parts = zip(x.split(rows), answers.split(rows), strict=True)
        found = [cross_entropy(scores(part), here, smoothing) for part, here in parts]
        return Loss(*(torch.stack(column).sum() for column in zip(*found, strict=True)))
    if not len(x) or (len(x) <= rows and compiled is None):
        return cross_entropy(scores(x), answers, smoothing)
    work = compiled or cross_entropy_chunk
    if compiled is not None:  # which keeps scores as narrow as they are; parts of one size, as kernels like it
        most = _rows(head, limit, matmul_dtype(x).itemsize)
        rows = max(128, -(-len(x) // -(-len(x) // most) // 128) * 128) if len(x) > most else most
    sums = ChunkedCrossEntropy.apply(x, scores.weight, scores.bias, answers, smoothing, rows, work)  # type: ignore[no-untyped-call]
    return Loss(*sums)


def argmax_tokens(hidden: Tensor, head: LMHead, limit: int = LIMIT) -> Tensor:
    """The word with the highest score at every position, without gradient: (…, D) to (…)."""
    x = hidden.reshape(-1, hidden.shape[-1])
    with torch.no_grad():
        best = [head(part).argmax(-1) for part in x.split(_rows(head, limit))]
    return torch.cat(best).reshape(hidden.shape[:-1])


def _rows(head: LMHead, limit: int, bytes_each: int = 4) -> int:
    """How many positions have so many bytes of scores, at least one."""
    return max(1, limit // (bytes_each * head.proj.out_features))


def cross_entropy(scores: Tensor, labels: Tensor, smoothing: float = 0.0) -> Loss:
    """−Σ q log softmax(scores) for scores (N, C) and labels (N,), q being the smoothed answer."""
    scores = to_fp32(scores)
    classes = scores.shape[-1]
    spread = torch_smoothing(smoothing, classes)
    total = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=spread)
    with torch.no_grad():
        counts, plain = labels != IGNORED, total.detach()
        if smoothing:  # what smoothing added to each item is its score's lead over the mean score
            lead = scores.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) - scores.mean(dim=1)
            plain = plain - spread * lead.masked_fill(~counts, 0).sum()
        right = (scores.argmax(dim=1) == labels).sum()  # no class has the number −100
    return Loss(total, counts.sum(), plain, right)


def class_loss(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Loss:
    """Cross entropy of class scores (…, C) against labels (…).

    `weights` (C,) multiply the loss of each item by that of its class; the count stays that of the items.
    """
    scores, labels = to_fp32(scores.reshape(-1, scores.shape[-1])), labels.reshape(-1)
    loss = cross_entropy(scores, labels)
    if weights is None:
        return loss
    return loss._replace(
        total=F.cross_entropy(scores, labels, weights.to(scores), ignore_index=IGNORED, reduction="sum")
    )


tag_loss = class_loss  # scores (B, T, C), labels (B, T): −100 behind the end and inside a word
next_sentence = class_loss  # scores (B, 2), labels (B,)


def span_loss(scores: Tensor, first: Tensor, last: Tensor, lengths: Tensor) -> Loss:
    """The mean of two cross entropies: where an answer begins and where it ends, the last token included.

    scores (B, T, 2); first and last (B,), both 0 where there is no answer; lengths (B,): padding is no place to point.
    """
    padding = torch.arange(scores.shape[1], device=scores.device) >= lengths[:, None]  # (B, T)
    begins, ends = to_fp32(scores).masked_fill(padding[..., None], -torch.inf).unbind(-1)
    both = [cross_entropy(begins, first), cross_entropy(ends, last)]
    total = (both[0].total + both[1].total) / 2
    right = ((begins.argmax(1) == first) & (ends.argmax(1) == last)).sum()
    return Loss(total, both[0].count, total.detach(), right)


def regression_loss(scores: Tensor, values: Tensor) -> Loss:
    """Squared error of scores (B,) or (B, 1) against values (B,), of which −100 does not count."""
    counts = values != IGNORED
    errors = F.mse_loss(to_fp32(scores).reshape(values.shape), values.to(to_fp32(scores)), reduction="none")
    total = errors.masked_fill(~counts, 0).sum()
    return Loss(total, counts.sum(), total.detach(), torch.zeros_like(counts.sum()))


def cosine_loss(a: Tensor, b: Tensor, scores: Tensor) -> Loss:
    """Squared error of the cosine of two embeddings (B, D) each, against how similar they should be (B,), 0 to 1."""
    return regression_loss(F.cosine_similarity(to_fp32(a), to_fp32(b), dim=-1), scores)


def contrastive_loss(a: Tensor, b: Tensor, temperature: float = 0.05) -> Loss:
    """Row n of a (B, D) belongs to row n of b and to no other: find it among all, in both directions.

    The other rows of the batch are the wrong answers, so this is the one loss that parts of a batch do not add up to.
    """
    scores = F.normalize(to_fp32(a), dim=-1) @ F.normalize(to_fp32(b), dim=-1).T / temperature  # (B, B)
    own = torch.arange(len(scores), device=scores.device)
    there, back = cross_entropy(scores, own), cross_entropy(scores.T, own)
    total = (there.total + back.total) / 2
    return Loss(total, there.count, total.detach(), there.correct)
