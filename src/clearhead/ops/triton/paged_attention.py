"""Triton attention over a paged KV cache: of one new token per row (decode), or of several (a chunk, draft tokens).

N tokens · R rows · H heads · G key-value heads · E head dim · S splits of the keys

The decode kernel also rotates the queries and the new key and writes the new key and value. With few rows there are
fewer heads than multiprocessors, so the keys of a head are split, and the last split to finish combines them.
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

import math
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    from triton import language as tl
except ImportError:  # no Triton on this platform
    triton = None

MIN_DOT = 16  # smallest matrix side for tensor cores
MAX_SPLITS = 32
TARGET_PROGRAMS = 256  # to aim for when splitting
MAX_TILE_BYTES = 16384  # of keys in an iteration, so that the next iteration's fit into shared memory as well
MAX_COMBINED = 16384  # numbers that a program combines at once
QUERY_TILE = 64  # queries of a program of the chunk kernel: tokens times heads of a group
FP32_QUERY_TILE, FP32_BLOCK = 16, 16  # without tensor cores a larger tile does not fit into registers


class BlockTables(NamedTuple):
    """Block tables of rows: entry i of row r is `entries[layout[0] + r · layout[1] + i]`, a page or a slot.

    The layout is on the device too, so that a captured kernel reads tables of any width.
    """

    entries: Tensor  # int32
    layout: Tensor  # (2,) int32
    span: int  # slots of an entry


class QueryTiles(NamedTuple):
    """Tiles of neighboring tokens of a row, for `chunk_attention`."""

    rows: Tensor  # (tiles,) int32
    begins: Tensor  # (tiles,) int32, the first token
    ends: Tensor  # (tiles,) int32, after the last token; equal to `begins` in a tile of padding


def paged_attention_supports(head_dim: int, group: int, dtype: torch.dtype) -> str | None:
    """Return why a shape or dtype is not supported, or None."""
    if triton is None:
        return "Triton is not installed"
    if not (MIN_DOT <= head_dim <= 256 and head_dim & (head_dim - 1) == 0):
        return f"head_dim {head_dim} is not a power of two from {MIN_DOT} to 256"
    if group > MIN_DOT:
        return f"{group} heads share a key-value head, more than {MIN_DOT}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {dtype} is not bf16, fp16 or fp32"
    return None


def tokens_per_tile(group: int, dtype: torch.dtype) -> int:
    """Return the tokens of a tile of `chunk_attention`."""
    tile = FP32_QUERY_TILE if dtype == torch.float32 else QUERY_TILE
    return tile // _next_power_of_2(group)


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _block(head_dim: int, dtype: torch.dtype, largest: int) -> int:
    """Return the number of keys of an iteration."""
    return max(MIN_DOT, min(largest, MAX_TILE_BYTES // (head_dim * dtype.itemsize)))


def _splits(rows: int, kv_heads: int, group: int, head_dim: int) -> int:
    """Return the number of splits, a power of two."""
    combined = MAX_COMBINED // (_next_power_of_2(group) * head_dim)
    wanted = max(1, min(TARGET_PROGRAMS // (rows * kv_heads), MAX_SPLITS, combined))
    return 1 << (wanted.bit_length() - 1)


def decode_attention(
    heads: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    tables: BlockTables,
    positions: Tensor,
    slots: Tensor,
    arrived: Tensor,
) -> Tensor:
    """Attention of a new token per row: unrotated queries, key and value, heads (R, H + 2G, E), to (R, H, E).

    keys and values are (slots, G, E); the new ones, of positions (R,), are written to slots (R,). `rope` is cosines and
    sines (R, E/2). `arrived` are at least R · G int32 zeros, and zeros again afterwards.
    """
    return _decode(heads, rope, keys, values, tables, positions, slots, arrived, False)


def cross_attention(
    queries: Tensor, keys: Tensor, values: Tensor, tables: BlockTables, lengths: Tensor, arrived: Tensor
) -> Tensor:
    """Attention of a token per row, queries (R, H, E), to the keys and values of its source: (R, H, E)."""
    return _decode(queries, None, keys, values, tables, lengths, lengths, arrived, True)


def _decode(
    heads: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    tables: BlockTables,
    lengths: Tensor,
    slots: Tensor,
    arrived: Tensor,
    cross: bool,
) -> Tensor:
    rows, (_, kv_heads, head_dim) = len(heads), keys.shape
    num_heads = heads.shape[1] - (0 if cross else 2 * kv_heads)
    group = num_heads // kv_heads
    splits = _splits(rows, kv_heads, group, head_dim)
    out = heads.new_empty(rows, num_heads, head_dim)
    partial = out if splits == 1 else heads.new_empty(rows, num_heads, splits, head_dim, dtype=torch.float32)
    logsumexp = heads.new_empty(rows, num_heads, splits, dtype=torch.float32)
    _decode_attention[(rows, kv_heads, splits)](
        heads,
        *((lengths, lengths) if rope is None else rope),  # unused arguments must be tensors too
        keys,
        values,
        tables.entries,
        tables.layout,
        lengths,
        slots,
        out,
        partial,
        logsumexp,
        arrived,
        1 / (math.sqrt(head_dim) * math.log(2)),  # for exp2, which is cheaper than exp
        rope is not None,
        cross,
        group,
        _next_power_of_2(group),
        MIN_DOT,
        kv_heads,
        head_dim,
        tables.span,
        _block(head_dim, keys.dtype, 64 if splits == 1 else 32),
        splits,
        num_warps=4,
        num_stages=3,
    )
    return out


def rotate_and_write(
    heads: Tensor, rope: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, slots: Tensor
) -> None:
    """Rotate the queries of heads (N, H + 2G, E) in place, and write the keys, rotated too, and the values to slots."""
    tokens, num_heads, head_dim = heads.shape
    kv_heads = keys.shape[1]
    _rotate_and_write[(tokens,)](
        heads,
        *((slots, slots) if rope is None else rope),
        keys,
        values,
        slots,
        rope is not None,
        num_heads - 2 * kv_heads,
        kv_heads,
        _next_power_of_2(num_heads),
        head_dim,
        num_warps=4,
    )


def chunk_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: BlockTables,
    tiles: QueryTiles,
    lengths: Tensor,
    causal: bool = True,
) -> Tensor:
    """Attention of rows with any number of tokens: rotated queries (N, H, E), a view, to (N, H, E).

    A token attends to positions 0 to lengths[token], (N,); to those before lengths[row], (R,), if not causal.
    """
    tokens, num_heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    out = queries.new_empty(tokens, num_heads, head_dim)
    padded_group = _next_power_of_2(num_heads // kv_heads)
    _chunk_attention[(len(tiles.rows), kv_heads)](
        queries,
        keys,
        values,
        tables.entries,
        tables.layout,
        tiles.rows,
        tiles.begins,
        tiles.ends,
        lengths,
        out,
        queries.stride(0),
        1 / (math.sqrt(head_dim) * math.log(2)),
        causal,
        num_heads // kv_heads,
        padded_group,
        tokens_per_tile(padded_group, keys.dtype),
        kv_heads,
        head_dim,
        tables.span,
        _block(head_dim, keys.dtype, FP32_BLOCK if keys.dtype == torch.float32 else 64),
        num_warps=4,
        num_stages=3,
    )
    return out


if triton is not None:

    @triton.jit
    def _attend(
        q,
        keys,
        values,
        entries,
        begin,
        end,
        visible,
        max_score,
        total,
        acc,
        scale,
        stride: tl.constexpr,
        dim: tl.constexpr,
        span: tl.constexpr,
        block: tl.constexpr,
    ):
        """Online softmax of queries (Q, E) over positions `begin` to `end`, those below `visible` (Q,)."""
        columns = tl.arange(0, dim)
        for start in range(begin, end, block):
            position = start + tl.arange(0, block)
            mask = position < end
            entry = tl.load(entries + position // span, mask=mask, other=0)
            slot = (entry * span + position % span).to(tl.int64)
            at = slot[:, None] * stride + columns[None, :]  # (block, E)
            cached = tl.load(keys + at, mask=mask[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(cached), input_precision="ieee") * scale
            scores = tl.where(mask[None, :] & (position[None, :] < visible[:, None]), scores, -float("inf"))
            new_max = tl.maximum(max_score, tl.max(scores, 1))
            base = tl.where(new_max > -float("inf"), new_max, 0.0)
            rescale = tl.exp2(max_score - base)
            weights = tl.exp2(scores - base[:, None])
            total = total * rescale + tl.sum(weights, 1)
            cached = tl.load(values + at, mask=mask[:, None], other=0.0)
            acc = tl.dot(weights.to(cached.dtype), cached, acc * rescale[:, None], input_precision="ieee")
            max_score = new_max
        return max_score, total, acc

    @triton.jit
    def _decode_attention(
        heads,
        cosines,
        sines,
        keys,
        values,
        entries,
        layout,
        lengths,
        slots,
        outs,
        partials,
        logsumexps,
        arrived,
        scale,
        rotated: tl.constexpr,
        cross: tl.constexpr,
        group: tl.constexpr,
        group_power: tl.constexpr,
        padded: tl.constexpr,
        groups: tl.constexpr,
        dim: tl.constexpr,
        span: tl.constexpr,
        block: tl.constexpr,
        splits: tl.constexpr,
    ):
        """One program per row, key-value head and split; the first split also handles the new token."""
        row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        half: tl.constexpr = dim // 2
        stride: tl.constexpr = groups * dim
        row_heads: tl.constexpr = group * groups if cross else (group + 2) * groups
        length = tl.load(lengths + row)
        entries += tl.load(layout) + row.to(tl.int64) * tl.load(layout + 1)
        columns, queries = tl.arange(0, dim), tl.arange(0, padded)
        query_mask = queries[:, None] < group
        q_at = heads + (row * row_heads + kv_head * group + queries[:, None]) * dim  # (padded, 1)
        q = tl.load(q_at + columns[None, :], mask=query_mask, other=0.0)  # (padded, E)
        max_score = tl.full([padded], -float("inf"), tl.float32)
        total = tl.zeros([padded], tl.float32)
        acc = tl.zeros([padded, dim], tl.float32)
        if rotated:
            swapped = (columns + half) % dim
            cos = tl.load(cosines + row * half + columns % half)
            sin = tl.load(sines + row * half + columns % half)
            sin = tl.where(columns < half, -sin, sin)
            q_swapped = tl.load(q_at + swapped[None, :], mask=query_mask, other=0.0)
            q = (q.to(tl.float32) * cos[None, :] + q_swapped.to(tl.float32) * sin[None, :]).to(q.dtype)
        if not cross and split == 0:
            k_at = heads + (row * row_heads + group * groups + kv_head) * dim
            k, v = tl.load(k_at + columns), tl.load(k_at + groups * dim + columns)
            if rotated:
                k_swapped = tl.load(k_at + swapped)
                k = (k.to(tl.float32) * cos + k_swapped.to(tl.float32) * sin).to(k.dtype)
            at = tl.load(slots + row).to(tl.int64) * stride + kv_head * dim + columns
            tl.store(keys + at, k)
            tl.store(values + at, v)
            max_score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
            total += 1.0
            acc += v.to(tl.float32)[None, :]
        part = tl.cdiv(tl.cdiv(length, splits), block) * block
        end = tl.minimum(length, (split + 1) * part)
        keys += kv_head * dim
        values += kv_head * dim
        visible = tl.zeros([padded], tl.int32) + end
        max_score, total, acc = _attend(
            q, keys, values, entries, split * part, end, visible, max_score, total, acc, scale, stride, dim, span, block
        )
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # an empty split gives zeros of weight 0
        first = (row * groups + kv_head) * group
        if splits == 1:
            to = (first + queries[:, None]) * dim + columns[None, :]
            tl.store(outs + to, acc.to(outs.dtype.element_ty), mask=query_mask)
        else:
            to = (first + queries) * splits + split
            tl.store(partials + to[:, None] * dim + columns[None, :], acc, mask=query_mask)
            tl.store(logsumexps + to, max_score + tl.log2(total), mask=queries < group)
            tl.debug_barrier()  # all threads have written before the counter says so
            if tl.atomic_add(arrived + row * groups + kv_head, 1, sem="acq_rel") == splits - 1:
                tl.debug_barrier()
                query, part_ids = tl.arange(0, group_power), tl.arange(0, splits)
                real = query < group
                source = (first + query[None, :]) * splits + part_ids[:, None]  # (splits, group)
                logsumexp = tl.load(logsumexps + source, mask=real[None, :], other=0.0)
                logsumexp = tl.maximum(logsumexp, -1e30)  # of a source without tokens
                weights = tl.exp2(logsumexp - tl.max(logsumexp, 0)[None, :])
                part_at = partials + source[:, :, None] * dim + columns[None, None, :]
                parts = tl.load(part_at, mask=real[None, :, None], other=0.0)
                out = tl.sum(parts * weights[:, :, None], 0) / tl.sum(weights, 0)[:, None]
                out_at = outs + (first + query[:, None]) * dim + columns[None, :]
                tl.store(out_at, out.to(outs.dtype.element_ty), mask=real[:, None])
                tl.store(arrived + row * groups + kv_head, 0)

    @triton.jit
    def _rotate_and_write(
        heads,
        cosines,
        sines,
        keys,
        values,
        slots,
        rotated: tl.constexpr,
        q_heads: tl.constexpr,
        groups: tl.constexpr,
        padded: tl.constexpr,
        dim: tl.constexpr,
    ):
        """One program per token."""
        token = tl.program_id(0)
        half: tl.constexpr = dim // 2
        head, columns = tl.arange(0, padded)[:, None], tl.arange(0, half)[None, :]
        at = heads + token.to(tl.int64) * (q_heads + 2 * groups) * dim + head * dim + columns  # (padded, E/2)
        mask = head < q_heads + 2 * groups
        a, b = tl.load(at, mask=mask, other=0.0), tl.load(at + half, mask=mask, other=0.0)
        if rotated:
            cos = tl.load(cosines + token * half + columns)
            sin = tl.load(sines + token * half + columns)
            is_value = head >= q_heads + groups
            x, y = a.to(tl.float32), b.to(tl.float32)
            a = tl.where(is_value, x, x * cos - y * sin).to(a.dtype)
            b = tl.where(is_value, y, y * cos + x * sin).to(b.dtype)
            tl.store(at, a, mask=head < q_heads)
            tl.store(at + half, b, mask=head < q_heads)
        slot = tl.load(slots + token).to(tl.int64)
        to = (slot * groups + head - q_heads) * dim + columns
        is_key = (head >= q_heads) & (head < q_heads + groups)
        tl.store(keys + to, a, mask=is_key)
        tl.store(keys + to + half, b, mask=is_key)
        to -= groups * dim
        is_value = (head >= q_heads + groups) & mask
        tl.store(values + to, a, mask=is_value)
        tl.store(values + to + half, b, mask=is_value)

    @triton.jit
    def _chunk_attention(
        heads,
        keys,
        values,
        entries,
        layout,
        tile_rows,
        tile_begins,
        tile_ends,
        lengths,
        outs,
        token_stride,
        scale,
        causal: tl.constexpr,
        group: tl.constexpr,
        group_power: tl.constexpr,
        tile: tl.constexpr,
        groups: tl.constexpr,
        dim: tl.constexpr,
        span: tl.constexpr,
        block: tl.constexpr,
    ):
        """One program per tile of tokens and key-value head; a query is a token and a head of the group."""
        number, kv_head = tl.program_id(0), tl.program_id(1)
        row, begin, end = tl.load(tile_rows + number), tl.load(tile_begins + number), tl.load(tile_ends + number)
        query, columns = tl.arange(0, tile * group_power), tl.arange(0, dim)
        token, head = begin + query // group_power, query % group_power
        mask = (token < end) & (head < group)
        head += kv_head * group
        at = token.to(tl.int64)[:, None] * token_stride + head[:, None] * dim + columns[None, :]
        q = tl.load(heads + at, mask=mask[:, None], other=0.0)
        if causal:
            visible = tl.load(lengths + token, mask=token < end, other=-1) + 1
        else:
            visible = tl.zeros([tile * group_power], tl.int32) + tl.load(lengths + row)
        entries += tl.load(layout) + row.to(tl.int64) * tl.load(layout + 1)
        max_score = tl.full([tile * group_power], -float("inf"), tl.float32)
        total = tl.zeros([tile * group_power], tl.float32)
        acc = tl.zeros([tile * group_power, dim], tl.float32)
        keys += kv_head * dim
        values += kv_head * dim
        stride: tl.constexpr = groups * dim
        max_score, total, acc = _attend(
            q, keys, values, entries, 0, tl.max(visible, 0), visible, max_score, total, acc, scale,
            stride, dim, span, block,
        )  # fmt: skip
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        at = (token.to(tl.int64) * groups * group + head)[:, None] * dim + columns[None, :]
        tl.store(outs + at, acc.to(outs.dtype.element_ty), mask=mask[:, None])
