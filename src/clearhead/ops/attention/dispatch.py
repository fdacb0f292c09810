"""Attention by the fastest backend for the mask, dtype and device.

B batch · H heads · G key-value heads · T queries · S keys · E head dim · N tokens of a packed row · D documents

`attend` takes the first of BACKENDS that does not refuse. The reference is never chosen by itself: it is the formula
that every other backend must equal.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.ops.attention.cpu_training import cpu_training_refuses, matmul_attention
from clearhead.ops.attention.flex import flex, flex_refuses
from clearhead.ops.attention.packed_cpu import attend_runs, can_use_short_attention, packed_cpu_refuses, short_attention
from clearhead.ops.attention.reference import attention
from clearhead.ops.attention.sdpa import sdpa
from clearhead.ops.attention.sparse import attend_sparse, sparse_refuses
from clearhead.ops.attention.varlen import varlen, varlen_refuses
from clearhead.ops.masks import Mask

log = logging.getLogger("clearhead")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0, backend: str | None = None) -> Tensor:
    """Attention of q (B, H, T, E) over k and v (B, G, S, E), G a divisor of H; returns (B, H, T, E).

    `backend` forces one by name; if it does not support the inputs, another is used and the reason logged as a warning.
    Outputs at padded queries are finite but meaningless.
    """
    mask = mask.simplified(k.shape[2])
    requested = backend or _forced
    if requested is not None:
        if requested not in BACKENDS:
            raise ValueError(f"backend: no attention backend {requested!r}; use {', '.join(BACKENDS)}")
        reason = BACKENDS[requested].refuses(q, k, mask, dropout)
        if reason is None:
            return BACKENDS[requested].run(q, k, v, mask, dropout)
        _log_once(f"attention backend {requested} cannot be used here ({reason}); falling back")
    return BACKENDS[choose_backend(q, k, mask, dropout)].run(q, k, v, mask, dropout)


def attention_with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """The reference for any mask and for grouped heads: output (B, H, T, E) and weights (B, H, T, S)."""
    return _reference(q, k, v, mask, 0.0)


def choose_backend(q: Tensor, k: Tensor, mask: Mask, dropout: float = 0.0) -> str:
    """Return the name of the backend that `attend` uses; the log says at level INFO why earlier ones do not apply."""
    if mask.documents is None and mask.pattern.kind == "full":  # the common case, without asking every backend
        return "sdpa" if cpu_training_refuses(q, k, mask, dropout) else "cpu_training"
    reasons = []
    for name, backend in BACKENDS.items():
        reason = "it is for comparison" if name == "reference" else backend.refuses(q, k, mask, dropout)
        if reason is None:
            break
        reasons.append(f"{name}: {reason}")
    if not torch.compiler.is_compiling() and log.isEnabledFor(logging.INFO):
        _log_once(f"{mask.pattern.kind} attention by {name} (not by {'; '.join(reasons[1:])})", logging.INFO)
    return name


@contextmanager
def attention_backend(name: str | None) -> Iterator[None]:
    """Force a backend for all attention inside the `with`; not thread-safe (for tests and benchmarks)."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


_forced: str | None = None
_logged: set[str] = set()


def _log_once(message: str, level: int = logging.WARNING) -> None:
    if message not in _logged:
        _logged.add(message)
        log.log(level, message)


# Backends that take any mask, dtype and device


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    dense = mask.dense(q.shape[2], k.shape[2], q.device)
    return attention(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), dense, dropout)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    if mask.causal and mask.documents is None and mask.pattern.kind == "full":
        if mask.start is None and q.shape[2] == k.shape[2]:  # the causal mask hides padding, which comes last
            return sdpa(q, k, v, None, dropout, causal=True)
        if isinstance(mask.start, int) and q.shape[2] == 1 and mask.start == k.shape[2] - 1:  # the last query
            return sdpa(q, k, v, None, dropout)
    dense = mask.dense(q.shape[2], k.shape[2], q.device)
    return sdpa(q, k, v, dense, dropout)


# Backends that rearrange a packed row and dispatch again


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    """Pad a packed row (1, H, N, E) to a row for each document, for attention only."""
    assert mask.documents is not None
    queries, keys = mask.documents
    padded_mask = replace(mask, documents=None, lengths=None if queries is keys and mask.causal else keys.lengths)
    q, k, v = queries.pad(q), keys.pad(k), keys.pad(v)  # (D, H or G, T or S, E)
    padded_mask = padded_mask.simplified(k.shape[2])
    out = BACKENDS[choose_backend(q, k, padded_mask, dropout)].run(q, k, v, padded_mask, dropout)
    return queries.unpad(out)


def _packed_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    """Attend in each run of equally long documents of a packed row (1, H, N, E)."""

    def attend_run(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if can_use_short_attention(q, k, mask, dropout):
            return short_attention(q, k, v)
        return BACKENDS[choose_backend(q, k, mask, dropout)].run(q, k, v, mask, dropout)

    return attend_runs(q, k, v, mask, attend_run)


class Backend(NamedTuple):
    """An implementation of attention, and a function that returns why it cannot be used, or None if it can."""

    run: Callable[[Tensor, Tensor, Tensor, Mask, float], Tensor]
    refuses: Callable[[Tensor, Tensor, Mask, float], str | None]


BACKENDS = {
    "reference": Backend(lambda *args: _reference(*args)[0], lambda *_: None),
    "varlen": Backend(varlen, varlen_refuses),
    "packed_cpu": Backend(_packed_cpu, packed_cpu_refuses),
    "padded": Backend(_padded, lambda q, k, mask, dropout: None if mask.documents else "the row is not packed"),
    "flex": Backend(flex, flex_refuses),
    "sparse": Backend(attend_sparse, sparse_refuses),
    "cpu_training": Backend(matmul_attention, cpu_training_refuses),
    "sdpa": Backend(_sdpa, lambda *_: None),
}
