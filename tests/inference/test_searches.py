"""Searches hold against the same searches written out plainly, on random models of both families in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference import beam_search as beam_module
from clearhead.inference import generation_batch as rows_module
from clearhead.inference import stream
from clearhead.model import build
from tests.inference.random_writers import FEW, rows_for, same, sharpened, writers
from tests.inference.reference import BEGIN, END, Row, beam, exhaustive, greedy, search, whole


@FEW
@given(writers, st.integers(0, 99))
def test_greedy_is_the_plain_search(config: ModelConfig, seed: int) -> None:
    network, rows = sharpened(config), rows_for(config, seed)
    for row, [found] in zip(
        rows, search(network, rows, GenerationConfig(max_new_tokens=9, logprobs=True)), strict=True
    ):
        text, total = greedy(network, row, 9)
        assert whole(found) == text
        assert found.score == pytest.approx(total / len(text), abs=1e-5)
        assert len(found.logprobs) == len(text)


@FEW
@given(
    writers,
    st.integers(0, 99),
    st.sampled_from([2, 3, 5]),
    st.sampled_from([0.0, 0.6, 1.0, 2.0, -1.0]),
    st.sampled_from(["power", "gnmt"]),
    st.sampled_from(["full", "likely", "never"]),
)
def test_beam_search_is_the_plain_search(
    config: ModelConfig, seed: int, dim: int, penalty: float, form: str, early: str
) -> None:
    network, rows = sharpened(config), rows_for(config, seed, count=3)
    settings = GenerationConfig(
        max_new_tokens=6,
        beam=dim,
        n_best=dim,
        length_penalty=penalty,
        length_form=form,
        early_stopping=early,
        logprobs=True,
    )
    for row, found in zip(rows, search(network, rows, settings), strict=True):
        expected = beam(network, row, settings)
        assert [whole(output) for output in found] == [text for text, _ in expected]
        assert [output.score for output in found] == pytest.approx([score for _, score in expected], abs=1e-9)
        for output in found:  # the parts add up to the whole
            length = len(output.logprobs)
            divisor = ((5 + length) / 6 if form == "gnmt" else length) ** penalty
            assert sum(output.logprobs) / divisor == pytest.approx(output.score, abs=1e-9)


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beam_search_of_full_width_is_exhaustive_search(family: str, penalty: float) -> None:
    layers = {"decoder_layers": 2} | ({"encoder_layers": 2} if family == "encoder-decoder" else {})
    config = ModelConfig(family=family, dim=8, heads=2, vocab_size=4, max_positions=16, **layers)
    network = _tiny(config)
    row = ([3, 2, 1], [BEGIN]) if family == "encoder-decoder" else ([], [2, 3])
    settings = GenerationConfig(max_new_tokens=3, beam=64, n_best=64, length_penalty=penalty, early_stopping="never")
    [found] = search(network, [row], settings)
    expected = exhaustive(network, row, settings, words=4)
    assert len(expected) == 1 + 3 + 9 * 4
    assert [whole(output) for output in found] == [text for text, _ in expected]
    assert [output.score for output in found] == pytest.approx([score for _, score in expected], abs=1e-9)
    [[best]] = search(network, [row], settings.model_copy(update={"n_best": 1}))
    assert whole(best) == expected[0][0]


def _tiny(config: ModelConfig) -> Any:
    network = build(config).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return network


SETTINGS = st.sampled_from(
    [
        GenerationConfig(max_new_tokens=8, logprobs=True),
        GenerationConfig(max_new_tokens=8, temperature=1.3, top_k=9, top_p=0.9, min_p=0.02, logprobs=True),
        GenerationConfig(max_new_tokens=8, temperature=0.7, samples=3, repetition_penalty=1.2, presence_penalty=0.5),
        GenerationConfig(max_new_tokens=8, beam=3, n_best=2, logprobs=True),
        GenerationConfig(
            max_new_tokens=8, beam=4, n_best=4, no_repeat_ngram_size=2, banned_ids=((3,), (4, 5)), forced_ids=((7, 8),)
        ),
    ]
)


@FEW
@given(writers, st.integers(0, 99), SETTINGS)
def test_a_row_never_depends_on_its_batch_mates(config: ModelConfig, seed: int, settings: GenerationConfig) -> None:
    network, rows, seeds = sharpened(config), rows_for(config, seed, count=6), [5, 6, 5, 2**40, 0, 9]
    together = search(network, rows, settings, seeds=seeds)
    alone = [search(network, [row], settings, seeds=[own])[0] for row, own in zip(rows, seeds, strict=True)]
    assert same(together, alone)
    order = [3, 0, 5, 1, 4, 2]
    turned = search(network, [rows[n] for n in order], settings, seeds=[seeds[n] for n in order])
    assert same(turned, [alone[n] for n in order])


@FEW
@given(writers, st.integers(0, 99), SETTINGS, st.integers(1, 60), st.integers(1, 4))
def test_sorted_batches_give_what_one_by_one_gives(
    config: ModelConfig, seed: int, settings: GenerationConfig, tokens: int, most: int
) -> None:
    network, rows = sharpened(config), rows_for(config, seed, count=7)
    small = settings.model_copy(update={"batch_tokens": tokens, "batch_rows": most})
    assert same(search(network, rows, small), search(network, rows, settings))


@FEW
@given(writers, st.integers(0, 99), SETTINGS)
def test_rows_that_leave_give_what_rows_that_stay_give(
    config: ModelConfig, seed: int, settings: GenerationConfig
) -> None:
    network, rows, found = sharpened(config), rows_for(config, seed, count=6), []
    for worth, every in ((1.0, 1), (0.0, 1), (0.75, 3)):  # leave at once, stay to the last, be looked at seldom
        with pytest.MonkeyPatch.context() as patch:
            for module in (rows_module, beam_module):
                patch.setattr(module, "WORTH_DROPPING", worth)
                patch.setattr(module, "sync_interval", lambda device, every=every: every)
            found.append(search(network, rows, settings))
    assert same(found[1], found[0])
    assert same(found[2], found[0])


@FEW
@given(writers, st.integers(0, 99), st.sampled_from([0.0, 1.0]))
def test_a_stream_gives_the_text_of_the_search(config: ModelConfig, seed: int, temperature: float) -> None:
    network = sharpened(config)
    [(source, prompt)] = rows = rows_for(config, seed, count=1)
    settings = GenerationConfig(max_new_tokens=9, temperature=temperature)
    [[found]] = search(network, rows, settings, seeds=[seed])
    pieces = stream(network, prompt, settings, end=END, seed=seed, source=source or None)
    assert list(pieces) == found.ids


@pytest.mark.parametrize("dim", [1, 3])
def test_texts_end_where_the_positions_of_the_model_end(dim: int) -> None:
    config = ModelConfig(family="decoder", decoder_layers=1, dim=8, heads=2, vocab_size=11, max_positions=10)
    network, settings = _tiny(config), GenerationConfig(max_new_tokens=20, min_new_tokens=20, beam=dim)
    rows: list[Row] = [([], [1] * 10), ([], [2] * 4), ([], [3] * 9), ([], [4])]
    found = search(network, rows, settings)
    # Nothing is read after the last token, so that it needs no position.
    assert [len(outputs[0].ids) for outputs in found] == [1, 7, 2, 10]
    assert not any(output.finished for outputs in found for output in outputs)
    assert same(found, [search(network, [row], settings)[0] for row in rows])
