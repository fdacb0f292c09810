"""Triton decode attention: rotary embedding, cache write and split-KV attention of one new token per row in one kernel.

B batch · H heads · G key-value heads · C cache slots · E head dim · S splits of the cache

PyTorch's kernels read every slot of a static cache, filled or not, and need further kernels to rotate and write. With a
small batch there are fewer heads than multiprocessors, so each head's cache is split and the parts are combined after.
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

import logging
import math
from functools import cache

import torch
from torch import Tensor

try:
    import triton
    from triton import language as tl
except ImportError:  # no Triton on this platform; `cached_attention` does the same
    triton = None

log = logging.getLogger("clearhead")

MAX_BLOCK, MAX_SPLIT_BLOCK = 64, 32  # slots per loop iteration, without and with splits
MAX_TILE_BYTES = 16384  # of keys per iteration, so that the next iteration's fit into shared memory as well
WARPS, STAGES = 4, 3
FULL_GRID, TARGET_PROGRAMS = 128, 256  # programs from which on nothing is split, and to aim for when splitting
MIN_DOT = 16  # smallest matrix side for tensor cores


@cache
def triton_works(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: the first launch needs a C compiler, which some machines lack."""
    if triton is None or device.type != "cuda":
        return False
    try:
        with torch.cuda.device(device):
            partial, logsumexp, out = (torch.ones(size, device=device) for size in (2 * MIN_DOT, 2, MIN_DOT))
            _combine_splits[(1, 1)](partial, logsumexp, out, MIN_DOT, MIN_DOT, 2, 2, num_warps=WARPS)
    except Exception as error:  # whatever a compiler, a driver or a full disk raises
        log.warning("decoding without Triton's kernels, and slower: %s", str(error).split("\n")[0])
        return False
    return True


def triton_decode_attention_supports(heads: Tensor, keys: Tensor) -> bool:
    """Whether the kernel supports heads (B, H + 2G, E) and keys (B, G, C, E); for the device ask `triton_works`."""
    head_dim, group = heads.shape[-1], heads.shape[-2] // keys.shape[1] - 2
    power_of_two = MIN_DOT <= head_dim <= 256 and head_dim & (head_dim - 1) == 0
    dtypes = heads.dtype == keys.dtype and keys.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return power_of_two and group <= MIN_DOT and keys.is_contiguous() and dtypes


