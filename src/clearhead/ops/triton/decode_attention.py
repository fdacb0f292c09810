"""Attention of one new token a row on a GPU: one kernel rotates it, puts it in its place, and reads only what is there.

B rows · H heads · G key-value heads · C slots · E head width · S shares of the past

Torch's kernels read every slot of a cache, filled or not, and have others rotate and write before them. With few rows
there are fewer heads than multiprocessors: then the past of each is cut up, and its shares are added up behind.
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
except ImportError:  # there is none for this platform; `cached_attention` does the same
    triton = None

log = logging.getLogger("clearhead")

BLOCK, FINE = 64, 32  # slots that a program sees at once, at most: of the whole past, and of a share of it
TILE = 16384  # bytes that their keys may have; there is room for the next ones beside them
WARPS, STAGES = 4, 3
ENOUGH, PROGRAMS = 128, 256  # programs that need no cutting, and as many as cutting should give
LEAST = 16  # rows and columns of a matrix that tensor cores take


@cache
def triton_works(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device: the first one made needs a C compiler, which not every machine has."""
    if triton is None or device.type != "cuda":
        return False
    try:
        with torch.cuda.device(device):
            parts, masses, found = (torch.ones(size, device=device) for size in (2 * LEAST, 2, LEAST))
            _add_up[(1, 1)](parts, masses, found, LEAST, LEAST, 2, 2, num_warps=WARPS)
    except Exception as error:  # whatever a compiler, a driver or a full disk may say
        log.warning("steps go without Triton's kernels, and slower: %s", str(error).split("\n")[0])
        return False
    return True


def kernel_supports(heads: Tensor, keys: Tensor) -> bool:
    """Whether it is for heads (B, H + 2G, E) and keys (B, G, C, E) like these; `triton_works` says on which devices."""
    dim, group = heads.shape[-1], heads.shape[-2] // keys.shape[1] - 2
    fits = LEAST <= dim <= 256 and dim & (dim - 1) == 0 and group <= LEAST and keys.is_contiguous()
    exact = heads.dtype == keys.dtype and keys.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return fits and exact


