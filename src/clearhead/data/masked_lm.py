"""Masked language modeling and next-sentence prediction, as in BERT.

Masks and random second segments are drawn anew in every epoch, as a function of (seed, epoch, row).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clearhead.config.data import DataConfig
from clearhead.data.batch import Batch, collate
from clearhead.data.formats import TEXT, Record
from clearhead.data.random import randint, uniform
from clearhead.data.tasks import SampleIds, Task, token_field
from clearhead.data.token_store import MAX_POSITION, Field, Row, TokenStore, concat_ranges
from clearhead.ops.cross_entropy import IGNORED
from clearhead.text import Tokenizer

# Fractions of selected tokens replaced by [MASK] and by a random token; the rest are unchanged
MASK_RATIO, RANDOM_RATIO = 0.8, 0.1
# Purposes of random draws, part of the hash
DRAW_OTHER_ROW, DRAW_SWAP, DRAW_CHOOSE, DRAW_ACTION, DRAW_REPLACEMENT = range(1, 6)


class MaskedLanguageModel(Task):
    """Documents cut into samples of up to `max_length` tokens; with next_sentence, each has two segments.

    A row is (ids, cut, document): the second segment starts at `cut`. In half of the samples it is replaced by as many
    tokens from the end of a row of another document, so that length does not reveal the label.
    """

    columns = TEXT
    roles = ("pad", "unknown", "class", "separator", "mask")
    is_stream = True

    def __init__(self, config: DataConfig, tokenizers: Sequence[Tokenizer], labels: Sequence[str] = ()):
        super().__init__(config, tokenizers, labels)
        self.cls_id, self.sep_id, self.mask_id = (self.tokenizer.id(role) for role in ("class", "separator", "mask"))
        self.is_special = np.zeros(len(self.tokenizer), bool)
        self.is_special[list(self.tokenizer.roles.values())] = True
        self.ordinary_ids = np.flatnonzero(~self.is_special)
        self.is_continuation = np.array(self.tokenizer.continuation_flags())
        self.document, self.remainder = 0, list[int]()

    @property
    def fields(self) -> dict[str, Field]:
        position = Field("int32", MAX_POSITION, row=1, within="ids", inclusive=True)
        return {"ids": token_field(self.tokenizer), "cut": position, "document": Field("int64", MAX_POSITION, row=1)}

    def encode_records(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        rows: list[Row] = []
        size = self.config.max_length - (3 if self.config.next_sentence else 2)
        for record, ids in zip(records, self.tokenizer.encode_batch([r.values[0] for r in records]), strict=True):
            opens, closes = (*record.values, True, True)[1:3]  # a long document is split into several records
            self.document += int(opens)
            ids = ([] if opens else self.remainder) + ids
            starts = range(0, len(ids), size)
            self.remainder = [] if closes else ids[starts[-1] :] if starts else []
            for start in starts[:-1] if not closes else starts:
                piece = ids[start : start + size]
                if len(piece) < max(2, self.config.min_length):
                    dropped["too short"] += 1
                    continue
                cut = len(piece) if not self.config.next_sentence else self._random_cut(piece, len(rows))
                rows.append({"ids": piece, "cut": [cut], "document": [self.document]})
        return rows

    def _random_cut(self, piece: list[int], salt: int) -> int:
        """Return a random start of the second segment, as in BERT."""
        return 1 + int(randint(len(piece) - 1, len(piece), salt, sum(piece)))

    def _row_range(self, store: TokenStore) -> tuple[int, int]:
        start, end = (int(fraction * len(store)) for fraction in self.stream_range)
        return start, end

    def num_samples(self, store: TokenStore, epoch: int) -> int:
        start, end = self._row_range(store)
        return end - start

    def has_enough_documents(self, store: TokenStore) -> bool:
        """Check that there are two documents, if next_sentence needs them."""
        if not self.config.next_sentence:
            return True
        start, end = self._row_range(store)
        documents = store.fields["document"][0][start:end]
        return len(documents) > 0 and bool(documents[0] != documents[-1])

    def lengths(self, store: TokenStore, samples: SampleIds, epoch: int) -> NDArray[np.int64]:
        special = 3 if self.config.next_sentence else 2
        return (store.spans("ids", samples + self._row_range(store)[0])[1] + special)[:, None]

    def batch(self, store: TokenStore, samples: SampleIds, epoch: int, seed: int) -> Batch:
        rows = samples + self._row_range(store)[0]
        second_rows, swapped = self._second_rows(store, rows, epoch, seed)
        starts, sizes = store.spans("ids", rows)
        first_lengths = store.gather("cut", rows)[0].astype(np.int64)
        second_starts, second_sizes = store.spans("ids", second_rows)
        second_lengths = np.minimum(sizes - first_lengths, second_sizes)
        values = store.fields["ids"][0]
        first = values[concat_ranges(starts, first_lengths)]
        second = values[concat_ranges(second_starts + second_sizes - second_lengths, second_lengths)]
        ids, lengths, segments = join_segments(
            first, first_lengths, second, second_lengths, self.cls_id, self.sep_id, self.config.next_sentence
        )
        chosen, masked = self._mask(ids, lengths, rows, epoch, seed)
        fields = {"ids": masked, "segments": segments, "labels": np.where(chosen, ids, IGNORED)}
        per_row = {"next_sentence": swapped.astype(np.int64)} if self.config.next_sentence else None
        return collate({"ids": fields}, {"ids": lengths}, self.config.packed, self.pad_values, per_row)

    def _second_rows(
        self, store: TokenStore, rows: SampleIds, epoch: int, seed: int
    ) -> tuple[SampleIds, NDArray[np.bool_]]:
        """Return the row of each second segment, and whether it is from another document."""
        if not self.config.next_sentence:
            return rows, np.zeros(len(rows), bool)
        start, end = self._row_range(store)
        documents = store.fields["document"][0]
        swap = uniform(seed, epoch, rows, DRAW_SWAP) < 0.5
        others = rows.copy()
        for attempt in range(8):  # enough to hit another document, unless one dominates
            same = swap & (documents[others] == documents[rows])
            others[same] = start + randint(end - start, seed, epoch, rows[same], DRAW_OTHER_ROW + 16 * attempt)
        swapped = swap & (documents[others] != documents[rows])
        return np.where(swapped, others, rows), swapped

    def _mask(
        self, ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: SampleIds, epoch: int, seed: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return which tokens to predict, and the input ids with masks; both (N,)."""
        row = np.repeat(rows, lengths)
        position = np.arange(len(ids)) - np.repeat(lengths.cumsum() - lengths, lengths)
        eligible = ~self.is_special[ids]
        word = position
        if self.config.whole_word_masking:  # all tokens of a word share one draw
            starts = ~self.is_continuation[ids] | ~eligible | (position == 0)
            word = position[np.maximum.accumulate(np.where(starts, np.arange(len(ids)), 0))]
        draws = np.where(eligible, uniform(seed, epoch, row, word, DRAW_CHOOSE), 2.0)
        chosen = draws < self.config.mask_prob
        chosen |= eligible & _is_row_minimum(draws, lengths)  # at least one token per sample
        action = uniform(seed, epoch, row, word, DRAW_ACTION)
        random_ids = self.ordinary_ids[randint(len(self.ordinary_ids), seed, epoch, row, position, DRAW_REPLACEMENT)]
        masked = np.where(chosen & (action < MASK_RATIO), self.mask_id, ids)
        randomized = chosen & (action >= MASK_RATIO) & (action < MASK_RATIO + RANDOM_RATIO)
        return chosen, np.where(randomized, random_ids, masked)


def _is_row_minimum(values: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the smallest value of each row."""
    starts = lengths.cumsum() - lengths
    return values == np.repeat(np.minimum.reduceat(values, starts), lengths)


def join_segments(
    first: NDArray[np.integer],
    first_lengths: NDArray[np.int64],
    second: NDArray[np.integer],
    second_lengths: NDArray[np.int64],
    cls_id: int,
    sep_id: int,
    pairs: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return ids, lengths and segments of `cls first sep` or, for pairs, `cls first sep second sep`.

    `first` and `second` are concatenated rows of lengths `first_lengths` and `second_lengths` (B,).
    """
    lengths = first_lengths + 2 + (second_lengths + 1 if pairs else 0)
    starts = lengths.cumsum() - lengths
    ids = np.full(int(lengths.sum()), sep_id, np.int64)
    ids[starts] = cls_id
    ids[concat_ranges(starts + 1, first_lengths)] = first
    segments = np.zeros(len(ids), np.int64)
    if pairs:
        ids[concat_ranges(starts + first_lengths + 2, second_lengths)] = second
        segments[concat_ranges(starts + first_lengths + 2, second_lengths + 1)] = 1
    return ids, lengths, segments
