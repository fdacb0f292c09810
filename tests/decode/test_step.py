"""A step stands on its cache: grown or not, rewound or not, with decided rows in it or not, it says the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import DecodeConfig, ModelConfig
from clearhead.decode import Step
from clearhead.decode import beam as beam_module
from clearhead.model import Cache
from clearhead.model import cache as cache_module
from tests.decode.beside import marian, random_rows
from tests.decode.random_writers import FEW, rows_for, same, sharpened, writers
from tests.decode.test_parity_transformers import ours
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
            cache = Cache(config, rows=2, capacity=30)
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
    config = DecodeConfig(max_new_tokens=16, beam=3, n_best=3, early_stop=early, length_penalty=2.0)
    for worth in (1.0, 0.0):  # leave at once, stay to the last
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(beam_module, "WORTH_DROPPING", worth)
            found.append(ours(pair, rows, config))
    assert same(*found)
