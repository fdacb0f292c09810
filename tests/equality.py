"""Compare an attention backend with the reference: output and gradients, on any device."""

import torch
from torch import Tensor

from clearhead.model import Mask, attend

# Rounding of each dtype, accumulated over the keys.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def inputs(
    rows: int, heads: int, groups: int, tokens: int, dtype: torch.dtype, dim: int = 8, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as the model lays them out, views of (B, T, H, E), seeded by the shape."""
    torch.manual_seed(tokens)
    q, k, v = (
        torch.randn(rows, tokens, count, dim, device=device).to(dtype).transpose(1, 2).requires_grad_()
        for count in (heads, groups, groups)
    )
    return q, k, v


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask, padding_mask: Tensor, name: str | None) -> None:
    """Assert that output and gradients equal the reference in fp32 (or float64), except at padding (B, T)."""
    dtype = q.dtype
    exact = [x.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_() for x in (q, k, v)]
    expected = attend(*exact, mask, backend="reference")
    out = attend(q, k, v, mask, backend=name)
    assert out.dtype == dtype
    assert out.isfinite().all()
    grad = torch.randn_like(expected) * padding_mask[:, None, :, None]
    (expected * grad).sum().backward()
    (out * grad.to(dtype)).sum().backward()
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    keep = padding_mask[:, None].expand(out.shape[:3])
    torch.testing.assert_close(out[keep].to(expected.dtype), expected[keep], **tolerance)
    for x, reference in zip((q, k, v), exact, strict=True):
        scale = max(1.0, reference.grad.abs().max().item())
        torch.testing.assert_close(x.grad.to(reference.dtype) / scale, reference.grad / scale, **tolerance)
