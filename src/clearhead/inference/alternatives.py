"""What else could stand at a position: other next words, each with the text that would follow it."""

from __future__ import annotations

import torch

from clearhead.config import GenerationConfig
from clearhead.errors import UserError
from clearhead.inference.generate import EosIds, check, prepare_batch
from clearhead.inference.output import GenerationOutput
from clearhead.inference.step import Ids, Writer


def alternatives(
    network: Writer,
    prompt: Ids,
    count: int,
    config: GenerationConfig,
    *,
    end: EosIds,
    source: Ids | None = None,
    seed: int = 0,
) -> list[GenerationOutput]:
    """The likeliest `count` words behind the prompt, likeliest first, each completed by greedy search or sampling.

    For a translator, the prompt is the begin token and the target so far. The prompt is read once.
    """
    if config.beam > 1 or config.samples > 1:
        raise UserError("alternatives are written straight on, one for each word; use beam=1 and samples=1")
    words = network.config.target_vocab
    if not 1 <= count <= words:
        raise UserError(f"{count} alternatives, but there are {words} words; ask for 1 to {words}")
    ends = (end,) if isinstance(end, int) else tuple(end)
    check(network, [prompt], None if source is None else [source], config, ends)
    copies = config.model_copy(update={"samples": count})
    with torch.inference_mode():
        rows = prepare_batch(network, [prompt], None if source is None else [source], copies, ends, [seed])
        rows.take(rows.processed_logits(rows.scores)[0].topk(count).indices)
        return rows.run()
