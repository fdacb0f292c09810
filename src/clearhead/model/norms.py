"""Normalization: LayerNorm, RMSNorm, and BatchNorm over positions that are not padding.   B rows · T tokens · D width

All three are called the same way, `norm(x, real)`; only BatchNorm needs to know which positions are real.
"""

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig


class LayerNorm(nn.LayerNorm):
    """Mean 0 and variance 1 over the features of each token by itself."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class RMSNorm(nn.RMSNorm):
    """Root mean square 1 over the features of each token; no mean is taken off, nothing is added."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class BatchNorm(nn.Module):
    """Mean 0 and variance 1 of each feature over all real tokens of the batch, as the notes compare with LayerNorm.

    While training, a row depends on its batch mates; in evaluation the running statistics make it independent again.
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

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """x (…, D); `real` (…) is True where a token is no padding, None where all are."""
        mean, variance = self.mean, self.variance
        if self.training:
            mean, variance = self._of_batch(x, padding_mask)
        out = (x - mean) * torch.rsqrt(variance + self.eps) * self.weight
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def _of_batch(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and variance (D,) of the real tokens, summed in fp32 or better; the running statistics follow them."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        keep = x.new_ones(x.shape[:-1]) if real is None else real.to(x.dtype)
        total = keep.sum()
        count = total.clamp(min=1)
        mean = torch.einsum("...d,...->d", x, keep) / count
        variance = torch.einsum("...d,...->d", (x - mean).square(), keep) / count
        with torch.no_grad():  # as torch.nn.BatchNorm1d: the running variance is the unbiased one
            unbiased = variance * count / (count - 1).clamp(min=1)
            weight = self.momentum * (total > 0).to(self.mean.dtype)  # a batch of padding alone teaches nothing
            self.mean.lerp_(mean.to(self.mean.dtype), weight)
            self.variance.lerp_(unbiased.to(self.variance.dtype), weight)
        return mean, variance


def build_norm(config: ModelConfig) -> LayerNorm | RMSNorm | BatchNorm:
    """The normalization that `config.norm` names."""
    match config.norm:
        case "layer":
            return LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        case "rms":
            return RMSNorm(config.dim, eps=config.norm_eps)
        case "batch":
            return BatchNorm(config.dim, eps=config.norm_eps, bias=config.bias)
