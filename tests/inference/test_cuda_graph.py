"""Replayed decode steps give the outputs of eager ones; on a CPU a replay runs the step (see tests/gpu)."""

import gc
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference import StopStrings, cuda_graph_replay, enable_cuda_graphs, generate, static_decoder, stream
from clearhead.inference import generation_batch as batch_module
from clearhead.inference.cuda_graph import CapturedGraph, GraphSampling
from clearhead.inference.model_runner import ModelRunner
from clearhead.inference.static_decoder import FusedLinear, StaticKV, cached_attention
from clearhead.model import Mask, attend, build
from clearhead.text import train
from tests.inference.random_models import FEW, TEXTS, random_model, random_network, rows_for, same_outputs
from tests.inference.reference import END, search
from tests.quantization import quantize_module
from tests.strategies import VOCABULARY, configs

decoders = configs(families=("decoder",)).filter(lambda config: set(config.attention) == {"full"})
PLAIN = ModelConfig(family="decoder", decoder_layers=2, dim=16, heads=4, kv_heads=2, vocab_size=VOCABULARY)
GATED = PLAIN.model_copy(update={"activation": "swiglu"})
LONG = {"max_new_tokens": 20}
SETTINGS = st.sampled_from(
    [
        GenerationConfig(**LONG),
        GenerationConfig(**LONG, logprobs=True),
        GenerationConfig(**LONG, temperature=1.3, top_k=9, top_p=0.9, min_p=0.02, logprobs=True),
        GenerationConfig(**LONG, temperature=0.7, samples=3),
        GenerationConfig(**LONG, temperature=0.9, repetition_penalty=1.2, presence_penalty=0.5, no_repeat_ngram_size=3),
        GenerationConfig(**LONG, min_new_tokens=6, banned_ids=((3,), (4, 5)), logprobs=True),
        GenerationConfig(**LONG, batch_size=2),
    ]
)


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate as on a GPU, with graphs so small that texts outgrow them, and as rare checks for finished rows."""
    monkeypatch.setattr(import_module("clearhead.inference.generate"), "runs_on_cpu", lambda network: False)
    monkeypatch.setattr(static_decoder, "CHUNK", 2)
    monkeypatch.setattr(cuda_graph_replay, "MIN_SLOTS", 8)
    monkeypatch.setattr(batch_module, "sync_interval", lambda device: 3)
    monkeypatch.setattr(cuda_graph_replay, "sync_interval", lambda device: 3)


def enable_replay(network: Any) -> cuda_graph_replay.GraphCache:
    """What `enable_cuda_graphs` does on a CUDA device."""
    graphs = cuda_graph_replay._GRAPHS[network] = cuda_graph_replay.GraphCache(network, compiled=False)
    return graphs


@FEW
@given(decoders, st.integers(0, 99), SETTINGS)
def test_replay_gives_the_outputs_of_eager_steps(config: ModelConfig, seed: int, settings: GenerationConfig) -> None:
    network, rows, seeds = random_model(config), rows_for(config, seed), [5, 6, 5, 2**40, 0]
    expected = search(network, rows, settings, seeds=seeds)
    graphs = enable_replay(network)
    assert same_outputs(search(network, rows, settings, seeds=seeds), expected)
    assert graphs.captured, "graphs were used"
    before = list(graphs.captured)
    assert same_outputs(search(network, rows[::-1], settings, seeds=seeds[::-1]), expected[::-1])
    assert graphs.captured[-1] in before, "and used again"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replayed_stream_equals_generate(temperature: float) -> None:
    network, settings = random_model(PLAIN), GenerationConfig(max_new_tokens=40, temperature=temperature)
    [[output]] = generate(network, [[3, 4]], settings, eos_ids=END, seeds=[7])
    enable_replay(network)
    assert list(stream(network, [3, 4], settings, eos_ids=END, seed=7)) == output.ids


def test_two_streams_at_once_do_not_share_a_graph() -> None:
    network, settings = random_model(PLAIN), GenerationConfig(max_new_tokens=30, temperature=1.0)
    expected = [list(stream(network, [prompt], settings, eos_ids=(), seed=prompt)) for prompt in (3, 4)]
    graphs = enable_replay(network)
    first, second = (stream(network, [prompt], settings, eos_ids=(), seed=prompt) for prompt in (3, 4))
    outputs: list[list[int]] = [[], []]
    for _ in range(30):
        for output, tokens in zip(outputs, (first, second), strict=True):
            output.extend(token for token in [next(tokens, None)] if token is not None)
    assert outputs == expected
    abandoned = stream(network, [5], settings, eos_ids=END, seed=5)
    next(abandoned)
    count = len(graphs.captured)
    del abandoned, first, second
    gc.collect()
    list(stream(network, [6], settings, eos_ids=END, seed=6))
    assert len(graphs.captured) <= max(count, cuda_graph_replay.MAX_IDLE_GRAPHS + 1), "unused graphs are reused"


def test_old_contents_of_a_graph_never_show() -> None:
    network, settings = random_model(PLAIN), GenerationConfig(max_new_tokens=16)
    expected = generate(network, [[3, 4], [5]], settings, eos_ids=END)
    graphs = enable_replay(network)
    generate(network, [[7] * 9, [8]], settings, eos_ids=END)
    for graph in graphs.captured:
        for tensor in (*graph.keys, *graph.values):
            tensor.fill_(torch.nan)
    assert same_outputs(generate(network, [[3, 4], [5]], settings, eos_ids=END), expected)


def test_dropped_rows_never_change_the_others() -> None:
    network, tokens = random_model(PLAIN), torch.randint(VOCABULARY, (20, 3, 1))
    with torch.inference_mode():
        eager, other = (ModelRunner(network, 3, 40) for _ in range(2))
        for runner in (eager, other):
            runner.prefill([[3, 4, 5, 6, 7], [8], [9, 10, 11]])
        replayed = cuda_graph_replay.ReplayRunner(other, enable_replay(network), GraphSampling(None))
        for number, ids in enumerate(tokens):
            if number == 7:
                kept = torch.tensor([2, 0])
                eager.select(kept)
                replayed.select(kept)
            rows = replayed.num_rows
            torch.testing.assert_close(replayed.decode_step(ids[:rows]), eager.decode_step(ids[:rows]))


def test_few_steps_are_replayed_after_eos(monkeypatch: pytest.MonkeyPatch) -> None:
    network, replays = random_model(PLAIN), []
    settings = GenerationConfig(max_new_tokens=60, temperature=1.0)
    ids = generate(network, [[3, 4]], settings, eos_ids=())[0][0].ids
    eos = next(token for token in ids[8:] if token not in ids[:8])
    enable_replay(network)
    replay = CapturedGraph.replay
    monkeypatch.setattr(CapturedGraph, "replay", lambda graph: (replays.append(1), replay(graph)))
    [[output]] = generate(network, [[3, 4]], settings, eos_ids=eos)
    assert output.ids == ids[: ids.index(eos)]
    assert len(replays) <= len(output.ids) + 6, "two intervals"


def test_stop_strings_end_replayed_rows_where_they_end_eager_ones() -> None:
    tokenizer = train(TEXTS, "byte-bpe", 300)
    network, prompts = random_network("decoder", len(tokenizer), decoder_layers=2), [[n, n + 1] for n in range(5, 13)]
    settings = GenerationConfig(max_new_tokens=30, temperature=1.0)
    texts = [tokenizer.decode(output.ids) for [output] in generate(network, prompts, settings, eos_ids=0)]
    stop = StopStrings([text[n : n + 2] for n, text in enumerate(texts) if len(text) > n + 2][:3], tokenizer)
    expected = generate(network, prompts, settings, eos_ids=0, stop_strings=stop)
    assert {output.finished for [output] in expected} == {True, False}
    enable_replay(network)
    assert same_outputs(generate(network, prompts, settings, eos_ids=0, stop_strings=stop), expected)


def test_replayed_rows_end_at_max_positions() -> None:
    config = ModelConfig(family="decoder", decoder_layers=1, dim=8, heads=2, vocab_size=VOCABULARY, max_positions=20)
    network, settings = random_model(config), GenerationConfig(max_new_tokens=40)
    enable_replay(network)
    outputs = generate(network, [[1] * 20, [2] * 4, [3] * 19, [4]], settings, eos_ids=())
    assert [len(output.ids) for [output] in outputs] == [1, 17, 2, 20]


def test_weights_changed_in_place_are_used_and_replaced_weights_are_detected() -> None:
    network, other = random_model(GATED), random_model(GATED)
    settings = GenerationConfig(max_new_tokens=16)
    graphs = enable_replay(network)
    names = {name for name, _ in network.named_parameters()}
    network.load_state_dict(other.state_dict())
    assert {name for name, _ in network.named_parameters()} == names
    expected = generate(other, [[3, 4]], settings, eos_ids=END)
    assert same_outputs(generate(network, [[3, 4]], settings, eos_ids=END), expected)
    assert cuda_graph_replay.cuda_graphs_of(network) is graphs
    network.decoder.layers[0].attention.query.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.float64))
    assert cuda_graph_replay.cuda_graphs_of(network) is None, "on a CPU they cannot be captured again"


def test_a_static_copy_stores_no_weight_twice() -> None:
    network = build(ModelConfig(family="decoder", decoder_layers=2, dim=16, heads=4, vocab_size=VOCABULARY, bias=True))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    static = static_decoder.static_copy(network)
    storages = {tensor.untyped_storage().data_ptr() for tensor in network.state_dict().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in static.state_dict().values()} <= storages
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("min_chunked_slots", [4, 1024])
def test_cached_attention_equals_reference_attention(min_chunked_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_decoder, "MIN_CHUNKED_SLOTS", min_chunked_slots)
    q, k, v = torch.randn(3, 6, 4), torch.randn(3, 2, 10, 4), torch.randn(3, 2, 10, 4)
    lengths = torch.tensor([0, 9, 4])
    attn_bias = torch.zeros(3, 10).masked_fill(torch.arange(10) > lengths[:, None], -torch.inf)[:, None, None]
    expected = attend(q[:, :, None], k, v, Mask(causal=True, start=lengths), backend="reference")[:, :, 0]
    torch.testing.assert_close(cached_attention(q, StaticKV(k, v, lengths, attn_bias)), expected)


def test_a_static_copy_of_int8_weights_equals_the_dequantized_linears() -> None:
    network, dequantized = random_model(GATED), random_model(GATED)
    dequantized.load_state_dict(network.state_dict())
    quantized = quantize_module(network)
    with torch.no_grad():
        for name, module in dequantized.named_modules():
            if isinstance(module, nn.Linear):
                weight = quantized.get_submodule(name).dequantize().double()
                module.weight = nn.Parameter(weight, requires_grad=False)
    settings = GenerationConfig(max_new_tokens=16)
    graphs = enable_replay(quantized)
    layer = graphs.static_network.decoder.layers[0]
    assert isinstance(layer.attention.output, FusedLinear)
    assert layer.attention.qkv.weight.dtype == torch.int8
    x = torch.randn(2, 1, 16, dtype=torch.float64)
    attention = dequantized.decoder.layers[0].attention
    expected = torch.cat([linear(x) for linear in (attention.query, attention.key, attention.value)], dim=-1)
    torch.testing.assert_close(layer.attention.qkv(x), expected)
    assert len(generate(quantized, [[3, 4]], settings, eos_ids=())[0][0].ids) == 16


def test_networks_without_support_run_without_graphs() -> None:
    assert static_decoder.can_be_static(build(PLAIN))
    assert not enable_cuda_graphs(build(PLAIN)), "on a CPU"
    assert not static_decoder.can_be_static(build(PLAIN.model_copy(update={"attention": ("window",), "window": 4})))
    assert not static_decoder.can_be_static(quantize_module(build(PLAIN.model_copy(update={"dim": 32})), bits=4))
