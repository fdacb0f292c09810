"""Loss functions: language modeling, classes, tags, spans, similarity.

B batch · T tokens · D model dim · V vocabulary · C classes · N positions

Labels are int64; −100 is ignored. Every loss is a sum with a count: for gradient accumulation and data parallelism, add
the sums and divide by the sum of the counts to get the gradient of the full batch.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.data import IGNORED
from clearhead.model.heads import LMHead
from clearhead.ops.cross_entropy import (
    ChunkedCrossEntropy,
    CrossEntropyChunk,
    cross_entropy_chunk,
    matmul_dtype,
    to_fp32,
    torch_label_smoothing,
)

MAX_LOGIT_BYTES = 1 << 30  # above this size, logits are computed in chunks


class Loss(NamedTuple):
    """Sums over the labeled items; all are scalars that stay on the device."""

    total: Tensor  # differentiable, fp32 or fp64
    count: Tensor  # type: ignore[assignment]  # int64: labeled items (a tuple has a method of this name)
    unsmoothed: Tensor  # without label smoothing and class weights: perplexity is exp(unsmoothed / count)
    correct: Tensor  # int64: correct predictions; 0 for regression


def lm_loss(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor,
    label_smoothing: float = 0.0,
    max_bytes: int = MAX_LOGIT_BYTES,
    chunk_fn: Callable[..., CrossEntropyChunk] | None = None,
) -> Loss:
    """Cross-entropy of the logits that `head` computes from hidden (…, D), against labels (…).

    Label smoothing ε puts 1 − ε on the target token and ε / (V − 1) on every other (section 5.4). A masked language
    model has a transform before its logits and few labeled positions: only those go through (one GPU sync). Logits
    above `max_bytes`, and all logits with `chunk_fn` (a fast `cross_entropy_chunk`), are computed in chunks.
    """
    x, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if head.transform is not None:
        labeled = (targets != IGNORED).nonzero().squeeze(1)
        x, targets = head.transform(x[labeled]), targets[labeled]
    proj, rows = head.proj, _rows_within(head, max_bytes)
    if not torch.is_grad_enabled():
        chunks = zip(x.split(rows), targets.split(rows), strict=True)
        losses = [cross_entropy(proj(chunk), chunk_targets, label_smoothing) for chunk, chunk_targets in chunks]
        return Loss(*(torch.stack(column).sum() for column in zip(*losses, strict=True)))
    if not len(x) or (len(x) <= rows and chunk_fn is None):
        return cross_entropy(proj(x), targets, label_smoothing)
    if chunk_fn is not None:  # it keeps logits in the dtype of the matmul; equal chunks, multiples of 128
        max_rows = _rows_within(head, max_bytes, matmul_dtype(x).itemsize)
        rows = max(128, -(-len(x) // -(-len(x) // max_rows) // 128) * 128) if len(x) > max_rows else max_rows
    work = chunk_fn or cross_entropy_chunk
    sums = ChunkedCrossEntropy.apply(x, proj.weight, proj.bias, targets, label_smoothing, rows, work)  # type: ignore[no-untyped-call]
    return Loss(*sums)


def argmax_tokens(hidden: Tensor, head: LMHead, max_bytes: int = MAX_LOGIT_BYTES) -> Tensor:
    """Return the most likely token at every position, without gradient: (…, D) to (…)."""
    x = hidden.reshape(-1, hidden.shape[-1])
    with torch.no_grad():
        best = [head(chunk).argmax(-1) for chunk in x.split(_rows_within(head, max_bytes))]
    return torch.cat(best).reshape(hidden.shape[:-1])


def _rows_within(head: LMHead, max_bytes: int, itemsize: int = 4) -> int:
    """The number of positions whose logits fit into `max_bytes`, at least one."""
    return max(1, max_bytes // (itemsize * head.proj.out_features))


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Loss:
    """−Σ q log softmax(logits) for logits (N, C) and labels (N,), q being the smoothed target distribution."""
    logits = to_fp32(logits)
    smoothing = torch_label_smoothing(label_smoothing, logits.shape[-1])
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    with torch.no_grad():
        labeled, unsmoothed = labels != IGNORED, total.detach()
        if label_smoothing:  # smoothing adds ε · (target logit − mean logit) to each item
            margin = logits.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) - logits.mean(dim=1)
            unsmoothed = unsmoothed - smoothing * margin.masked_fill(~labeled, 0).sum()
        correct = (logits.argmax(dim=1) == labels).sum()  # no class is −100
    return Loss(total, labeled.sum(), unsmoothed, correct)


def class_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Loss:
    """Cross-entropy of class logits (…, C) against labels (…).

    `weights` (C,) multiply the loss of each item by the weight of its class; the count is still that of the items.
    """
    logits, labels = to_fp32(logits.reshape(-1, logits.shape[-1])), labels.reshape(-1)
    loss = cross_entropy(logits, labels)
    if weights is None:
        return loss
    return loss._replace(
        total=F.cross_entropy(logits, labels, weights.to(logits), ignore_index=IGNORED, reduction="sum")
    )


tag_loss = class_loss  # logits (B, T, C), labels (B, T): −100 for padding and inside a word
next_sentence_loss = class_loss  # logits (B, 2), labels (B,)


def span_loss(logits: Tensor, first: Tensor, last: Tensor, lengths: Tensor) -> Loss:
    """Mean of two cross-entropies: of the first and of the last token of the answer.

    logits (B, T, 2); first and last (B,), both 0 for no answer; lengths (B,): padding is masked out.
    """
    padding = torch.arange(logits.shape[1], device=logits.device) >= lengths[:, None]  # (B, T)
    starts, ends = to_fp32(logits).masked_fill(padding[..., None], -torch.inf).unbind(-1)
    losses = [cross_entropy(starts, first), cross_entropy(ends, last)]
    total = (losses[0].total + losses[1].total) / 2
    correct = ((starts.argmax(1) == first) & (ends.argmax(1) == last)).sum()
    return Loss(total, losses[0].count, total.detach(), correct)


def regression_loss(predictions: Tensor, values: Tensor) -> Loss:
    """Squared error of predictions (B,) or (B, 1) against values (B,); −100 is ignored."""
    labeled = values != IGNORED
    predictions = to_fp32(predictions)
    errors = F.mse_loss(predictions.reshape(values.shape), values.to(predictions), reduction="none")
    total = errors.masked_fill(~labeled, 0).sum()
    return Loss(total, labeled.sum(), total.detach(), torch.zeros_like(labeled.sum()))


def cosine_loss(a: Tensor, b: Tensor, similarities: Tensor) -> Loss:
    """Squared error of the cosine similarity of embeddings a and b (B, D) against similarities (B,) from 0 to 1."""
    return regression_loss(F.cosine_similarity(to_fp32(a), to_fp32(b), dim=-1), similarities)


def contrastive_loss(a: Tensor, b: Tensor, temperature: float = 0.05) -> Loss:
    """Symmetric InfoNCE loss: row n of a (B, D) matches row n of b; the other rows of the batch are negatives.

    The one loss for which micro-batches do not add up to the full batch.
    """
    logits = F.normalize(to_fp32(a), dim=-1) @ F.normalize(to_fp32(b), dim=-1).T / temperature  # (B, B)
    labels = torch.arange(len(logits), device=logits.device)
    a_to_b, b_to_a = cross_entropy(logits, labels), cross_entropy(logits.T, labels)
    total = (a_to_b.total + b_to_a.total) / 2
    return Loss(total, a_to_b.count, total.detach(), a_to_b.correct)
