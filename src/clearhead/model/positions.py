"""Where a token stands: sinusoids that are added, and rotations of queries and keys.   B rows · T tokens · E head width

Both are computed from the positions each time, in fp32: no tables to store, to cast by accident, or to outgrow.
"""

import math

import torch
from torch import Tensor

from clearhead.config import ModelConfig, RopeScaling


def sinusoidal_positions(positions: Tensor, dim: int, layout: str | None = "interleaved") -> Tensor:
    """Section 3.5: sin(p / 10000^(2i/width)) and the cosine of the same; positions (B, T) to (B, T, width).

    Interleaved puts sine and cosine of a frequency side by side, as the paper; halves puts all sines first.
    """
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    angles = positions[..., None].float() * torch.exp(-math.log(10_000.0) * exponents)  # (B, T, width/2)
    pairs = torch.stack([angles.sin(), angles.cos()], dim=-1)  # (B, T, width/2, 2)
    return pairs.flatten(-2) if layout == "interleaved" else pairs.transpose(-2, -1).flatten(-2)


def rope_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians that each pair of a head turns per position, fastest first: (E/2,)."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    assert config.rope_theta is not None, "the config gives one wherever positions are rotary"
    turns = 1.0 / config.rope_theta**exponents
    return turns if config.rope_scaling is None else scale_rope_frequencies(turns, config.rope_scaling)


def scale_rope_frequencies(turns: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's rule: fast turns stay, slow ones are divided by the factor, and between them it fades in."""
    rounds = scaling.original_positions * turns / (2 * math.pi)  # full circles within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = ((rounds - low) / (high - low)).clamp(0, 1)
    return turns * keep + turns / scaling.factor * (1 - keep)


def rope_cos_sin(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine for every position: positions (B, T) to two (B, T, 1, E/2), the 1 being the head axis."""
    angles = positions[..., None, None].float() * rope_frequencies(config, positions.device)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[e], x[e + E/2]) of x (B, T, H, E) by its angle; q·k then depends on distance alone."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)
