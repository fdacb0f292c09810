"""Triton attention over a paged KV cache: of one new token per row (decode), or of several (a chunk, draft tokens).

N tokens · R rows · H heads · G key-value heads · E head dim · S splits of the keys

The decode kernel also rotates the queries and the new key and writes the new key and value. With few rows there are
fewer heads than multiprocessors, so the keys of a head are split, and the last split to finish combines them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

try:
    from clearhead.ops.triton import paged_attention_kernels as kernels
except ImportError:  # no Triton on this platform
    kernels = None  # type: ignore[assignment]

MIN_DOT = 16  # smallest matrix side for tensor cores
MAX_SPLITS = 16
TARGET_PROGRAMS = 128  # to aim for when splitting
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
    if kernels is None:
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
    wanted = max(1, min(TARGET_PROGRAMS // (rows * kv_heads), MAX_SPLITS, combined))  # tuned on an H200
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
    dependent: bool = False,
) -> Tensor:
    """Attention of a new token per row: unrotated queries, key and value, heads (R, H + 2G, E), to (R, H, E).

    keys and values are (slots, G, E); the new ones, of positions (R,), are written to slots (R,). `rope` is cosines and
    sines (R, E/2). `arrived` are at least R · G int32 zeros, and zeros again afterwards. A `dependent`
    kernel starts before the one before it has ended.
    """
    return _decode(heads, rope, keys, values, tables, positions, slots, arrived, False, dependent)


def cross_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: BlockTables,
    lengths: Tensor,
    arrived: Tensor,
    dependent: bool = False,
) -> Tensor:
    """Attention of a token per row, queries (R, H, E), to the keys and values of its source: (R, H, E)."""
    return _decode(queries, None, keys, values, tables, lengths, lengths, arrived, True, dependent)


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
    dependent: bool,
) -> Tensor:
    rows, (_, kv_heads, head_dim) = len(heads), keys.shape
    num_heads = heads.shape[1] - (0 if cross else 2 * kv_heads)
    group = num_heads // kv_heads
    splits = _splits(rows, kv_heads, group, head_dim)
    out = heads.new_empty(rows, num_heads, head_dim)
    partial = out if splits == 1 else heads.new_empty(rows, num_heads, splits, head_dim, dtype=torch.float32)
    logsumexp = heads.new_empty(rows, num_heads, splits, dtype=torch.float32)
    kernels.decode_attention[(rows, kv_heads, splits)](
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
        _block(head_dim, keys.dtype, 128),
        splits,
        dependent,
        num_warps=4,
        num_stages=3,
        launch_pdl=dependent,
    )
    return out


def rotate_and_write(
    heads: Tensor, rope: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, slots: Tensor
) -> None:
    """Rotate the queries of heads (N, H + 2G, E) in place, and write the keys, rotated too, and the values to slots."""
    tokens, num_heads, head_dim = heads.shape
    kv_heads = keys.shape[1]
    kernels.rotate_and_write[(tokens,)](
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
    kernels.chunk_attention[(len(tiles.rows), kv_heads)](
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
