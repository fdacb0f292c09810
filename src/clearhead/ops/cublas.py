"""Products with GELU in them, which cuBLAS has and torch does not offer.   R rows · D width · F feed-forward width

A GPU multiplies while its memory rests; GELU and its slope, done by kernels of their own, read and write everything
once more. Here they are done to what a product has found before it is written.
"""

import ctypes
import weakref
from ctypes import byref, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

GELU_AUX_BIAS, DGELU = 164, 192  # what cuBLAS calls them: h beside gelu(h), and times the slope at h
TRANSPOSED, EPILOGUE, BIAS, BESIDE, BESIDE_WIDTH = 3, 7, 8, 11, 12  # attributes of a product
SUMS_IN_FP32, FP32, SPACE_LIMIT = 68, 0, 1
DTYPES = {torch.bfloat16: 14, torch.float16: 2}
SPACE = 32 << 20  # bytes that a product may use on the way


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def works(dtype: torch.dtype, *sizes: int) -> bool:
    """Whether there are such products of matrices of these sizes."""
    return dtype in DTYPES and all(size % 8 == 0 for size in sizes) and _library() is not None


@torch.library.custom_op("clearhead::gelu_of_product", mutates_args=())
def gelu_of_product(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """h = x Wᵀ + b and gelu_tanh(h), (R, F) each, for x (R, D), weight (F, D) and bias (F,)."""
    plan = _plan(x, len(weight), True, GELU_AUX_BIAS)
    if plan is None:
        before = F.linear(x, weight, bias)
        return before, F.gelu(before, approximate="tanh")
    before, after = (x.new_empty(len(x), len(weight)) for _ in range(2))
    plan.run(_even(x), _even(weight), after, before, _even(bias))
    return before, after


@torch.library.custom_op("clearhead::product_times_slope", mutates_args=())
def product_times_slope(grad: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """(grad W) · gelu_tanh'(before), (R, F), for grad (R, D), weight (D, F) and before (R, F)."""
    plan = _plan(grad, weight.shape[1], False, DGELU)
    if plan is None:
        return torch.ops.aten.gelu_backward(grad @ weight, before, approximate="tanh")
    out = torch.empty_like(before)
    plan.run(_even(grad), _even(weight), out, _even(before))
    return out


@gelu_of_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], weight.shape[0])


@product_times_slope.register_fake
def _(grad: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    return torch.empty_like(before)


class Proposal(ctypes.Structure):
    """How cuBLAS would do a product."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("space", c_size_t),
        ("state", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    )


class Plan:
    """out (R, N) = a b for a (R, K) and b (K, N), given as (N, K) where it is `transposed`, with something done to it.

    cuBLAS thinks in columns: a row-major matrix is its transpose, and outᵀ = bᵀ aᵀ.
    """

    def __init__(self, rows: int, inner: int, wide: int, transposed: bool, epilogue: int, dtype: torch.dtype, gpu: int):
        """cuBLAS proposes a way; a RuntimeError where it has none."""
        self.handle, self.what, self.best = _handle(gpu), c_void_p(), Proposal()
        self.layouts: list[c_void_p] = []
        _call("cublasLtMatmulDescCreate", byref(self.what), SUMS_IN_FP32, FP32)
        weakref.finalize(self, _destroy, self.what, self.layouts)
        self._set(TRANSPOSED, c_int32(transposed))
        self._set(EPILOGUE, c_int32(epilogue))
        self._set(BESIDE_WIDTH, c_int64(wide))
        self._set(BESIDE, c_void_p(1 << 20))  # any place: it is asked for before a way is proposed
        for height, dim in ((wide, inner) if transposed else (inner, wide), (rows, inner), (rows, wide)):
            layout, size = c_void_p(), (c_uint64(dim), c_uint64(height), c_int64(dim))
            _call("cublasLtMatrixLayoutCreate", byref(layout), DTYPES[dtype], *size)
            self.layouts.append(layout)
        b, a, out = self.layouts
        limit, space, count = c_void_p(), c_size_t(SPACE), c_int32()
        _call("cublasLtMatmulPreferenceCreate", byref(limit))
        _call("cublasLtMatmulPreferenceSetAttribute", limit, SPACE_LIMIT, byref(space), ctypes.sizeof(space))
        choice = (limit, 1, byref(self.best), byref(count))
        try:
            _call("cublasLtMatmulAlgoGetHeuristic", self.handle, self.what, b, a, out, out, *choice)
        finally:
            _call("cublasLtMatmulPreferenceDestroy", limit)
        if not count.value or self.best.state:
            raise RuntimeError("cuBLAS has no way to do this product")

    def _set(self, attribute: int, value: c_int32 | c_int64 | c_void_p) -> None:
        _call("cublasLtMatmulDescSetAttribute", self.what, attribute, byref(value), ctypes.sizeof(value))

    def run(self, a: Tensor, b: Tensor, out: Tensor, beside: Tensor, bias: Tensor | None = None) -> None:
        """Fill `out`; `beside` (R, N) is written or read, as the epilogue has it."""
        self._set(BESIDE, _at(beside))
        if bias is not None:
            self._set(BIAS, _at(bias))
        space = torch.empty(SPACE, dtype=torch.uint8, device=a.device)
        first, second, third = self.layouts
        matrices = (_at(b), first, _at(a), second, byref(c_float(0.0)), _at(out), third, _at(out), third)
        stream = c_void_p(torch.cuda.current_stream(a.device).cuda_stream)
        way = (byref(self.best), _at(space), c_size_t(SPACE), stream)
        with torch.cuda.device(a.device):
            _call("cublasLtMatmul", self.handle, self.what, byref(c_float(1.0)), *matrices, *way)


def _destroy(what: c_void_p, layouts: list[c_void_p]) -> None:
    """What cuBLAS holds of a plan."""
    for layout in layouts:
        _call("cublasLtMatrixLayoutDestroy", layout)
    _call("cublasLtMatmulDescDestroy", what)


def _plan(a: Tensor, wide: int, transposed: bool, epilogue: int) -> Plan | None:
    return _planned(*a.shape, wide, transposed, epilogue, a.dtype, a.device.index) if a.is_cuda else None


@lru_cache(1024)
def _planned(
    rows: int, inner: int, wide: int, transposed: bool, epilogue: int, dtype: torch.dtype, gpu: int
) -> Plan | None:
    """A plan for a GPU; None where torch must do."""
    try:
        return Plan(rows, inner, wide, transposed, epilogue, dtype, gpu) if works(dtype, inner, wide) else None
    except RuntimeError:
        return None


@cache
def _library() -> ctypes.CDLL | None:
    """cuBLAS as torch has loaded it."""
    try:
        return ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
    except OSError:
        return None


@cache
def _handle(gpu: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(gpu):
        _call("cublasLtCreate", byref(handle))
    return handle


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"cuBLAS: {name} ended with status {status}")


def _even(tensor: Tensor) -> Tensor:
    """The same, lying in one piece from where cuBLAS expects it, as what torch allocates does."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 256 == 0 else tensor.clone()


def _at(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())
