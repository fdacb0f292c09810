"""Networks with int8 and int4 layers: native ones where they are compiled, else PyTorch's."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clearhead.config import preset
from clearhead.inference import INT4, model_runner, optimize_for_inference
from clearhead.inference.optimize import is_quantized
from clearhead.model import Network, build
from clearhead.ops.linear.packed_weight import NativeLinear, pack_weight
from clearhead.ops.linear.quantized import Int8Embedding, QuantizedLinear, _quantize_groups, unpack_int4
from clearhead.ops.native.structs import step_library

DTYPES = pytest.mark.parametrize("dtype", [torch.int8, INT4])


def llama(seed: int = 0, **changes: Any) -> Network:
    torch.manual_seed(seed)
    return build(preset("tiny-llama").model_copy(update={"vocab_size": 320, **changes})).eval()


@pytest.mark.skipif(step_library() is None, reason="the native step was not compiled here")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_native_linear_equals_its_packed_weight_in_any_shape_and_dtype(kind: str) -> None:
    linear, x = nn.Linear(70, 37), torch.randn(2, 3, 70)
    layer, expected = NativeLinear(linear, kind), pack_weight(linear.weight, linear.bias, kind)(x.flatten(0, 1))
    assert torch.equal(layer(x).flatten(0, 1), expected)
    assert torch.equal(layer(x.transpose(0, 1)).transpose(0, 1), layer(x)), "not contiguous"
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert (layer.dequantize() - linear.weight).abs().max() < 0.02


def test_q4_1_blocks_are_requantized_bit_for_bit() -> None:
    quants = pytest.importorskip("gguf.quants", reason="gguf is not installed")
    types = pytest.importorskip("gguf").GGMLQuantizationType
    raw = quants.quantize(np.random.default_rng(0).normal(size=(48, 96)).astype(np.float32), types.Q4_1)
    packed, scale, group_min = _quantize_groups(torch.from_numpy(quants.dequantize(raw, types.Q4_1)), 32)
    blocks = raw.reshape(48, 3, 20)  # scale and minimum in fp16, then 16 bytes: the first half in the lower bits
    values = np.concatenate([blocks[:, :, 4:] & 15, blocks[:, :, 4:] >> 4], axis=2).reshape(48, 96)
    assert (unpack_int4(packed).numpy() == values).all()
    expected = blocks[:, :, :4].copy().view(np.float16).astype(np.float32)
    assert np.allclose(scale.numpy(), expected[:, :, 0], rtol=1e-3)
    assert np.allclose(group_min.numpy(), expected[:, :, 1], rtol=1e-6)


def test_int8_embedding_is_within_rounding_error() -> None:
    table = nn.Embedding(50, 16)
    ids = torch.tensor([[0, 49, 7], [7, 7, 1]])
    out, exact = Int8Embedding(table)(ids), table(ids)
    assert out.shape == exact.shape
    assert ((out - exact).abs() <= exact.abs().amax(-1, keepdim=True) / 127 * 0.51).all()


@DTYPES
def test_a_quantized_decoder_keeps_no_full_weights(dtype: torch.dtype, between: str) -> None:
    network = llama(dim=128, head_dim=32, ff_dim=512)
    optimized = optimize_for_inference(network, dtype)
    assert is_quantized(optimized)
    assert not is_quantized(network)
    assert optimize_for_inference(optimized, dtype) is optimized
    pointers = {tensor.data_ptr() for tensor in network.state_dict().values()}
    assert not pointers & {tensor.data_ptr() for tensor in optimized.state_dict().values()}
    types = [type(module) for module in optimized.modules()]
    assert (NativeLinear if between == "native" else QuantizedLinear) in types
    assert nn.Linear not in types
    assert nn.Embedding not in types


@DTYPES
def test_quantized_layers_are_close_to_the_original_and_rows_are_independent(dtype: torch.dtype, between: str) -> None:
    network, ids = llama(2), torch.randint(0, 320, (3, 9))
    optimized = optimize_for_inference(network, dtype)
    with torch.inference_mode():
        logits, expected = optimized(ids), network(ids)
        assert (logits - expected).abs().mean() <= 0.1 * expected.abs().max()
        alone = torch.cat([optimized(row[None]) for row in ids])
    torch.testing.assert_close(alone, logits, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


def test_chunked_prefill_equals_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    network = llama(3).double()
    prompts = torch.randint(0, 320, (2, 23)).tolist()
    with torch.inference_mode():
        expected = model_runner.ModelRunner(network, 2, 30).prefill(prompts)
        monkeypatch.setattr(model_runner, "PREFILL_CHUNK", 4)
        decoder = model_runner.ModelRunner(network, 2, 30)
        assert torch.allclose(decoder.prefill(prompts), expected, atol=1e-12)
        assert decoder.cache.max_length == 23
