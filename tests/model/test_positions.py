"""Sinusoidal and rotary positions equal their formulas in float64, whatever the model's dtype."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.config import RopeScaling, preset
from clearhead.model import KVCache, build
from clearhead.model.positions import apply_rope, rope_cos_sin, scale_rope_frequencies, sinusoidal_positions


def test_sinusoids_are_the_papers_formula() -> None:
    """Section 3.5, in float64 with a loop."""
    dim, positions = 6, torch.tensor([[0, 1, 7, 500]])
    interleaved, halves = (sinusoidal_positions(positions, dim, layout) for layout in ("interleaved", "halves"))
    for index, p in enumerate(positions[0].tolist()):
        for i in range(dim // 2):
            angle = p / 10_000 ** (2 * i / dim)
            assert interleaved[0, index, 2 * i].item() == pytest.approx(math.sin(angle), abs=5e-5)
            assert interleaved[0, index, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=5e-5)
            assert halves[0, index, i].item() == interleaved[0, index, 2 * i].item()
            assert halves[0, index, dim // 2 + i].item() == interleaved[0, index, 2 * i + 1].item()


def test_rotary_dot_products_depend_on_distance_only() -> None:
    config = preset("tiny-llama")
    q, k = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)

    def dot(i: int, j: int) -> float:
        rotated = [apply_rope(x, rope_cos_sin(config, torch.tensor([[p]]))).double() for x, p in ((q, i), (k, j))]
        return float((rotated[0] * rotated[1]).sum())

    assert dot(5, 2) == pytest.approx(dot(105, 102), abs=1e-4)
    assert dot(5, 2) != pytest.approx(dot(5, 3), abs=1e-2)
    assert dot(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-5)


def test_llama3_scaling_keeps_high_frequencies_and_divides_low_ones() -> None:
    scaling = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192)
    wavelengths = torch.tensor([100.0, 2047.0, 4096.0, 8193.0, 100_000.0])
    ratio = scale_rope_frequencies(2 * math.pi / wavelengths, scaling) / (2 * math.pi / wavelengths)
    smooth = (8192 / 4096 - 1) / 3  # as Llama 3's own code names it
    expected = torch.tensor([1.0, 1.0, smooth + (1 - smooth) / 8, 1 / 8, 1 / 8])
    torch.testing.assert_close(ratio, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rotary_angles_are_fp32_in_a_model_of_any_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """At position 4,000 queries and keys are rotated as in float64, up to one rounding of the result.

    In bf16 the angle would be off by radians, and cosines rounded to bf16 by 2e-3.
    """
    start, calls = 4000, []

    def record(x: Tensor, rope: Any) -> Tensor:
        calls.append((x, apply_rope(x, rope)))
        return calls[-1][1]

    monkeypatch.setattr("clearhead.model.attention.apply_rope", record)
    config = preset("tiny-llama", ["max_positions=8192", "decoder_layers=1"])
    network = build(config).to(dtype).eval()
    with torch.no_grad():
        network.decoder.layers[0].attention.query.weight.normal_()
        network.decoder.layers[0].attention.key.weight.normal_()
    cache = KVCache(config, rows=1, capacity=config.max_positions)
    cache.rewind([start])  # skip the first tokens: only positions matter here
    network.decode(torch.randint(4000, (1, 16)), cache=cache)

    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)
    angles = torch.arange(start, start + 16).double()[None, :, None, None] * frequencies  # (1, T, 1, E/2)
    assert len(calls) == 2, "queries and keys"
    for x, rotated in calls:
        a, b = x.double().chunk(2, dim=-1)
        expected = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
        atol = 5e-4 * x.abs().max().item()  # an fp32 angle of 4,000 is exact to 2.4e-4
        torch.testing.assert_close(rotated.double(), expected, rtol=torch.finfo(dtype).eps, atol=atol)


def test_sinusoids_of_late_positions_are_fp32_in_a_bf16_model() -> None:
    embedding = build(preset("tiny-translator", ["max_positions=8192"])).bfloat16().eval().encoder.embedding
    ids, positions = torch.zeros(1, 1, dtype=torch.long), torch.tensor([[4001]])
    added = embedding(ids, positions).double() - embedding.tokens(ids).double() * embedding.scale
    exponents = torch.arange(0, 128, 2).double() / 128
    angles = 4001 * 10_000**-exponents
    expected = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten()
    torch.testing.assert_close(added[0, 0], expected, rtol=0, atol=0.03)  # roundings of sums of up to 4 in bf16
