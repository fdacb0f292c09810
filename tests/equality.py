"""How a fast path is held against the reference: output and gradients, at the real queries, on any device."""

import torch
from torch import Tensor

from clearhead.model import Mask, attend

# What each format can promise: its own rounding, grown by sums over the keys.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def inputs(
    rows: int, heads: int, groups: int, tokens: int, dtype: torch.dtype, dim: int = 8, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the layout that the model gives them, (B, T, H, E) turned; the same for the same shape."""
    torch.manual_seed(tokens)
    q, k, v = (
        torch.randn(rows, tokens, count, dim, device=device).to(dtype).transpose(1, 2).requires_grad_()
        for count in (heads, groups, groups)
    )
    return q, k, v


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask, real: Tensor, name: str | None) -> None:
    """Output and gradients by the backend equal those of the reference in fp32 (or float64), at the real queries."""
    dtype = q.dtype
    exact = [x.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_() for x in (q, k, v)]
    expected = attend(*exact, mask, backend="reference")
    found = attend(q, k, v, mask, backend=name)
    assert found.dtype == dtype
    assert found.isfinite().all()
    choice = torch.randn_like(expected) * real[:, None, :, None]
    (expected * choice).sum().backward()
    (found * choice.to(dtype)).sum().backward()
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    keep = real[:, None].expand(found.shape[:3])
    torch.testing.assert_close(found[keep].to(expected.dtype), expected[keep], **close)
    for ours, theirs in zip((q, k, v), exact, strict=True):
        scale = max(1.0, theirs.grad.abs().max().item())
        torch.testing.assert_close(ours.grad.to(theirs.dtype) / scale, theirs.grad / scale, **close)
