"""A norm beside the residual it is taken of, on a GPU that learns: what comes back through both is added at once.

R rows · D width
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

from typing import Any

import torch
from torch import Tensor, nn

try:
    import triton
    from triton import language as tl
except ImportError:  # there is none for this platform, nor what needs it
    triton = None

ROWS, BLOCK_ROWS, WARPS = 32, 1, 4  # what a program looks at, as an H200 likes it
WIDEST = 4096  # a row that fits into registers


def norm_beside_works(x: Tensor, norm: nn.Module) -> bool:
    """Whether `norm_beside` can stand for the norm of x: compiled training on a GPU."""
    compiled = torch.compiler.is_compiling() and torch.is_grad_enabled() and triton is not None
    layer = isinstance(norm, nn.LayerNorm) and norm.bias is not None and x.shape[-1] <= WIDEST
    return compiled and layer and x.is_cuda and x.dtype != torch.float64


def norm_beside(x: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x (…, D) and its norm, which is as narrow as products will have it."""
    found: tuple[Tensor, Tensor] = NormBeside.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    return found


class NormBeside(torch.autograd.Function):
    """A compiler would read the gradients again to add up those of weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        scale = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        out = (wide - mean) * scale * weight + bias
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        if out.dtype != dtype:  # torch 2.11, compiling, loses the gradient of a cast that has nothing to do
            out = out.to(dtype)
        return x.view_as(x), out

    @staticmethod
    def backward(ctx: Any, beside: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, scale = ctx.saved_tensors
        beside, grad, x, width = beside.contiguous(), grad.contiguous(), x.contiguous(), x.shape[-1]
        rows = x.numel() // width
        found, parts = torch.empty_like(x), -(-rows // ROWS)
        sums = torch.empty(parts, 2, width, device=x.device, dtype=torch.float32)
        block = triton.next_power_of_2(width)
        _norm_slope[(parts,)](
            beside, grad, x, weight, mean, scale, found, sums, rows, width, ROWS, BLOCK_ROWS, block, num_warps=WARPS
        )  # fmt: skip
        of_weight, of_bias = sums.sum(0).to(weight.dtype)
        return found, of_weight, of_bias, None


if triton is not None:

    @triton.jit
    def _norm_slope(
        besides, grads, inputs, weights, means, scales, found, sums, rows, width,
        many: tl.constexpr, few: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """A program for `many` rows, of which it looks at `few` at a time."""
        column, row = tl.arange(0, block)[None, :], tl.program_id(0) * many + tl.arange(0, few)[:, None]
        weight = tl.load(weights + column, mask=column < width, other=0.0).to(tl.float32)
        of_weight, of_bias = tl.zeros((few, block), tl.float32), tl.zeros((few, block), tl.float32)
        at = row.to(tl.int64) * width + column
        for _ in range(0, many, few):
            inside = (row < rows) & (column < width)
            grad = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32)
            x = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
            beside = tl.load(besides + at, mask=inside, other=0.0).to(tl.float32)
            mean, scale = (
                tl.load(means + row, mask=row < rows, other=0.0),
                tl.load(scales + row, mask=row < rows, other=0.0),
            )
            x = tl.where(inside, (x - mean) * scale, 0.0)
            of_weight += grad * x
            of_bias += grad
            grad *= weight
            slope = grad - tl.sum(grad, 1, keep_dims=True) / width - x * (tl.sum(grad * x, 1, keep_dims=True) / width)
            tl.store(found + at, (beside + slope * scale).to(found.dtype.element_ty), mask=inside)
            at += few * width
            row += few
        at = sums + tl.program_id(0) * 2 * width + tl.arange(0, block)
        tl.store(at, tl.sum(of_weight, 0), mask=tl.arange(0, block) < width)
        tl.store(at + width, tl.sum(of_bias, 0), mask=tl.arange(0, block) < width)
