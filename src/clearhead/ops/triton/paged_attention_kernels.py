"""The Triton kernels of paged_attention.py.   Q queries · E head dim"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
def decode_attention(
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
    dependent: tl.constexpr,
):
    """One program per row, key-value head and split; the first split also handles the new token."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = dim // 2
    stride: tl.constexpr = groups * dim
    row_heads: tl.constexpr = group * groups if cross else (group + 2) * groups
    length = tl.load(lengths + row)
    entries += tl.load(layout) + row.to(tl.int64) * tl.load(layout + 1)
    columns, queries = tl.arange(0, dim), tl.arange(0, padded)
    if dependent:
        gdc_launch_dependents()
        gdc_wait()
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
        q = q.to(tl.float32) * cos[None, :] + q_swapped.to(tl.float32) * sin[None, :]
    q = q.to(keys.dtype.element_ty)
    if not cross and split == 0:
        k_at = heads + (row * row_heads + group * groups + kv_head) * dim
        k, v = tl.load(k_at + columns), tl.load(k_at + groups * dim + columns)
        if rotated:
            k_swapped = tl.load(k_at + swapped)
            k = k.to(tl.float32) * cos + k_swapped.to(tl.float32) * sin
        k, v = k.to(keys.dtype.element_ty), v.to(keys.dtype.element_ty)
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
            valid = query < group
            source = (first + query[None, :]) * splits + part_ids[:, None]  # (splits, group)
            logsumexp = tl.load(logsumexps + source, mask=valid[None, :], other=0.0)
            logsumexp = tl.maximum(logsumexp, -1e30)  # of a source without tokens
            weights = tl.exp2(logsumexp - tl.max(logsumexp, 0)[None, :])
            part_at = partials + source[:, :, None] * dim + columns[None, None, :]
            parts = tl.load(part_at, mask=valid[None, :, None], other=0.0)
            out = tl.sum(parts * weights[:, :, None], 0) / tl.sum(weights, 0)[:, None]
            out_at = outs + (first + query[:, None]) * dim + columns[None, :]
            tl.store(out_at, out.to(outs.dtype.element_ty), mask=valid[:, None])
            tl.store(arrived + row * groups + kv_head, 0)


@triton.jit
def rotate_and_write(
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
def chunk_attention(
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
