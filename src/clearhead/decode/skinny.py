"""Products of a few rows with a large matrix on a GPU, where all that counts is how fast the matrix is read.

B rows · K inputs · N outputs · S shares of the inputs

Libraries cut the outputs up among the multiprocessors. With few rows and few outputs that leaves some of them without
work; here the inputs are cut up as well, and the shares are added up by whatever comes next.
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"

import torch
from torch import Tensor

try:
    import triton
    from triton import language as tl
except ImportError:  # there is none for this platform
    triton = None

MOST = 64  # rows
OUTPUTS, INPUTS = 64, 128  # of a program at once
PROGRAMS = 256  # about two for each multiprocessor


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether x (…, K) with few rows and weight (N, K) can be multiplied so."""
    rows = x.numel() // x.shape[-1]
    small = weight.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype
    fits = weight.shape[1] % INPUTS == 0 and weight.is_contiguous()
    return triton is not None and x.device.type == "cuda" and small and fits and 1 < rows <= MOST


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ for x (…, K) and weight (N, K): (…, N), summed in fp32."""
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs)
    rows, split = len(flat), shares(outputs, inputs)
    sums = torch.empty(split, rows, outputs, dtype=torch.float32, device=x.device)
    block = 16 if rows <= 16 else 32 if rows <= 32 else 64
    grid = (-(-outputs // OUTPUTS), split)
    _share[grid](flat, weight, sums, rows, outputs, inputs, split, block, OUTPUTS, INPUTS, num_warps=4, num_stages=4)
    return sums.sum(dim=0).to(x.dtype).reshape(*x.shape[:-1], outputs)


def shares(outputs: int, inputs: int) -> int:
    """Into how many shares the inputs are cut so that there is work for all: a power of two."""
    split = 1
    while split * -(-outputs // OUTPUTS) < PROGRAMS and inputs % (2 * split * INPUTS) == 0:
        split *= 2
    return split


if triton is not None:

    @triton.jit
    def _share(
        x,
        weight,
        sums,
        rows,
        outputs,
        inputs,
        split: tl.constexpr,
        block: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
    ):
        """A program for some outputs and one share of the inputs."""
        m = tl.arange(0, block)
        n = tl.program_id(0) * block_n + tl.arange(0, block_n)
        part = tl.program_id(1)
        size = inputs // split
        total = tl.zeros((block, block_n), tl.float32)
        for first in range(part * size, (part + 1) * size, block_k):
            k = first + tl.arange(0, block_k)
            a = tl.load(x + m[:, None] * inputs + k[None, :], mask=m[:, None] < rows, other=0.0)
            b = tl.load(weight + n[:, None].to(tl.int64) * inputs + k[None, :], mask=n[:, None] < outputs, other=0.0)
            total = tl.dot(a, tl.trans(b), total)
        place = part.to(tl.int64) * rows * outputs + m[:, None] * outputs + n[None, :]
        tl.store(sums + place, total, mask=(m[:, None] < rows) & (n[None, :] < outputs))
