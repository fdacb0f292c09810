"""What happens on a CPU between the matrix products of a step, by native.c where it could be compiled.

B rows · H heads · T queries · S keys · E head width · M rows of numbers · D width

The C file is compiled when the package is installed, and only if there is a compiler; without it, or with
CLEARHEAD_NATIVE=0, torch's operations do the same.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

WIDE = 16  # numbers that are computed at once; every width must be a multiple of it
LITTLE = 4096  # numbers for which a second thread is not worth waking


class Raw(NamedTuple):
    """What a product has given, if its rows still have to be multiplied with their scales and to get the bias."""

    numbers: Tensor  # (M, D)
    scales: Tensor | None = None  # (M,)
    bias: Tensor | None = None  # (D,)


class Small(NamedTuple):
    """Rows rounded to bytes, each by its own largest value; 128 stands for 0."""

    numbers: Tensor  # (M, D) uint8
    scales: Tensor  # (M,) what a step of one is worth


class Norm(NamedTuple):
    """A layer norm."""

    weight: Tensor  # (D,)
    bias: Tensor | None
    eps: float


class _Look(ctypes.Structure):
    """As `struct look` in native.c."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("q", "new_k", "new_v", "keys", "values", "allowed", "lengths", "out")),
        *((name, c_int64) for name in ("q_row", "q_head", "q_query", "row", "head", "key")),
        *((name, c_int64) for name in ("rows", "heads", "queries", "count", "width", "halves", "place")),
    ]


class _Between(ctypes.Structure):
    """As `struct between` in native.c."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("x", "scales", "bias", "residual", "weight", "shift")),
        *((name, c_void_p) for name in ("sum", "normed", "bytes", "sizes")),
        *((name, c_int64) for name in ("rows", "width", "relu")),
        ("eps", c_float),
    ]


@cache
def library() -> Any | None:
    """The compiled functions, or None where there are none."""
    if os.environ.get("CLEARHEAD_NATIVE") == "0":
        return None
    for path in Path(__file__).parent.glob("_native.*"):
        try:
            found = ctypes.CDLL(str(path))  # torch's OpenMP is loaded already, and its threads are shared
            found.clearhead_look.argtypes = found.clearhead_between.argtypes = [c_void_p, c_int64]
        except (OSError, AttributeError):  # of another system, or an older file
            continue
        return found
    return None


def fits(*widths: int) -> bool:
    """Whether rows of numbers of these widths can be computed here."""
    return library() is not None and not any(width % WIDE for width in widths)


def look(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None = None,
    lengths: Tensor | None = None,
    new: tuple[Tensor, Tensor, int] | None = None,
) -> Tensor:
    """Attention of q (B, H, T, E) over k and v (B, H, S, E), in fp32 or bf16, the heads joined: (B · T, H · E).

    `allowed` (B, T, up to S) says which keys a query sees, or `lengths` (B,) how many, or all are seen; each must see
    one. `new` are keys and values (B, H, T, E) that are put in place first, from a slot on.
    """
    (rows, heads, queries, width), keys = q.shape, k.shape[2] if allowed is None else allowed.shape[2]
    apart, held = q.stride(), k.stride()
    assert apart[3] == held[3] == 1, "a head's numbers must lie together"
    assert held == v.stride(), "keys and values must be laid out alike"
    new_k, new_v, place = new or (None, None, 0)
    if new_k is not None and new_v is not None:
        assert new_k.stride() == new_v.stride() == apart, "new keys and values must be laid out as queries are"
    out = q.new_empty(rows * queries, heads * width)
    asked = _Look(
        *(q.data_ptr(), _to(new_k), _to(new_v), k.data_ptr(), v.data_ptr()),
        *(_at(allowed), _at(lengths), out.data_ptr(), *apart[:3], *held[:3]),
        *(rows, heads, queries, keys, width, k.dtype == torch.bfloat16, place),
    )
    _call("clearhead_look", asked, k.numel())
    return out


def between(
    raw: Raw,
    residual: Tensor | None = None,
    relu: bool = False,
    norm: Norm | None = None,
    *,
    sum: Tensor | None = None,
    normed: Tensor | None = None,
    small: Small | None = None,
) -> None:
    """From one product to the next: what it gave (M, D), plus the residual, behind a relu if there is one.

    This is written to `sum`, which may be the product itself; its norm to `normed`; and whichever came last, rounded to
    bytes, to `small`. None of these: it is not wanted.
    """
    rows, width = raw.numbers.shape
    weight, bias, eps = norm or (None, None, 0.0)
    numbers, scales = small or (None, None)
    tensors = (raw.numbers, raw.scales, raw.bias, residual, weight, bias, sum, normed, numbers, scales)
    _call("clearhead_between", _Between(*map(_at, tensors), rows, width, relu, eps), rows * width)


def rounded(x: Tensor) -> Small:
    """Room for x (M, D) in bytes."""
    return Small(torch.empty(x.shape, dtype=torch.uint8), x.new_empty(len(x)))


def in_bytes(raw: Raw, relu: bool = False, norm: Norm | None = None) -> Small:
    """What a product gave, behind a relu or a norm if there is one, in bytes alone."""
    small = rounded(raw.numbers)
    between(raw, None, relu, norm, small=small)
    return small


def whole(raw: Raw) -> Tensor:
    """What a product gave, in fp32, in its own place."""
    between(raw, sum=raw.numbers)
    return raw.numbers


def _at(x: Tensor | None) -> int | None:
    assert x is None or x.is_contiguous(), "native code reads what lies together"
    return _to(x)


def _to(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _call(name: str, asked: ctypes.Structure, numbers: int) -> None:
    """Let a function of the library do what is asked with so many numbers; meanwhile other threads may run."""
    functions = library()
    assert functions is not None, "ask fits() first"
    if not getattr(functions, name)(ctypes.byref(asked), torch.get_num_threads() if numbers > LITTLE else 1):
        raise MemoryError("not enough memory for a step of decoding")
