"""Attention by whichever backend is fastest for the mask, the dtype and the device.

B rows · H heads · G key-value heads · T queries · S keys · E head width

`attend()` takes the first backend of BACKENDS that does not refuse. The reference is never chosen by itself: it is the
written-out formula that every other backend must equal.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.ops.attention import flex, packed_cpu, sparse, varlen
from clearhead.ops.attention.cpu_training import matmul_attention, matmul_refuses
from clearhead.ops.attention.reference import attention
from clearhead.ops.attention.sdpa import sdpa
from clearhead.ops.masks import Mask

log = logging.getLogger("clearhead")


def attention_with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """The reference for any mask and for grouped heads: output (B, H, T, E) and weights (B, H, T, S)."""
    return _reference(q, k, v, mask, 0.0)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0, backend: str | None = None) -> Tensor:
    """Attention of q (B, H, T, E) over k and v (B, G, S, E), G a divisor of H; returns (B, H, T, E).

    `backend` forces one by name; where it cannot do what is asked, the choice falls back and the log says why.
    Outputs at padded queries are finite and mean nothing.
    """
    mask = mask.simplified(k.shape[2])
    wanted = backend or _forced
    if wanted is not None:
        if wanted not in BACKENDS:
            raise ValueError(f"no attention backend {wanted!r}; there are {', '.join(BACKENDS)}")
        reason = BACKENDS[wanted].refuses(q, k, mask, dropout)
        if reason is None:
            return BACKENDS[wanted].run(q, k, v, mask, dropout)
        _say_once(f"attention backend {wanted} cannot be used here ({reason}); falling back")
    chosen = BACKENDS[choose_backend(q, k, mask, dropout)]
    return chosen.run(q, k, v, mask, dropout)


def choose_backend(q: Tensor, k: Tensor, mask: Mask, dropout: float = 0.0) -> str:
    """The name of the backend that `attend` would take; the log tells, at level INFO, why not an earlier one."""
    if mask.documents is None and mask.pattern.kind == "full":  # the common case does not ask everybody
        return "sdpa" if matmul_refuses(q, k, mask, dropout) else "products"
    reasons = []
    for name, way in BACKENDS.items():
        reason = "it is for comparison" if name == "reference" else way.refuses(q, k, mask, dropout)
        if reason is None:
            break
        reasons.append(f"{name}: {reason}")
    if not torch.compiler.is_compiling() and log.isEnabledFor(logging.INFO):
        _say_once(f"{mask.pattern.kind} attention by {name} (not by {'; '.join(reasons[1:])})", logging.INFO)
    return name


@contextmanager
def attention_backend(name: str | None) -> Iterator[None]:
    """Every attention inside the `with` uses this backend (one thread at a time: for tests, benchmarks and the lab)."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


_forced: str | None = None
_said: set[str] = set()


def _say_once(message: str, level: int = logging.WARNING) -> None:
    if message not in _said:
        _said.add(message)
        log.log(level, message)


# The two ways that take any mask, any dtype and any device.


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    allowed = mask.dense(q.shape[2], k.shape[2], q.device)
    return attention(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), allowed, dropout)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    if mask.causal and mask.documents is None and mask.pattern.kind == "full":
        if mask.start is None and q.shape[2] == k.shape[2]:  # padding is later than every real query, hidden by that
            return sdpa(q, k, v, None, dropout, causal=True)
        if isinstance(mask.start, int) and q.shape[2] == 1 and mask.start == k.shape[2] - 1:  # the last sees everything
            return sdpa(q, k, v, None, dropout)
    allowed = mask.dense(q.shape[2], k.shape[2], q.device)
    itself = mask.tree is not None and mask.pattern.kind != "summary"  # every query sees at least its own key
    return sdpa(q, k, v, allowed, dropout, no_empty_rows=itself)


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    """A packed row with padding put back, only around attention: a row for each document."""
    assert mask.documents is not None
    ours, theirs = mask.documents
    rows = replace(mask, documents=None, lengths=None if ours is theirs and mask.causal else theirs.lengths)
    q, k, v = ours.pad(q), theirs.pad(k), theirs.pad(v)
    rows = rows.simplified(k.shape[2])
    return ours.unpad(BACKENDS[choose_backend(q, k, rows, dropout)].run(q, k, v, rows, dropout))


def _by_runs(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    def rows(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if packed_cpu.is_short(q, k, mask, dropout):
            return packed_cpu.short(q, k, v)
        return BACKENDS[choose_backend(q, k, mask, dropout)].run(q, k, v, mask, dropout)

    return packed_cpu.by_runs(q, k, v, mask, rows)


# What each way refuses, in words for the log; None means that it can do it.


def _sparse_refuses(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> str | None:
    if mask.pattern.kind == "full":
        return "the mask is not sparse"
    if mask.documents is not None:
        return "the row is packed"
    if mask.start is not None or mask.tree is not None or q.shape[2] != k.shape[2]:
        return "queries and keys are not the same positions"
    return None


class Backend(NamedTuple):
    """One way to compute attention, and when it cannot."""

    run: Callable[[Tensor, Tensor, Tensor, Mask, float], Tensor]
    refuses: Callable[[Tensor, Tensor, Mask, float], str | None]


BACKENDS = {
    "reference": Backend(lambda *args: _reference(*args)[0], lambda *_: None),
    "varlen": Backend(varlen.varlen, varlen.varlen_refuses),
    "runs": Backend(_by_runs, packed_cpu.runs_refuse),
    "padded": Backend(_padded, lambda q, k, mask, dropout: None if mask.documents else "the row is not packed"),
    "flex": Backend(flex.flex, flex.flex_refuses),
    "sparse": Backend(sparse.attend_sparse, _sparse_refuses),
    "products": Backend(matmul_attention, matmul_refuses),
    "sdpa": Backend(_sdpa, lambda *_: None),
}
