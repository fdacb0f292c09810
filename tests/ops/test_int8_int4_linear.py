"""Int8Linear, Int4Linear and the decode layers that use them equal the formulas, and rows are independent."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clearhead.config import preset
from clearhead.inference import INT4, model_runner, optimize_for_inference
from clearhead.inference.llama_decode_layer import DecodeLayer
from clearhead.inference.optimize import is_quantized
from clearhead.model import Network, build
from clearhead.model.cache import KVCache
from clearhead.ops.linear import int4
from clearhead.ops.linear.int4 import Int4Linear
from clearhead.ops.linear.int8 import Int8Embedding, Int8Linear, has_int8_kernel
from clearhead.ops.linear.quantized import QuantizedLinear, _quantize_groups, quantize_rows, unpack_int4

needs_int8_kernel = pytest.mark.skipif(not has_int8_kernel(), reason="this CPU has no exact FBGEMM int8 kernel")


def llama(seed: int = 0, **changes: Any) -> Network:
    torch.manual_seed(seed)
    return build(preset("tiny-llama").model_copy(update={"vocab_size": 320, **changes})).eval()


def random_linear(in_features: int, out_features: int, bias: bool, seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    linear = nn.Linear(in_features, out_features, bias=bias)
    linear.weight.data *= torch.rand(out_features, 1) * 3 + 0.01
    return linear


@needs_int8_kernel
@given(
    st.integers(1, 9), st.sampled_from([1, 3, 31, 64, 100]), st.integers(1, 70), st.booleans(), st.integers(0, 2**30)
)
def test_int8_linear_is_within_rounding_error_and_batch_mates_never_change_a_row(
    rows: int, in_features: int, out_features: int, bias: bool, seed: int
) -> None:
    linear = random_linear(in_features, out_features, bias, seed)
    x = torch.randn(rows, in_features) * 10.0 ** torch.randint(-1, 3, (rows, 1))
    x[0] = x[0].abs() if seed % 2 else 0
    with torch.inference_mode():
        out = Int8Linear(linear)(x)
        quantized, scale = quantize_rows(linear.weight)
        weights = quantized.double() * scale.double()
        step = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0))[:, None].double() / 255
        bound = (step * (0.5 + 1e-3) + 6.1e-5) * weights.abs().sum(1)  # each activation is off by half a step at most
        exact = x.double() @ weights.t() + (0 if linear.bias is None else linear.bias.double())
        assert ((out - exact).abs() <= bound + 1e-5 * exact.abs() + 1e-6).all()
        alone = torch.cat([Int8Linear(linear)(row[None]) for row in x])
        assert ((out - alone).abs() <= 1e-5 * (exact.abs().amax(1, keepdim=True) + 1)).float().mean() > 0.98
        assert torch.allclose(Int8Linear(linear)(x[:, None])[:, 0], out, atol=1e-6)


@pytest.mark.parametrize(("in_features", "out_features"), [(64, 128), (96, 48), (32, 16), (160, 192)])
@pytest.mark.parametrize("bias", [False, True])
def test_int4_linear_equals_quantized_linear_for_small_and_large_batches(
    in_features: int, out_features: int, bias: bool
) -> None:
    linear = random_linear(in_features, out_features, bias, 1)
    packed, portable = Int4Linear(linear), QuantizedLinear(linear, bits=4, group=32)
    x = torch.randn(int4.MIN_DEQUANTIZE_ROWS + 3, in_features)
    with torch.inference_mode():
        expected = portable(x)
        small_batches = torch.cat([packed(x[n : n + 5]) for n in range(0, len(x), 5)])
        for out in (packed(x), small_batches):
            assert (out - expected).abs().max() <= 0.02 * expected.abs().max()
        assert packed(x[None, :2]).shape == (1, 2, out_features)


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


@needs_int8_kernel
def test_int8_embedding_is_within_rounding_error() -> None:
    table = nn.Embedding(50, 16)
    ids = torch.tensor([[0, 49, 7], [7, 7, 1]])
    out, exact = Int8Embedding(table)(ids), table(ids)
    assert out.shape == exact.shape
    assert ((out - exact).abs() <= exact.abs().amax(-1, keepdim=True) / 127 * 0.51).all()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_decode_layers_equal_the_full_forward_pass(kv_heads: int) -> None:
    network = llama(heads=4, kv_heads=kv_heads)
    optimized = optimize_for_inference(network)
    assert isinstance(optimized.decoder.layers[0], DecodeLayer)
    ids = torch.randint(0, 320, (1, 40))
    with torch.inference_mode():
        expected = network(ids)
        decoder = model_runner.ModelRunner(optimized, 1, 64)
        logits = [decoder.prefill([ids[0, :7].tolist()])]
        logits += [decoder.decode_step(ids[:, n : n + 1])[:, 0] for n in range(7, 40)]
        assert torch.allclose(torch.cat(logits), expected[0, 6:], atol=1e-5)


@pytest.mark.parametrize("shrinks", [True, False])
def test_a_row_left_alone_ignores_the_cache_of_longer_rows(shrinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shrinks:  # as on a device where reading lengths would synchronize
        monkeypatch.setattr(KVCache, "select", lambda cache, rows, tighten=False: cache._index_rows(rows))
    network = llama()
    optimized = optimize_for_inference(network)
    long, short = (torch.randint(0, 320, (count,)).tolist() for count in (25, 3))
    more = torch.randint(0, 320, (6,)).tolist()
    with torch.inference_mode():
        expected = network(torch.tensor([short + more]))[0]
        decoder = model_runner.ModelRunner(optimized, 2, 64)
        assert torch.allclose(decoder.prefill([long, short])[1], expected[2], atol=1e-5)
        decoder.select(torch.tensor([1]))
        logits = torch.cat([decoder.decode_step(torch.tensor([[token]]))[:, 0] for token in more])
    assert torch.allclose(logits, expected[3:], atol=1e-5)


@needs_int8_kernel
@pytest.mark.parametrize("dtype", [torch.int8, INT4])
def test_a_quantized_decoder_is_the_same_cached_and_uncached(dtype: torch.dtype) -> None:
    network = llama(1)
    optimized = optimize_for_inference(network, dtype)
    ids = torch.randint(0, 320, (2, 30))
    with torch.inference_mode():
        uncached, fp32 = optimized(ids), network(ids)
        decoder = model_runner.ModelRunner(optimized, 1, 40)
        logits = [decoder.prefill([ids[0, :5].tolist()])]
        logits += [decoder.decode_step(ids[:1, n : n + 1])[:, 0] for n in range(5, 30)]
        tolerance = 0.02 if dtype == torch.int8 else 0.05  # bf16 sums depend on the batch shape
        assert (torch.cat(logits) - uncached[0, 4:]).abs().max() <= tolerance * fp32.abs().max()
        assert (uncached - fp32).abs().mean() <= (0.02 if dtype == torch.int8 else 0.1) * fp32.abs().max()
        assert (uncached - fp32).abs().max() > 0


@needs_int8_kernel
@pytest.mark.parametrize(("dtype", "ratio"), [(torch.int8, 0.3), (INT4, 0.25)])
def test_a_quantized_network_keeps_no_full_weights(dtype: torch.dtype, ratio: float) -> None:
    network = llama(dim=128, head_dim=32, ff_dim=512)
    optimized = optimize_for_inference(network, dtype)
    assert is_quantized(optimized)
    assert not is_quantized(network)
    assert optimize_for_inference(optimized, dtype) is optimized
    pointers = {tensor.data_ptr() for tensor in network.state_dict().values()}
    assert not pointers & {tensor.data_ptr() for tensor in optimized.state_dict().values()}
    full_bytes = sum(tensor.numel() * 4 for tensor in network.parameters())
    kept_bytes = sum(tensor.numel() * tensor.element_size() for tensor in optimized.state_dict().values())
    kept_bytes += sum(m.in_features * m.out_features for m in optimized.modules() if isinstance(m, Int8Linear))
    assert kept_bytes <= ratio * full_bytes + 4 * network.config.dim * (2 * network.config.decoder_layers + 1)
    types = [type(module) for module in optimized.modules()]
    assert (Int4Linear in types) == (dtype == INT4)
    assert nn.Linear not in types
    assert nn.Embedding not in types


def test_without_fbgemm_the_portable_quantized_layers_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.inference.optimize.has_int8_kernel", lambda: False)
    network = llama(2)
    for dtype in (torch.int8, INT4):
        optimized = optimize_for_inference(network, dtype)
        assert any(isinstance(module, QuantizedLinear) for module in optimized.modules())
        ids = torch.randint(0, 320, (1, 9))
        with torch.inference_mode():
            assert (optimized(ids) - network(ids)).abs().mean() <= 0.1 * network(ids).abs().max()


def test_chunked_prefill_equals_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    network = llama(3).double()
    prompts = torch.randint(0, 320, (2, 23)).tolist()
    with torch.inference_mode():
        expected = model_runner.ModelRunner(network, 2, 30).prefill(prompts)
        monkeypatch.setattr(model_runner, "PREFILL_CHUNK", 4)
        decoder = model_runner.ModelRunner(network, 2, 30)
        assert torch.allclose(decoder.prefill(prompts), expected, atol=1e-12)
        assert decoder.cache.max_length == 23
