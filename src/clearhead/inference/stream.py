"""One text as it is written: tokens, or pieces of text, the moment they are known."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clearhead.config import GenerationConfig
from clearhead.errors import UserError
from clearhead.inference.generate import EosIds, check, prepare_batch
from clearhead.inference.speculative import Draft
from clearhead.inference.step import Ids, Writer
from clearhead.inference.stop_strings import StopStrings
from clearhead.text import Tokenizer


def stream(
    network: Writer,
    prompt: Ids,
    config: GenerationConfig,
    *,
    end: EosIds,
    seed: int = 0,
    source: Ids | None = None,
    draft: Draft | None = None,
) -> Iterator[int]:
    """The tokens that `generate` would give, without the end, each as soon as it is chosen.

    For a translator, `source` is what it translates and `prompt` the begin token, with a prefix if there is one.
    """
    if config.beam > 1 or config.samples > 1:
        raise UserError("a stream is one text that is written straight on; use beam=1 and samples=1")
    ends = (end,) if isinstance(end, int) else tuple(end)
    sources = None if source is None else [source]
    check(network, [prompt], sources, config, ends)

    def tokens() -> Iterator[int]:
        with torch.inference_mode():
            rows = prepare_batch(network, [prompt], sources, config, ends, [seed], draft=draft)
        given = 0
        while rows.numbers:
            with torch.inference_mode():  # not around a yield: the caller's own work is none of it
                found = rows.advance()[0].tolist()
            # A step of guesses may have more tokens than were taken.
            new = found[: rows.counts[0] - given] if rows.numbers else rows.outputs[0].ids[given:]
            for token in new:
                if token in ends:
                    return
                yield token
            given += len(new)

    return tokens()


def stream_text(
    network: Writer,
    prompt: Ids,
    config: GenerationConfig,
    tokenizer: Tokenizer,
    *,
    end: EosIds,
    seed: int = 0,
    source: Ids | None = None,
    draft: Draft | None = None,
    stop: tuple[str, ...] = (),
) -> Iterator[str]:
    """The text of `stream` in pieces that never end inside a character, up to the first of the stop strings."""
    pieces = tokenizer.stream(stream(network, prompt, config, end=end, seed=seed, source=source, draft=draft))
    return StopStrings(stop, tokenizer).watch(pieces) if stop else pieces
