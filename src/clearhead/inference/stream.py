"""Stream one generated sequence: token ids, or pieces of text, as soon as they are known."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clearhead.config import GenerationConfig
from clearhead.errors import UserError
from clearhead.inference.generate import prepare_batch
from clearhead.inference.make_runner import StepNetwork
from clearhead.inference.request import EosIds, TokenIds, eos_tuple, validate
from clearhead.inference.speculative import Draft
from clearhead.inference.stop_strings import StopStrings
from clearhead.text import Tokenizer


def stream(
    network: StepNetwork,
    prompt: TokenIds,
    config: GenerationConfig,
    *,
    eos_ids: EosIds,
    seed: int = 0,
    source: TokenIds | None = None,
    draft: Draft | None = None,
) -> Iterator[int]:
    """Yield the tokens of `generate` without EOS, each as soon as it is chosen.

    For a translator, `source` is the source and `prompt` is BOS and the prefix of the target, if any.
    """
    if config.beam > 1 or config.samples > 1:
        raise UserError("streaming decodes one sequence, greedily or by sampling; use beam=1 and samples=1")
    eos = eos_tuple(eos_ids)
    sources = None if source is None else [source]
    validate(network.config, [prompt], sources, config, eos)

    def generate_tokens() -> Iterator[int]:
        with torch.inference_mode():
            batch = prepare_batch(network, [prompt], sources, config, eos, [seed], draft=draft)
        yielded = 0
        while batch.active:
            with torch.inference_mode():  # not around a yield, where it would affect the caller
                tokens = batch.advance()[0].tolist()
            # A speculative step may return more tokens than were accepted.
            new = tokens[: batch.num_new[0] - yielded] if batch.active else batch.outputs[0].ids[yielded:]
            for token in new:
                if token in eos:
                    return
                yield token
            yielded += len(new)

    return generate_tokens()


def stream_text(
    network: StepNetwork,
    prompt: TokenIds,
    config: GenerationConfig,
    tokenizer: Tokenizer,
    *,
    eos_ids: EosIds,
    seed: int = 0,
    source: TokenIds | None = None,
    draft: Draft | None = None,
    stop: tuple[str, ...] = (),
) -> Iterator[str]:
    """Yield the text of `stream` in pieces of complete characters, up to the first stop string."""
    pieces = tokenizer.stream(stream(network, prompt, config, eos_ids=eos_ids, seed=seed, source=source, draft=draft))
    return StopStrings(stop, tokenizer).truncate_stream(pieces) if stop else pieces
