"""Continue prompts, translate sources: checks what came in, cuts it into batches and runs the search of the config."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.errors import UserError
from clearhead.inference.alignment import with_alignments
from clearhead.inference.batches import in_batches
from clearhead.inference.beam_search import Beams
from clearhead.inference.generation_batch import GenerationBatch
from clearhead.inference.output import GenerationOutput
from clearhead.inference.replay import cuda_graphs_of
from clearhead.inference.sampling import sample_seeds
from clearhead.inference.speculative import Draft, Speculative
from clearhead.inference.step import Ids, Step, Writer
from clearhead.inference.stop_strings import StopStrings
from clearhead.model import Decoder, EncoderDecoder
from clearhead.model.cost import cache_bytes

EosIds = int | Sequence[int]
LARGEST = 1 << 63
ROWS = 128  # of a batch; more are no faster
CACHE, CACHE_ON_GPU = 1 << 30, 1 << 34  # bytes that the cache of a batch may take if all of its texts are long


def generate(
    network: Decoder,
    prompts: Sequence[Ids],
    config: GenerationConfig,
    *,
    end: EosIds,
    seeds: Sequence[int] | None = None,
    stops: StopStrings | None = None,
    draft: Draft | None = None,
) -> list[list[GenerationOutput]]:
    """Go on from each prompt: for each, `n_best` texts of a beam search, or `samples` of greedy search or sampling.

    `end` is the token (or tokens) that ends a text; row n draws by seeds[n], or by n where none are given. A draft
    makes it faster and changes nothing (see `speculative`).
    """
    if config.align:
        raise UserError("align: only a translator has a source to align with; set it to false")
    return _search(network, prompts, None, config, end, seeds, stops, draft)


def translate(
    network: EncoderDecoder,
    sources: Sequence[Ids],
    config: GenerationConfig,
    *,
    begin: int,
    end: EosIds,
    prefixes: Sequence[Ids] | None = None,
    seeds: Sequence[int] | None = None,
    stops: StopStrings | None = None,
    draft: Draft | None = None,
) -> list[list[GenerationOutput]]:
    """Translate each source; the target goes on from its prefix where one is given, which is no part of the output."""
    prompts = [[begin, *prefix] for prefix in (prefixes if prefixes is not None else [()] * len(sources))]
    if len(prompts) != len(sources):
        raise ValueError(f"{len(sources)} sources, but {len(prompts)} prefixes; give one for each, or none")
    found = _search(network, prompts, sources, config, end, seeds, stops, draft)
    return with_alignments(network, sources, prompts, found) if config.align else found


def _search(
    network: Writer,
    prompts: Sequence[Ids],
    sources: Sequence[Ids] | None,
    config: GenerationConfig,
    end: EosIds,
    seeds: Sequence[int] | None,
    stops: StopStrings | None,
    draft: Draft | None,
) -> list[list[GenerationOutput]]:
    ends = (end,) if isinstance(end, int) else tuple(end)
    seeds = range(len(prompts)) if seeds is None else seeds
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(seeds)} seeds; give one for each")
    if config.beam > 1 and (stops is not None or draft is not None):
        raise UserError("stop strings and drafts are for texts that are written straight on; use them with beam=1")
    check(network, prompts, sources, config, ends)

    def work(batch: list[int]) -> list[list[GenerationOutput]]:
        rows = [prompts[number] for number in batch]
        texts = [sources[number] for number in batch] if sources is not None else None
        own = [seeds[number] for number in batch]
        with torch.inference_mode():
            if config.beam > 1:
                return Beams(*started(network, rows, texts, config), rows, config, ends).run()
            found = prepare_batch(network, rows, texts, config, ends, own, stops, draft).run()
        return [found[n : n + config.samples] for n in range(0, len(found), config.samples)]

    sizes = [len(prompt) for prompt in prompts]
    if sources is not None:
        sizes = [max(size, len(source)) for size, source in zip(sizes, sources, strict=True)]
    branches, on_cpu = config.beam * config.samples, network.decoder.embedding.tokens.weight.is_cpu
    memory = CACHE if on_cpu else CACHE_ON_GPU
    rows = config.batch_size or rows_that_fit(network.config, config, max(sizes, default=1), memory)
    workers = config.workers if on_cpu else max(1, config.workers)
    return in_batches(sizes, max(1, config.batch_tokens // branches), rows, work, workers)


def rows_that_fit(network: ModelConfig, config: GenerationConfig, max_length: int, memory: int) -> int:
    """Rows of a batch whose cache takes at most so many bytes in fp32, but no more than are of use."""
    new = config.beam * config.samples * min(config.max_new_tokens, network.max_positions)
    return max(1, min(ROWS, memory // cache_bytes(network, max_length + new)))


def started(
    network: Writer, prompts: Sequence[Ids], sources: Sequence[Ids] | None, config: GenerationConfig
) -> tuple[Step, Tensor]:
    """A step that has read the prompts, and the scores (B, V) of what comes next."""
    step = Step(network, len(prompts), max(map(len, prompts)) + config.max_new_tokens)
    return step, step.start(prompts, sources)


def prepare_batch(
    network: Writer,
    prompts: Sequence[Ids],
    sources: Sequence[Ids] | None,
    config: GenerationConfig,
    ends: Sequence[int],
    seeds: Sequence[int],
    stops: StopStrings | None = None,
    draft: Draft | None = None,
) -> GenerationBatch:
    """Rows about to be written, `samples` for each prompt, which is read once; a seed for each prompt."""
    check_seeds(seeds)
    step, scores = started(network, prompts, sources, config)
    guesser = None if draft is None else draft.begin(prompts, sources, config.max_new_tokens)
    if config.samples > 1:
        several = torch.arange(len(prompts), device=step.device).repeat_interleave(config.samples)
        step.select(several)
        if guesser is not None:
            guesser.select(several)
        scores, prompts = scores[several], [prompt for prompt in prompts for _ in range(config.samples)]
    own = sample_seeds(seeds, config.samples)
    if guesser is not None and draft is not None:
        return Speculative(
            step, scores, prompts, config, ends, own, stops, guesser=guesser, num_draft_tokens=draft.num_draft_tokens
        )
    rows = GenerationBatch if (graphs := cuda_graphs_of(network)) is None else graphs.rows
    return rows(step, scores, prompts, config, ends, own, stops)


def check(
    network: Writer,
    prompts: Sequence[Ids],
    sources: Sequence[Ids] | None,
    config: GenerationConfig,
    ends: Sequence[int],
) -> None:
    """Every row has tokens, no more than the model has positions, and all tokens are in the vocabulary."""
    positions, words = network.config.max_positions, network.config.target_vocab
    for what, rows, size in (("prompt", prompts, words), ("source", sources or (), network.config.source_vocab)):
        for number, row in enumerate(rows):
            if not row:
                raise ValueError(f"{what} {number + 1} is empty; give it at least a begin or an end token")
            if len(row) > positions:
                raise UserError(
                    f"{what} {number + 1} has {len(row)} tokens, but the model has {positions} positions; "
                    "shorten it, or cut it into pieces"
                )
            if not 0 <= min(row) <= max(row) < size:
                wrong = next(token for token in row if not 0 <= token < size)
                raise ValueError(f"{what} {number + 1}: token {wrong} is outside the vocabulary of {size} tokens")
    for what, groups in (("banned", config.banned_ids), ("forced", config.forced_ids), ("end", (ends,))):
        for token in (token for group in groups for token in group if not 0 <= token < words):
            raise UserError(f"{what}: token {token} is outside the vocabulary of {words} tokens")


def check_seeds(seeds: Sequence[int]) -> None:
    """Every seed fits into 64 bits."""
    if any(not -LARGEST <= seed < LARGEST for seed in seeds):
        raise UserError(f"a seed is a whole number of 64 bits, at most {LARGEST - 1}")
