"""Several projections of the same tokens as one product, on a GPU that learns.   R rows · D width"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import triton
    from triton import language as tl
except ImportError:  # there is none for this platform, nor what needs it
    triton = None

ROWS, BLOCK_ROWS, BLOCK, WARPS = 64, 8, 256, 1  # what a program looks at, as an H200 likes it


def together_works(x: Tensor, *parts: nn.Module) -> bool:
    """Whether `together` can stand for these projections of x: compiled training on a GPU."""
    compiled = torch.compiler.is_compiling() and torch.is_grad_enabled() and triton is not None
    linear = all(type(part) is nn.Linear and part.bias is not None for part in parts)
    return compiled and linear and x.is_cuda and x.dtype != torch.float64


def together(x: Tensor, *parts: nn.Linear) -> tuple[Tensor, ...]:
    """x (…, D) through each of the parts."""
    weights, biases = tuple(part.weight for part in parts), tuple(part.bias for part in parts)
    out = F.linear(x, torch.cat(weights), torch.cat(biases).detach())
    found: tuple[Tensor, ...] = Parts.apply(out, *biases)  # type: ignore[no-untyped-call]
    return found


class Parts(torch.autograd.Function):
    """What a product of several made, taken apart; biases get their gradients here, while those by it are joined.

    A compiler would join the gradients and then read them again to add them up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *biases: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.kinds = [len(bias) for bias in biases], [bias.dtype for bias in biases]
        return x.split(ctx.sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        total, rows = sum(ctx.sizes), grads[0].numel() // ctx.sizes[0]
        found = grads[0].new_empty(*grads[0].shape[:-1], total)
        sums = torch.empty(-(-rows // ROWS), total, device=found.device, dtype=torch.float32)
        first = 0
        for grad, width in zip(grads, ctx.sizes, strict=True):
            grid = (-(-width // BLOCK), len(sums))
            _place[grid](
                grad.contiguous(), found, sums, rows, width, first, total, ROWS, BLOCK_ROWS, BLOCK, num_warps=WARPS
            )  # fmt: skip
            first += width
        parts = sums.sum(0).split(ctx.sizes)
        return found, *(part.to(kind) for part, kind in zip(parts, ctx.kinds, strict=True))


if triton is not None:

    @triton.jit
    def _place(
        grads, found, sums, rows, width, first, total, many: tl.constexpr, few: tl.constexpr, block: tl.constexpr
    ):
        """A program for some columns of `many` rows, of which it looks at `few` at a time: copied to column `first`."""
        column, row = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1) * many + tl.arange(0, few)
        sum_of = tl.zeros((few, block), tl.float32)
        begin = tl.program_id(1).to(tl.int64) * many
        source = begin * width + tl.arange(0, few)[:, None] * width + column[None, :]
        target = begin * total + tl.arange(0, few)[:, None] * total + column[None, :] + first
        for _ in range(0, many, few):
            inside = (row < rows)[:, None] & (column < width)[None, :]
            grad = tl.load(grads + source, mask=inside, other=0.0)
            tl.store(found + target, grad, mask=inside)
            sum_of += grad.to(tl.float32)
            source += few * width
            target += few * total
            row += few
        tl.store(sums + tl.program_id(1) * total + first + column, tl.sum(sum_of, 0), mask=column < width)
