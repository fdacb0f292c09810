"""Greedy and beam search equal transformers' generate on the same weights: tokens, order and scores.

CLEARHEAD_INPUTS=1000 compares that many random inputs of each family instead of 96.
"""

import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from clearhead.config import GenerationConfig
from clearhead.inference import GenerationOutput, generate, pack_for_steps, translate
from clearhead.ops.native.structs import step_library
from tests.inference.peers import PADDING, Pair, gpt2, llama, marian, padded, random_rows

INPUTS, ROWS, MAX_NEW_TOKENS, TOLERANCE = int(os.environ.get("CLEARHEAD_INPUTS", "96")), 16, 12, 1e-4
EARLY_STOPPING = {"likely": False, "full": True, "never": "never"}
BEAMS = list(product([4, 8], [1.0, 0.0, 0.6, 2.0, -0.5], EARLY_STOPPING))
PROCESSORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.3},
    "ngram": {"no_repeat_ngram_size": 2},
    "banned": {"banned_ids": ((3,), (5, 7), (11, 2, 9))},
    "minimum": {"min_new_tokens": 6},
}

families = pytest.mark.parametrize("make", [marian, gpt2, llama], ids=lambda make: make.__name__)
steps = pytest.mark.parametrize(
    "native",
    [False, pytest.param(True, marks=pytest.mark.skipif(step_library() is None, reason="not compiled here"))],
    ids=["reference", "native"],
)


def generate_ours(
    pair: Pair, rows: list[list[int]], config: GenerationConfig, native: bool = False
) -> list[list[GenerationOutput]]:
    """Run our search; padding is banned for Marian."""
    network = pack_for_steps(pair.ours, None) if native else pair.ours
    assert network is not None
    if pair.theirs.config.is_encoder_decoder:
        config = config.model_copy(update={"banned_ids": (*config.banned_ids, (PADDING,))})
        return translate(network, rows, config, bos_id=PADDING, eos_ids=pair.end)
    return generate(network, rows, config, eos_ids=pair.end)


def generate_theirs(pair: Pair, rows: list[list[int]], **options: Any) -> Iterator[list[tuple[list[int], float]]]:
    """Run transformers; yield tokens, EOS included, and scores."""
    translator = pair.theirs.config.is_encoder_decoder
    ids, attention_mask = padded(rows, left=not translator)
    if translator:
        options["bad_words_ids"] = [*options.get("bad_words_ids", []), [PADDING]]
    beams = options["num_beams"]
    result = pair.theirs.generate(
        input_ids=ids,
        attention_mask=attention_mask,
        do_sample=False,
        eos_token_id=pair.end,
        pad_token_id=PADDING,
        max_new_tokens=MAX_NEW_TOKENS,
        return_dict_in_generate=True,
        output_scores=True,
        num_return_sequences=beams,
        **options,
    )
    scores = result.sequences_scores.tolist() if beams > 1 else greedy_scores(pair, result)
    prompt_length = 1 if translator else ids.shape[1]
    for first in range(0, len(rows) * beams, beams):
        indices = range(first, first + beams)
        yield [(until_eos(result.sequences[n, prompt_length:].tolist(), pair.end), scores[n]) for n in indices]


def greedy_scores(pair: Pair, result: Any) -> list[float]:
    """The mean logprob of each output of transformers' greedy search."""
    logprobs = pair.theirs.compute_transition_scores(result.sequences, result.scores, normalize_logits=True)
    new = result.sequences[:, -logprobs.shape[1] :]
    until = (new == pair.end).long().cumsum(dim=1) - (new == pair.end).long() == 0
    return ((logprobs * until).sum(dim=1) / until.sum(dim=1)).tolist()


def until_eos(ids: list[int], end: int) -> list[int]:
    """Return ids up to EOS, which removes padding."""
    return ids[: ids.index(end) + 1] if end in ids else ids


def with_eos(pair: Pair, output: GenerationOutput) -> list[int]:
    return [*output.ids, pair.end] if output.finished else output.ids


def batches(pair: Pair) -> Iterator[list[list[int]]]:
    for _ in range(0, INPUTS, ROWS):
        rows = random_rows(ROWS)
        yield [[*row, pair.end] for row in rows] if pair.theirs.config.is_encoder_decoder else rows


