"""GELU in GPT's form, and its slope by a sigmoid on a CPU that learns."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))), any shape: GPT's form of GELU."""
    # The same by a sigmoid, which a GPU has done before its memory has answered; fp16 ends before x³ may.
    if torch.compiler.is_compiling() and x.dtype != torch.float16:
        # Written out: where shapes vary, a compiler takes the numbers of a module for inputs, too.
        return x * torch.sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * x * x))
    learns = x.requires_grad and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    if learns and x.device.type == "cpu" and x.dtype == torch.float32:
        return SigmoidGelu.apply(x)  # type: ignore[no-untyped-call]
    return F.gelu(x, approximate="tanh")


CUBIC, SLOPE = 0.044715, math.sqrt(8 / math.pi)
STEEPNESS, ONE = (torch.tensor(number, dtype=torch.float32, device="cpu") for number in (SLOPE, 1.0))


class SigmoidGelu(torch.autograd.Function):
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
