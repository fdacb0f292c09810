"""Python bindings of native.c: CPU kernels for attention, residual + norm + int8 quantization, and beam top-k.

B batch · H heads · T queries · S keys · E head dim · M rows of a matrix · D dim · V vocabulary

native.c is compiled when the package is installed, if there is a C compiler; without it, or with CLEARHEAD_NATIVE=0,
callers use PyTorch ops instead.
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
DIM_MULTIPLE = 32  # the kernels process two vectors of 16 floats at a time
VERSION = 2  # must equal VERSION in native.c
MIN_PARALLEL_SIZE = 4096  # elements below which a second thread does not pay


class GemmOutput(NamedTuple):
    """A GEMM's fp32 output before its row scales and bias are applied."""

    values: Tensor  # (M, D)
    scales: Tensor | None = None  # (M,)
    bias: Tensor | None = None  # (D,)


class QuantizedRows(NamedTuple):
    """Rows in symmetric int8, each with its own scale, stored as uint8 with zero point 128."""

    values: Tensor  # (M, D) uint8
    scales: Tensor  # (M,)


class NormParams(NamedTuple):
    """Parameters of a LayerNorm."""

    weight: Tensor  # (D,)
    bias: Tensor | None
    eps: float


class _AttentionArgs(ctypes.Structure):
    """Mirrors `struct attention_args` in native.c."""

    _fields_: ClassVar = [
        *(("qkv", c_void_p), ("qkv_stride", c_int64), ("write_slot", c_int64), ("scales", c_void_p)),
        *((name, c_void_p) for name in ("bias", "keys", "values")),
        *((name, c_int64) for name in ("batch_stride", "head_stride", "key_stride")),
        *((name, c_void_p) for name in ("mask", "lengths", "out", "quantized", "quantized_scales")),
        *((name, c_int64) for name in ("batch", "heads", "queries", "keys_visible", "head_dim", "is_bf16")),
    ]


class _ResidualNormArgs(ctypes.Structure):
    """Mirrors `struct residual_norm_args` in native.c."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("x", "scales", "bias", "residual", "weight", "norm_bias")),
        *((name, c_void_p) for name in ("sum", "normed", "quantized", "quantized_scales")),
        *((name, c_int64) for name in ("rows", "dim", "relu")),
        ("eps", c_float),
    ]


class _TopKArgs(ctypes.Structure):
    """Mirrors `struct topk_args` in native.c."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("logprobs", "beam_scores", "scores", "beams", "tokens")),
        *((name, c_int64) for name in ("rows", "beam_count", "vocab_size", "k")),
    ]


@cache
def library() -> Any | None:
    """Return the compiled library, or None where it is missing or turned off."""
    if os.environ.get("CLEARHEAD_NATIVE") == "0":
        return None
    preferred = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"  # one built for another Python works as well
    for path in sorted(Path(__file__).parent.glob("_native.*"), key=lambda path: path.name != preferred):
        try:
            lib = ctypes.CDLL(str(path))  # torch's OpenMP is already loaded, so its threads are shared
            for function in (lib.clearhead_attention, lib.clearhead_residual_norm_quantize, lib.clearhead_topk):
                function.argtypes = [c_void_p, c_int64]
            lib.clearhead_abi.restype = c_int64
        except (OSError, AttributeError) as error:  # built for another system, or from an older native.c
            log.info("%s: cannot be loaded: %s; reinstall the package to rebuild it", path, error)
            continue
        struct_sizes = sum(map(ctypes.sizeof, (_AttentionArgs, _ResidualNormArgs, _TopKArgs)))
        if lib.clearhead_abi() == VERSION + 1000 * struct_sizes:
            return lib
        log.info("%s: built from another version of native.c; reinstall the package to rebuild it", path)
    return None


def supports(*dims: int) -> bool:
    """Whether the library is loaded and supports rows of these dims."""
    return library() is not None and not any(dim % DIM_MULTIPLE for dim in dims)


