"""What stands in each row so far, on the device: prompt and new tokens.   R rows · W width that grows"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class TokenBuffer:
    """Rows of ids, each as long as it is; behind them stands `filler`, one more than the last word.

    Beside each new token may stand its log-probability.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], words: int, device: torch.device):
        self.max_length, self.filler = max(len(prompt) for prompt in prompts), words
        rows = [[*prompt, *[words] * (self.max_length - len(prompt))] for prompt in prompts]
        self._ids = torch.tensor(rows).to(device)
        self._chances = torch.zeros(self._ids.shape, device=device)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts]).to(device)  # (R,)
        self.new = torch.zeros_like(self.lengths)  # (R,) how many of them are no prompt
        self.left = torch.tensor(limits).to(device)  # (R,) how many may still come

    @property
    def ids(self) -> Tensor:
        """(R, longest), where `longest` is known on the host."""
        return self._ids[:, : self.max_length]

    @property
    def new_tokens(self) -> Tensor:
        """(R, longest) with filler in the place of the prompt."""
        places = torch.arange(self.max_length, device=self._ids.device)
        return self.ids.masked_fill(places < (self.lengths - self.new)[:, None], self.filler)

    def of(self, row: int) -> tuple[list[int], list[float]]:
        """The new tokens of one row, and their log-probabilities where they were given."""
        length, new = int(self.lengths[row]), int(self.new[row])
        return tuple(x[row, length - new : length].tolist() for x in (self._ids, self._chances))  # type: ignore[return-value]

    def append(self, chosen: Tensor, chances: Tensor | None = None) -> None:
        """One token (R,) for every row, with its log-probability (R,) if that is wanted later."""
        if self.max_length == self._ids.shape[1]:
            more = (0, max(32, self.max_length))
            self._ids, self._chances = F.pad(self._ids, more, value=self.filler), F.pad(self._chances, more)
        self._ids.scatter_(1, self.lengths[:, None], chosen[:, None])
        if chances is not None:
            self._chances.scatter_(1, self.lengths[:, None], chances[:, None].float())
        self.lengths, self.new, self.left = self.lengths + 1, self.new + 1, self.left - 1
        self.max_length += 1

    def rewind(self, new: Tensor, max_length: int) -> None:
        """Take back what stands beyond so many new tokens (R,); the longest row then has `longest` in all."""
        back, self.max_length = self.new - new, max_length
        self.lengths, self.new, self.left = self.lengths - back, new, self.left + back
        places = torch.arange(self._ids.shape[1], device=self._ids.device)
        self._ids = self._ids.masked_fill(places >= self.lengths[:, None], self.filler)

    def select(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was."""
        self._ids, self._chances = self._ids[rows], self._chances[rows]
        self.lengths, self.new, self.left = self.lengths[rows], self.new[rows], self.left[rows]

    def join(self, other: TokenBuffer) -> None:
        """The rows of another come behind our own."""
        self.max_length = max_length = max(self.max_length, other.max_length)
        for name, filler in (("_ids", self.filler), ("_chances", 0)):
            parts = (getattr(self, name)[:, :max_length], getattr(other, name)[:, :max_length])
            joined = torch.cat([F.pad(part, (0, max_length - part.shape[1]), value=filler) for part in parts])
            setattr(self, name, joined)
        self.lengths = torch.cat([self.lengths, other.lengths])
        self.new, self.left = torch.cat([self.new, other.new]), torch.cat([self.left, other.left])

    def recent(self, count: int) -> Tensor:
        """The last tokens of each row (R, count); filler where a row is shorter."""
        places = self.lengths[:, None] - count + torch.arange(count, device=self._ids.device)
        found = self._ids.gather(1, places.clamp(min=0))
        return found.masked_fill(places < 0, self.filler)
