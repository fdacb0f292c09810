"""Weight-only int8 and int4 weights: packing and dequantization."""

import pytest
import torch

from clearhead.ops.linear.weight_only import WeightOnlyLinear, pack_words, unpack_words, weight_only_linear


@pytest.mark.parametrize(("bits", "group"), [(8, 128), (8, 32), (4, 128), (4, 64), (4, 32)])
def test_packed_words_unpack_to_the_same_values(bits: int, group: int) -> None:
    values = torch.randint(0, 1 << bits, (5, 3 * group), dtype=torch.int32)
    words = pack_words(values, bits, group)
    assert words.shape == (5, 3 * group * bits // 32)
    assert torch.equal(unpack_words(words, bits, group), values)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.12)])
@pytest.mark.parametrize("inputs", [128, 192, 96])
def test_quantized_weights_are_near_the_original(bits: int, error: float, inputs: int) -> None:
    weight = torch.randn(6, inputs)
    linear = WeightOnlyLinear(weight, bias=torch.randn(6), activation="relu").quantize(bits)
    assert linear.bits == bits
    assert linear.in_features == inputs
    dequantized = linear.dequantize(torch.float32)
    assert (dequantized - weight).norm() < error * weight.norm()
    x = torch.randn(3, inputs)
    expected = torch.relu(x @ dequantized.T + linear.bias)
    torch.testing.assert_close(weight_only_linear(x, linear), expected)


def test_inputs_that_no_group_divides_stay_as_they_are() -> None:
    linear = WeightOnlyLinear(torch.randn(4, 40))
    assert linear.quantize(8) is linear
    assert linear.bits == 16
