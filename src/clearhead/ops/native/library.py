"""What happens on a CPU between the matrix products of a step, by native.c where it could be compiled.

B rows · H heads · T queries · S keys · E head width · M rows of numbers · D width

The C file is compiled when the package is installed, and only if there is a compiler; without it, or with
CLEARHEAD_NATIVE=0, torch's operations do the same.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sysconfig
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("clearhead")
WIDE = 32  # every width must be a multiple of it: two vectors of 16 numbers are computed at once
VERSION = 1  # of what native.c does, as it stands there
LITTLE = 4096  # numbers for which a second thread is not worth waking


class GemmOutput(NamedTuple):
    """What a product has given, if its rows still have to be multiplied with their scales and to get the bias."""

    numbers: Tensor  # (M, D)
    scales: Tensor | None = None  # (M,)
    bias: Tensor | None = None  # (D,)


class QuantizedRows(NamedTuple):
    """Rows rounded to bytes, each by its own largest value; 128 stands for 0."""

    numbers: Tensor  # (M, D) uint8
    scales: Tensor  # (M,) what a step of one is worth


class NormParams(NamedTuple):
    """A layer norm."""

    weight: Tensor  # (D,)
    bias: Tensor | None
    eps: float


NOTHING = (None, None)
NO_NORM = (None, None, 0.0)


class _Look(ctypes.Structure):
    """As `struct look` in native.c."""

    _fields_: ClassVar = [
        *(("asked", c_void_p), ("apart", c_int64), ("place", c_int64), ("scales", c_void_p), ("bias", c_void_p)),
        *(("keys", c_void_p), ("values", c_void_p), ("row", c_int64), ("head", c_int64), ("key", c_int64)),
        *((name, c_void_p) for name in ("allowed", "lengths", "out", "bytes", "sizes")),
        *((name, c_int64) for name in ("rows", "heads", "queries", "count", "dim", "halves")),
    ]


class _Between(ctypes.Structure):
    """As `struct between` in native.c."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("x", "scales", "bias", "residual", "weight", "shift")),
        *((name, c_void_p) for name in ("sum", "normed", "bytes", "sizes")),
        *((name, c_int64) for name in ("rows", "dim", "relu")),
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
    own = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"  # that of another Python would do as well
    for path in sorted(Path(__file__).parent.glob("_native.*"), key=lambda path: path.name != own):
        try:
            found = ctypes.CDLL(str(path))  # torch's OpenMP is loaded already, and its threads are shared
            for function in (found.clearhead_look, found.clearhead_between, found.clearhead_best):
                function.argtypes = [c_void_p, c_int64]
            found.clearhead_layout.restype = c_int64
        except (OSError, AttributeError) as error:  # of another system, or an older file
            log.info("%s cannot be used: %s", path, error)
            continue
        if found.clearhead_layout() == VERSION + 1000 * sum(map(ctypes.sizeof, (_Look, _Between, _Best))):
            return found
        log.info("%s was compiled from another version of native.c; install the package again", path)
    return None


def supports(*widths: int) -> bool:
    """Whether rows of numbers of these widths can be computed here."""
    return library() is not None and not any(dim % WIDE for dim in widths)


def attend(
    asked: GemmOutput,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None = None,
    lengths: Tensor | None = None,
    place: int | None = None,
    small: QuantizedRows | None = None,
) -> Tensor:
    """Attention over k and v (B, H, S, E), in fp32 or bf16, the heads joined: (B · T, H · E), and the same in bytes.

    What a product has `asked` are queries (B · T, H · E); or, with a `place`, these and as many keys and values, which
    are put in place first, from that slot on. `allowed` (B, T, up to S) says which keys a query sees, or `lengths` (B,)
    how many, or all are seen; each must see one.
    """
    (rows, heads, keys, dim), held, x = k.shape, k.stride(), asked.numbers
    lines, outputs = x.shape
    queries, seen = lines // rows, keys if allowed is None else allowed.shape[2]
    assert (lines, outputs) == (rows * queries, heads * dim * (1 if place is None else 3)), "q, or q, k and v"
    assert (held, k.dtype) == (v.stride(), v.dtype), "keys and values must be laid out alike"
    assert held[3] == 1, "a head's numbers must lie together"
    assert k.dtype is torch.float32 or k.dtype is torch.bfloat16
    assert allowed is None or (_is_plain(allowed, torch.bool, (rows, queries, seen)) and seen <= keys)
    assert lengths is None or _is_plain(lengths, torch.int64, (rows,))
    assert place is None or place + queries <= keys, "there must be room"
    assert _is_plain(x, torch.float32, x.shape)
    out = torch.empty(lines, heads * dim)
    numbers, sizes = small or NOTHING
    wanted = _Look(
        *(x.data_ptr(), outputs, -1 if place is None else place, _to(asked.scales), _to(asked.bias)),
        *(k.data_ptr(), v.data_ptr(), *held[:3], _to(allowed), _to(lengths), out.data_ptr(), _to(numbers), _to(sizes)),
        *(rows, heads, queries, seen, dim, k.dtype is torch.bfloat16),
    )
    _call("clearhead_look", wanted, k.numel())
    return out


