"""Gradients on a GPU together with the sums that biases and norms need, for which a compiler would read them again.

D width · F feed-forward width · R rows
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops import cublas
from clearhead.ops.cross_entropy import matmul_dtype
from clearhead.ops.gelu import gelu_tanh

try:
    import triton
    from triton import language as tl
except ImportError:  # there is none for this platform, nor what needs it
    triton = None

WORK = triton is not None
# What a program looks at, as an H200 likes it: rows, so many at a time, (columns,) and by how many warps.
NORM, JOIN, GELU = (32, 1, 4), (64, 8, 256, 1), (256, 4, 128, 1)
WIDEST = 4096  # a row that a norm has in registers


class ResidualLayerNorm(torch.autograd.Function):
    """x (…, D) and its norm, as narrow as products will have it; what comes back through both is added at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        scale = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        out = (wide - mean) * scale * weight + bias
        if out.dtype != matmul_dtype(x):  # torch 2.11, compiling, loses the gradient of a cast with nothing to do
            out = out.to(matmul_dtype(x))
        return x.view_as(x), out

    @staticmethod
    def backward(ctx: Any, beside: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, scale = ctx.saved_tensors
        beside, grad, x, dim = beside.contiguous(), grad.contiguous(), x.contiguous(), x.shape[-1]
        rows = x.numel() // dim
        found, (many, few, warps) = torch.empty_like(x), NORM
        parts = -(-rows // many)
        sums = torch.empty(parts, 2, dim, device=x.device, dtype=torch.float32)
        block = triton.next_power_of_2(dim)
        _norm_slope[(parts,)](
            beside, grad, x, weight, mean, scale, found, sums, rows, dim, many, few, block, num_warps=warps
        )  # fmt: skip
        of_weight, of_bias = sums.sum(0).to(weight.dtype)
        return found, of_weight, of_bias, None


class SplitQKV(torch.autograd.Function):
    """What a product of several layers made, taken apart, (…, sum of the biases' sizes) to (…, size) each.

    The biases were added, detached, before: they get their gradients here, while those by the product are joined.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *biases: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.kinds = [len(bias) for bias in biases], [bias.dtype for bias in biases]
        return x.split(ctx.sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        total, rows = sum(ctx.sizes), grads[0].numel() // ctx.sizes[0]
        found = grads[0].new_empty(*grads[0].shape[:-1], total)
        many, few, block, warps = JOIN
        sums = torch.empty(-(-rows // many), total, device=found.device, dtype=torch.float32)
        first = 0
        for grad, dim in zip(grads, ctx.sizes, strict=True):
            grid = (-(-dim // block), len(sums))
            _place[grid](
                grad.contiguous(), found, sums, rows, dim, first, total, many, few, block, num_warps=warps
            )  # fmt: skip
            first += dim
        parts = sums.sum(0).split(ctx.sizes)
        return found, *(part.to(kind) for part, kind in zip(parts, ctx.kinds, strict=True))


class BiasGelu(torch.autograd.Function):
    """gelu(x) for x (…, F) to which a detached bias (F,) was added: it gets its gradient here, with that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, exact: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.exact, ctx.kind = exact, bias.dtype
        return F.gelu(x) if exact else gelu_tanh(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        grad, x, dim = grad.contiguous(), x.contiguous(), x.shape[-1]
        rows = x.numel() // dim
        found, (many, few, block, warps) = torch.empty_like(x), GELU
        parts = -(-rows // many)
        sums = torch.empty(parts, dim, device=x.device, dtype=torch.float32)
        grid = (-(-dim // block), parts)
        _gelu_slope[grid](grad, x, found, sums, rows, dim, ctx.exact, many, few, block, num_warps=warps)
        return found, sums.sum(0).to(ctx.kind), None


class MatmulGelu(torch.autograd.Function):
    """gelu_tanh(x Uᵀ + b) Dᵀ for x (R, D), U (F, D), b (F,), D (D, F)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        before, after = cublas.gelu_of_product(x, up, bias)
        ctx.save_for_backward(x, before, after, up, down)
        return after @ down.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, before, after, up, down = ctx.saved_tensors
        inner = cublas.product_times_slope(grad, down, before)
        return inner @ up, inner.T @ x, inner.sum(0, dtype=torch.float32).to(up.dtype), grad.T @ after


class PositionAdd(torch.autograd.Function):
    """x (B, T, D) + row (1, T, D). The rows of the gradient are added up by a product: a compiler does it slowly.

    Under autocast the sum is rounded as those of other products are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor) -> Tensor:
        return x + row

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, (grad.new_ones(1, len(grad)) @ grad.flatten(1)).view(1, *grad.shape[1:])


if triton is not None:

    @triton.jit
    def _norm_slope(
        besides, grads, inputs, weights, means, scales, found, sums, rows, dim,
        many: tl.constexpr, few: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """A program for `many` rows, of which it looks at `few` at a time."""
        column, row = tl.arange(0, block)[None, :], tl.program_id(0) * many + tl.arange(0, few)[:, None]
        weight = tl.load(weights + column, mask=column < dim, other=0.0).to(tl.float32)
        of_weight, of_bias = tl.zeros((few, block), tl.float32), tl.zeros((few, block), tl.float32)
        at = row.to(tl.int64) * dim + column
        for _ in range(0, many, few):
            inside = (row < rows) & (column < dim)
            grad = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32)
            x = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
            beside = tl.load(besides + at, mask=inside, other=0.0).to(tl.float32)
            mean = tl.load(means + row, mask=row < rows, other=0.0)
            scale = tl.load(scales + row, mask=row < rows, other=0.0)
            x = tl.where(inside, (x - mean) * scale, 0.0)
            of_weight += grad * x
            of_bias += grad
            grad *= weight
            slope = grad - tl.sum(grad, 1, keep_dims=True) / dim - x * (tl.sum(grad * x, 1, keep_dims=True) / dim)
            tl.store(found + at, (beside + slope * scale).to(found.dtype.element_ty), mask=inside)
            at += few * dim
            row += few
        at = sums + tl.program_id(0) * 2 * dim + tl.arange(0, block)
        tl.store(at, tl.sum(of_weight, 0), mask=tl.arange(0, block) < dim)
        tl.store(at + dim, tl.sum(of_bias, 0), mask=tl.arange(0, block) < dim)

    @triton.jit
    def _place(grads, found, sums, rows, dim, first, total, many: tl.constexpr, few: tl.constexpr, block: tl.constexpr):
        """A program for some columns of `many` rows, of which it looks at `few` at a time: copied to column `first`."""
        column, row = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1) * many + tl.arange(0, few)
        sum_of = tl.zeros((few, block), tl.float32)
        begin = tl.program_id(1).to(tl.int64) * many
        source = begin * dim + tl.arange(0, few)[:, None] * dim + column[None, :]
        target = begin * total + tl.arange(0, few)[:, None] * total + column[None, :] + first
        for _ in range(0, many, few):
            inside = (row < rows)[:, None] & (column < dim)[None, :]
            grad = tl.load(grads + source, mask=inside, other=0.0)
            tl.store(found + target, grad, mask=inside)
            sum_of += grad.to(tl.float32)
            source += few * dim
            target += few * total
            row += few
        tl.store(sums + tl.program_id(1) * total + first + column, tl.sum(sum_of, 0), mask=column < dim)

    @triton.jit
    def _gelu_slope(
        grads, inputs, found, sums, rows, dim,
        exact: tl.constexpr, many: tl.constexpr, few: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """A program for some columns of `many` rows, of which it looks at `few` at a time."""
        columns, row = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1) * many + tl.arange(0, few)
        total = tl.zeros((few, block), tl.float32)
        at = tl.program_id(1).to(tl.int64) * many * dim + tl.arange(0, few)[:, None] * dim + columns[None, :]
        for _ in range(0, many, few):
            inside = (row < rows)[:, None] & (columns < dim)[None, :]
            x = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
            if exact:
                gate = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
                slope = gate + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
            else:  # x · sigmoid(√(8/π) (x + 0.044715 x³))
                gate = tl.sigmoid(x * (1.5957691216057308 + 0.0713548162726 * x * x))
                slope = gate + x * gate * (1 - gate) * (1.5957691216057308 + 0.2140644488178 * x * x)
            grad = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32) * slope
            tl.store(found + at, grad.to(found.dtype.element_ty), mask=inside)
            total += grad
            at += few * dim
            row += few
        tl.store(sums + tl.program_id(1) * dim + columns, tl.sum(total, 0), mask=columns < dim)
