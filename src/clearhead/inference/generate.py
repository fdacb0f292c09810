"""Generate from prompts and translate sources: validate the input, split it into batches, run the configured search."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.errors import UserError
from clearhead.inference.alignment import Heads, add_alignments
from clearhead.inference.batches import run_in_batches
from clearhead.inference.beam_search import BeamSearch
from clearhead.inference.cuda_graph_replay import cuda_graphs_of
from clearhead.inference.generation_batch import GenerationBatch
from clearhead.inference.model_runner import GenerativeNetwork, ModelRunner
from clearhead.inference.optimize import has_hooks
from clearhead.inference.output import GenerationOutput
from clearhead.inference.request import EosIds, TokenIds, check_seeds, eos_tuple, validate
from clearhead.inference.sampling import sample_seeds
from clearhead.inference.speculative import Draft, SpeculativeBatch
from clearhead.inference.stop_strings import StopStrings
from clearhead.model import Decoder, EncoderDecoder
from clearhead.model.cost import cache_bytes

MAX_BATCH_SIZE = 128  # larger batches are not faster
CPU_CACHE_BYTES, GPU_CACHE_BYTES = 1 << 30, 1 << 34  # of the KV cache of a batch if all of its rows reach their limit


def generate(
    network: Decoder,
    prompts: Sequence[TokenIds],
    config: GenerationConfig,
    *,
    eos_ids: EosIds,
    seeds: Sequence[int] | None = None,
    stop_strings: StopStrings | None = None,
    draft: Draft | None = None,
) -> list[list[GenerationOutput]]:
    """Return for each prompt the `n_best` hypotheses of beam search, or `samples` outputs of greedy search or sampling.

    Prompt n samples with seeds[n], by default n. A draft speeds up decoding and does not change the output (see
    `speculative`).
    """
    if config.align:
        raise UserError("align: only a translator has a source to align with; set it to false")
    return _generate(network, prompts, None, config, eos_ids, seeds, stop_strings, draft)


def translate(
    network: EncoderDecoder,
    sources: Sequence[TokenIds],
    config: GenerationConfig,
    *,
    bos_id: int,
    eos_ids: EosIds,
    prefixes: Sequence[TokenIds] | None = None,
    seeds: Sequence[int] | None = None,
    stop_strings: StopStrings | None = None,
    draft: Draft | None = None,
    alignment_heads: Heads | None = None,
) -> list[list[GenerationOutput]]:
    """Translate sources. With `prefixes`, each target continues its prefix, which is not returned.

    `config.align` adds the attention weights of some heads, (decoder layer, head) each.
    """
    prompts = [[bos_id, *prefix] for prefix in (prefixes if prefixes is not None else [()] * len(sources))]
    if len(prompts) != len(sources):
        raise ValueError(f"{len(sources)} sources, but {len(prompts)} prefixes; give one for each, or none")
    outputs = _generate(network, prompts, sources, config, eos_ids, seeds, stop_strings, draft)
    return add_alignments(network, sources, prompts, outputs, alignment_heads) if config.align else outputs


def _generate(
    network: GenerativeNetwork,
    prompts: Sequence[TokenIds],
    sources: Sequence[TokenIds] | None,
    config: GenerationConfig,
    eos_ids: EosIds,
    seeds: Sequence[int] | None,
    stop_strings: StopStrings | None,
    draft: Draft | None,
) -> list[list[GenerationOutput]]:
    eos = eos_tuple(eos_ids)
    seeds = range(len(prompts)) if seeds is None else seeds
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(seeds)} seeds; give one for each")
    if config.top_logprobs:
        raise UserError("top_logprobs: only requests of the engine return them; set it to 0")
    if config.beam > 1 and (stop_strings is not None or draft is not None):
        raise UserError("beam search supports neither stop strings nor a draft; use beam=1")
    validate(network.config, prompts, sources, config, eos)

    def run(batch: list[int]) -> list[list[GenerationOutput]]:
        batch_prompts = [prompts[index] for index in batch]
        batch_sources = [sources[index] for index in batch] if sources is not None else None
        batch_seeds = [seeds[index] for index in batch]
        with torch.inference_mode():
            if config.beam > 1:
                runner, logits = prefill(network, batch_prompts, batch_sources, config)
                return BeamSearch(runner, logits, batch_prompts, config, eos).run()
            outputs = prepare_batch(
                network, batch_prompts, batch_sources, config, eos, batch_seeds, stop_strings, draft
            ).run()
        return [outputs[n : n + config.samples] for n in range(0, len(outputs), config.samples)]

    lengths = [len(prompt) for prompt in prompts]
    if sources is not None:
        lengths = [max(length, len(source)) for length, source in zip(lengths, sources, strict=True)]
    branches, on_cpu = config.beam * config.samples, network.decoder.embedding.tokens.weight.is_cpu
    memory = CPU_CACHE_BYTES if on_cpu else GPU_CACHE_BYTES
    rows = config.batch_size or max_batch_size(network.config, config, max(lengths, default=1), memory)
    workers = config.workers if on_cpu else max(1, config.workers)
    if has_hooks(network):  # they see one batch after another
        workers = 1
    return run_in_batches(lengths, max(1, config.batch_tokens // branches), rows, run, workers)


def max_batch_size(network: ModelConfig, config: GenerationConfig, max_length: int, memory: int) -> int:
    """Return how many rows fit into `memory` bytes of fp32 KV cache, at most MAX_BATCH_SIZE."""
    new_tokens = config.beam * config.samples * min(config.max_new_tokens, network.max_positions)
    return max(1, min(MAX_BATCH_SIZE, memory // cache_bytes(network, max_length + new_tokens)))


def prefill(
    network: GenerativeNetwork,
    prompts: Sequence[TokenIds],
    sources: Sequence[TokenIds] | None,
    config: GenerationConfig,
) -> tuple[ModelRunner, Tensor]:
    """Prefill the prompts; return the runner and the logits (B, V) after each prompt."""
    runner = ModelRunner(network, len(prompts), max(map(len, prompts)) + config.max_new_tokens)
    return runner, runner.prefill(prompts, sources)


def prepare_batch(
    network: GenerativeNetwork,
    prompts: Sequence[TokenIds],
    sources: Sequence[TokenIds] | None,
    config: GenerationConfig,
    eos_ids: Sequence[int],
    seeds: Sequence[int],
    stop_strings: StopStrings | None = None,
    draft: Draft | None = None,
) -> GenerationBatch:
    """Prefill each prompt once and return a batch with `samples` rows for each; `seeds` has one seed a prompt."""
    check_seeds(seeds)
    runner, logits = prefill(network, prompts, sources, config)
    draft_state = None if draft is None else draft.begin(prompts, sources, config.max_new_tokens)
    if config.samples > 1:
        repeated = torch.arange(len(prompts), device=runner.device).repeat_interleave(config.samples)
        runner.select(repeated)
        if draft_state is not None:
            draft_state.select(repeated)
        logits, prompts = logits[repeated], [prompt for prompt in prompts for _ in range(config.samples)]
    row_seeds = sample_seeds(seeds, config.samples)
    if draft_state is not None and draft is not None:
        return SpeculativeBatch(
            runner,
            logits,
            prompts,
            config,
            eos_ids,
            row_seeds,
            stop_strings,
            draft_state=draft_state,
            num_draft_tokens=draft.num_draft_tokens,
        )
    make_batch = GenerationBatch if (graphs := cuda_graphs_of(network)) is None else graphs.make_batch
    return make_batch(runner, logits, prompts, config, eos_ids, row_seeds, stop_strings)
