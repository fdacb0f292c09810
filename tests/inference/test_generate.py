"""Greedy search, sampling and beam search equal reference searches, on random models in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.inference import generate, stream
from clearhead.inference import generation_batch as batch_module
from clearhead.inference.beam_search import FinishedHypotheses
from clearhead.model import build
from tests.inference.random_models import FEW, generative_configs, random_model, random_network, rows_for, same_outputs
from tests.inference.reference import (
    BEGIN,
    END,
    Row,
    beam_search,
    exhaustive_search,
    greedy_search,
    next_logprobs,
    search,
    with_eos,
)


@FEW
@given(generative_configs, st.integers(0, 99))
def test_greedy_search_equals_the_reference(config: ModelConfig, seed: int) -> None:
    network, rows = random_model(config), rows_for(config, seed)
    for row, [output] in zip(
        rows, search(network, rows, GenerationConfig(max_new_tokens=9, logprobs=True)), strict=True
    ):
        tokens, total = greedy_search(network, row, 9)
        assert with_eos(output) == tokens
        assert output.score == pytest.approx(total / len(tokens), abs=1e-5)
        assert len(output.logprobs) == len(tokens)


@FEW
@given(
    generative_configs,
    st.integers(0, 99),
    st.sampled_from([2, 3, 5]),
    st.sampled_from([0.0, 0.6, 1.0, 2.0, -1.0]),
    st.sampled_from(["power", "gnmt"]),
    st.sampled_from(["full", "likely", "never"]),
)
def test_beam_search_equals_the_reference(
    config: ModelConfig, seed: int, beam: int, penalty: float, form: str, early: str
) -> None:
    network, rows = random_model(config), rows_for(config, seed, count=3)
    settings = GenerationConfig(
        max_new_tokens=6,
        beam=beam,
        n_best=beam,
        length_penalty=penalty,
        length_form=form,
        early_stopping=early,
        logprobs=True,
    )
    for row, outputs in zip(rows, search(network, rows, settings), strict=True):
        expected = beam_search(network, row, settings)
        assert [with_eos(output) for output in outputs] == [tokens for tokens, _ in expected]
        assert [output.score for output in outputs] == pytest.approx([score for _, score in expected], abs=1e-9)
        for output in outputs:
            length = len(output.logprobs)
            divisor = ((5 + length) / 6 if form == "gnmt" else length) ** penalty
            assert sum(output.logprobs) / divisor == pytest.approx(output.score, abs=1e-9)


def test_a_full_list_of_finished_hypotheses_keeps_the_highest_scores() -> None:
    finished = FinishedHypotheses(2, 2, np.float32)

    def merge(scores: list[list[float]], tokens: list[list[list[int]]]) -> None:
        ids = np.array(tokens)
        finished.merge(np.arange(2), np.array(scores, np.float32), np.ones((2, 2), bool), ids, -ids.astype(np.float32))

    merge([[-1.0, -3.0], [-4.0, -math.inf]], [[[1], [3]], [[4], [0]]])
    merge([[-2.0, -5.0], [-6.0, -0.5]], [[[2, 2], [5, 5]], [[6, 6], [7, 7]]])  # replaces the worst of a full list
    merge([[-9.0, -8.0], [-math.inf, -math.inf]], [[[8, 8, 8], [9, 9, 9]]] * 2)  # worse than a full list
    assert finished.scores.tolist() == [[-1.0, -2.0], [-0.5, -4.0]]
    config = GenerationConfig(beam=2, n_best=2, logprobs=True)
    outputs = [
        [(output.ids, output.score, output.logprobs) for output in finished.outputs(row, config)] for row in (0, 1)
    ]
    assert outputs[0] == [([], -1.0, [-1.0]), ([2], -2.0, [-2.0, -2.0])], "the last token is EOS"
    assert outputs[1] == [([7], -0.5, [-7.0, -7.0]), ([], -4.0, [-4.0])]


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beam_search_with_all_beams_is_exhaustive_search(family: str, penalty: float) -> None:
    layers = {"decoder_layers": 2} | ({"encoder_layers": 2} if family == "encoder-decoder" else {})
    config = ModelConfig(family=family, dim=8, heads=2, vocab_size=4, max_positions=16, **layers)
    network = _perturbed(config)
    row = ([3, 2, 1], [BEGIN]) if family == "encoder-decoder" else ([], [2, 3])
    settings = GenerationConfig(max_new_tokens=3, beam=64, n_best=64, length_penalty=penalty, early_stopping="never")
    [outputs] = search(network, [row], settings)
    expected = exhaustive_search(network, row, settings, vocab_size=4)
    assert len(expected) == 1 + 3 + 9 * 4
    assert [with_eos(output) for output in outputs] == [tokens for tokens, _ in expected]
    assert [output.score for output in outputs] == pytest.approx([score for _, score in expected], abs=1e-9)
    [[best]] = search(network, [row], settings.model_copy(update={"n_best": 1}))
    assert with_eos(best) == expected[0][0]


def _perturbed(config: ModelConfig) -> Any:
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
@given(generative_configs, st.integers(0, 99), SETTINGS)
def test_a_row_never_depends_on_its_batch_mates(config: ModelConfig, seed: int, settings: GenerationConfig) -> None:
    network, rows, seeds = random_model(config), rows_for(config, seed, count=6), [5, 6, 5, 2**40, 0, 9]
    together = search(network, rows, settings, seeds=seeds)
    alone = [search(network, [row], settings, seeds=[own])[0] for row, own in zip(rows, seeds, strict=True)]
    assert same_outputs(together, alone)
    order = [3, 0, 5, 1, 4, 2]
    reordered = search(network, [rows[n] for n in order], settings, seeds=[seeds[n] for n in order])
    assert same_outputs(reordered, [alone[n] for n in order])


@FEW
@given(generative_configs, st.integers(0, 99), SETTINGS, st.integers(1, 60), st.integers(1, 4))
def test_batch_limits_never_change_the_outputs(
    config: ModelConfig, seed: int, settings: GenerationConfig, batch_tokens: int, batch_size: int
) -> None:
    network, rows = random_model(config), rows_for(config, seed, count=7)
    small = settings.model_copy(update={"batch_tokens": batch_tokens, "batch_size": batch_size})
    assert same_outputs(search(network, rows, small), search(network, rows, settings))


@FEW
@given(generative_configs, st.integers(0, 99), SETTINGS)
def test_when_finished_rows_are_removed_never_changes_the_outputs(
    config: ModelConfig, seed: int, settings: GenerationConfig
) -> None:
    network, rows, outputs = random_model(config), rows_for(config, seed, count=6), []
    for threshold, interval in ((1.0, 1), (0.0, 1), (0.75, 3)):  # removed at once, at the end, rarely
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_module, "COMPACT_THRESHOLD", threshold)
            patch.setattr(batch_module, "sync_interval", lambda device, interval=interval: interval)
            outputs.append(search(network, rows, settings))
    assert same_outputs(outputs[1], outputs[0])
    assert same_outputs(outputs[2], outputs[0])


@FEW
@given(generative_configs, st.integers(0, 99), st.sampled_from([0.0, 1.0]))
def test_a_stream_equals_generate(config: ModelConfig, seed: int, temperature: float) -> None:
    network = random_model(config)
    [(source, prompt)] = rows = rows_for(config, seed, count=1)
    settings = GenerationConfig(max_new_tokens=9, temperature=temperature)
    [[output]] = search(network, rows, settings, seeds=[seed])
    tokens = stream(network, prompt, settings, eos_ids=END, seed=seed, source=source or None)
    assert list(tokens) == output.ids


@pytest.mark.parametrize("beam", [1, 3])
def test_rows_end_at_max_positions(beam: int) -> None:
    config = ModelConfig(family="decoder", decoder_layers=1, dim=8, heads=2, vocab_size=11, max_positions=10)
    network, settings = _perturbed(config), GenerationConfig(max_new_tokens=20, min_new_tokens=20, beam=beam)
    rows: list[Row] = [([], [1] * 10), ([], [2] * 4), ([], [3] * 9), ([], [4])]
    outputs = search(network, rows, settings)
    # The last token is never an input, so it needs no position.
    assert [len(row[0].ids) for row in outputs] == [1, 7, 2, 10]
    assert not any(output.finished for row in outputs for output in row)
    assert same_outputs(outputs, [search(network, [row], settings)[0] for row in rows])


def test_logprobs_are_those_of_the_unprocessed_logits() -> None:
    network = random_network("decoder", 300, decoder_layers=2)
    config = GenerationConfig(
        max_new_tokens=6, logprobs=True, temperature=2.0, top_k=40, repetition_penalty=1.5, banned_ids=((9,),)
    )
    prompts = [[5, 6], [7]]
    for prompt, [output] in zip(prompts, generate(network, prompts, config, eos_ids=2), strict=True):
        tokens = [*output.ids, 2] if output.finished else output.ids
        expected = [float(next_logprobs(network, ([], prompt), tokens[:n])[token]) for n, token in enumerate(tokens)]
        assert output.logprobs == pytest.approx(expected, abs=1e-5)
        assert output.score == pytest.approx(sum(expected) / len(tokens), abs=1e-5)


def test_samples_differ_and_the_first_equals_a_single_sample() -> None:
    network = random_network("decoder", 30, decoder_layers=1)
    config = GenerationConfig(max_new_tokens=10, temperature=1.0, samples=8)
    [samples] = generate(network, [[3, 4]], config, eos_ids=0, seeds=[11])
    [[single]] = generate(network, [[3, 4]], config.model_copy(update={"samples": 1}), eos_ids=0, seeds=[11])
    assert samples[0] == single
    assert len({tuple(output.ids) for output in samples}) > 5


def test_any_of_several_eos_ids_ends_a_row() -> None:
    network = random_network("decoder", 12, decoder_layers=1)
    for beam in (1, 3):
        config = GenerationConfig(max_new_tokens=20, beam=beam)
        [[endless]] = generate(network, [[3, 4]], config, eos_ids=[])
        assert len(endless.ids) == 20
        assert not endless.finished
    [[endless]] = generate(network, [[3, 4]], GenerationConfig(max_new_tokens=20), eos_ids=())
    eos_ids = (endless.ids[7], endless.ids[4])
    [[output]] = generate(network, [[3, 4]], GenerationConfig(max_new_tokens=20), eos_ids=eos_ids)
    first = min(endless.ids.index(eos) for eos in eos_ids)
    assert output.ids == endless.ids[:first]
    assert output.finished


def test_beam_search_with_several_eos_ids_gives_each_hypothesis_once() -> None:
    config = ModelConfig(family="decoder", dim=8, heads=2, vocab_size=5, max_positions=16, decoder_layers=2)
    network, eos_ids = _perturbed(config), (0, 2, 4, 2)
    settings = GenerationConfig(max_new_tokens=3, beam=64, n_best=64, early_stopping="never", logprobs=True)
    [outputs] = generate(network, [[2, 3]], settings, eos_ids=eos_ids)
    ids = [tuple(output.ids) for output in outputs]
    assert len({*ids}) == len(ids) == 1 + 2 + 4 + 8, "hypotheses of the two tokens that are not EOS"
    for output in outputs:
        ends = [next_logprobs(network, ([], [2, 3]), output.ids)[eos].item() for eos in (0, 2, 4)]
        assert not output.finished or output.logprobs[-1] == pytest.approx(max(ends), abs=1e-9), "the best EOS"
    [few] = generate(network, [[2, 3]], settings.model_copy(update={"beam": 4, "n_best": 4}), eos_ids=eos_ids)
    assert len({tuple(output.ids) for output in few}) == 4
