"""What cannot be done is refused in words; what is cut into batches is all there, in order."""

import signal
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig, ModelConfig, preset
from clearhead.errors import ConfigError, UserError
from clearhead.inference import StopStrings, generate, stream, translate
from clearhead.inference.batches import MOST, batches, in_batches, raise_if_cancelled
from clearhead.inference.generate import ROWS, rows_that_fit
from clearhead.model import KVCache, TreeCache, build
from clearhead.text import train

CONFIG = GenerationConfig(max_new_tokens=4)


def gpt() -> Any:
    config = ModelConfig(family="decoder", decoder_layers=1, dim=8, heads=2, vocab_size=12, max_positions=8)
    return build(config).eval()


def translator() -> Any:
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    return build(ModelConfig(family="encoder-decoder", dim=8, heads=2, vocab_size=12, **layers)).eval()


@pytest.mark.parametrize(
    ("prompts", "options", "says"),
    [
        ([[1], []], {}, "prompt 2 is empty"),
        ([[1] * 9], {}, "prompt 1 has 9 tokens, but the model has 8 positions"),
        ([[1, 12]], {}, "token 12 is outside the vocabulary of 12"),
        ([[-1]], {}, "token -1 is outside"),
        ([[1]], {"end": 12}, "end: token 12 is outside"),
        ([[1]], {"seeds": [1, 2]}, "1 prompts, but 2 seeds"),
        ([[1]], {"seeds": [1 << 63]}, "a seed is a whole number of 64 bits"),
        ([[1]], {"config": GenerationConfig(banned_ids=((3, 99),))}, "banned: token 99"),
        ([[1]], {"config": GenerationConfig(forced_ids=((99,),))}, "forced: token 99"),
    ],
)
def test_wrong_prompts_and_options_are_refused(prompts: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        generate(gpt(), prompts, options.pop("config", CONFIG), **({"end": 0} | options))


def test_nothing_gives_nothing() -> None:
    assert generate(gpt(), [], CONFIG, end=0) == []
    assert translate(translator(), [], CONFIG, begin=1, end=0) == []


def test_a_training_network_is_refused() -> None:
    with pytest.raises(ValueError, match="eval"):
        generate(gpt().train(), [[1]], CONFIG, end=0)


def test_prefixes_are_one_for_each_source() -> None:
    with pytest.raises(ValueError, match="2 sources, but 1 prefixes"):
        translate(translator(), [[1], [2]], CONFIG, begin=1, end=0, prefixes=[[3]])


def test_beams_take_neither_stops_nor_streams() -> None:
    stops = StopStrings(["x"], train(["some text"], "char", 20))
    with pytest.raises(UserError, match="beam=1"):
        generate(gpt(), [[1]], GenerationConfig(beam=2), end=0, stops=stops)
    with pytest.raises(UserError, match="beam=1"):
        stream(gpt(), [1], GenerationConfig(beam=2), end=0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temprature": 1.0}, "did you mean temperature"),
        ({"temperature": -0.1}, "use 0 or more"),
        ({"temperature": 101.0}, "use at most 100"),
        ({"top_p": 0.0}, "use more than 0"),
        ({"beam": 0}, "use 1 or more"),
        ({"beam": 65}, "use at most 64"),
        ({"max_new_tokens": 1 << 21}, "use at most"),
        ({"beam": 2, "temperature": 1.0}, "temperature: 1, but beam search"),
        ({"beam": 2, "n_best": 3}, "n_best: 3 is more than the beam 2"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens: 9 is more than max_new_tokens 8"),
        ({"samples": 2}, "samples: 2, but without a temperature"),
        ({"forced": [[1, 2, 3]], "max_new_tokens": 3}, "forced: 4 tokens with the end"),
        ({"forced": [[1]], "banned": [[1]]}, "is banned too"),
        ({"banned": [[]]}, "banned.0: empty"),
        ({"banned": [[1 << 24]]}, "use less than"),
        ({"early_stopping": "always"}, "use full, likely or never"),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        GenerationConfig.build(settings, where="recipe.yaml")
    assert str(caught.value).startswith("recipe.yaml: ")


def test_words_come_as_lists_from_files() -> None:
    assert GenerationConfig.build({"banned": [[1, 2], [3]]}).banned_ids == ((1, 2), (3,))


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 100), st.integers(1, 9))
def test_batches_hold_every_row_once_within_their_bounds(lengths: list[int], tokens: int, rows: int) -> None:
    found = list(batches(lengths, tokens, rows))
    assert sorted(number for batch in found for number in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) <= rows
        assert len(batch) == 1 or len(batch) * max(lengths[number] for number in batch) <= tokens
    assert in_batches(lengths, tokens, rows, lambda batch: [-number for number in batch]) == [
        -number for number in range(len(lengths))
    ]


def test_without_a_number_there_is_a_worker_for_each_thread_and_batch_up_to_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def workers(batches: int, threads: int) -> tuple[int, set[int]]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        together, own = threading.Barrier(min(batches, threads, MOST), timeout=10), set[int]()
        monkeypatch.setattr(torch, "set_num_threads", lambda count: own.add(count))

        def work(batch: list[int]) -> list[int]:
            if batch[0] < together.parties:
                together.wait()  # for all of them: none begins before the others are there
            return [threading.get_ident()]

        return len(set(in_batches([1] * batches, 1, 1, work, 0))), own

    assert workers(8, threads=1) == (1, set())
    assert workers(1, threads=8) == (1, set())
    assert workers(2, threads=8) == (2, {4, 8})
    assert workers(9, threads=8) == (2, {4, 8})


def test_a_batch_has_as_many_rows_as_fit_into_the_cache_but_no_more_than_are_of_use() -> None:
    network = preset("transformer-base", ["vocab_size=100", "max_positions=512"])
    token = 6 * 2 * 512 * 4  # layers, keys and values, width, bytes
    config = GenerationConfig(beam=4, max_new_tokens=100)
    assert rows_that_fit(network, config, 20, 420 * token * 7) == 7
    assert rows_that_fit(network, config, 20, 1) == 1
    assert rows_that_fit(network, config, 20, 1 << 60) == ROWS
    endless = GenerationConfig(max_new_tokens=1 << 20)
    assert rows_that_fit(network, endless, 8, 520 * token * 3) == 3, "no text is longer than the model's positions"


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_compute_in_the_precision_of_the_one_who_asks(workers: int) -> None:
    def work(batch: list[int]) -> list[torch.dtype]:
        return [(torch.ones(1, 1) @ torch.ones(1, 1)).dtype]

    with torch.autocast("cpu", torch.bfloat16):
        assert in_batches([1, 1, 1], 1, 1, work, workers) == [torch.bfloat16] * 3
    assert in_batches([1, 1, 1], 1, 1, work, workers) == [torch.float32] * 3


def test_workers_leave_with_the_one_who_waits_for_them() -> None:
    left = []

    def work(batch: list[int]) -> list[int]:
        if batch == [1]:
            time.sleep(0.3)  # until everybody is at work
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            while True:
                raise_if_cancelled()
                time.sleep(0.01)
        finally:
            left.append(batch)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        in_batches([1] * 9, 1, 1, work, 2)
    assert len(left) == 2, "nobody begins another batch"
    assert time.monotonic() - begun < 20


def test_a_tree_takes_one_token_a_branch_for_as_many_steps_as_said() -> None:
    network = gpt()
    cache = KVCache(network.config, rows=2, capacity=8)
    with torch.no_grad():
        network(torch.tensor([[1, 2], [3, 4]]), cache=cache)
        tree = TreeCache(cache, branches=3, steps=2)
        with pytest.raises(ValueError, match="one token a branch"):
            network(torch.tensor([[1], [2]]), cache=tree)
        for _ in range(2):
            network(torch.ones(2, 3, dtype=torch.long), cache=tree)
        with pytest.raises(ValueError, match="fewer steps"):
            network(torch.ones(2, 3, dtype=torch.long), cache=tree)