def split_cache(keys: Tensor) -> tuple[int, int]:
    """Return the block size in slots and the number of splits for keys (B, G, C, E)."""
    batch, groups, slots, head_dim = keys.shape
    block = max(MIN_DOT, min(MAX_BLOCK, MAX_TILE_BYTES // (head_dim * keys.element_size())))
    if batch * groups >= FULL_GRID:
        return block, 1
    block = min(block, MAX_SPLIT_BLOCK)
    return block, min(-(-TARGET_PROGRAMS // (batch * groups)), -(-slots // block))


def triton_decode_attention(
    heads: Tensor, rope: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, lengths: Tensor
) -> Tensor:
    """Attention of one new token per row: unrotated queries, key and value, heads (B, H + 2G, E), to (B, H, E).

    The new key and value are written to keys and values (B, G, C, E) at slot lengths (B,).
    """
    batch, groups, slots, head_dim = keys.shape
    queries, (block, splits) = heads.shape[1] - 2 * groups, split_cache(keys)
    out = heads.new_empty(batch, queries, head_dim)
    partial = out if splits == 1 else heads.new_empty(batch, queries, splits, head_dim, dtype=torch.float32)
    logsumexp = heads.new_empty(batch, queries, splits, dtype=torch.float32)
    heads = heads.contiguous()
    scale = 1 / (math.sqrt(head_dim) * math.log(2))  # for exp2, which is cheaper than exp
    _decode_attention[(batch, groups, splits)](
        heads,
        *((heads, heads) if rope is None else rope),  # unused arguments must be tensors too
        keys,
        values,
        lengths,
        partial,
        logsumexp,
        slots,
        scale,
        rope is not None,
        queries // groups,
        MIN_DOT,
        groups,
        head_dim,
        block,
        splits,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    if splits > 1:
        padded = 1 << (splits - 1).bit_length()
        _combine_splits[(batch * queries, head_dim // MIN_DOT)](
            partial, logsumexp, out, head_dim, MIN_DOT, splits, padded, num_warps=WARPS
        )
    return out


if triton is not None:

    @triton.jit
    def _decode_attention(
        heads,
        cosines,
        sines,
        keys,
        values,
        lengths,
        partial,
        logsumexps,
        slots,
        scale: tl.constexpr,
        rotated: tl.constexpr,
        group: tl.constexpr,
        padded: tl.constexpr,
        groups: tl.constexpr,
        dim: tl.constexpr,
        block: tl.constexpr,
        splits: tl.constexpr,
    ):
        """One program per row, key-value head and split; the first split also handles the new token."""
        row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        half: tl.constexpr = dim // 2
        length = tl.load(lengths + row).to(tl.int32)
        columns, queries = tl.arange(0, dim), tl.arange(0, padded)
        query_mask = queries[:, None] < group
        q_at = heads + (row * (group + 2) * groups + kv_head * group + queries[:, None]) * dim  # (padded, 1)
        k_at = heads + (row * (group + 2) * groups + group * groups + kv_head) * dim
        q = tl.load(q_at + columns[None, :], mask=query_mask, other=0.0).to(tl.float32)  # (padded, E)
        k = tl.load(k_at + columns).to(tl.float32)
        v = tl.load(k_at + groups * dim + columns)
        if rotated:
            swapped = (columns + half) % dim
            cos = tl.load(cosines + row * half + columns % half)
            sin = tl.load(sines + row * half + columns % half)
            sin = tl.where(columns < half, -sin, sin)
            q_swapped = tl.load(q_at + swapped[None, :], mask=query_mask, other=0.0).to(tl.float32)
            k_swapped = tl.load(k_at + swapped).to(tl.float32)
            q = q * cos[None, :] + q_swapped * sin[None, :]
            k = k * cos + k_swapped * sin
        q, k = q.to(keys.dtype.element_ty), k.to(keys.dtype.element_ty)
        keys += (row * groups + kv_head) * slots * dim
        values += (row * groups + kv_head) * slots * dim
        first = split == 0
        if first:
            tl.store(keys + length * dim + columns, k)
            tl.store(values + length * dim + columns, v)

        # Online softmax, started from the new token's registers; in other splits its score only sets the maximum.
        max_score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale  # (padded,)
        total = tl.where(first, tl.full([padded], 1.0, tl.float32), 0.0)
        acc = tl.where(first, v.to(tl.float32)[None, :], tl.zeros([padded, dim], tl.float32))
        span = tl.cdiv(tl.cdiv(length, splits), block) * block
        end = tl.minimum(length, (split + 1) * span)
        for start in range(split * span, end, block):
            slot_ids = start + tl.arange(0, block)
            slot_mask = slot_ids < end
            at = slot_ids[:, None] * dim + columns[None, :]  # (block, E)
            cached = tl.load(keys + at, mask=slot_mask[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(cached), input_precision="ieee") * scale
            scores = tl.where(slot_mask[None, :], scores, -float("inf"))
            new_max = tl.maximum(max_score, tl.max(scores, 1))
            rescale = tl.exp2(max_score - new_max)
            weights = tl.exp2(scores - new_max[:, None])
            total = total * rescale + tl.sum(weights, 1)
            cached = tl.load(values + at, mask=slot_mask[:, None], other=0.0)
            acc = tl.dot(weights.to(cached.dtype), cached, acc * rescale[:, None], input_precision="ieee")
            max_score = new_max
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # an empty split gives zeros of weight 0
        to = ((row * groups + kv_head) * group + queries) * splits + split
        tl.store(partial + to[:, None] * dim + columns[None, :], acc.to(partial.dtype.element_ty), mask=query_mask)
        tl.store(logsumexps + to, max_score + tl.log2(total), mask=queries < group)

    @triton.jit
    def _combine_splits(
        partial,
        logsumexps,
        outs,
        dim: tl.constexpr,
        columns: tl.constexpr,
        splits: tl.constexpr,
        padded: tl.constexpr,
    ):
        """Average a query's partial outputs, weighted by their log2-sum-exp2; one program per query and columns."""
        query, first = tl.program_id(0), tl.program_id(1) * columns
        split, column = tl.arange(0, padded), first + tl.arange(0, columns)
        logsumexp = tl.load(logsumexps + query * splits + split, mask=split < splits, other=-float("inf"))
        weights = tl.exp2(logsumexp - tl.max(logsumexp, 0))
        at = (query * splits + split[:, None]) * dim + column[None, :]
        part = tl.load(partial + at, mask=split[:, None] < splits, other=0.0)
        out = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
        tl.store(outs + query * dim + column, out.to(outs.dtype.element_ty))
