"""GELU and its slope: by a sigmoid on a CPU that learns, and with the bias before it on a GPU that learns."""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.model import cublas

try:
    import triton
    from triton import language as tl
except ImportError:  # there is none for this platform, nor what needs it
    triton = None

ROWS, BLOCK_ROWS, BLOCK, WARPS = 256, 4, 128, 1  # what a program looks at, as an H200 likes it


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))), any shape: GPT's form of GELU."""
    # The same by a sigmoid, which a GPU has done before its memory has answered; fp16 ends before x³ may.
    if torch.compiler.is_compiling() and x.dtype != torch.float16:
        return x * torch.sigmoid(x * (SLOPE + SLOPE * CUBIC * x * x))
    learns = x.requires_grad and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    if learns and x.device.type == "cpu" and x.dtype == torch.float32:
        return GeluBySigmoid.apply(x)  # type: ignore[no-untyped-call]
    return F.gelu(x, approximate="tanh")


CUBIC, SLOPE = 0.044715, math.sqrt(8 / math.pi)
STEEPNESS, ONE = (torch.tensor(number, dtype=torch.float32, device="cpu") for number in (SLOPE, 1.0))


class GeluBySigmoid(torch.autograd.Function):
    """The same as x · sigmoid(√(8/π) (x + 0.044715 x³)): a CPU's sigmoid takes a sixth of the time of its tanh.

    The slope is made at once: half of torch's time for both directions.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        cubic = CUBIC * SLOPE
        gate = torch.addcmul(STEEPNESS, x, x, value=cubic).mul_(x).sigmoid_()
        out = x * gate
        slope = torch.addcmul(STEEPNESS, x, x, value=3 * cubic).mul_(out)  # of what the sigmoid takes, times out;
        ctx.save_for_backward(x, slope.lerp_(ONE, gate))  # gate + (1 − gate) · that is the slope of out
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, slope = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return grad * slope
        # Somebody asks for the slope of the slope, which was made as a number.
        (found,) = torch.autograd.grad(F.gelu(x, approximate="tanh"), x, grad, create_graph=True)
        return found


def gelu_of_biased_works(x: Tensor, before: nn.Module) -> bool:
    """Whether what comes out of `before` can go through `gelu_of_biased`: compiled training on a GPU."""
    compiled = torch.compiler.is_compiling() and torch.is_grad_enabled() and triton is not None
    return compiled and x.is_cuda and x.dtype != torch.float64 and type(before) is nn.Linear and before.bias is not None


def gelu_of_biased(x: Tensor, bias: Tensor, exact: bool) -> Tensor:
    """gelu(x) for x (…, F) to which a detached `bias` (F,) was added: it gets its gradient here, with that of x."""
    out: Tensor = GeluOfBiased.apply(x, bias, exact)  # type: ignore[no-untyped-call]
    return out


class GeluOfBiased(torch.autograd.Function):
    """A compiler would read the gradient by x again to add it up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, exact: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.exact, ctx.kind = exact, bias.dtype
        return F.gelu(x) if exact else gelu_tanh(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        grad, x, width = grad.contiguous(), x.contiguous(), x.shape[-1]
        rows = x.numel() // width
        found, parts = torch.empty_like(x), -(-rows // ROWS)
        sums = torch.empty(parts, width, device=x.device, dtype=torch.float32)
        grid = (-(-width // BLOCK), parts)
        _gelu_slope[grid](grad, x, found, sums, rows, width, ctx.exact, ROWS, BLOCK_ROWS, BLOCK, num_warps=WARPS)
        return found, sums.sum(0).to(ctx.kind), None


def gelu_between_works(x: Tensor, up: nn.Linear, down: nn.Linear) -> bool:
    """Whether `gelu_between` can stand for down(gelu_tanh(up(x))): compiled training in half precision on a GPU."""
    compiled = torch.compiler.is_compiling() and torch.is_grad_enabled() and x.is_cuda
    plain = type(up) is type(down) is nn.Linear and up.bias is not None
    return compiled and plain and cublas.works(_narrow(x), up.in_features, up.out_features)


def gelu_between(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """(…, D) to (…, D), with GELU and its slope inside the products."""
    dtype = _narrow(x)
    rows, *weights = (tensor.to(dtype) for tensor in (x.reshape(-1, x.shape[-1]), up.weight, up.bias, down.weight))
    out: Tensor = GeluBetween.apply(rows, *weights)  # type: ignore[no-untyped-call]
    out = out.view(*x.shape[:-1], -1)
    return out if down.bias is None else out + down.bias.to(dtype)


def _narrow(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


class GeluBetween(torch.autograd.Function):
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


if triton is not None:

    @triton.jit
    def _gelu_slope(
        grads,
        inputs,
        found,
        sums,
        rows,
        width,
        exact: tl.constexpr,
        many: tl.constexpr,
        few: tl.constexpr,
        block: tl.constexpr,
    ):
        """A program for some columns of `many` rows, of which it looks at `few` at a time."""
        columns, row = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1) * many + tl.arange(0, few)
        total = tl.zeros((few, block), tl.float32)
        at = tl.program_id(1).to(tl.int64) * many * width + tl.arange(0, few)[:, None] * width + columns[None, :]
        for _ in range(0, many, few):
            inside = (row < rows)[:, None] & (columns < width)[None, :]
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
            at += few * width
            row += few
        tl.store(sums + tl.program_id(1) * width + columns, tl.sum(total, 0), mask=columns < width)
