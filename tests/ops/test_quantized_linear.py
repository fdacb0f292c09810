"""Quantized layers: close to the original, exact about what they promise, and blind to batch mates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clearhead.config import preset
from clearhead.model import build
from clearhead.ops.linear.quantized import QuantizedLinear, quantize_module, quantize_rows


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.05)])
@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from([32, 96, 256]), st.booleans())
def test_the_small_product_is_close_to_the_full_one(
    bits: int, error: float, rows: int, outputs: int, inputs: int, bias: bool
) -> None:
    linear, x = nn.Linear(inputs, outputs, bias=bias), torch.randn(2, rows, inputs)
    small = QuantizedLinear(linear, bits)
    expected = linear(x)
    size = x.norm(dim=-1).max() * linear.weight.norm(dim=-1).max()  # what a product can be at the most
    assert small(x).shape == expected.shape
    assert (small(x) - expected).abs().max() <= error * size
    half = small(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - expected).abs().max() <= (error + 0.01) * size


@given(st.integers(2, 33), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([4, 8]))
def test_batch_mates_never_change_a_row(rows: int, dtype: torch.dtype, bits: int) -> None:
    small = QuantizedLinear(nn.Linear(64, 24), bits)
    x = torch.randn(rows, 64, dtype=dtype)
    x[1:] *= 1000  # one scale for the whole batch would leave nothing of the first row
    alone, together = small(x[:1]), small(x)[:1]
    if bits == 8:
        assert torch.equal(alone, together)
    else:
        torch.testing.assert_close(alone, together, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_eight_bits_equal_the_formula_exactly() -> None:
    linear, x = nn.Linear(48, 20, bias=False), torch.randn(7, 48)
    weight, weight_scale = quantize_rows(linear.weight.detach())
    numbers, scale = quantize_rows(x)
    expected = (numbers.double() @ weight.double().T) * scale * weight_scale.T
    torch.testing.assert_close(QuantizedLinear(linear)(x).double(), expected, rtol=1e-6, atol=1e-6)
    assert weight.abs().max() == 127


def test_four_bits_in_two_forms_are_the_same_numbers() -> None:
    """The packed kernel in bf16 and the spread weights in fp32."""
    small, x = QuantizedLinear(nn.Linear(128, 64), bits=4, group=64), torch.randn(5, 128).bfloat16()
    torch.testing.assert_close(small(x).float(), small(x.float()), rtol=0.02, atol=0.02)
    assert small.weight.numel() == 128 * 64 // 2


def test_rows_of_zeros_stay_zeros() -> None:
    for bits in (4, 8):
        small = QuantizedLinear(nn.Linear(32, 5, bias=False), bits)
        assert small(torch.zeros(2, 32)).abs().max() == 0
    dead = nn.Linear(32, 5, bias=False)
    nn.init.zeros_(dead.weight)
    assert QuantizedLinear(dead, 4)(torch.randn(2, 32)).abs().max() == 0


@pytest.mark.parametrize("name", ["tiny-translator", "tiny-encoder", "tiny-gpt", "tiny-llama"])
def test_a_whole_network_keeps_its_scores(name: str) -> None:
    network, ids = build(preset(name)).eval(), torch.randint(4000, (2, 9))
    inputs = (ids, ids) if name == "tiny-translator" else (ids,)
    with torch.no_grad():
        before = network(*inputs)
        after = quantize_module(network)(*inputs)
    assert not any(isinstance(module, nn.Linear) for module in network.modules())
    assert (after - before).norm() < 0.05 * before.norm()
    assert not torch.equal(after, before)


def test_what_cannot_be_grouped_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="bits: 3"):
        QuantizedLinear(nn.Linear(32, 8), bits=3)
    with pytest.raises(ValueError, match="group: 32 does not divide the 40 inputs"):
        QuantizedLinear(nn.Linear(40, 8), bits=4)
    with pytest.raises(ValueError, match="group: 48 is not supported"):
        quantize_module(build(preset("tiny-gpt")), bits=4, group=48)


def test_weights_that_are_loaded_later_are_those_that_count() -> None:
    first, second = (QuantizedLinear(nn.Linear(64, 32), bits=4) for _ in range(2))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    first(x)
    first.load_state_dict(second.state_dict())
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize(("bits", "steps"), [(8, 254), (4, 15)])
def test_a_small_weight_is_off_by_half_a_step_at_the_most(bits: int, steps: int) -> None:
    linear = nn.Linear(32, 50)
    weight = linear.weight.detach()
    span = 2 * weight.abs().amax(1) if bits == 8 else weight.amax(1) - weight.amin(1)
    assert ((QuantizedLinear(linear, bits).dequantize() - weight).abs().amax(1) <= span / steps / 2 + 1e-6).all()


def test_quantize_hands_bits_and_group_down_and_keeps_what_no_group_divides(caplog: pytest.LogCaptureFixture) -> None:
    module = quantize_module(nn.Sequential(nn.Sequential(nn.Linear(128, 8)), nn.Linear(40, 8)), bits=4, group=64)
    assert (module[0][0].bits, module[0][0].group) == (4, 64)
    assert isinstance(module[1], nn.Linear)
    assert "1 keeps its weights: its 40 inputs are no multiple of 64" in caplog.text
    with pytest.raises(ValueError, match="group: 16 is not supported; use 32, 64, 128 or 256"):
        QuantizedLinear(nn.Linear(32, 8), bits=4, group=16)
