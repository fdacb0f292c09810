"""LayerNorm, RMSNorm, and BatchNorm over the tokens that are not padding.   B batch · T tokens · D model dim

All three have one interface, `norm(x, norm_mask)`; only BatchNorm uses the mask.
"""

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig


class LayerNorm(nn.LayerNorm):
    """Normalize each token to mean 0 and variance 1 over its features."""

    def forward(self, x: Tensor, norm_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class RMSNorm(nn.RMSNorm):
    """Normalize each token to root mean square 1 over its features; no mean, no bias."""

    def forward(self, x: Tensor, norm_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class BatchNorm(nn.Module):
    """Normalize each feature to mean 0 and variance 1 over all tokens of the batch, to compare with LayerNorm.

    In training a row depends on the rest of its batch; evaluation uses running statistics instead.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, dim: int, eps: float, bias: bool = True, momentum: float = 0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("variance", torch.ones(dim))

    def forward(self, x: Tensor, norm_mask: Tensor | None = None) -> Tensor:
        """x (…, D) to (…, D); `norm_mask` (…) is False at padding, None means no padding."""
        mean, variance = self.mean, self.variance
        if self.training:
            mean, variance = self._batch_statistics(x, norm_mask)
        out = (x - mean) * torch.rsqrt(variance + self.eps) * self.weight
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def _batch_statistics(self, x: Tensor, norm_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance (D,) over the tokens, summed in fp32 or better; update the running statistics."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        keep = x.new_ones(x.shape[:-1]) if norm_mask is None else norm_mask.to(x.dtype)
        total = keep.sum()
        count = total.clamp(min=1)
        mean = torch.einsum("...d,...->d", x, keep) / count
        variance = torch.einsum("...d,...->d", (x - mean).square(), keep) / count
        with torch.no_grad():  # as torch.nn.BatchNorm1d: the running variance is the unbiased one
            unbiased = variance * count / (count - 1).clamp(min=1)
            weight = self.momentum * (total > 0).to(self.mean.dtype)  # a batch of padding leaves the statistics alone
            self.mean.lerp_(mean.to(self.mean.dtype), weight)
            self.variance.lerp_(unbiased.to(self.variance.dtype), weight)
        return mean, variance


class NoNorm(nn.Module):
    """Return the input, which is normalized already."""

    def forward(self, x: Tensor, norm_mask: Tensor | None = None) -> Tensor:
        return x


def build_norm(config: ModelConfig) -> LayerNorm | RMSNorm | BatchNorm:
    """Build the norm of `config.norm`."""
    match config.norm:
        case "layer":
            return LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        case "rms":
            return RMSNorm(config.dim, eps=config.norm_eps)
        case "batch":
            return BatchNorm(config.dim, eps=config.norm_eps, bias=config.bias)