def attend(
    qkv: GemmOutput,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    write_slot: int | None = None,
    quantized_out: QuantizedRows | None = None,
) -> Tensor:
    """Attention over k and v (B, H, S, E) in fp32 or bf16, with merged heads: (B · T, H · E), optionally in int8 too.

    `qkv` holds queries (B · T, H · E); with a `write_slot`, queries, keys and values (B · T, 3 · H · E), whose keys and
    values are first written to the cache from that slot on. `mask` (B, T, up to S) is True where a query may attend, or
    `lengths` (B,) gives the number of keys, or all are visible. Every query must have at least one visible key.
    """
    (batch, heads, slots, head_dim), strides, x = k.shape, k.stride(), qkv.values
    rows, columns = x.shape
    queries, keys_visible = rows // batch, slots if mask is None else mask.shape[2]
    parts = 1 if write_slot is None else 3
    assert (rows, columns) == (batch * queries, heads * head_dim * parts), "qkv must hold q, or q, k and v"
    assert (strides, k.dtype) == (v.stride(), v.dtype), "k and v must have the same strides and dtype"
    assert strides[3] == 1, "the head dim must be contiguous"
    assert k.dtype is torch.float32 or k.dtype is torch.bfloat16
    assert mask is None or (_is_dense(mask, torch.bool, (batch, queries, keys_visible)) and keys_visible <= slots)
    assert lengths is None or _is_dense(lengths, torch.int64, (batch,))
    assert write_slot is None or write_slot + queries <= slots, "the new keys must fit into the cache"
    assert _is_dense(x, torch.float32, x.shape)
    out = torch.empty(rows, heads * head_dim)
    args = _AttentionArgs(
        *(x.data_ptr(), columns, -1 if write_slot is None else write_slot, _pointer(qkv.scales), _pointer(qkv.bias)),
        *(k.data_ptr(), v.data_ptr(), *strides[:3], _pointer(mask), _pointer(lengths), out.data_ptr()),
        *(*_pointers(quantized_out), batch, heads, queries, keys_visible, head_dim, k.dtype is torch.bfloat16),
    )
    _call("clearhead_attention", args, k.numel())
    return out


def residual_norm_quantize(
    gemm_output: GemmOutput,
    residual: Tensor | None = None,
    relu: bool = False,
    norm: NormParams | None = None,
    *,
    sum_out: Tensor | None = None,
    normed_out: Tensor | None = None,
    quantized_out: QuantizedRows | None = None,
) -> None:
    """Apply a GEMM's scales and bias, add the residual, apply ReLU, LayerNorm and int8 quantization in one pass.

    Writes the requested outputs: `sum_out`, the value before the norm (may be the GEMM output itself); `normed_out`,
    after it; and `quantized_out`, the last of these in int8.
    """
    x = gemm_output.values
    assert _is_dense(x, torch.float32, x.shape)
    assert residual is None or _is_dense(residual, torch.float32, x.shape)
    rows, dim = x.shape
    weight, bias, eps = norm or (None, None, 0.0)
    args = _ResidualNormArgs(
        *(
            x.data_ptr(),
            _pointer(gemm_output.scales),
            _pointer(gemm_output.bias),
            _pointer(residual),
            _pointer(weight),
            _pointer(bias),
        ),
        *(_pointer(sum_out), _pointer(normed_out), *_pointers(quantized_out), rows, dim, relu, eps),
    )
    _call("clearhead_residual_norm_quantize", args, rows * dim)


def empty_quantized_rows(rows: int, dim: int) -> QuantizedRows:
    """Allocate an uninitialized `QuantizedRows`."""
    return QuantizedRows(torch.empty(rows, dim, dtype=torch.uint8), torch.empty(rows))


def quantize(gemm_output: GemmOutput, relu: bool = False, norm: NormParams | None = None) -> QuantizedRows:
    """Return a GEMM's output in int8, optionally after ReLU or a LayerNorm."""
    quantized = empty_quantized_rows(*gemm_output.values.shape)
    residual_norm_quantize(gemm_output, None, relu, norm, quantized_out=quantized)
    return quantized


def dequantize(gemm_output: GemmOutput) -> Tensor:
    """Apply a GEMM's scales and bias in place and return its output in fp32."""
    residual_norm_quantize(gemm_output, sum_out=gemm_output.values)
    return gemm_output.values


def beam_topk(logprobs: Tensor, beam_scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k best of beam_scores (B, beams) + logprobs (B, beams, V), with their beams and tokens: (B, k)."""
    rows, beam_count, vocab_size = logprobs.shape
    assert 0 < k <= beam_count * vocab_size
    assert _is_dense(logprobs, torch.float32, logprobs.shape)
    assert _is_dense(beam_scores, torch.float32, (rows, beam_count))
    scores, (beams, tokens) = torch.empty(rows, k), torch.empty(2, rows, k, dtype=torch.long)
    pointers = (x.data_ptr() for x in (logprobs, beam_scores, scores, beams, tokens))
    _call("clearhead_topk", _TopKArgs(*pointers, rows, beam_count, vocab_size, k), logprobs.numel())
    return scores, beams, tokens


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _pointers(rows: QuantizedRows | None) -> tuple[int | None, int | None]:
    return (None, None) if rows is None else (rows.values.data_ptr(), rows.scales.data_ptr())


def _is_dense(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether x is a contiguous CPU tensor of this dtype and shape."""
    return x.dtype is dtype and x.shape == shape and x.is_contiguous() and x.is_cpu


def _call(name: str, args: ctypes.Structure, size: int) -> None:
    """Call a function of the library without the GIL, on one thread for small inputs."""
    lib = library()
    assert lib is not None, "check supports() first"
    if not getattr(lib, name)(ctypes.byref(args), torch.get_num_threads() if size > MIN_PARALLEL_SIZE else 1):
        raise MemoryError("native kernel: out of memory; free some, or use a smaller batch")