def residual_norm_quantize(
    raw: GemmOutput,
    residual: Tensor | None = None,
    relu: bool = False,
    norm: NormParams | None = None,
    *,
    sum: Tensor | None = None,
    normed: Tensor | None = None,
    small: QuantizedRows | None = None,
) -> None:
    """From one product to the next: what it gave (M, D), plus the residual, behind a relu if there is one.

    This is written to `sum`, which may be the product itself; its norm to `normed`; and whichever came last, rounded to
    bytes, to `small`. None of these: it is not wanted.
    """
    x = raw.numbers
    assert _is_plain(x, torch.float32, x.shape)
    assert residual is None or _is_plain(residual, torch.float32, x.shape)
    rows, dim = x.shape
    weight, bias, eps = norm or NO_NORM
    numbers, sizes = small or NOTHING
    wanted = _Between(
        *(x.data_ptr(), _to(raw.scales), _to(raw.bias), _to(residual), _to(weight), _to(bias)),
        *(_to(sum), _to(normed), _to(numbers), _to(sizes), rows, dim, relu, eps),
    )
    _call("clearhead_between", wanted, rows * dim)


def empty_quantized_rows(rows: int, dim: int) -> QuantizedRows:
    """Room for rows of bytes."""
    return QuantizedRows(torch.empty(rows, dim, dtype=torch.uint8), torch.empty(rows))


def quantize(raw: GemmOutput, relu: bool = False, norm: NormParams | None = None) -> QuantizedRows:
    """What a product gave, behind a relu or a norm if there is one, in bytes alone."""
    small = empty_quantized_rows(*raw.numbers.shape)
    residual_norm_quantize(raw, None, relu, norm, small=small)
    return small


def dequantize(raw: GemmOutput) -> Tensor:
    """What a product gave, in fp32, in its own place."""
    residual_norm_quantize(raw, sum=raw.numbers)
    return raw.numbers


def top_continuations(scores: Tensor, totals: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The highest of totals (B, K) plus scores (B, K, V), highest first, their beams and words: (B, count) each."""
    rows, beams, words = scores.shape
    assert 0 < count <= beams * words
    assert _is_plain(scores, torch.float32, scores.shape)
    assert _is_plain(totals, torch.float32, (rows, beams))
    sums, chosen = torch.empty(rows, count), torch.empty(2, rows, count, dtype=torch.long)
    first, second = chosen
    pointers = (scores.data_ptr(), totals.data_ptr(), sums.data_ptr(), first.data_ptr(), second.data_ptr())
    _call("clearhead_best", _Best(*pointers, rows, beams, words, count), scores.numel())
    return sums, first, second


def _to(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _is_plain(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether native code can read x: these numbers, on the CPU, one behind the other."""
    return x.dtype is dtype and x.shape == shape and x.is_contiguous() and x.is_cpu


def _call(name: str, asked: ctypes.Structure, numbers: int) -> None:
    """Let a function of the library do what is asked with so many numbers; meanwhile other threads may run."""
    functions = library()
    assert functions is not None, "ask fits() first"
    if not getattr(functions, name)(ctypes.byref(asked), torch.get_num_threads() if numbers > LITTLE else 1):
        raise MemoryError("not enough memory for a step of decoding")
