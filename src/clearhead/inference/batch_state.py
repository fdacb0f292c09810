"""What the engine knows of its running rows, in arrays by row number, from which it builds the inputs of a step.

N tokens · R rows · M outputs
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clearhead.config import ModelConfig
from clearhead.inference.page_pool import pages_for
from clearhead.inference.request import EngineRequest
from clearhead.inference.scheduler import Chunk, Row
from clearhead.inference.step import LAST_TOKEN, PAGE_SIZE, SamplingInputs, StepInputs

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NO_PENALTIES = (1.0, 0.0, 0.0)
Numbers = NDArray[np.int32]


class BatchState:
    """Arrays with one entry for each row number."""

    def __init__(self, config: ModelConfig, max_rows: int):
        pages = pages_for(config.max_positions)
        self.is_translator = config.family == "encoder-decoder"
        self.table = np.zeros((max_rows, pages), np.int32)
        self.source_table = np.zeros((max_rows, pages if self.is_translator else 0), np.int32)
        self.source_lengths = np.zeros(max_rows, np.int32)
        self.cached = np.zeros(max_rows, np.int32)  # tokens in the KV cache
        self.slots = np.zeros(max_rows, np.int32)  # of the pages allocated so far
        self.num_new, self.limits = np.zeros(max_rows, np.int64), np.zeros(max_rows, np.int64)
        self.next_ids = np.zeros(max_rows, np.int32)  # the token that the next step takes, or LAST_TOKEN
        self.top_k, self.seeds = np.zeros(max_rows, np.int32), np.zeros(max_rows, np.int64)
        self.floats = np.zeros((len(FLOATS), max_rows), np.float32)
        self.logprobs = np.full(max_rows, -1, np.int32)
        self.is_processed = np.zeros(max_rows, bool)  # whether the logits are changed before a token is chosen
        self._range = np.arange(max_rows, dtype=np.int32)

    def start(self, row: Row) -> None:
        """Fill in the entries of an admitted row."""
        request, number = row.request, row.number
        config = request.config
        self.table[number, : len(row.pages)] = row.pages
        self.source_table[number, : len(row.source_pages)] = row.source_pages
        self.source_lengths[number] = len(request.source or ())
        self.cached[number], self.slots[number] = row.cached, len(row.pages) * PAGE_SIZE
        self.num_new[number], self.limits[number] = len(request.ids), request.limit
        self.top_k[number], self.seeds[number] = config.top_k, request.seed
        self.floats[:, number] = [getattr(config, name) for name in FLOATS]
        self.logprobs[number] = request.wanted_logprobs
        self.is_processed[number] = has_processors(request)
        if self.is_processed[number]:  # penalties are processors then, to keep the order
            self.floats[3:, number] = NO_PENALTIES

    def has_penalties(self, row: Row) -> bool:
        """Whether the runner counts the tokens of a row."""
        return tuple(self.floats[3:, row.number].tolist()) != NO_PENALTIES

    def grow(self, row: Row, page: int) -> None:
        """Add a page to the table of a row."""
        self.table[row.number, len(row.pages) - 1] = page
        self.slots[row.number] += PAGE_SIZE

    def decode_inputs(self, numbers: Numbers) -> StepInputs:
        """Return the next token of some rows."""
        positions, tokens = self.cached[numbers], self._range[: len(numbers)]
        return self._inputs(self.next_ids[numbers], tokens, positions, tokens, numbers)

    def chunk_inputs(self, chunks: Sequence[Chunk]) -> StepInputs:
        """Return chunks of prompts; the last token of each prompt is an output."""
        counts = [chunk.length for chunk in chunks]
        begins = [chunk.row.cached for chunk in chunks]
        numbers = np.array([chunk.row.number for chunk in chunks], np.int32)
        spans = list(zip(chunks, begins, counts, strict=True))
        ids = np.concatenate([np.array(chunk.row.prompt[begin : begin + count]) for chunk, begin, count in spans])
        positions = np.concatenate([np.arange(begin, begin + count) for _, begin, count in spans])
        ends = np.cumsum(counts) - 1
        outputs = np.array([end for end, chunk in zip(ends, chunks, strict=True) if chunk.is_last], np.int32)
        rows = np.repeat(self._range[: len(chunks)], counts)
        return self._inputs(ids.astype(np.int32), rows, positions.astype(np.int32), outputs, numbers)

    def _inputs(
        self, ids: Numbers, rows: Numbers, positions: Numbers, outputs: Numbers, numbers: Numbers
    ) -> StepInputs:
        pages = positions // PAGE_SIZE
        sources = source_lengths = None
        if self.is_translator:
            source_lengths = self.source_lengths[numbers]
            sources = self.source_table[numbers, : pages_for(int(source_lengths.max()))]
        return StepInputs(
            ids=ids,
            rows=rows,
            positions=positions,
            slots=self.table[numbers[rows], pages] * PAGE_SIZE + positions % PAGE_SIZE,
            outputs=outputs,
            numbers=numbers,
            table=self.table[numbers, : int(pages.max()) + 1],
            source_table=sources,
            source_lengths=source_lengths,
        )

    def sampling(self, numbers: Numbers) -> SamplingInputs:
        """Return how the next tokens (M,) of some rows are chosen."""
        return SamplingInputs(
            numbers=numbers,
            top_k=self.top_k[numbers],
            seeds=self.seeds[numbers],
            num_new=self.num_new[numbers],
            logprobs=int(self.logprobs[numbers].max(initial=-1)),
            **dict(zip(FLOATS, self.floats[:, numbers], strict=True)),
        )

    def chosen(self, numbers: Numbers) -> None:
        """Count a token of each row, which a launched step chooses."""
        self.num_new[numbers] += 1
        self.next_ids[numbers] = LAST_TOKEN


def has_processors(request: EngineRequest) -> bool:
    """Return whether a request changes its logits in more ways than a step does by itself."""
    config = request.config
    return bool(
        request.constraint is not None
        or config.no_repeat_ngram_size
        or config.banned_ids
        or config.min_new_tokens
        or config.forced_ids
    )
