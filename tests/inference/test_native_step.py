"""The native step gives the logits of the network, for all families, however rows and tokens are arranged."""

import copy
import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference import DraftModel, PromptLookup
from clearhead.inference.native_network import NativeNetwork, native_refuses
from clearhead.inference.native_step import NativeRunner
from clearhead.inference.reference_step import ReferenceRunner
from clearhead.inference.step import LAST_TOKEN, PAGE_SIZE, PagedKVCache
from clearhead.model import build
from clearhead.ops.linear.packed_weight import pack_weight
from clearhead.ops.linear.quantized import INT4
from clearhead.ops.native.structs import step_library
from tests.inference.random_models import FEW, generative_configs, random_model, random_network, rows_for
from tests.inference.reference import Row, search
from tests.inference.test_choose_tokens import sampling_inputs
from tests.inference.test_reference_step import PagedRows, expected_logits
from tests.ops.test_native_step_ops import expected_linear

pytestmark = pytest.mark.skipif(step_library() is None, reason="the native step was not compiled here")


def native_runner(network: Any, dtype: torch.dtype | None = None, pages: int = 40, rows: int = 16) -> NativeRunner:
    return NativeRunner(NativeNetwork(network, dtype), pages, rows)


def assert_close(logits: torch.Tensor, expected: torch.Tensor, within: float = 1e-5) -> None:
    scale = float(expected.abs().max()) + 1e-3
    torch.testing.assert_close(logits.double() / scale, expected.double() / scale, rtol=0, atol=within)


@FEW
@given(generative_configs, st.integers(0, 1 << 20), st.sampled_from([1, PAGE_SIZE]))
def test_chunks_and_tokens_of_any_rows_give_the_logits_of_the_network(
    config: ModelConfig, seed: int, span: int
) -> None:
    network, draw = random_model(config), random.Random(seed)
    rows = rows_for(config, seed, count=6, max_length=min(40, config.max_positions))
    paged, done = PagedRows(native_runner(network), rows, draw, span), dict.fromkeys(range(len(rows)), 0)
    expected = [expected_logits(network, row) for row in rows]
    while left := [row for row in done if done[row] < len(rows[row][1])]:
        chosen = draw.sample(left, draw.randint(1, len(left)))
        new = {row: rows[row][1][done[row] : done[row] + draw.choice([1, 1, 2, 5, 40])] for row in chosen}
        logits = paged.runner.logits(paged.inputs(new, done))
        wanted = torch.cat([expected[row][done[row] : done[row] + len(new[row])] for row in chosen])
        assert_close(logits, wanted, 2e-5)
        for row in chosen:
            done[row] += len(new[row])


class RoundedLinear(torch.nn.Module):
    """A linear layer as the kernels compute it: dequantized weights, activations rounded per row and group."""

    def __init__(self, linear: torch.nn.Linear, kind: str):
        super().__init__()
        self.packed = pack_weight(linear.weight, linear.bias, kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return expected_linear(self.packed, x.flatten(0, -2)).view(*x.shape[:-1], -1).to(x.dtype)


def rounded_network(network: Any, kind: str) -> Any:
    """The network with all linears and embeddings replaced by the formula of the kernels."""
    network, head_kind = copy.deepcopy(network), "int8" if kind == "int4" else kind
    for name, module in list(network.named_modules()):
        if isinstance(module, torch.nn.Embedding) and name.endswith("tokens"):
            table = pack_weight(module.weight, None, head_kind).dequantize().to(module.weight.dtype)
            module.weight = torch.nn.Parameter(table)
        if isinstance(module, torch.nn.Linear):
            parent, _, child = name.rpartition(".")
            is_head = name == "heads.lm_head.proj"
            setattr(network.get_submodule(parent), child, RoundedLinear(module, head_kind if is_head else kind))
    return network


def medium_network(family: str, **settings: Any) -> Any:
    torch.manual_seed(7)
    layers = {"decoder_layers": 2} | ({"encoder_layers": 2} if family != "decoder" else {})
    config = ModelConfig(family=family, dim=96, heads=3, vocab_size=131, max_positions=128, **layers, **settings)
    return build(config).eval()


LLAMA: dict[str, Any] = {"norm": "rms", "position": "rotary", "activation": "swiglu", "bias": False, "kv_heads": 1}


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("kind", ["int8", "int4", "bf16"])
def test_quantized_steps_equal_the_dequantized_formula(family: str, kind: str) -> None:
    network = medium_network(family, **({} if family == "encoder-decoder" else LLAMA), tie="output")
    rows = rows_for(network.config, 1, count=8, max_length=40)
    dtype = {"int8": torch.int8, "int4": INT4, "bf16": torch.bfloat16}[kind]
    paged = PagedRows(NativeRunner(NativeNetwork(network, dtype, torch.float32), 80, 16), rows, random.Random(1))
    logits = paged.runner.logits(paged.inputs({n: row[1] for n, row in enumerate(rows)}, dict.fromkeys(range(8), 0)))
    rounded = rounded_network(network, kind)
    expected = torch.cat([expected_logits(rounded, row) for row in rows])
    error = (logits - expected).abs() / expected.abs().max()
    # An activation next to the middle of two integers may round either way, which then shows in its row.
    assert error.median() < 1e-3
    assert error.max() < 2e-2
    unrounded = torch.cat([expected_logits(network, row) for row in rows])
    assert (logits - expected).square().mean() < 0.05 * (logits - unrounded).square().mean()


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4])
def test_logits_are_the_same_bits_in_any_batch_chunk_and_number_of_threads(family: str, dtype: torch.dtype) -> None:
    network = NativeNetwork(medium_network(family, **({} if family == "encoder-decoder" else LLAMA)), dtype)
    rows = rows_for(network.config, 2, count=9, max_length=30)
    expected, threads = [], torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for row in rows:
            paged = PagedRows(NativeRunner(network, 10, 1), [row], random.Random(1))
            steps = [paged.runner.logits(paged.inputs({0: [token]}, {0: n})).clone() for n, token in enumerate(row[1])]
            expected.append(torch.cat(steps))
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            paged = PagedRows(NativeRunner(network, 80, 16), rows, random.Random(count), span=1 if count == 2 else 16)
            new = {n: row[1] for n, row in enumerate(rows)}
            assert torch.equal(paged.runner.logits(paged.inputs(new, dict.fromkeys(new, 0))), torch.cat(expected))
    finally:
        torch.set_num_threads(threads)


