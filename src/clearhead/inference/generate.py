"""Generate from prompts and translate sources: validate the input, split it into batches, run the configured search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.errors import UserError
from clearhead.inference.alignment import Heads, add_alignments
from clearhead.inference.batches import run_in_batches
from clearhead.inference.beam_search import BeamSearch
from clearhead.inference.cuda_graph_replay import cuda_graphs_of
from clearhead.inference.generation_batch import GenerationBatch
from clearhead.inference.make_runner import StepNetwork, make_runner
from clearhead.inference.model_runner import ModelRunner
from clearhead.inference.native_network import NativeNetwork
from clearhead.inference.optimize import has_hooks
from clearhead.inference.output import GenerationOutput
from clearhead.inference.request import EosIds, TokenIds, check_seeds, eos_tuple, new_token_limits, validate
from clearhead.inference.sampling import sample_seeds
from clearhead.inference.speculative import Draft, SpeculativeBatch
from clearhead.inference.step import StepRunner
from clearhead.inference.step_batch import StepBatch, pages_of_batch
from clearhead.inference.stop_strings import StopStrings
from clearhead.model import EncoderDecoder
from clearhead.model.cost import cache_bytes

MAX_BATCH_SIZE = 128  # larger batches are not faster
CPU_CACHE_BYTES, GPU_CACHE_BYTES = 1 << 30, 1 << 34  # of the KV cache of a batch if all of its rows reach their limit


def generate(
    network: StepNetwork,
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
    network: StepNetwork,
    sources: Sequence[TokenIds],
    config: GenerationConfig,
    *,
    bos_id: int,
    eos_ids: EosIds,
    prefixes: Sequence[TokenIds] | None = None,
    limits: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    stop_strings: StopStrings | None = None,
    draft: Draft | None = None,
    alignment_heads: Heads | None = None,
) -> list[list[GenerationOutput]]:
    """Translate sources. With `prefixes`, each target continues its prefix, which is not returned.

    In beam search, `limits` are the `max_new_tokens` of each source. `config.align` adds the attention weights of some
    heads, (decoder layer, head) each.
    """
    prompts = [[bos_id, *prefix] for prefix in (prefixes if prefixes is not None else [()] * len(sources))]
    if len(prompts) != len(sources):
        raise ValueError(f"{len(sources)} sources, but {len(prompts)} prefixes; give one for each, or none")
    outputs = _generate(network, prompts, sources, config, eos_ids, seeds, stop_strings, draft, limits)
    if not config.align:
        return outputs
    assert isinstance(network, EncoderDecoder), "alignments need the layers' attention weights, so the network itself"
    return add_alignments(network, sources, prompts, outputs, alignment_heads)


def _generate(
    network: StepNetwork,
    prompts: Sequence[TokenIds],
    sources: Sequence[TokenIds] | None,
    config: GenerationConfig,
    eos_ids: EosIds,
    seeds: Sequence[int] | None,
    stop_strings: StopStrings | None,
    draft: Draft | None,
    limits: Sequence[int] | None = None,
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
    limits = [config.max_new_tokens] * len(prompts) if limits is None else limits
    runners: list[StepRunner] = []  # of beam search, between batches; each worker needs one

    def run(batch: list[int]) -> list[list[GenerationOutput]]:
        rows = [prompts[index] for index in batch]
        row_sources = [sources[index] for index in batch] if sources is not None else None
        with torch.inference_mode():
            if config.beam > 1:
                row_limits = [limits[index] for index in batch]
                return search_beams(network, rows, row_sources, config, row_limits, eos, runners)
            row_seeds = [seeds[index] for index in batch]
            outputs = prepare_batch(network, rows, row_sources, config, eos, row_seeds, stop_strings, draft).run()
        return [outputs[n : n + config.samples] for n in range(0, len(outputs), config.samples)]

    lengths = [len(prompt) for prompt in prompts]
    if sources is not None:
        lengths = [max(length, len(source)) for length, source in zip(lengths, sources, strict=True)]
    branches, on_cpu = config.beam * config.samples, runs_on_cpu(network)
    memory = CPU_CACHE_BYTES if on_cpu else GPU_CACHE_BYTES
    max_rows = [
        config.batch_size or max_batch_size(network.config, branches, limit, length, memory)
        for limit, length in zip(limits, lengths, strict=True)
    ]
    workers = config.workers if on_cpu else max(1, config.workers)
    if watched(network):  # hooks see one batch after another
        workers = 1
    return run_in_batches(lengths, max(1, config.batch_tokens // branches), max_rows, run, workers)


def watched(network: StepNetwork) -> bool:
    """Return whether forward hooks watch the network."""
    return not isinstance(network, NativeNetwork) and has_hooks(network)


def runs_on_cpu(network: StepNetwork) -> bool:
    """Return whether steps of a network run on a CPU."""
    return isinstance(network, NativeNetwork) or network.decoder.embedding.tokens.weight.is_cpu


def max_batch_size(network: ModelConfig, branches: int, max_new_tokens: int, max_length: int, memory: int) -> int:
    """Return how many rows fit into `memory` bytes of fp32 KV cache, at most MAX_BATCH_SIZE."""
    new_tokens = branches * min(max_new_tokens, network.max_positions)
    return max(1, min(MAX_BATCH_SIZE, memory // cache_bytes(network, max_length + new_tokens)))


def search_beams(
    network: StepNetwork,
    prompts: Sequence[TokenIds],
    sources: Sequence[TokenIds] | None,
    config: GenerationConfig,
    limits: Sequence[int],
    eos_ids: Sequence[int],
    runners: list[StepRunner],
) -> list[list[GenerationOutput]]:
    """Run beam search on one of the idle runners, or on a new one if its cache is too small."""
    longest_prompt, longest_source = max(map(len, prompts)), max(map(len, sources or ()), default=0)
    limits = new_token_limits(prompts, limits, network.config.max_positions)
    pages = pages_of_batch(len(prompts), longest_prompt, longest_source, config.beam * sum(limits))
    runner = runners.pop() if runners else None
    if runner is None or min(runner.cache.pages - pages, runner.max_rows - len(prompts) * config.beam) < 0:
        runner = make_runner(network, pages, len(prompts) * config.beam)
    outputs = BeamSearch(runner, prompts, sources, config, limits, eos_ids).run()
    runners.append(runner)
    return outputs


def prepare_batch(
    network: StepNetwork,
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
    draft_state = None if draft is None else draft.begin(prompts, sources, config)
    runner: Any
    if isinstance(network, NativeNetwork) or runs_on_cpu(network) or draft is not None:
        new_tokens = config.max_new_tokens + (0 if draft is None else draft.num_draft_tokens)
        runner = StepBatch.of(network, prompts, sources, len(prompts) * config.samples * new_tokens)
        graphs, logits = None, runner.prefill()
    else:
        runner = ModelRunner(network, len(prompts), max(map(len, prompts)) + config.max_new_tokens)
        graphs, logits = cuda_graphs_of(network), runner.prefill(prompts, sources)
    if config.samples > 1:
        repeated = torch.arange(len(prompts), device=runner.device).repeat_interleave(config.samples)
        runner.select(repeated)
        if draft_state is not None:
            draft_state.select(repeated)
        logits, prompts = logits[repeated], [prompt for prompt in prompts for _ in range(config.samples)]
    args = (logits, prompts, config, eos_ids, sample_seeds(seeds, config.samples), stop_strings)
    if draft_state is not None and draft is not None:
        return SpeculativeBatch(runner, *args, draft_state=draft_state, num_draft_tokens=draft.num_draft_tokens)
    return GenerationBatch(runner, *args) if graphs is None else graphs.make_batch(runner, *args)
