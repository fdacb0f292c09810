"""Alternative next tokens at a position, each with its most likely (or a sampled) continuation."""

from __future__ import annotations

import torch

from clearhead.config import GenerationConfig
from clearhead.errors import UserError
from clearhead.inference.generate import prepare_batch
from clearhead.inference.make_runner import StepNetwork
from clearhead.inference.output import GenerationOutput
from clearhead.inference.request import EosIds, TokenIds, eos_tuple, validate


def alternatives(
    network: StepNetwork,
    prompt: TokenIds,
    count: int,
    config: GenerationConfig,
    *,
    eos_ids: EosIds,
    source: TokenIds | None = None,
    seed: int = 0,
) -> list[GenerationOutput]:
    """Return the `count` most likely next tokens, each continued by greedy search or sampling; one prefill for all.

    For a translator, the prompt is BOS and the target so far.
    """
    if config.beam > 1 or config.samples > 1:
        raise UserError("alternatives are continued by greedy search or sampling; use beam=1 and samples=1")
    vocab_size = network.config.target_vocab
    if not 1 <= count <= vocab_size:
        raise UserError(f"{count} alternatives, but the vocabulary has {vocab_size} tokens; ask for 1 to {vocab_size}")
    eos, sources = eos_tuple(eos_ids), None if source is None else [source]
    validate(network.config, [prompt], sources, config, eos)
    config = config.model_copy(update={"samples": count})
    with torch.inference_mode():
        batch = prepare_batch(network, [prompt], sources, config, eos, [seed])
        batch.accept(batch.process_logits(batch.logits)[0].topk(count).indices)
        return batch.run()
