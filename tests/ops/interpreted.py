"""What holds of the kernel for one new token, on a CPU in Triton's interpreter: run by test_kernel.py.

TRITON_INTERPRET=1 python -m pytest tests/ops/interpreted.py
"""

import random
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference import generate
from clearhead.inference import replay as graphs
from clearhead.inference import static_decoder as joined
from clearhead.ops.triton import decode_attention as kernel
from clearhead.ops.triton.decode_attention import triton_decode_attention
from tests.inference.one_token import check, given
from tests.inference.random_writers import same, sharpened
from tests.strategies import VOCABULARY

ONE, MANY = (16, 1), (16, 5)  # slots at once, shares
EDGES = [0, 1, 15, 16, 17, 80, 97, 129]


@pytest.fixture(autouse=True)
def right_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bf16 as whole numbers, and would multiply those."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return TensorHandle(np.matmul(a.data, b.data, dtype=np.float32) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cut", [ONE, (64, 1), MANY, (32, 2)])
def test_it_finds_what_the_formula_finds_at_every_edge(
    monkeypatch: pytest.MonkeyPatch, cut: tuple[int, int], dtype: torch.dtype, rotated: bool
) -> None:
    monkeypatch.setattr(kernel, "cut", lambda keys: cut)
    check(given((len(EDGES), 1, 130, 16), 4, EDGES, dtype, rotated))


@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("cut", [ONE, MANY])
def test_any_number_of_queries_may_share_a_key(
    monkeypatch: pytest.MonkeyPatch, cut: tuple[int, int], group: int
) -> None:
    monkeypatch.setattr(kernel, "cut", lambda keys: cut)
    check(given((2, 3, 64, 32), group, [0, 63]))


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 4])
def test_heads_are_of_any_width_that_is_a_power_of_two(dim: int, rows: int) -> None:
    check(given((rows, 2, 40, dim), 2, [33, 0, 39, 17][:rows], torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_are_not_cut_up_and_a_single_one_is(dtype: torch.dtype) -> None:
    lengths = [random.Random(row).randrange(130) for row in range(32)]
    many, single = given((32, 4, 130, 16), 2, lengths, dtype), given((1, 4, 130, 16), 2, [129], dtype)
    assert kernel.cut(many.keys)[1] == 1
    assert kernel.cut(single.keys)[1] == 5, "a share is no less than what a program sees at once"
    check(many)
    check(single)


def test_scores_far_apart_and_a_nan_are_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "cut", lambda keys: MANY)
    case = given((2, 1, 130, 16), 4, [90, 90])
    case.keys.mul_(200)  # softmax is all but a choice, of a slot in any share
    check(case)
    case.values[1, 0, 3, 5] = torch.nan
    found = triton_decode_attention(*case)
    assert found[1, :, 5].isnan().all()
    assert found.isnan().sum() == 4


@pytest.mark.parametrize("position", ["rotary", "learned"])
@pytest.mark.parametrize("rows", [1, 4])
def test_steps_that_use_it_write_the_texts_of_the_ordinary_path(
    monkeypatch: pytest.MonkeyPatch, position: str, rows: int
) -> None:
    shape = {"decoder_layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "max_positions": 64}
    network = sharpened(ModelConfig(family="decoder", vocab_size=VOCABULARY, position=position, **shape)).float()
    prompts, settings = (
        [[3, 4, 5], [6], [7, 8], [9, 3, 4, 5]][:rows],
        GenerationConfig(max_new_tokens=20, logprobs=True),
    )
    expected = generate(network, prompts, settings, end=())
    monkeypatch.setattr(graphs, "FIRST_SLOTS", 16)  # so few that texts outgrow them
    monkeypatch.setattr(joined, "triton_works", lambda device: True)
    monkeypatch.setattr(joined, "kernel_supports", lambda heads, keys: calls.append(1) is None)
    calls: list[int] = []
    graphs._GRAPHS[network] = graphs.GraphCache(network, compiled=False)
    assert same(generate(network, prompts, settings, end=()), expected, within=1e-4)
    assert len(calls) == 2 * 19, "all layers, all tokens but the first"