def logit_gap(pair: Pair, row: list[int], a: list[int], b: list[int]) -> float:
    """Return the difference of the logits of the first tokens in which two greedy outputs differ."""
    position = next(n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    with torch.no_grad():
        if pair.theirs.config.is_encoder_decoder:
            logits = pair.ours(torch.tensor([row]), torch.tensor([[PADDING, *a[:position]]]))[0, -1]
        else:
            logits = pair.ours(torch.tensor([[*row, *a[:position]]]))[0, -1]
    return float((logits[a[position]] - logits[b[position]]).abs())


@families
@steps
def test_greedy_search_gives_the_same_tokens_and_scores(make: Callable[[], Pair], native: bool) -> None:
    pair, near_ties, finished = make(), 0, 0
    # Their scores are those of processed logits, ours of unprocessed ones; without processors they are equal.
    config = GenerationConfig(max_new_tokens=MAX_NEW_TOKENS, logprobs=True)
    for rows in batches(pair):
        ours, theirs = generate_ours(pair, rows, config, native), generate_theirs(pair, rows, num_beams=1)
        for row, [output], [(tokens, score)] in zip(rows, ours, theirs, strict=True):
            our_tokens = with_eos(pair, output)
            finished += output.finished
            if our_tokens != tokens:
                assert logit_gap(pair, row, our_tokens, tokens) < TOLERANCE
                near_ties += 1
            elif make is not marian:  # for which padding is banned
                assert output.score == pytest.approx(score, abs=TOLERANCE)
            assert output.score == pytest.approx(sum(output.logprobs) / len(output.logprobs))
    print(f"{make.__name__}: {INPUTS} inputs, {near_ties} near ties, {finished} finished")
    assert near_ties <= INPUTS // 50
    assert INPUTS // 10 < finished < INPUTS, "some rows must end by EOS, some at the limit"


@families
@steps
def test_beam_search_gives_the_same_hypotheses_in_the_same_order(make: Callable[[], Pair], native: bool) -> None:
    pair, near_ties, outputs, finished = make(), 0, 0, 0
    for number, rows in enumerate(batches(pair)):
        for beam, penalty, early in BEAMS[number % 5 :: 5] if INPUTS < 1000 else BEAMS[number % 3 :: 3]:
            config = GenerationConfig(
                max_new_tokens=MAX_NEW_TOKENS, beam=beam, n_best=beam, length_penalty=penalty, early_stopping=early
            )
            options = {"num_beams": beam, "length_penalty": penalty, "early_stopping": EARLY_STOPPING[early]}
            both = zip(generate_ours(pair, rows, config, native), generate_theirs(pair, rows, **options), strict=True)
            for ours, theirs in both:
                expected = [score for _, score in theirs]
                assert [output.score for output in ours] == pytest.approx(expected, abs=TOLERANCE)
                for output, (tokens, _) in zip(ours, theirs, strict=True):
                    near_ties += with_eos(pair, output) != tokens  # equal scores in another order
                    outputs, finished = outputs + 1, finished + output.finished
    print(f"{make.__name__}: {INPUTS} inputs, {outputs} outputs, {near_ties} near ties, {finished} finished")
    assert near_ties <= outputs // 200
    assert outputs // 10 < finished < outputs, "some rows must end by EOS, some at the limit"


@families
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("settings", PROCESSORS.values(), ids=PROCESSORS)
def test_logits_processors_give_the_same_outputs(make: Callable[[], Pair], beam: int, settings: dict[str, Any]) -> None:
    pair = make()
    rows = next(batches(pair))
    config = GenerationConfig(max_new_tokens=MAX_NEW_TOKENS, beam=beam, n_best=beam, **settings)
    options = {name: value for name, value in settings.items() if name != "banned_ids"}
    if "banned_ids" in settings:
        options["bad_words_ids"] = [list(sequence) for sequence in settings["banned_ids"]]
    equal_lengths = pair.theirs.config.is_encoder_decoder or len({len(row) for row in rows}) == 1
    if equal_lengths or "no_repeat_ngram_size" not in settings:
        parts = [rows]
    else:  # theirs counts padding among the n-grams
        parts = [[row] for row in rows]
    same = 0
    for part in parts:
        theirs = generate_theirs(pair, part, num_beams=beam, **options)
        for outputs, expected in zip(generate_ours(pair, part, config), theirs, strict=True):
            same += [with_eos(pair, output) for output in outputs] == [tokens for tokens, _ in expected]
    assert same == len(rows)