def test_tokens_are_chosen_as_by_the_reference_step() -> None:
    network = random_network("decoder", 24, decoder_layers=2)
    rows: list[Row] = [([], [3, 4, 5]), ([], [6]), ([], [7, 8])]
    draws = [[{}] * 3, [{"temperature": 1.0}] * 3, [{"repetition_penalty": 1.5}, {}, {"temperature": 0.7, "top_k": 3}]]
    for options in draws:
        outputs = []
        for runner in (
            native_runner(network),
            ReferenceRunner(network, PagedKVCache(network.config, 40, torch.float64, torch.device("cpu")), 16),
        ):
            paged: Any = PagedRows(runner, rows, random.Random(2))
            for number, (_, prompt) in enumerate(rows):
                runner.start_row(number, prompt, [])
            new, done, chosen = {n: row[1] for n, row in enumerate(rows)}, dict.fromkeys(range(3), 0), []
            for step in range(6):
                sampling = sampling_inputs(options, [5, 6, 7], num_new=[step] * 3)
                output = runner.launch(paged.inputs(new, done, every=False), sampling).result()
                assert output.finite == [True] * 3
                done = {n: done[n] + len(new[n]) for n in new}
                new = {n: [LAST_TOKEN] for n in new}
                chosen.append(output.tokens)
            outputs.append(chosen)
        assert outputs[0] == outputs[1]


def test_copied_slots_continue_like_the_original() -> None:
    paged = PagedRows(
        native_runner(random_network("decoder", 24, decoder_layers=2)), [([], [3, 4, 5])], random.Random(2)
    )
    paged.runner.logits(paged.inputs({0: [3, 4]}, {0: 0}))
    expected = paged.runner.logits(paged.inputs({0: [5]}, {0: 2}))
    [old], new = paged.tables[0], paged.units.pop()
    offsets = np.arange(2, dtype=np.int32)
    paged.runner.copy_slots(old * PAGE_SIZE + offsets, new * PAGE_SIZE + offsets)
    paged.tables[0] = [new]
    assert torch.equal(paged.runner.logits(paged.inputs({0: [5]}, {0: 2})), expected)


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_nan_in_freed_pages_and_in_other_rows_stays_there(family: str) -> None:
    network = medium_network(family)
    runner, rows = native_runner(network), rows_for(network.config, 3, count=3, max_length=20)
    for pool in (*runner.cache.keys, *runner.cache.values):
        pool[PAGE_SIZE:] = torch.nan
    paged = PagedRows(runner, rows, random.Random(1))
    inputs = paged.inputs({row: rows[row][1] for row in range(3)}, dict.fromkeys(range(3), 0))
    assert runner.logits(inputs).isfinite().all()
    for pool in (*runner.cache.keys, *runner.cache.values):
        pool[inputs.slots[0]] = torch.nan  # the first row's
    new = {row: [5] for row in range(3)}
    sampling = sampling_inputs([{}] * 3, [0] * 3)
    output = runner.launch(paged.inputs(new, {row: len(rows[row][1]) for row in range(3)}), sampling).result()
    assert output.finite == [False, True, True]