def cut(keys: Tensor) -> tuple[int, int]:
    """The slots of keys (B, G, C, E) that a program sees at once, and the shares into which the past is cut."""
    rows, groups, slots, dim = keys.shape
    block = max(LEAST, min(BLOCK, TILE // (dim * keys.element_size())))
    if rows * groups >= ENOUGH:
        return block, 1
    block = min(block, FINE)
    return block, min(-(-PROGRAMS // (rows * groups)), -(-slots // block))


def triton_decode_attention(
    heads: Tensor, rotation: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, lengths: Tensor
) -> Tensor:
    """Queries, keys and values before rotation, heads (B, H + 2G, E), to what the queries find (B, H, E).

    The new key and value are put behind the lengths (B,) that keys and values (B, G, C, E) have so far.
    """
    rows, groups, slots, dim = keys.shape
    queries, (block, shares) = heads.shape[1] - 2 * groups, cut(keys)
    found = heads.new_empty(rows, queries, dim)
    parts = found if shares == 1 else heads.new_empty(rows, queries, shares, dim, dtype=torch.float32)
    masses = heads.new_empty(rows, queries, shares, dtype=torch.float32)
    heads = heads.contiguous()
    scale = 1 / (math.sqrt(dim) * math.log(2))  # powers of two are cheaper than those of e
    _look_back[(rows, groups, shares)](
        heads,
        *((heads, heads) if rotation is None else rotation),  # what is not read must be a tensor too
        keys,
        values,
        lengths,
        parts,
        masses,
        slots,
        scale,
        rotation is not None,
        queries // groups,
        LEAST,
        groups,
        dim,
        block,
        shares,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    if shares > 1:
        padded = 1 << (shares - 1).bit_length()
        _add_up[(rows * queries, dim // LEAST)](parts, masses, found, dim, LEAST, shares, padded, num_warps=WARPS)
    return found


if triton is not None:

    @triton.jit
    def _look_back(
        heads,
        cosines,
        sines,
        keys,
        values,
        lengths,
        parts,
        masses,
        slots,
        scale: tl.constexpr,
        rotated: tl.constexpr,
        group: tl.constexpr,
        padded: tl.constexpr,
        groups: tl.constexpr,
        dim: tl.constexpr,
        block: tl.constexpr,
        shares: tl.constexpr,
    ):
        """A program for a share of what the queries of a group look at; the first one sees to the new token too."""
        row, one, share = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        half: tl.constexpr = dim // 2
        length = tl.load(lengths + row).to(tl.int32)
        columns, queries = tl.arange(0, dim), tl.arange(0, padded)
        real = queries[:, None] < group
        q_at = heads + (row * (group + 2) * groups + one * group + queries[:, None]) * dim  # (padded, 1)
        k_at = heads + (row * (group + 2) * groups + group * groups + one) * dim
        q = tl.load(q_at + columns[None, :], mask=real, other=0.0).to(tl.float32)  # (padded, E)
        k = tl.load(k_at + columns).to(tl.float32)
        v = tl.load(k_at + groups * dim + columns)
        if rotated:
            across = (columns + half) % dim
            cos = tl.load(cosines + row * half + columns % half)
            sin = tl.load(sines + row * half + columns % half)
            sin = tl.where(columns < half, -sin, sin)
            q_across = tl.load(q_at + across[None, :], mask=real, other=0.0).to(tl.float32)
            k_across = tl.load(k_at + across).to(tl.float32)
            q = q * cos[None, :] + q_across * sin[None, :]
            k = k * cos + k_across * sin
        q, k = q.to(keys.dtype.element_ty), k.to(keys.dtype.element_ty)
        keys += (row * groups + one) * slots * dim
        values += (row * groups + one) * slots * dim
        first = share == 0
        if first:
            tl.store(keys + length * dim + columns, k)
            tl.store(values + length * dim + columns, v)

        # What softmax has seen so far: the new token, which nobody reads back, or a highest score that weighs nothing.
        best = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale  # (padded,)
        total = tl.where(first, tl.full([padded], 1.0, tl.float32), 0.0)
        found = tl.where(first, v.to(tl.float32)[None, :], tl.zeros([padded, dim], tl.float32))
        span = tl.cdiv(tl.cdiv(length, shares), block) * block
        end = tl.minimum(length, (share + 1) * span)
        for start in range(share * span, end, block):
            places = start + tl.arange(0, block)
            there = places < end
            at = places[:, None] * dim + columns[None, :]  # (block, E)
            past = tl.load(keys + at, mask=there[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(past), input_precision="ieee") * scale
            scores = tl.where(there[None, :], scores, -float("inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            fading = tl.exp2(best - higher)
            weights = tl.exp2(scores - higher[:, None])
            total = total * fading + tl.sum(weights, 1)
            past = tl.load(values + at, mask=there[:, None], other=0.0)
            found = tl.dot(weights.to(past.dtype), past, found * fading[:, None], input_precision="ieee")
            best = higher
        found = found / tl.where(total > 0, total, 1.0)[:, None]  # a share may be empty: zeros that weigh nothing
        to = ((row * groups + one) * group + queries) * shares + share
        tl.store(parts + to[:, None] * dim + columns[None, :], found.to(parts.dtype.element_ty), mask=real)
        tl.store(masses + to, best + tl.log2(total), mask=queries < group)

    @triton.jit
    def _add_up(
        parts,
        masses,
        founds,
        dim: tl.constexpr,
        columns: tl.constexpr,
        shares: tl.constexpr,
        padded: tl.constexpr,
    ):
        """A program for some columns of what a query found in all shares, by the logarithms of the shares' masses."""
        query, first = tl.program_id(0), tl.program_id(1) * columns
        share, column = tl.arange(0, padded), first + tl.arange(0, columns)
        mass = tl.load(masses + query * shares + share, mask=share < shares, other=-float("inf"))
        weights = tl.exp2(mass - tl.max(mass, 0))
        at = (query * shares + share[:, None]) * dim + column[None, :]
        part = tl.load(parts + at, mask=share[:, None] < shares, other=0.0)
        found = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
        tl.store(founds + query * dim + column, found.to(founds.dtype.element_ty))
