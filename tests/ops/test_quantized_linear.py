"""QuantizedLinear: close to nn.Linear, exact integer arithmetic, and independent of batch mates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clearhead.config import preset
from clearhead.model import build
from clearhead.ops.linear.quantized import QuantizedLinear, quantize_rows
from tests.quantization import quantize_module


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.05)])
@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from([32, 96, 256]), st.booleans())
def test_quantized_linear_is_close_to_linear(
    bits: int, error: float, rows: int, out_features: int, in_features: int, bias: bool
) -> None:
    linear, x = nn.Linear(in_features, out_features, bias=bias), torch.randn(2, rows, in_features)
    quantized = QuantizedLinear(linear, bits)
    expected = linear(x)
    bound = x.norm(dim=-1).max() * linear.weight.norm(dim=-1).max()  # the largest possible dot product
    assert quantized(x).shape == expected.shape
    assert (quantized(x) - expected).abs().max() <= error * bound
    bf16_out = quantized(x.bfloat16())
    assert bf16_out.dtype == torch.bfloat16
    assert (bf16_out.float() - expected).abs().max() <= (error + 0.01) * bound


@given(st.integers(2, 33), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([4, 8]))
def test_batch_mates_never_change_a_row(rows: int, dtype: torch.dtype, bits: int) -> None:
    quantized = QuantizedLinear(nn.Linear(64, 24), bits)
    x = torch.randn(rows, 64, dtype=dtype)
    x[1:] *= 1000  # one scale for the whole batch would round the first row to 0
    alone, batched = quantized(x[:1]), quantized(x)[:1]
    if bits == 8:
        assert torch.equal(alone, batched)
    else:
        torch.testing.assert_close(alone, batched, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_int8_equals_the_formula() -> None:
    linear, x = nn.Linear(48, 20, bias=False), torch.randn(7, 48)
    weight, weight_scale = quantize_rows(linear.weight.detach())
    quantized, scale = quantize_rows(x)
    expected = (quantized.double() @ weight.double().T) * scale * weight_scale.T
    torch.testing.assert_close(QuantizedLinear(linear)(x).double(), expected, rtol=1e-6, atol=1e-6)
    assert weight.abs().max() == 127


def test_the_int4_kernel_equals_dequantized_weights() -> None:
    """The packed kernel in bf16 against dequantized weights in fp32."""
    quantized, x = QuantizedLinear(nn.Linear(128, 64), bits=4, group=64), torch.randn(5, 128).bfloat16()
    torch.testing.assert_close(quantized(x).float(), quantized(x.float()), rtol=0.02, atol=0.02)
    assert quantized.weight.numel() == 128 * 64 // 2


def test_zeros_stay_zeros() -> None:
    for bits in (4, 8):
        quantized = QuantizedLinear(nn.Linear(32, 5, bias=False), bits)
        assert quantized(torch.zeros(2, 32)).abs().max() == 0
    zeros = nn.Linear(32, 5, bias=False)
    nn.init.zeros_(zeros.weight)
    assert QuantizedLinear(zeros, 4)(torch.randn(2, 32)).abs().max() == 0


@pytest.mark.parametrize("name", ["tiny-translator", "tiny-encoder", "tiny-gpt", "tiny-llama"])
def test_a_quantized_network_has_nearly_the_same_logits(name: str) -> None:
    network, ids = build(preset(name)).eval(), torch.randint(4000, (2, 9))
    inputs = (ids, ids) if name == "tiny-translator" else (ids,)
    with torch.no_grad():
        before = network(*inputs)
        after = quantize_module(network)(*inputs)
    assert not any(isinstance(module, nn.Linear) for module in network.modules())
    assert (after - before).norm() < 0.05 * before.norm()
    assert not torch.equal(after, before)


def test_unsupported_bits_and_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="bits: 3"):
        QuantizedLinear(nn.Linear(32, 8), bits=3)
    with pytest.raises(ValueError, match="group: 32 does not divide the 40 inputs"):
        QuantizedLinear(nn.Linear(40, 8), bits=4)
    with pytest.raises(ValueError, match="group: 48 is not supported"):
        QuantizedLinear(nn.Linear(96, 8), bits=4, group=48)
    with pytest.raises(ValueError, match="group: 16 is not supported; use 32, 64, 128 or 256"):
        QuantizedLinear(nn.Linear(32, 8), bits=4, group=16)


def test_loading_weights_discards_the_packed_copy() -> None:
    first, second = (QuantizedLinear(nn.Linear(64, 32), bits=4) for _ in range(2))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    first(x)
    first.load_state_dict(second.state_dict())
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize(("bits", "steps"), [(8, 254), (4, 15)])
def test_weights_are_rounded_by_at_most_half_a_step(bits: int, steps: int) -> None:
    linear = nn.Linear(32, 50)
    weight = linear.weight.detach()
    span = 2 * weight.abs().amax(1) if bits == 8 else weight.amax(1) - weight.amin(1)
    assert ((QuantizedLinear(linear, bits).dequantize() - weight).abs().amax(1) <= span / steps / 2 + 1e-6).all()
