"""Random inputs of the paged attention kernels, and a check against attention in fp64, row by row.

N tokens · R rows · H heads · G key-value heads · E head dim
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.model.attention import Rope
from clearhead.ops.triton.paged_attention import (
    BlockTables,
    QueryTiles,
    chunk_attention,
    cross_attention,
    decode_attention,
    rotate_and_write,
    tokens_per_tile,
)

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the norm
OFFSET = 5  # of the tables in their tensor


@dataclass
class Shape:
    """Heads and storage of a case."""

    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    rotated: bool = True
    span: int = 16
    device: str = "cuda"


class PagedCase:
    """Rows with some cached tokens in random pages, and some new tokens; unused slots hold NaN."""

    def __init__(self, shape: Shape, cached: list[int], counts: list[int]):
        self.shape, span, device = shape, shape.span, shape.device
        self.lengths = [a + b for a, b in zip(cached, counts, strict=True)]
        entries = [length // span + 1 for length in self.lengths]
        order = iter((torch.randperm(sum(entries)) + 1).tolist())
        self.pages = [[next(order) for _ in range(count)] for count in entries]
        width = max(entries) + 3
        table = [page for pages in self.pages for page in pages + [0] * (width - len(pages))]
        layout = torch.tensor([OFFSET, width], dtype=torch.int32, device=device)
        entry_tensor = torch.tensor([-1] * OFFSET + table, dtype=torch.int32, device=device)
        self.tables = BlockTables(entry_tensor, layout, span)
        size = ((sum(entries) + 1) * span, shape.kv_heads, shape.head_dim)
        self.keys, self.values = (torch.full(size, torch.nan, dtype=shape.dtype, device=device) for _ in range(2))
        for row, count in enumerate(cached):
            slots = self.slots(row, 0, count)
            for pool in (self.keys, self.values):
                pool[slots] = torch.randn(count, *size[1:], device=device).to(shape.dtype)
        self.rows = [row for row, count in enumerate(counts) for _ in range(count)]
        positions = [start + n for start, count in zip(cached, counts, strict=True) for n in range(count)]
        self.positions = torch.tensor(positions, dtype=torch.int32, device=device)
        self.new_slots = torch.cat([self.slots(row, *span) for row, span in enumerate(zip(cached, self.lengths))])  # noqa: B905
        angles = 7 * torch.rand(len(positions), shape.head_dim // 2, device=device)
        self.rope = (angles.cos(), angles.sin()) if shape.rotated else None
        self.arrived = torch.zeros(len(self.rows) * shape.kv_heads, dtype=torch.int32, device=device)

    def slots(self, row: int, begin: int, end: int) -> Tensor:
        """Return the slots of positions of a row."""
        span, positions = self.shape.span, torch.arange(begin, end)
        pages = torch.tensor(self.pages[row])
        return (pages[positions // span] * span + positions % span).to(self.shape.device)

    def heads(self, others: int) -> Tensor:
        """Return random queries and `others` heads for each token."""
        count = self.shape.kv_heads * self.shape.group + others
        return torch.randn(len(self.rows), count, self.shape.head_dim, device=self.shape.device).to(self.shape.dtype)

    def tiles(self) -> QueryTiles:
        """Return tiles of all tokens, and one of padding."""
        size, tiles, begin = tokens_per_tile(self.shape.group, self.shape.dtype), [(0, 0, 0)], 0
        for row in dict.fromkeys(self.rows):
            end = begin + self.rows.count(row)
            tiles += [(row, first, min(first + size, end)) for first in range(begin, end, size)]
            begin = end
        return QueryTiles(*torch.tensor(tiles, dtype=torch.int32, device=self.shape.device).T.contiguous())

    def check(self, out: Tensor, queries: Tensor, visible: list[int]) -> float:
        """Compare with attention in fp64 to the first `visible` positions; return the largest relative error."""
        errors, group = [0.0], self.shape.group
        for token, (row, count) in enumerate(zip(self.rows, visible, strict=True)):
            slots = self.slots(row, 0, count)
            k, v = (pool[slots].double().repeat_interleave(group, dim=1) for pool in (self.keys, self.values))
            scores = torch.einsum("he,she->hs", queries[token].double(), k) / math.sqrt(self.shape.head_dim)
            expected = torch.einsum("hs,she->he", scores.softmax(dim=-1), v)
            errors.append(float((out[token].double() - expected).norm() / expected.norm()))
        assert max(errors) < TOLERANCE[self.shape.dtype], f"relative error {max(errors)}"
        return max(errors)


def rotate(x: Tensor, rope: Rope | None) -> Tensor:
    """Rotate x (N, H, E)."""
    if rope is None:
        return x
    cos, sin = (part[:, None] for part in rope)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def check_pools(case: PagedCase, before: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
    """Check that keys and values were written to their slots, and nothing else."""
    tolerance = TOLERANCE[case.shape.dtype]
    for pool, old, new, exact in zip((case.keys, case.values), before, (k, v), (0, 1), strict=True):
        old[case.new_slots] = new
        allowed = 0 if exact else tolerance
        torch.testing.assert_close(pool, old, atol=allowed, rtol=allowed, equal_nan=True)


def check_decode(shape: Shape, lengths: list[int]) -> float:
    """Check decode attention with some cached tokens per row."""
    case = PagedCase(shape, lengths, [1] * len(lengths))
    heads, before, num = case.heads(2 * shape.kv_heads), (case.keys.clone(), case.values.clone()), shape.kv_heads
    for _ in range(2):  # the second call finds the counters as the first one left them
        slots = case.new_slots.int()
        args = (case.rope, case.keys, case.values, case.tables, case.positions, slots, case.arrived)
        out = decode_attention(heads, *args)
    assert not case.arrived.any()
    q, k, v = heads[:, : -2 * num], heads[:, -2 * num : -num], heads[:, -num:]
    check_pools(case, before, rotate(k, case.rope), v)
    return case.check(out, rotate(q, case.rope), [length + 1 for length in lengths])


def check_cross(shape: Shape, lengths: list[int]) -> float:
    """Check cross-attention of one token per row."""
    case = PagedCase(shape, lengths, [1] * len(lengths))
    q, counts = case.heads(0), torch.tensor(lengths, dtype=torch.int32, device=shape.device)
    out = cross_attention(q, case.keys, case.values, case.tables, counts, case.arrived)
    assert not case.arrived.any()
    return case.check(out, q, lengths)


def check_chunks(shape: Shape, cached: list[int], counts: list[int], causal: bool = True) -> float:
    """Check attention of rows with several tokens."""
    case = PagedCase(shape, cached, counts)
    heads, num = case.heads(2 * shape.kv_heads), shape.kv_heads
    q, k, v = (rotate(heads[:, : -2 * num], case.rope), heads[:, -2 * num : -num], heads[:, -num:])
    k, before = rotate(k, case.rope).clone(), (case.keys.clone(), case.values.clone())
    rotate_and_write(heads, case.rope, case.keys, case.values, case.new_slots.int())
    check_pools(case, before, k, v)
    rotated = heads[:, : -2 * num]
    torch.testing.assert_close(rotated, q, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=shape.device)
    limits = case.positions if causal else lengths
    out = chunk_attention(rotated, case.keys, case.values, case.tables, case.tiles(), limits, causal)
    whole = [case.lengths[row] for row in case.rows]
    return case.check(out, rotated, [int(p) + 1 for p in case.positions] if causal else whole)
