"""Random inputs of the decode attention kernel, and a check against reference attention.

B batch · H heads · G key-value heads · C slots · E head dim
"""

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.model.attention import Rope
from clearhead.model.positions import apply_rope
from clearhead.ops.attention.reference import attention
from clearhead.ops.triton.decode_attention import triton_decode_attention


class AttentionCase(NamedTuple):
    """The arguments of the kernel."""

    heads: Tensor  # (B, H + 2G, E)
    rope: Rope | None
    keys: Tensor  # (B, G, C, E), nan in empty slots
    values: Tensor
    lengths: Tensor  # (B,)


def random_case(
    shape: tuple[int, int, int, int],
    group: int,
    lengths: list[int],
    dtype: torch.dtype = torch.float32,
    rotated: bool = True,
    device: str = "cpu",
) -> AttentionCase:
    """Random arguments with keys and values of a shape (B, G, C, E) and `group` queries for each key-value head."""
    rows, kv_heads, slots, dim = shape
    cached, angles = torch.tensor(lengths, device=device), 7 * torch.rand(rows, 1, 1, dim // 2, device=device)
    empty = (torch.arange(slots, device=device) >= cached[:, None])[:, None, :, None]
    keys, values = (torch.randn(shape, device=device).masked_fill(empty, torch.nan).to(dtype) for _ in range(2))
    heads = torch.randn(rows, (group + 2) * kv_heads, dim, device=device).to(dtype)
    return AttentionCase(heads, (angles.cos(), angles.sin()) if rotated else None, keys, values, cached)


def check_case(case: AttentionCase) -> None:
    """Check that the kernel equals reference attention, and that it stores the new keys and values and nothing else."""
    keys, values, kv_heads = case.keys.clone(), case.values.clone(), case.keys.shape[1]
    q_heads = case.heads.shape[1] - 2 * kv_heads
    q, k, v = case.heads[:, None].split([q_heads, kv_heads, kv_heads], dim=2)
    if case.rope is not None:
        q, k = apply_rope(q, case.rope), apply_rope(k, case.rope)
    expected = torch.empty_like(q[:, 0], dtype=torch.float32)
    for row, length in enumerate(case.lengths.tolist()):
        keys[row, :, length], values[row, :, length] = k[row, 0], v[row, 0]
        cached = (x[row, :, : length + 1].float().repeat_interleave(q_heads // kv_heads, dim=0) for x in (keys, values))
        expected[row] = attention(q[row].float().transpose(0, 1), *cached)[0][:, 0]
    out = triton_decode_attention(*case)
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.heads.dtype]
    assert out.dtype == case.heads.dtype
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    rounding = 3e-6 if case.heads.dtype == torch.float32 else 2 * torch.finfo(case.heads.dtype).eps
    torch.testing.assert_close(case.keys, keys, atol=rounding, rtol=rounding, equal_nan=True)
    torch.testing.assert_close(case.values, values, atol=0, rtol=0, equal_nan=True)
