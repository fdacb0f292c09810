"""The reference step over pages gives the logits of the network, however rows and tokens are arranged."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import ModelConfig
from clearhead.inference import optimize_for_inference
from clearhead.inference.reference_step import ReferenceRunner
from clearhead.inference.step import LAST_TOKEN, PAGE_SIZE, EncodeInputs, PagedKVCache, StepInputs
from clearhead.model import build
from tests.inference.random_models import FEW, generative_configs, random_model, random_network, rows_for
from tests.inference.reference import Row
from tests.inference.test_choose_tokens import sampling_inputs


class PagedRows:
    """Rows with pages in random order, for any StepRunner."""

    def __init__(self, runner: Any, rows: list[Row], draw: random.Random, span: int = PAGE_SIZE):
        self.runner, self.rows, self.span, self.draw = runner, rows, span, draw
        pages = list(range(1, runner.cache.pages))
        draw.shuffle(pages)
        self.sources = [[pages.pop() for _ in range(-(-len(source) // PAGE_SIZE))] for source, _ in rows]
        self.units = pages if span == PAGE_SIZE else [page * PAGE_SIZE + slot for page in pages for slot in range(16)]
        draw.shuffle(self.units)
        self.tables: list[list[int]] = [[] for _ in rows]
        if rows[0][0]:
            runner.encode(EncodeInputs([source for source, _ in rows], self.sources))

    def inputs(self, new: dict[int, list[int]], done: dict[int, int], every: bool = True) -> StepInputs:
        """The step of some tokens of some rows, each after its first `done` tokens."""
        chosen = list(new)
        rows = np.concatenate([np.full(len(new[row]), at) for at, row in enumerate(chosen)])
        positions = np.concatenate([done[row] + np.arange(len(new[row])) for row in chosen])
        for row in chosen:
            while len(self.tables[row]) * self.span < done[row] + len(new[row]):
                self.tables[row].append(self.units.pop())
        slots = [
            self.tables[chosen[at]][p // self.span] * self.span + p % self.span
            for at, p in zip(rows, positions, strict=True)
        ]
        ends = np.cumsum([len(new[row]) for row in chosen])
        sources = [self.sources[row] for row in chosen] if self.rows[0][0] else None
        return StepInputs(
            ids=np.concatenate([new[row] for row in chosen]).astype(np.int32),
            rows=rows.astype(np.int32),
            positions=positions.astype(np.int32),
            slots=np.array(slots, np.int32),
            outputs=np.arange(len(rows) if every else 0, dtype=np.int32) if every else (ends - 1).astype(np.int32),
            numbers=np.array(chosen, np.int32),
            table=padded([self.tables[row] for row in chosen]),
            span=self.span,
            source_table=None if sources is None else padded(sources),
            source_lengths=None
            if sources is None
            else np.array([len(self.rows[row][0]) for row in chosen], dtype=np.int32),
        )


def padded(tables: list[list[int]]) -> Any:
    width = max(map(len, tables))
    return np.array([[*table, *[0] * (width - len(table))] for table in tables], np.int32)


def small_network(family: str) -> Any:
    torch.manual_seed(5)
    return random_network(family, 24, decoder_layers=2, **({"encoder_layers": 1} if family != "decoder" else {}))


def runner_for(network: Any, pages: int = 40, rows: int = 16) -> ReferenceRunner:
    dtype = next(network.parameters()).dtype
    return ReferenceRunner(network, PagedKVCache(network.config, pages, dtype, torch.device("cpu")), rows)


def expected_logits(network: Any, row: Row) -> torch.Tensor:
    source, ids = row
    with torch.no_grad():
        return (network(torch.tensor([source]), torch.tensor([ids])) if source else network(torch.tensor([ids])))[0]


@FEW
@given(generative_configs, st.integers(0, 1 << 20), st.sampled_from([1, PAGE_SIZE]))
def test_chunks_and_tokens_of_any_rows_give_the_logits_of_the_network(
    config: ModelConfig, seed: int, span: int
) -> None:
    network, draw = random_model(config), random.Random(seed)
    rows = rows_for(config, seed, count=6, max_length=min(40, config.max_positions))
    paged, done = PagedRows(runner_for(network), rows, draw, span), dict.fromkeys(range(len(rows)), 0)
    expected = [expected_logits(network, row) for row in rows]
    while left := [row for row in done if done[row] < len(rows[row][1])]:
        chosen = draw.sample(left, draw.randint(1, len(left)))
        new = {row: rows[row][1][done[row] : done[row] + draw.choice([1, 1, 2, 5, 40])] for row in chosen}
        logits = paged.runner.logits(paged.inputs(new, done))
        wanted = torch.cat([expected[row][done[row] : done[row] + len(new[row])] for row in chosen])
        torch.testing.assert_close(logits, wanted.to(logits.dtype), rtol=1e-6, atol=1e-6)
        for row in chosen:
            done[row] += len(new[row])


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_nan_in_freed_pages_and_in_other_rows_stays_there(family: str) -> None:
    network, draw = small_network(family), random.Random(1)
    rows = rows_for(network.config, 3, count=3, max_length=20)
    runner = runner_for(network)
    for pool in (*runner.cache.keys, *runner.cache.values):
        pool[PAGE_SIZE:] = torch.nan
    paged = PagedRows(runner, rows, draw)
    logits = runner.logits(paged.inputs({row: rows[row][1] for row in range(3)}, dict.fromkeys(range(3), 0)))
    assert logits.isfinite().all()


OPTIMIZED = [
    {"kv_heads": 2, "norm": "rms", "norm_position": "pre", "position": "rotary", "activation": "swiglu", "bias": False},
    {"family": "encoder-decoder", "encoder_layers": 1},
]


@pytest.mark.parametrize("options", OPTIMIZED, ids=["llama", "translator"])
def test_optimized_networks_run_on_the_same_step(options: dict[str, Any]) -> None:
    """Their decode layers take over where a single row has one token."""
    torch.manual_seed(3)
    sizes = {"family": "decoder", "dim": 32, "heads": 4, "decoder_layers": 2, "vocab_size": 30, "max_positions": 64}
    network = build(ModelConfig(**(sizes | options))).eval()
    source = [5, 6, 7] if "encoder_layers" in options else []
    rows: list[Row] = [(source, [3, 4, 5, 6, 7]), (source, [8, 9]), (source, [4])]
    for optimized in (optimize_for_inference(network), network):
        paged, done = PagedRows(runner_for(optimized), rows, random.Random(2)), {0: 0, 1: 0}
        paged.runner.logits(paged.inputs({0: [3, 4, 5, 6], 1: [8]}, done))
        for row, token in ((0, 7), (1, 9), (2, 4)):
            logits = paged.runner.logits(paged.inputs({row: [token]}, {0: 4, 1: 1, 2: 0}))
            torch.testing.assert_close(logits[0], expected_logits(network, rows[row])[-1], rtol=1e-4, atol=1e-5)


def test_the_last_token_of_a_row_need_not_be_known() -> None:
    network = small_network("decoder")
    rows: list[Row] = [([], [3, 4, 5]), ([], [6])]
    paged, done = PagedRows(runner_for(network), rows, random.Random(2)), {0: 0, 1: 0}
    sampling = sampling_inputs([{}, {}], [0, 0])
    output = paged.runner.launch(paged.inputs({0: [3, 4, 5], 1: [6]}, done, every=False), sampling).result()
    done = {0: 3, 1: 1}
    known = paged.runner.logits(paged.inputs({row: [output.tokens[row]] for row in (0, 1)}, done))
    unknown = paged.runner.logits(paged.inputs({0: [LAST_TOKEN], 1: [LAST_TOKEN]}, done))
    assert torch.equal(known, unknown)


def test_copied_slots_continue_like_the_original() -> None:
    network = small_network("decoder")
    paged = PagedRows(runner_for(network), [([], [3, 4, 5])], random.Random(2))
    paged.runner.logits(paged.inputs({0: [3, 4]}, {0: 0}))
    expected = paged.runner.logits(paged.inputs({0: [5]}, {0: 2}))
    [old], new = paged.tables[0], paged.units.pop()
    offsets = np.arange(2, dtype=np.int32)
    paged.runner.copy_slots(old * PAGE_SIZE + offsets, new * PAGE_SIZE + offsets)
    paged.tables[0] = [new]
    assert torch.equal(paged.runner.logits(paged.inputs({0: [5]}, {0: 2})), expected)
