"""Small weights for reading: the formula they stand for, rows that know nothing of each other, and light layers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clearhead.config import preset
from clearhead.inference import INT4, optimize_for_inference, step
from clearhead.inference.decode_layer import DecodeLayer
from clearhead.inference.optimize import is_quantized
from clearhead.model import Network, build
from clearhead.model.cache import KVCache
from clearhead.ops.linear import int4
from clearhead.ops.linear.int4 import Int4Linear
from clearhead.ops.linear.int8 import Int8Embedding, Int8Linear, has_int8_kernel
from clearhead.ops.linear.quantized import QuantizedLinear, _quantize_groups, quantize_rows

needs_bytes = pytest.mark.skipif(not has_int8_kernel(), reason="this CPU has no exact FBGEMM kernel for bytes")


def llama(seed: int = 0, **changes: Any) -> Network:
    torch.manual_seed(seed)
    return build(preset("tiny-llama").model_copy(update={"vocab_size": 320, **changes})).eval()


def layer(inputs: int, outputs: int, bias: bool, seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    made = nn.Linear(inputs, outputs, bias=bias)
    made.weight.data *= torch.rand(outputs, 1) * 3 + 0.01
    return made


@needs_bytes
@given(
    st.integers(1, 9), st.sampled_from([1, 3, 31, 64, 100]), st.integers(1, 70), st.booleans(), st.integers(0, 2**30)
)
def test_bytes_are_the_product_of_rounded_numbers_and_rows_know_nothing_of_each_other(
    rows: int, inputs: int, outputs: int, bias: bool, seed: int
) -> None:
    linear = layer(inputs, outputs, bias, seed)
    x = torch.randn(rows, inputs) * 10.0 ** torch.randint(-1, 3, (rows, 1))
    x[0] = x[0].abs() if seed % 2 else 0
    with torch.inference_mode():
        found = Int8Linear(linear)(x)
        numbers, scale = quantize_rows(linear.weight)
        weights = numbers.double() * scale.double()
        step = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0))[:, None].double() / 255
        most = (step * (0.5 + 1e-3) + 6.1e-5) * weights.abs().sum(1)  # each number is off by half a step at the most
        exact = x.double() @ weights.t() + (0 if linear.bias is None else linear.bias.double())
        assert ((found - exact).abs() <= most + 1e-5 * exact.abs() + 1e-6).all()
        alone = torch.cat([Int8Linear(linear)(row[None]) for row in x])
        assert ((found - alone).abs() <= 1e-5 * (exact.abs().amax(1, keepdim=True) + 1)).float().mean() > 0.98
        assert torch.allclose(Int8Linear(linear)(x[:, None])[:, 0], found, atol=1e-6)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (96, 48), (32, 16), (160, 192)])
@pytest.mark.parametrize("bias", [False, True])
def test_half_bytes_are_the_groups_of_four_bits_for_few_rows_and_for_many(
    inputs: int, outputs: int, bias: bool
) -> None:
    linear = layer(inputs, outputs, bias, 1)
    made, plain = Int4Linear(linear), QuantizedLinear(linear, bits=4, group=32)
    x = torch.randn(int4.MANY + 3, inputs)
    with torch.inference_mode():
        expected = plain(x)
        few = torch.cat([made(x[n : n + 5]) for n in range(0, len(x), 5)])
        for found in (made(x), few):
            assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
        assert made(x[None, :2]).shape == (1, 2, outputs)


def test_blocks_of_q4_1_come_back_bit_by_bit() -> None:
    quants = pytest.importorskip("gguf.quants", reason="gguf is not installed")
    kinds = pytest.importorskip("gguf").GGMLQuantizationType
    raw = quants.quantize(np.random.default_rng(0).normal(size=(48, 96)).astype(np.float32), kinds.Q4_1)
    held, scale, lowest = _quantize_groups(torch.from_numpy(quants.dequantize(raw, kinds.Q4_1)), 32)
    blocks = raw.reshape(48, 3, 20)  # scale and lowest in fp16, then 16 bytes: the first half in the lower bits
    values = np.concatenate([blocks[:, :, 4:] & 15, blocks[:, :, 4:] >> 4], axis=2).reshape(48, 96)
    assert (torch.stack([held & 15, held >> 4], dim=-1).flatten(1).numpy() == values).all()
    both = blocks[:, :, :4].copy().view(np.float16).astype(np.float32)
    assert np.allclose(scale.numpy(), both[:, :, 0], rtol=1e-3)
    assert np.allclose(lowest.numpy(), both[:, :, 1], rtol=1e-6)


@needs_bytes
def test_a_table_of_bytes_gives_rounded_rows() -> None:
    table = nn.Embedding(50, 16)
    ids = torch.tensor([[0, 49, 7], [7, 7, 1]])
    found, exact = Int8Embedding(table)(ids), table(ids)
    assert found.shape == exact.shape
    assert ((found - exact).abs() <= exact.abs().amax(-1, keepdim=True) / 127 * 0.51).all()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_light_layer_reads_a_token_as_the_plain_one_does(kv_heads: int) -> None:
    network = llama(heads=4, kv_heads=kv_heads)
    reader = optimize_for_inference(network)
    assert isinstance(reader.decoder.layers[0], DecodeLayer)
    ids = torch.randint(0, 320, (1, 40))
    with torch.inference_mode():
        expected = network(ids)
        found = step.Step(reader, 1, 64)
        scores = [found.start([ids[0, :7].tolist()])]
        scores += [found.next(ids[:, n : n + 1])[:, 0] for n in range(7, 40)]
        assert torch.allclose(torch.cat(scores), expected[0, 6:], atol=1e-5)


@pytest.mark.parametrize("shrinks", [True, False])
def test_a_light_row_that_is_left_alone_sees_nothing_of_longer_ones(
    shrinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shrinks:  # as on a device that must not be asked for lengths
        monkeypatch.setattr(KVCache, "select", KVCache._take)
    network = llama()
    reader = optimize_for_inference(network)
    long, short = (torch.randint(0, 320, (count,)).tolist() for count in (25, 3))
    more = torch.randint(0, 320, (6,)).tolist()
    with torch.inference_mode():
        expected = network(torch.tensor([short + more]))[0]
        found = step.Step(reader, 2, 64)
        assert torch.allclose(found.start([long, short])[1], expected[2], atol=1e-5)
        found.select(torch.tensor([1]))
        scores = torch.cat([found.next(torch.tensor([[word]]))[:, 0] for word in more])
    assert torch.allclose(scores, expected[3:], atol=1e-5)


@needs_bytes
@pytest.mark.parametrize("dtype", [torch.int8, INT4])
def test_a_small_decoder_writes_with_a_cache_what_it_reads_at_once(dtype: torch.dtype) -> None:
    network = llama(1)
    reader = optimize_for_inference(network, dtype)
    ids = torch.randint(0, 320, (2, 30))
    with torch.inference_mode():
        whole, plain = reader(ids), network(ids)
        found = step.Step(reader, 1, 40)
        scores = [found.start([ids[0, :5].tolist()])]
        scores += [found.next(ids[:1, n : n + 1])[:, 0] for n in range(5, 30)]
        tolerance = 0.02 if dtype == torch.int8 else 0.05  # bf16 rounds otherwise where it sums otherwise
        assert (torch.cat(scores) - whole[0, 4:]).abs().max() <= tolerance * plain.abs().max()
        assert (whole - plain).abs().mean() <= (0.02 if dtype == torch.int8 else 0.1) * plain.abs().max()
        assert (whole - plain).abs().max() > 0


@needs_bytes
@pytest.mark.parametrize(("dtype", "share"), [(torch.int8, 0.3), (INT4, 0.25)])
def test_nothing_of_the_full_weights_is_kept(dtype: torch.dtype, share: float) -> None:
    network = llama(dim=128, head_dim=32, ff_dim=512)
    reader = optimize_for_inference(network, dtype)
    assert is_quantized(reader)
    assert not is_quantized(network)
    assert optimize_for_inference(reader, dtype) is reader
    own = {tensor.data_ptr() for tensor in network.state_dict().values()}
    assert not own & {tensor.data_ptr() for tensor in reader.state_dict().values()}
    full = sum(tensor.numel() * 4 for tensor in network.parameters())
    held = sum(tensor.numel() * tensor.element_size() for tensor in reader.state_dict().values())
    held += sum(m.inputs * m.outputs for m in reader.modules() if isinstance(m, Int8Linear))
    assert held <= share * full + 4 * network.config.dim * (2 * network.config.decoder_layers + 1)
    kinds = [type(module) for module in reader.modules()]
    assert (Int4Linear in kinds) == (dtype == INT4)
    assert nn.Linear not in kinds
    assert nn.Embedding not in kinds


def test_without_the_kernel_small_weights_are_the_plain_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.inference.optimize.has_int8_kernel", lambda: False)
    network = llama(2)
    for dtype in (torch.int8, INT4):
        reader = optimize_for_inference(network, dtype)
        assert any(isinstance(module, QuantizedLinear) for module in reader.modules())
        ids = torch.randint(0, 320, (1, 9))
        with torch.inference_mode():
            assert (reader(ids) - network(ids)).abs().mean() <= 0.1 * network(ids).abs().max()


def test_a_long_prompt_in_pieces_is_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    network = llama(3).double()
    prompts = torch.randint(0, 320, (2, 23)).tolist()
    with torch.inference_mode():
        expected = step.Step(network, 2, 30).start(prompts)
        monkeypatch.setattr(step, "PIECE", 4)
        found = step.Step(network, 2, 30)
        assert torch.allclose(found.start(prompts), expected, atol=1e-12)
        assert found.cache.max_length == 23
