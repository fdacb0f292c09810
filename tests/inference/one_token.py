"""Caches and a new token for each of their rows at random, and what attention by the formula makes of them.

B rows · H heads · G key-value heads · C slots · E head width
"""

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.model.attention import Rope
from clearhead.model.positions import apply_rope
from clearhead.ops.attention.reference import attention
from clearhead.ops.triton.decode_attention import triton_decode_attention


class Given(NamedTuple):
    """What the kernel takes."""

    heads: Tensor  # (B, H + 2G, E)
    rotation: Rope | None
    keys: Tensor  # (B, G, C, E), nan where nothing is held
    values: Tensor
    lengths: Tensor  # (B,)


def given(
    shape: tuple[int, int, int, int],
    group: int,
    lengths: list[int],
    dtype: torch.dtype = torch.float32,
    rotated: bool = True,
    device: str = "cpu",
) -> Given:
    """Keys and values of a shape (B, G, C, E), `group` queries to each of their heads."""
    rows, groups, slots, dim = shape
    held, angles = torch.tensor(lengths, device=device), 7 * torch.rand(rows, 1, 1, dim // 2, device=device)
    empty = (torch.arange(slots, device=device) >= held[:, None])[:, None, :, None]
    keys, values = (torch.randn(shape, device=device).masked_fill(empty, torch.nan).to(dtype) for _ in range(2))
    heads = torch.randn(rows, (group + 2) * groups, dim, device=device).to(dtype)
    return Given(heads, (angles.cos(), angles.sin()) if rotated else None, keys, values, held)


def check(case: Given) -> None:
    """The kernel finds what the formula finds, and writes the new keys and values, and nothing else."""
    keys, values, groups = case.keys.clone(), case.values.clone(), case.keys.shape[1]
    queries = case.heads.shape[1] - 2 * groups
    q, k, v = case.heads[:, None].split([queries, groups, groups], dim=2)
    if case.rotation is not None:
        q, k = apply_rope(q, case.rotation), apply_rope(k, case.rotation)
    expected = torch.empty_like(q[:, 0], dtype=torch.float32)
    for row, length in enumerate(case.lengths.tolist()):
        keys[row, :, length], values[row, :, length] = k[row, 0], v[row, 0]
        past = (x[row, :, : length + 1].float().repeat_interleave(queries // groups, dim=0) for x in (keys, values))
        expected[row] = attention(q[row].float().transpose(0, 1), *past)[0][:, 0]
    found = triton_decode_attention(*case)
    loose = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.heads.dtype]
    assert found.dtype == case.heads.dtype
    torch.testing.assert_close(found.float(), expected, atol=loose, rtol=loose)
    digit = 3e-6 if case.heads.dtype == torch.float32 else 2 * torch.finfo(case.heads.dtype).eps
    torch.testing.assert_close(case.keys, keys, atol=digit, rtol=digit, equal_nan=True)
    torch.testing.assert_close(case.values, values, atol=0, rtol=0, equal_nan=True)
