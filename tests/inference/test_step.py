"""A step stands on its cache: grown or not, rewound or not, with decided rows in it or not, it says the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference import Step
from clearhead.inference import beam_search as beam_module
from clearhead.model import KVCache
from clearhead.model import cache as cache_module
from tests.inference.peers import marian, random_rows
from tests.inference.random_writers import FEW, rows_for, same, sharpened, writers
from tests.inference.test_parity_transformers import ours
from tests.strategies import configs


@FEW
@given(writers, st.integers(0, 99), st.lists(st.integers(1, 4), min_size=3, max_size=6))
def test_a_cache_that_grows_holds_what_a_large_one_holds(config: ModelConfig, seed: int, sizes: list[int]) -> None:
    network, rows, found = sharpened(config), rows_for(config, seed, count=3), []
    sources = [source for source, _ in rows] if config.family == "encoder-decoder" else None
    reading = torch.randint(23, (3, sum(sizes)))
    for first in (1, 64):
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(cache_module, "FIRST_SLOTS", first)
            step = Step(network, 3, 60)
            scores = [step.start([prompt for _, prompt in rows], sources)[:, None]]
            scores += [step.next(piece) for piece in reading.split(sizes, dim=1)]
            step.branch(2, 3)
            scores += [step.next(reading[:, :2]) for _ in range(3)]
            found.append(torch.cat(scores, dim=1))
    torch.testing.assert_close(*found, atol=1e-9, rtol=0)


@FEW
@given(configs(families=("decoder",)))
def test_padding_leaves_no_trace_in_a_cache_that_has_grown(config: ModelConfig) -> None:
    network, ids, found = sharpened(config), torch.randint(23, (2, 9)), []
    for first in (1, 64):
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(cache_module, "FIRST_SLOTS", first)
            cache = KVCache(config, rows=2, capacity=30)
            network(ids[:, :3], cache=cache)
            network(ids[:, 3:8], torch.tensor([5, 1]), cache=cache)
            found.append(network(ids[:, 8:], cache=cache))
    torch.testing.assert_close(*found, atol=1e-9, rtol=0)


@FEW
@given(writers, st.integers(0, 99), st.tuples(*[st.integers(0, 5)] * 3))
def test_what_was_rewound_leaves_no_trace(config: ModelConfig, seed: int, keep: tuple[int, ...]) -> None:
    network, rows = sharpened(config), rows_for(config, seed, count=3)
    prompts, sources = [prompt for _, prompt in rows], [source for source, _ in rows]
    right, wrong = torch.randint(23, (2, 3, 5))
    with torch.inference_mode():
        step = Step(network, 3, 60)
        step.start(prompts, sources)
        mixed = torch.where(torch.arange(5) < torch.tensor(keep)[:, None], right, wrong)
        step.next(mixed)
        step.rewind([len(prompt) + kept for prompt, kept in zip(prompts, keep, strict=True)])
        found = step.next(right[:, :1])
        for row, kept in enumerate(keep):
            alone = Step(network, 1, 60)
            alone.start([[*prompts[row], *right[row, :kept].tolist()]], sources[row : row + 1])
            torch.testing.assert_close(found[row], alone.next(right[row : row + 1, :1])[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("early", ["full", "likely"])
def test_a_decided_row_that_stays_takes_nothing_more(early: str) -> None:
    pair, found = marian(), []
    rows = random_rows(24)
    config = GenerationConfig(max_new_tokens=16, beam=3, n_best=3, early_stopping=early, length_penalty=2.0)
    for worth in (1.0, 0.0):  # leave at once, stay to the last
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(beam_module, "WORTH_DROPPING", worth)
            found.append(ours(pair, rows, config))
    assert same(*found)


@FEW
@given(writers, st.integers(0, 99), st.integers(0, 3), st.integers(0, 4), st.integers(0, 3))
def test_rows_that_join_and_leave_read_on_as_alone(
    config: ModelConfig, seed: int, num_draft_tokens: int, first: int, second: int
) -> None:
    """Two batches, one some tokens ahead, become one; two rows leave; the rest say what each says by itself."""
    network, rows = sharpened(config), rows_for(config, seed, count=6)
    reading = torch.randint(23, (6, num_draft_tokens + 3))
    order = list(range(6))

    def started(places: list[int]) -> Step:
        sources = [rows[place][0] for place in places] if config.family == "encoder-decoder" else None
        step = Step(network, len(places), 20)
        step.start([rows[place][1] for place in places], sources)
        return step

    with torch.inference_mode():
        step, late = started([0, 1, 2, 3]), started([4, 5])
        for column in range(num_draft_tokens):
            step.next(reading[:4, column, None])
        step.join(late, 30)
        scores = [step.next(reading[:, num_draft_tokens, None])]
        for place in (first, second):
            step.drop(place)
            order[place] = order[-1]
            order.pop()
        read = [len(rows[row][1]) + 1 + num_draft_tokens * (row < 4) for row in order]
        step.rewind(read)
        scores += [step.next(reading[order, num_draft_tokens + column, None]) for column in (1, 2)]
        for place, row in enumerate(order):
            alone = started([row])
            for column in range(num_draft_tokens if row < 4 else 0):
                alone.next(reading[row, None, column, None])
            expected = [alone.next(reading[row, None, num_draft_tokens + column, None])[0] for column in range(3)]
            found = [scores[0][row], scores[1][place], scores[2][place]]
            torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-9, rtol=0)
