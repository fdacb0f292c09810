"""BERT's two tasks: fill in what was masked, and tell whether a second segment really follows the first.

Masks and swapped segments are drawn anew in every epoch, from (seed, epoch, sample) alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clearhead.config.data import DataConfig
from clearhead.data.batch import Batch, arrange
from clearhead.data.formats import TEXT, Record
from clearhead.data.random import below, uniform
from clearhead.data.store import Row, Store, ranges
from clearhead.data.tasks import Samples, Task, token_kind
from clearhead.ops.cross_entropy import IGNORED
from clearhead.text import Tokenizer

MASK, RANDOM = 0.8, 0.1  # of the chosen tokens: masked, replaced by another; the rest stays
OTHERS, SWAP, CHOOSE, REPLACE, PICK = range(1, 6)  # what a draw is for


class MaskedLanguageModel(Task):
    """Documents cut into samples of up to `longest` tokens; with next_sentence, each of two segments in a row.

    A row is (ids, cut, document): the second segment begins at `cut`. Half of the samples get as many tokens from the
    end of another document's row instead, so that a sample's length does not tell which of the two it is.
    """

    columns = TEXT
    roles = ("pad", "unknown", "class", "separator", "mask")
    stream = True

    def __init__(self, config: DataConfig, tokenizers: Sequence[Tokenizer], labels: Sequence[str] = ()):
        super().__init__(config, tokenizers, labels)
        self.open, self.close, self.mask = (self.tokenizer.id(role) for role in ("class", "separator", "mask"))
        self.special = np.zeros(len(self.tokenizer), bool)
        self.special[list(self.tokenizer.roles.values())] = True
        self.ordinary = np.flatnonzero(~self.special)
        self.continues = np.array(self.tokenizer.continues())
        self.document, self.rest = 0, list[int]()

    @property
    def kinds(self) -> dict[str, str]:
        return {"ids": token_kind(self.tokenizer), "cut": "int32", "document": "int64"}

    def rows(self, records: list[Record], dropped: Counter[str]) -> list[Row]:
        rows: list[Row] = []
        room = self.config.max_length - (3 if self.config.next_sentence else 2)
        for record, ids in zip(records, self.tokenizer.encode_batch([r.values[0] for r in records]), strict=True):
            opens, closes = (*record.values, True, True)[1:3]
            self.document += int(opens)
            ids = ([] if opens else self.rest) + ids
            cuts = range(0, len(ids), room)
            self.rest = [] if closes else ids[cuts[-1] :] if cuts else []
            for cut in cuts[:-1] if not closes else cuts:
                piece = ids[cut : cut + room]
                if len(piece) < max(2, self.config.min_length):
                    dropped["too short"] += 1
                    continue
                half = len(piece) if not self.config.next_sentence else self._half(piece, len(rows))
                rows.append({"ids": piece, "cut": [half], "document": [self.document]})
        return rows

    def _half(self, piece: list[int], salt: int) -> int:
        """Where a piece is cut into two segments: anywhere, as BERT does, so that their lengths vary."""
        return 1 + int(below(len(piece) - 1, len(piece), salt, sum(piece)))

    def _rows(self, store: Store, samples: Samples) -> Samples:
        return samples + int(self.share[0] * len(store))

    def samples(self, store: Store, epoch: int) -> int:
        return int(self.share[1] * len(store)) - int(self.share[0] * len(store))

    def enough(self, store: Store) -> bool:
        """Whether there are documents enough for the task: two, where a second segment has to come from another."""
        if not self.config.next_sentence:
            return True
        begin, behind = (int(share * len(store)) for share in self.share)
        documents = store.fields["document"][0][begin:behind]
        return len(documents) > 0 and bool(documents[0] != documents[-1])

    def lengths(self, store: Store, samples: Samples, epoch: int) -> NDArray[np.int64]:
        extra = 3 if self.config.next_sentence else 2
        return (store.span("ids", self._rows(store, samples))[1] + extra)[:, None]

    def batch(self, store: Store, samples: Samples, epoch: int, seed: int) -> Batch:
        rows = self._rows(store, samples)
        others, swapped = self._seconds(store, rows, epoch, seed)
        starts, sizes = store.span("ids", rows)
        n = store.take("cut", rows)[0].astype(np.int64)
        other_starts, other_sizes = store.span("ids", others)
        m = np.minimum(sizes - n, other_sizes)
        values = store.fields["ids"][0]
        first, second = values[ranges(starts, n)], values[ranges(other_starts + other_sizes - m, m)]
        ids, lengths, segments = join(first, n, second, m, self.open, self.close, self.config.next_sentence)
        chosen, masked = self._masked(ids, lengths, rows, epoch, seed)
        fields = {"ids": masked, "segments": segments, "labels": np.where(chosen, ids, IGNORED)}
        others_by_row = {"next_sentence": swapped.astype(np.int64)} if self.config.next_sentence else None
        return arrange({"ids": fields}, {"ids": lengths}, self.config.packed, self.padding, others_by_row)

    def _seconds(self, store: Store, rows: Samples, epoch: int, seed: int) -> tuple[Samples, NDArray[np.bool_]]:
        """The row that each second segment comes from, and whether that is another document's."""
        if not self.config.next_sentence:
            return rows, np.zeros(len(rows), bool)
        begin, behind = (int(share * len(store)) for share in self.share)
        documents = store.fields["document"][0]
        swap = uniform(seed, epoch, rows, SWAP) < 0.5
        others = rows.copy()
        for attempt in range(8):  # a few draws find another document, unless there is only one
            same = swap & (documents[others] == documents[rows])
            others[same] = begin + below(behind - begin, seed, epoch, rows[same], OTHERS + 16 * attempt)
        found = swap & (documents[others] != documents[rows])
        return np.where(found, others, rows), found

    def _masked(
        self, ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: Samples, epoch: int, seed: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which tokens are asked for, and the tokens with masks in their place; (N,) both."""
        row = np.repeat(rows, lengths)
        place = np.arange(len(ids)) - np.repeat(lengths.cumsum() - lengths, lengths)
        eligible = ~self.special[ids]
        word = place
        if self.config.whole_word_masking:  # the tokens of a word share one draw
            starts = ~self.continues[ids] | ~eligible | (place == 0)
            word = place[np.maximum.accumulate(np.where(starts, np.arange(len(ids)), 0))]
        draws = np.where(eligible, uniform(seed, epoch, row, word, CHOOSE), 2.0)
        chosen = draws < self.config.mask_prob
        chosen |= eligible & self._least(draws, lengths)
        action = uniform(seed, epoch, row, word, REPLACE)
        replacement = self.ordinary[below(len(self.ordinary), seed, epoch, row, place, PICK)]
        masked = np.where(chosen & (action < MASK), self.mask, ids)
        return chosen, np.where(chosen & (action >= MASK) & (action < MASK + RANDOM), replacement, masked)

    def _least(self, draws: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The smallest draw of each row: something is asked for in every sample."""
        starts = lengths.cumsum() - lengths
        return draws == np.repeat(np.minimum.reduceat(draws, starts), lengths)


def join(
    first: NDArray[np.integer],
    n: NDArray[np.int64],
    second: NDArray[np.integer],
    m: NDArray[np.int64],
    open: int,
    close: int,
    pairs: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """`open first close` or `open first close second close` for every row: ids, lengths and segments."""
    lengths = n + 2 + (m + 1 if pairs else 0)
    starts = lengths.cumsum() - lengths
    ids = np.full(int(lengths.sum()), close, np.int64)
    ids[starts] = open
    ids[ranges(starts + 1, n)] = first
    segments = np.zeros(len(ids), np.int64)
    if pairs:
        ids[ranges(starts + n + 2, m)] = second
        segments[ranges(starts + n + 2, m + 1)] = 1
    return ids, lengths, segments
