"""Sinusoidal and rotary position encodings.   B batch · T tokens · H heads · E head dim · D model dim

Both are computed from the positions at every call, in fp32 whatever the model's dtype: in bf16 the angle at position
4,000 would be off by several radians.
"""

import math

import torch
from torch import Tensor

from clearhead.config import ModelConfig, RopeScaling


def sinusoidal_positions(positions: Tensor, dim: int, layout: str | None = "interleaved") -> Tensor:
    """Return sin(p / 10000^(2i/D)) and cos(p / 10000^(2i/D)), section 3.5: positions (B, T) to (B, T, D).

    `interleaved` alternates sine and cosine, as the paper; `halves` puts all sines before all cosines; so does
    `fairseq`, with the slowest frequency at 1/10000.
    """
    slowest = dim - 2 if layout == "fairseq" else dim
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / slowest
    angles = positions[..., None].float() * torch.exp(-math.log(10_000.0) * exponents)  # (B, T, D/2)
    pairs = torch.stack([angles.sin(), angles.cos()], dim=-1)  # (B, T, D/2, 2)
    return pairs.flatten(-2) if layout == "interleaved" else pairs.transpose(-2, -1).flatten(-2)  # (B, T, D)


def rope_frequencies(config: ModelConfig, device: torch.device, theta: float | None = None) -> Tensor:
    """Rotary frequencies in radians per position, fastest first (RoFormer, Su et al. 2021): (E/2,)."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    theta = theta or config.rope_theta
    assert theta is not None, "a config with rotary positions has rope_theta"
    frequencies = 1.0 / theta**exponents
    return frequencies if config.rope_scaling is None else scale_rope_frequencies(frequencies, config.rope_scaling)


def scale_rope_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's scaling: divide low frequencies by the factor, keep high ones, interpolate linearly in between."""
    turns = scaling.original_positions * frequencies / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def rope_cos_sin(config: ModelConfig, positions: Tensor, theta: float | None = None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines in fp32: positions (B, T) to (B, T, 1, E/2) each, to broadcast over heads."""
    angles = positions[..., None, None].float() * rope_frequencies(config, positions.device, theta)  # (B, T, 1, E/2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x[e], x[e + E/2]) of x (B, T, H, E) by its angle; q·k then depends on distance only."""
    cos, sin = rope  # (B, T, 1, E/2)
    a, b = x.chunk(2, dim=-1)  # (B, T, H, E/2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)  # (B, T, H, E)
