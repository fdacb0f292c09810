"""One transfer of a step's small arrays to the GPU, to addresses that captured graphs read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STEPS_AHEAD = 4  # transfers that may be under way; the host waits for the oldest
TORCH = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class Uploader:
    """Arrays of 4 or 8 bytes a number, one after another in one buffer of the device."""

    def __init__(self, device: torch.device, words: int):
        self.device, self.step = device, 0
        self._allocate(words)

    def _allocate(self, words: int) -> None:
        pinned = self.device.type == "cuda"
        self.words = torch.zeros(words, dtype=torch.int32, device=self.device)
        self.hosts = [torch.empty(words, dtype=torch.int32, pin_memory=pinned) for _ in range(STEPS_AHEAD)]
        self.arrays = [host.numpy() for host in self.hosts]
        self.events: list[Any] = [torch.cuda.Event() if pinned else None for _ in range(STEPS_AHEAD)]

    def upload(self, columns: dict[str, NDArray[Any]]) -> bool:
        """Copy arrays, those of 8 bytes first, without waiting; return whether the buffer has moved."""
        used = sum(column.nbytes for column in columns.values()) // 4
        moved = used > len(self.words)
        if moved:
            self._allocate(2 * used)
        self.step = (self.step + 1) % STEPS_AHEAD
        host, event = self.arrays[self.step], self.events[self.step]
        if event is not None:
            event.synchronize()
        begin = 0
        for column in columns.values():
            end = begin + column.nbytes // 4
            host[begin:end] = np.ascontiguousarray(column).view(np.int32)
            begin = end
        self.words[:used].copy_(self.hosts[self.step][:used], non_blocking=True)
        if event is not None:
            event.record()
        return moved

    def views(self, columns: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
        """Return the arrays on the device."""
        views, begin = {}, 0
        for name, column in columns.items():
            end = begin + column.nbytes // 4
            views[name] = self.words[begin:end].view(TORCH[column.dtype.name])
            begin = end
        return views

    def rest(self, view: Tensor) -> Tensor:
        """Return all words from a view of int32 on."""
        return self.words[view.storage_offset() :]