def test_indices_out_of_range_are_refused() -> None:
    runner = native_runner(medium_network("decoder"))
    paged = PagedRows(runner, [([], [3, 4, 5])], random.Random(2))
    inputs = paged.inputs({0: [3, 4, 5]}, {0: 0})
    for field, bad in (("ids", 131), ("ids", -2), ("rows", 1), ("positions", 128), ("slots", 640), ("table", 40)):
        values = getattr(inputs, field).copy()
        values[..., -1] = bad
        with pytest.raises(ValueError, match="out of range"):
            runner.logits(dataclasses.replace(inputs, **{field: values}))
    with pytest.raises(ValueError, match="out of range"):
        runner.logits(dataclasses.replace(inputs, outputs=np.array([3], np.int32)))


def test_runners_in_two_threads_give_the_same_logits_as_alone() -> None:
    network = NativeNetwork(medium_network("encoder-decoder"), torch.int8)
    rows = rows_for(network.config, 4, count=5, max_length=30)

    def work(seed: int) -> torch.Tensor:
        paged = PagedRows(NativeRunner(network, 60, 8), rows, random.Random(seed))
        new = {n: row[1] for n, row in enumerate(rows)}
        return [paged.runner.logits(paged.inputs(new, dict.fromkeys(new, 0))) for _ in range(30)][-1]

    expected = work(0)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(logits, expected) for logits in pool.map(work, range(6)))


def test_networks_that_it_cannot_run_are_refused_with_a_reason() -> None:
    assert native_refuses(medium_network("decoder")) is None
    assert native_refuses(medium_network("decoder"), torch.int8) is None
    assert "float64" in str(native_refuses(random_network("decoder", 24, decoder_layers=1)))
    assert "decoders" in str(
        native_refuses(build(ModelConfig(family="encoder", dim=8, heads=2, encoder_layers=1, vocab_size=9)))
    )
    replaced = medium_network("decoder")
    replaced.decoder.layers[0].attention.query = RoundedLinear(replaced.decoder.layers[0].attention.query, "int8")
    assert "RoundedLinear" in str(native_refuses(replaced))
    watched = medium_network("decoder")
    watched.decoder.register_forward_hook(lambda *_: None)
    assert "hooks" in str(native_refuses(watched))


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4])
def test_beams_are_the_same_alone_in_a_batch_and_with_two_workers(family: str, dtype: torch.dtype) -> None:
    network = NativeNetwork(medium_network(family, **({} if family == "encoder-decoder" else LLAMA)), dtype)
    rows = rows_for(network.config, 3, count=12, max_length=20)
    config = GenerationConfig(beam=4, n_best=4, max_new_tokens=12, logprobs=True, batch_size=5, length_penalty=0.8)
    together, threads = search(network, rows, config), torch.get_num_threads()
    assert len({tuple(output.ids) for outputs in together for output in outputs}) > 12
    try:
        torch.set_num_threads(2)
        assert search(network, rows, config.model_copy(update={"workers": 2, "batch_size": 3})) == together
    finally:
        torch.set_num_threads(threads)
    assert [search(network, [row], config)[0] for row in rows] == together


SEARCHES = st.sampled_from(
    [
        GenerationConfig(beam=4, n_best=4, max_new_tokens=7, min_new_tokens=3, banned_ids=((3,), (4, 5))),
        GenerationConfig(beam=3, n_best=2, max_new_tokens=7, length_penalty=0.6, early_stopping="never"),
        GenerationConfig(max_new_tokens=9),
        GenerationConfig(max_new_tokens=9, temperature=1.2, top_k=9, samples=2, repetition_penalty=1.3),
    ]
)


@FEW
@given(generative_configs, st.integers(0, 99), SEARCHES, st.sampled_from(["none", "lookup", "model"]))
def test_native_searches_equal_those_of_the_reference_step(
    config: ModelConfig, seed: int, settings: GenerationConfig, kind: str
) -> None:
    network, rows = random_model(config), rows_for(config, seed)
    packed = NativeNetwork(network)
    drafts = {"lookup": PromptLookup(num_draft_tokens=4), "model": DraftModel(packed)}
    outputs = search(packed, rows, settings, draft=drafts.get(kind) if settings.beam == 1 else None)
    same = [a[0].ids == b[0].ids for a, b in zip(outputs, search(network, rows, settings), strict=True)]
    assert same.count(False) <= 1, "fp32 and float64: rounding may decide a near tie"
