"""Greedy and beam search give what transformers' generate gives on the same weights: texts, order and scores.

CLEARHEAD_INPUTS=1000 compares so many random inputs of each family instead of 96.
"""

import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from clearhead.config import GenerationConfig
from clearhead.inference import GenerationOutput, generate, translate
from tests.inference.peers import PADDING, Pair, gpt2, llama, marian, padded, random_rows

INPUTS, ROWS, LONGEST, NEAR = int(os.environ.get("CLEARHEAD_INPUTS", "96")), 16, 12, 1e-4
EARLY = {"likely": False, "full": True, "never": "never"}
BEAMS = list(product([4, 8], [1.0, 0.0, 0.6, 2.0, -0.5], EARLY))
PENALTIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.3},
    "ngram": {"no_repeat_ngram": 2},
    "banned": {"banned": ((3,), (5, 7), (11, 2, 9))},
    "minimum": {"min_new_tokens": 6},
}
NAMES = {"no_repeat_ngram": "no_repeat_ngram_size", "banned": "bad_words_ids"}

families = pytest.mark.parametrize("make", [marian, gpt2, llama], ids=lambda make: make.__name__)


def ours(pair: Pair, rows: list[list[int]], config: GenerationConfig) -> list[list[GenerationOutput]]:
    """Our search; Marian never writes padding."""
    if pair.theirs.config.is_encoder_decoder:
        config = config.model_copy(update={"banned": (*config.banned_ids, (PADDING,))})
        return translate(pair.ours, rows, config, begin=PADDING, end=pair.end)
    return generate(pair.ours, rows, config, end=pair.end)


def theirs(pair: Pair, rows: list[list[int]], **options: Any) -> Iterator[list[tuple[list[int], float]]]:
    """Texts and scores by transformers, texts with their end."""
    translator = pair.theirs.config.is_encoder_decoder
    ids, real = padded(rows, left=not translator)
    if translator:
        options["bad_words_ids"] = [*options.get("bad_words_ids", []), [PADDING]]
    beams = options["num_beams"]
    found = pair.theirs.generate(
        input_ids=ids,
        attention_mask=real,
        do_sample=False,
        eos_token_id=pair.end,
        pad_token_id=PADDING,
        max_new_tokens=LONGEST,
        return_dict_in_generate=True,
        output_scores=True,
        num_return_sequences=beams,
        **options,
    )
    scores = found.sequences_scores.tolist() if beams > 1 else greedy_scores(pair, found)
    prompt = 1 if translator else ids.shape[1]
    for first in range(0, len(rows) * beams, beams):
        best = range(first, first + beams)
        yield [(cut(found.sequences[n, prompt:].tolist(), pair.end), scores[n]) for n in best]


def greedy_scores(pair: Pair, found: Any) -> list[float]:
    """The mean log-probability of each text, from the logits that transformers' greedy search saw."""
    steps = pair.theirs.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    new = found.sequences[:, -steps.shape[1] :]
    before = (new == pair.end).long().cumsum(dim=1) - (new == pair.end).long() == 0
    return ((steps * before).sum(dim=1) / before.sum(dim=1)).tolist()


def cut(ids: list[int], end: int) -> list[int]:
    """Up to the end, with it; a text without one that is shorter than others is followed by padding."""
    return ids[: ids.index(end) + 1] if end in ids else ids


def batches(pair: Pair) -> Iterator[list[list[int]]]:
    for _ in range(0, INPUTS, ROWS):
        rows = random_rows(ROWS)
        yield [[*row, pair.end] for row in rows] if pair.theirs.config.is_encoder_decoder else rows


def gap(pair: Pair, row: list[int], a: list[int], b: list[int]) -> float:
    """Where two greedy texts part, how far the two words were apart."""
    place = next(n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    with torch.no_grad():
        if pair.theirs.config.is_encoder_decoder:
            scores = pair.ours(torch.tensor([row]), torch.tensor([[PADDING, *a[:place]]]))[0, -1]
        else:
            scores = pair.ours(torch.tensor([[*row, *a[:place]]]))[0, -1]
    return float((scores[a[place]] - scores[b[place]]).abs())


@families
def test_greedy_gives_the_same_texts_and_scores(make: Callable[[], Pair]) -> None:
    pair, near, ended = make(), 0, 0
    # Their scores come behind the rules, ours before; without a rule both are the model's.
    config = GenerationConfig(max_new_tokens=LONGEST, logprobs=True)
    for rows in batches(pair):
        found, other = ours(pair, rows, config), theirs(pair, rows, num_beams=1)
        for row, [mine], [(text, score)] in zip(rows, found, other, strict=True):
            written = [*mine.ids, pair.end] if mine.finished else mine.ids
            ended += mine.finished
            if written != text:
                assert gap(pair, row, written, text) < NEAR
                near += 1
            elif make is not marian:  # where padding is barred, their scores are of what is left
                assert mine.score == pytest.approx(score, abs=NEAR)
            assert mine.score == pytest.approx(sum(mine.logprobs) / len(mine.logprobs))
    print(f"{make.__name__}: {INPUTS} inputs, {near} near-ties, {ended} ended")
    assert near <= INPUTS // 50
    assert INPUTS // 10 < ended < INPUTS, "both ways to finish have to occur"


@families
def test_beam_search_gives_the_same_texts_in_the_same_order_with_the_same_scores(make: Callable[[], Pair]) -> None:
    pair, near, texts, ended = make(), 0, 0, 0
    for number, rows in enumerate(batches(pair)):
        for beam, penalty, early in BEAMS[number % 5 :: 5] if INPUTS < 1000 else BEAMS[number % 3 :: 3]:
            config = GenerationConfig(
                max_new_tokens=LONGEST, beam=beam, n_best=beam, length_penalty=penalty, early_stopping=early
            )
            options = {"num_beams": beam, "length_penalty": penalty, "early_stopping": EARLY[early]}
            for mine, other in zip(ours(pair, rows, config), theirs(pair, rows, **options), strict=True):
                assert [output.score for output in mine] == pytest.approx([score for _, score in other], abs=NEAR)
                for output, (text, _) in zip(mine, other, strict=True):
                    written = [*output.ids, pair.end] if output.finished else output.ids
                    near += written != text  # with equal scores, another order of equals
                    texts, ended = texts + 1, ended + output.finished
    print(f"{make.__name__}: {INPUTS} inputs, {texts} texts, {near} near-ties, {ended} ended")
    assert near <= texts // 200
    assert texts // 10 < ended < texts, "both ways to finish have to occur"


@families
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("rules", PENALTIES.values(), ids=PENALTIES)
def test_rules_change_the_texts_as_theirs_do(make: Callable[[], Pair], beam: int, rules: dict[str, Any]) -> None:
    pair = make()
    rows = next(batches(pair))
    config = GenerationConfig(max_new_tokens=LONGEST, beam=beam, n_best=beam, **rules)
    options = {NAMES.get(name, name): value for name, value in rules.items()}
    if "bad_words_ids" in options:
        options["bad_words_ids"] = [list(word) for word in options["bad_words_ids"]]
    same = 0
    if pair.theirs.config.is_encoder_decoder or len({len(row) for row in rows}) == 1 or "no_repeat_ngram" not in rules:
        batched = [rows]
    else:  # theirs counts padding among the n-grams
        batched = [[row] for row in rows]
    for part in batched:
        for mine, other in zip(ours(pair, part, config), theirs(pair, part, num_beams=beam, **options), strict=True):
            written = [[*output.ids, pair.end] if output.finished else output.ids for output in mine]
            same += written == [text for text, _ in other]
    assert same == len(rows)
