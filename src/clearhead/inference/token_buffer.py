"""Token ids of a batch on the device: prompts and new tokens.   B batch · T tokens, growing"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class TokenBuffer:
    """Rows of ids of different lengths, padded on the right with `pad_id` = V, which is no token of the vocabulary.

    Each new token may have a logprob.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], vocab_size: int, device: torch.device):
        self.max_length, self.pad_id = max(len(prompt) for prompt in prompts), vocab_size
        rows = [[*prompt, *[vocab_size] * (self.max_length - len(prompt))] for prompt in prompts]
        self._ids = torch.tensor(rows).to(device)
        self._logprobs = torch.zeros(self._ids.shape, device=device)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts]).to(device)  # (B,) prompt and new tokens
        self.num_new = torch.zeros_like(self.lengths)  # (B,) new tokens
        self.num_left = torch.tensor(limits).to(device)  # (B,) new tokens that still fit

    @property
    def ids(self) -> Tensor:
        """Prompt and new tokens (B, max_length); `max_length` is known on the host."""
        return self._ids[:, : self.max_length]

    @property
    def new_ids(self) -> Tensor:
        """New tokens (B, max_length), the prompt replaced by padding."""
        positions = torch.arange(self.max_length, device=self._ids.device)
        return self.ids.masked_fill(positions < (self.lengths - self.num_new)[:, None], self.pad_id)

    def new_tokens_of(self, row: int) -> tuple[list[int], list[float]]:
        """Return the new tokens of one row and their logprobs (0 where none were given)."""
        length, new = int(self.lengths[row]), int(self.num_new[row])
        return tuple(x[row, length - new : length].tolist() for x in (self._ids, self._logprobs))  # type: ignore[return-value]

    def append(self, tokens: Tensor, logprobs: Tensor | None = None) -> None:
        """Append one token (B,) to every row, optionally with its logprob (B,)."""
        if self.max_length == self._ids.shape[1]:
            more = (0, max(32, self.max_length))
            self._ids, self._logprobs = F.pad(self._ids, more, value=self.pad_id), F.pad(self._logprobs, more)
        self._ids.scatter_(1, self.lengths[:, None], tokens[:, None])
        if logprobs is not None:
            self._logprobs.scatter_(1, self.lengths[:, None], logprobs[:, None].float())
        self.lengths, self.num_new, self.num_left = self.lengths + 1, self.num_new + 1, self.num_left - 1
        self.max_length += 1

    def rewind(self, num_new: Tensor, max_length: int) -> None:
        """Keep only the first `num_new` (B,) new tokens of each row; `max_length` is the longest row after that."""
        removed, self.max_length = self.num_new - num_new, max_length
        self.lengths, self.num_new, self.num_left = self.lengths - removed, num_new, self.num_left + removed
        positions = torch.arange(self._ids.shape[1], device=self._ids.device)
        self._ids = self._ids.masked_fill(positions >= self.lengths[:, None], self.pad_id)

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows: row n becomes the old row rows[n]."""
        self._ids, self._logprobs = self._ids[rows], self._logprobs[rows]
        self.lengths, self.num_new, self.num_left = self.lengths[rows], self.num_new[rows], self.num_left[rows]

    def last_tokens(self, count: int) -> Tensor:
        """Return the last `count` tokens of each row (B, count), padded on the left where a row is shorter."""
        positions = self.lengths[:, None] - count + torch.arange(count, device=self._ids.device)
        tokens = self._ids.gather(1, positions.clamp(min=0))
        return tokens.masked_fill(positions < 0, self.pad_id)
