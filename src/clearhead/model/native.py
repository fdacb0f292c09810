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

WIDE = 32  # every width must be a multiple of it: two vectors of 16 numbers are computed at once
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
        *(("asked", c_void_p), ("apart", c_int64), ("place", c_int64), ("scales", c_void_p), ("bias", c_void_p)),
        *(("keys", c_void_p), ("values", c_void_p), ("row", c_int64), ("head", c_int64), ("key", c_int64)),
        *((name, c_void_p) for name in ("allowed", "lengths", "out", "bytes", "sizes")),
        *((name, c_int64) for name in ("rows", "heads", "queries", "count", "width", "halves")),
    ]


class _Between(ctypes.Structure):
    """As `struct between` in native.c."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("x", "scales", "bias", "residual", "weight", "shift")),
        *((name, c_void_p) for name in ("sum", "normed", "bytes", "sizes")),
        *((name, c_int64) for name in ("rows", "width", "relu")),
        ("eps", c_float),
    ]


class _Best(ctypes.Structure):
    """As `struct best` in native.c."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("scores", "totals", "sums", "beams", "words")),
        *((name, c_int64) for name in ("rows", "each", "count", "kept")),
    ]


@cache
def library() -> Any | None:
    """The compiled functions, or None where there are none."""
    if os.environ.get("CLEARHEAD_NATIVE") == "0":
        return None
    for path in Path(__file__).parent.glob("_native.*"):
        try:
            found = ctypes.CDLL(str(path))  # torch's OpenMP is loaded already, and its threads are shared
            for function in (found.clearhead_look, found.clearhead_between, found.clearhead_best):
                function.argtypes = [c_void_p, c_int64]
        except (OSError, AttributeError):  # of another system, or an older file
            continue
        return found
    return None


def fits(*widths: int) -> bool:
    """Whether rows of numbers of these widths can be computed here."""
    return library() is not None and not any(width % WIDE for width in widths)


def look(
    asked: Raw,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None = None,
    lengths: Tensor | None = None,
    place: int | None = None,
    small: Small | None = None,
) -> Tensor:
    """Attention over k and v (B, H, S, E), in fp32 or bf16, the heads joined: (B · T, H · E), and the same in bytes.

    What a product has `asked` are queries (B · T, H · E); or, with a `place`, these and as many keys and values, which
    are put in place first, from that slot on. `allowed` (B, T, up to S) says which keys a query sees, or `lengths` (B,)
    how many, or all are seen; each must see one.
    """
    (rows, heads, keys, width), held = k.shape, k.stride()
    lines, outputs = asked.numbers.shape
    assert held == v.stride(), "keys and values must be laid out alike"
    assert held[3] == 1, "a head's numbers must lie together"
    assert outputs == heads * width * (1 if place is None else 3), "queries, or queries, keys and values"
    out = asked.numbers.new_empty(lines, heads * width)
    numbers, sizes = small or (None, None)
    wanted = _Look(
        *(_at(asked.numbers), outputs, -1 if place is None else place, _at(asked.scales), _at(asked.bias)),
        *(k.data_ptr(), v.data_ptr(), *held[:3], _at(allowed), _at(lengths), out.data_ptr(), _at(numbers), _at(sizes)),
        *(rows, heads, lines // rows, keys if allowed is None else allowed.shape[2], width, k.dtype == torch.bfloat16),
    )
    _call("clearhead_look", wanted, k.numel())
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


def rounded(rows: int, width: int) -> Small:
    """Room for rows of bytes."""
    return Small(torch.empty(rows, width, dtype=torch.uint8), torch.empty(rows))


def in_bytes(raw: Raw, relu: bool = False, norm: Norm | None = None) -> Small:
    """What a product gave, behind a relu or a norm if there is one, in bytes alone."""
    small = rounded(*raw.numbers.shape)
    between(raw, None, relu, norm, small=small)
    return small


def whole(raw: Raw) -> Tensor:
    """What a product gave, in fp32, in its own place."""
    between(raw, sum=raw.numbers)
    return raw.numbers


def best(scores: Tensor, totals: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The highest of totals (B, K) plus scores (B, K, V), highest first, their beams and words: (B, count) each."""
    rows, beams, words = scores.shape
    sums, chosen = scores.new_empty(rows, count), torch.empty(2, rows, count, dtype=torch.long)
    pointers = (*map(_at, (scores, totals, sums)), chosen[0].data_ptr(), chosen[1].data_ptr())
    _call("clearhead_best", _Best(*pointers, rows, beams, words, count), scores.numel())
    return sums, chosen[0], chosen[1]


def _at(x: Tensor | None) -> int | None:
    assert x is None or x.is_contiguous(), "native code reads what lies together"
    return None if x is None else x.data_ptr()


def _call(name: str, asked: ctypes.Structure, numbers: int) -> None:
    """Let a function of the library do what is asked with so many numbers; meanwhile other threads may run."""
    functions = library()
    assert functions is not None, "ask fits() first"
    if not getattr(functions, name)(ctypes.byref(asked), torch.get_num_threads() if numbers > LITTLE else 1):
        raise MemoryError("not enough memory for a step of decoding")
