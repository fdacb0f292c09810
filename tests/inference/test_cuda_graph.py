"""Replayed steps over fixed places give the texts of the ordinary path; on a CPU a replay is a call (see tests/gpu)."""

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference import StopStrings, enable_cuda_graphs, generate, stream
from clearhead.inference import generation_batch as rows_module
from clearhead.inference import replay as graphs
from clearhead.inference import static_decoder as joined
from clearhead.inference.cuda_graph import CapturedGraph, Choice
from clearhead.inference.static_decoder import FusedLinear, StaticKV, cached_attention
from clearhead.inference.step import Step
from clearhead.model import Mask, attend, build
from clearhead.text import train
from tests.inference.random_writers import FEW, rows_for, same, sharpened
from tests.inference.reference import END, search
from tests.inference.test_texts import TEXTS, writer
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
def small_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few slots that texts outgrow them, and looks as rare as on a GPU."""
    monkeypatch.setattr(joined, "CHUNK", 2)
    monkeypatch.setattr(graphs, "FIRST_SLOTS", 8)
    monkeypatch.setattr(rows_module, "sync_interval", lambda device: 3)
    monkeypatch.setattr(graphs, "sync_interval", lambda device: 3)


def replayed(network: Any) -> graphs.GraphCache:
    """As `enable_cuda_graphs` does it on a CUDA device."""
    found = graphs._GRAPHS[network] = graphs.GraphCache(network, compiled=False)
    return found


@FEW
@given(decoders, st.integers(0, 99), SETTINGS)
def test_replays_give_the_texts_of_the_ordinary_path(
    config: ModelConfig, seed: int, settings: GenerationConfig
) -> None:
    network, rows, seeds = sharpened(config), rows_for(config, seed), [5, 6, 5, 2**40, 0]
    expected = search(network, rows, settings, seeds=seeds)
    capture_steps = replayed(network)
    assert same(search(network, rows, settings, seeds=seeds), expected)
    assert capture_steps.recordings, "they were used"
    before = list(capture_steps.recordings)
    assert same(search(network, rows[::-1], settings, seeds=seeds[::-1]), expected[::-1])
    assert capture_steps.recordings[-1] in before, "and used again"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replayed_stream_gives_the_text_of_the_search(temperature: float) -> None:
    network, settings = sharpened(PLAIN), GenerationConfig(max_new_tokens=40, temperature=temperature)
    [[found]] = generate(network, [[3, 4]], settings, end=END, seeds=[7])
    replayed(network)
    assert list(stream(network, [3, 4], settings, end=END, seed=7)) == found.ids


def test_two_texts_at_once_do_not_share_a_recording() -> None:
    network, settings = sharpened(PLAIN), GenerationConfig(max_new_tokens=30, temperature=1.0)
    expected = [list(stream(network, [prompt], settings, end=(), seed=prompt)) for prompt in (3, 4)]
    capture_steps = replayed(network)
    one, other = (stream(network, [prompt], settings, end=(), seed=prompt) for prompt in (3, 4))
    pairs: list[list[int]] = [[], []]
    for _ in range(30):
        for text, tokens in zip(pairs, (one, other), strict=True):
            text.extend(token for token in [next(tokens, None)] if token is not None)
    assert pairs == expected
    abandoned = stream(network, [5], settings, end=END, seed=5)
    next(abandoned)
    count = len(capture_steps.recordings)
    del abandoned, one, other
    gc.collect()
    list(stream(network, [6], settings, end=END, seed=6))
    assert len(capture_steps.recordings) <= max(count, graphs.KEPT + 1), "what nobody uses is taken again"


def test_what_stood_in_a_recording_before_never_shows() -> None:
    network, settings = sharpened(PLAIN), GenerationConfig(max_new_tokens=16)
    expected = generate(network, [[3, 4], [5]], settings, end=END)
    capture_steps = replayed(network)
    generate(network, [[7] * 9, [8]], settings, end=END)
    for one in capture_steps.recordings:
        for tensor in (*one.keys, *one.values):
            tensor.fill_(torch.nan)
    assert same(generate(network, [[3, 4], [5]], settings, end=END), expected)


def test_rows_that_leave_take_nothing_with_them() -> None:
    network, tokens = sharpened(PLAIN), torch.randint(VOCABULARY, (20, 3, 1))
    with torch.inference_mode():
        plain, other = (Step(network, 3, 40) for _ in range(2))
        for step in (plain, other):
            step.start([[3, 4, 5, 6, 7], [8], [9, 10, 11]])
        step = graphs.ReplayStep(other, replayed(network), Choice(None))
        for number, ids in enumerate(tokens):
            if number == 7:
                kept = torch.tensor([2, 0])
                plain.select(kept)
                step.select(kept)
            torch.testing.assert_close(step.next(ids[: step.used]), plain.next(ids[: step.used]))


def test_a_text_that_has_ended_is_not_written_on_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    network, replays = sharpened(PLAIN), []
    settings = GenerationConfig(max_new_tokens=60, temperature=1.0)
    first = generate(network, [[3, 4]], settings, end=())[0][0].ids
    end = next(token for token in first[8:] if token not in first[:8])
    replayed(network)
    monkeypatch.setattr(CapturedGraph, "replay", lambda one, step=CapturedGraph.replay: (replays.append(1), step(one)))
    [[found]] = generate(network, [[3, 4]], settings, end=end)
    assert found.ids == first[: first.index(end)]
    assert len(replays) <= len(found.ids) + 6, "two looks"


def test_stop_strings_cut_where_they_cut_without_replays() -> None:
    tokenizer = train(TEXTS, "byte-bpe", 300)
    network, prompts = writer("decoder", len(tokenizer), decoder_layers=2), [[n, n + 1] for n in range(5, 13)]
    settings = GenerationConfig(max_new_tokens=30, temperature=1.0)
    whole = [tokenizer.decode(output.ids) for [output] in generate(network, prompts, settings, end=0)]
    stops = StopStrings([text[n : n + 2] for n, text in enumerate(whole) if len(text) > n + 2][:3], tokenizer)
    expected = generate(network, prompts, settings, end=0, stops=stops)
    assert {output.finished for [output] in expected} == {True, False}
    replayed(network)
    assert same(generate(network, prompts, settings, end=0, stops=stops), expected)


def test_replayed_texts_end_where_the_positions_of_the_model_end() -> None:
    config = ModelConfig(family="decoder", decoder_layers=1, dim=8, heads=2, vocab_size=VOCABULARY, max_positions=20)
    network, settings = sharpened(config), GenerationConfig(max_new_tokens=40)
    replayed(network)
    found = generate(network, [[1] * 20, [2] * 4, [3] * 19, [4]], settings, end=())
    assert [len(outputs[0].ids) for outputs in found] == [1, 17, 2, 20]


def test_weights_that_change_are_seen_and_weights_that_move_are_noticed() -> None:
    network, other = sharpened(GATED), sharpened(GATED)
    settings = GenerationConfig(max_new_tokens=16)
    capture_steps = replayed(network)
    names = {name for name, _ in network.named_parameters()}
    network.load_state_dict(other.state_dict())
    assert {name for name, _ in network.named_parameters()} == names
    expected = generate(other, [[3, 4]], settings, end=END)
    assert same(generate(network, [[3, 4]], settings, end=END), expected)
    assert graphs.cuda_graphs_of(network) is capture_steps
    network.decoder.layers[0].attention.query.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.float64))
    assert graphs.cuda_graphs_of(network) is None, "on a CPU there are none to be made anew"


def test_the_joined_twin_holds_no_weight_twice() -> None:
    network = build(ModelConfig(family="decoder", decoder_layers=2, dim=16, heads=4, vocab_size=VOCABULARY, bias=True))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    twin = joined.joined(network)
    storages = {tensor.untyped_storage().data_ptr() for tensor in network.state_dict().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in twin.state_dict().values()} <= storages
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("many", [4, 1024])
def test_the_formula_for_few_rows_is_attention(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "MANY", many)
    q, k, v = torch.randn(3, 6, 4), torch.randn(3, 2, 10, 4), torch.randn(3, 2, 10, 4)
    lengths = torch.tensor([0, 9, 4])
    hidden = torch.zeros(3, 10).masked_fill(torch.arange(10) > lengths[:, None], -torch.inf)[:, None, None]
    expected = attend(q[:, :, None], k, v, Mask(causal=True, start=lengths), backend="reference")[:, :, 0]
    torch.testing.assert_close(cached_attention(q, StaticKV(k, v, lengths, hidden)), expected)


def test_eight_bits_are_read_as_they_are() -> None:
    network, spread = sharpened(GATED), sharpened(GATED)
    spread.load_state_dict(network.state_dict())
    small = quantize_module(network)
    with torch.no_grad():  # the same weights, rounded, in full width
        for name, module in spread.named_modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(small.get_submodule(name).spread().double(), requires_grad=False)
    settings = GenerationConfig(max_new_tokens=16)
    capture_steps = replayed(small)
    layer = capture_steps.twin.decoder.layers[0]
    assert isinstance(layer.attention.output, FusedLinear)
    assert layer.attention.joint.weight.dtype == torch.int8
    x = torch.randn(2, 1, 16, dtype=torch.float64)
    parts = spread.decoder.layers[0].attention
    expected = torch.cat([part(x) for part in (parts.query, parts.key, parts.value)], dim=-1)
    torch.testing.assert_close(layer.attention.joint(x), expected)
    assert len(generate(small, [[3, 4]], settings, end=())[0][0].ids) == 16


def test_networks_that_have_no_graphs_go_on_without_them() -> None:
    assert joined.can_be_static(build(PLAIN))
    assert not enable_cuda_graphs(build(PLAIN)), "it is on a CPU"
    assert not joined.can_be_static(build(PLAIN.model_copy(update={"attention": ("window",), "window": 4})))
    assert not joined.can_be_static(quantize_module(build(PLAIN.model_copy(update={"dim": 32})), bits=4))
