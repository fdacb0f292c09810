"""Triton decode attention tests that run in the interpreter, started by test_triton_decode_attention.py.

TRITON_INTERPRET=1 python -m pytest tests/ops/interpreted.py
"""

import random
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference import cuda_graph_replay as graphs
from clearhead.inference import generate, static_decoder
from clearhead.ops.triton import decode_attention as kernel
from clearhead.ops.triton.decode_attention import triton_decode_attention
from tests.inference.decode_attention_cases import check_case, random_case
from tests.inference.random_models import random_model, same_outputs
from tests.strategies import VOCABULARY

NO_SPLIT, FIVE_SPLITS = (16, 1), (16, 5)  # block size in slots, splits
EDGES = [0, 1, 15, 16, 17, 80, 97, 129]


@pytest.fixture(autouse=True)
def bf16_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert bf16 to fp32 in tl.dot: the interpreter stores bf16 as integers and would multiply those."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return TensorHandle(np.matmul(a.data, b.data, dtype=np.float32) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [NO_SPLIT, (64, 1), FIVE_SPLITS, (32, 2)])
def test_the_kernel_equals_the_reference_at_every_block_edge(
    monkeypatch: pytest.MonkeyPatch, splits: tuple[int, int], dtype: torch.dtype, rotated: bool
) -> None:
    monkeypatch.setattr(kernel, "split_cache", lambda keys: splits)
    check_case(random_case((len(EDGES), 1, 130, 16), 4, EDGES, dtype, rotated))


@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("splits", [NO_SPLIT, FIVE_SPLITS])
def test_grouped_queries_of_any_size_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, splits: tuple[int, int], group: int
) -> None:
    monkeypatch.setattr(kernel, "split_cache", lambda keys: splits)
    check_case(random_case((2, 3, 64, 32), group, [0, 63]))


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 4])
def test_every_power_of_two_head_dim_equals_the_reference(dim: int, rows: int) -> None:
    check_case(random_case((rows, 2, 40, dim), 2, [33, 0, 39, 17][:rows], torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_is_split_for_a_single_row_but_not_for_large_batches(dtype: torch.dtype) -> None:
    lengths = [random.Random(row).randrange(130) for row in range(32)]
    batch, single = random_case((32, 4, 130, 16), 2, lengths, dtype), random_case((1, 4, 130, 16), 2, [129], dtype)
    assert kernel.split_cache(batch.keys)[1] == 1
    assert kernel.split_cache(single.keys)[1] == 5, "a split is at least one block"
    check_case(batch)
    check_case(single)


def test_large_scores_and_nan_propagate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "split_cache", lambda keys: FIVE_SPLITS)
    case = random_case((2, 1, 130, 16), 4, [90, 90])
    case.keys.mul_(200)  # softmax is nearly one-hot, at a slot of any split
    check_case(case)
    case.values[1, 0, 3, 5] = torch.nan
    out = triton_decode_attention(*case)
    assert out[1, :, 5].isnan().all()
    assert out.isnan().sum() == 4


@pytest.mark.parametrize("position", ["rotary", "learned"])
@pytest.mark.parametrize("rows", [1, 4])
def test_generation_with_the_kernel_equals_generation_without(
    monkeypatch: pytest.MonkeyPatch, position: str, rows: int
) -> None:
    shape = {"decoder_layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "max_positions": 64}
    network = random_model(ModelConfig(family="decoder", vocab_size=VOCABULARY, position=position, **shape)).float()
    prompts = [[3, 4, 5], [6], [7, 8], [9, 3, 4, 5]][:rows]
    settings = GenerationConfig(max_new_tokens=20, logprobs=True)
    expected = generate(network, prompts, settings, eos_ids=())
    monkeypatch.setattr(graphs, "MIN_SLOTS", 16)  # so few that the cache has to grow
    monkeypatch.setattr(static_decoder, "triton_works", lambda device: True)
    monkeypatch.setattr(static_decoder, "triton_decode_attention_supports", lambda heads, keys: calls.append(1) is None)
    calls: list[int] = []
    graphs._GRAPHS[network] = graphs.GraphCache(network, compiled=False)
    assert same_outputs(generate(network, prompts, settings, eos_ids=()), expected, within=1e-4)
    assert len(calls) == 2 * 19, "two layers, and every token but the first"
