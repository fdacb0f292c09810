"""The Triton kernels of linear.py.   M rows · K inputs · N outputs

A program prefetches its first weights before it waits for the kernel before it (programmatic dependent launch), so that
a step of many small kernels keeps the memory busy between them. Inputs are loaded in the layout of the weights, which
spares exchanging them through shared memory: their vectors must be as long as those of the weights.
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def, unused-ignore"

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _activate(x, activation: tl.constexpr):
    """Apply an activation in fp32."""
    if activation == "relu":
        x = tl.maximum(x, 0.0)
    elif activation == "silu":
        x = x * tl.sigmoid(x)
    elif activation == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def _load(weight, n, mask, start, inputs: tl.constexpr, bits: tl.constexpr, group: tl.constexpr, block_k: tl.constexpr):
    """Load a tile of weights (N, K), or of words (groups, N, words of a group), from input `start` on."""
    if bits == 16:
        k = start + tl.arange(0, block_k)
        w = tl.load(weight + n[:, None] * inputs + k[None, :], mask=mask[:, None] & (k < inputs)[None, :], other=0.0)
    else:
        words: tl.constexpr = group * bits // 32
        groups = (start // group + tl.arange(0, block_k // group))[:, None, None]
        at = n[None, :, None] * (inputs * bits // 32) + groups * words + tl.arange(0, words)[None, None, :]
        w = tl.load(weight + at, mask=mask[None, :, None] & (groups < inputs // group), other=0)
    return w


@triton.jit
def _as_float(w, index: tl.constexpr, bits: tl.constexpr):
    """Return weight `index` of each word plus `_offset`: its bits become low ones of a float's mantissa."""
    nibble: tl.constexpr = _nibble(index, bits)
    shift: tl.constexpr = bits * index - 4 * nibble
    if shift > 0:
        w = w >> shift
    elif shift < 0:
        w = w << -shift
    asm: tl.constexpr = _and_or(nibble, bits)
    x = tl.inline_asm_elementwise(asm, "=r,r", [w], dtype=tl.int32, is_pure=True, pack=1)
    return x.to(tl.float32, bitcast=True)


@triton.constexpr_function
def _nibble(index, bits):
    """Return the nibble of a float's bits in which weight `index` of a word begins: few words must be shifted."""
    return 2 if bits == 8 else index + 2 if index < 3 else index if index < 5 else index - 3


@triton.constexpr_function
def _and_or(nibble, bits):
    """Return the instruction that keeps the bits of a weight and sets those of a float's exponent."""
    mask, base = ((1 << bits) - 1) << (4 * nibble), (150 - 4 * nibble) << 23
    return f"lop3.b32 $0, $1, {mask:#x}, {base:#x}, 0xEA;"


@triton.constexpr_function
def _offset(index, bits):
    """Return what `_as_float` adds; int8 weights are stored as bytes that are not negative."""
    return 2.0 ** (23 - 4 * _nibble(index, bits)) + (128.0 if bits == 8 else 0.0)


@triton.jit
def _dot(
    x, weight, scales, minimums, norm, n, mask, w, inputs: tl.constexpr, bits: tl.constexpr, group: tl.constexpr,
    normed: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Return the products (N,) of one row x with weights, of which `w` are the first, and the row's sum of squares."""
    if bits == 16:
        acc = tl.zeros([block_n, block_k], tl.float32)
        squares = tl.zeros([1, block_k], tl.float32)
        for start in range(0, inputs, block_k):
            k = start + tl.arange(0, block_k)[None, :]
            next_w = _load(weight, n, mask, start + block_k, inputs, bits, group, block_k)
            values = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
            if normed:
                squares += values * values
                values *= tl.load(norm + k, mask=k < inputs, other=0.0).to(tl.float32)
            acc += w.to(tl.float32) * values
            w = next_w
        out, square_sum = tl.sum(acc, 1), tl.sum(tl.sum(squares, 1), 0)
    else:
        words: tl.constexpr = group * bits // 32
        acc = tl.zeros([block_k // group, block_n, words], tl.float32)
        squares = tl.zeros([block_k // group, 1, words], tl.float32)
        for start in range(0, inputs, block_k):
            groups = (start // group + tl.arange(0, block_k // group))[:, None, None]
            valid = groups < inputs // group
            next_w = _load(weight, n, mask, start + block_k, inputs, bits, group, block_k)
            part = tl.zeros([block_k // group, block_n, words], tl.float32)
            sums = tl.zeros([block_k // group, 1, words], tl.float32)
            offsets = tl.zeros([block_k // group, 1, words], tl.float32)
            for index in tl.static_range(32 // bits):
                k = groups * group + index * words + tl.arange(0, words)[None, None, :]
                values = tl.load(x + k, mask=valid, other=0.0)
                if normed:
                    squares += values * values
                    values *= tl.load(norm + k, mask=valid, other=0.0)
                offsets += _offset(index, bits) * values
                if bits == 4:
                    sums += values
                part += _as_float(w, index, bits) * values
            if bits == 4:
                at = n[None, :, None] * (inputs // group) + groups
                scale = tl.load(scales + at, mask=mask[None, :, None] & valid, other=0.0).to(tl.float32)
                minimum = tl.load(minimums + at, mask=mask[None, :, None] & valid, other=0.0).to(tl.float32)
                acc += (part - offsets) * scale + sums * minimum
            else:
                acc += part - offsets
            w = next_w
        out, square_sum = tl.sum(tl.sum(acc, 2), 0), tl.sum(tl.sum(tl.sum(squares, 2), 1), 0)
        if bits == 8:
            out *= tl.load(scales + n, mask=mask, other=0.0)
    return out, square_sum


@triton.jit
def row_linear(
    x, weight, scales, minimums, bias, norm, residual, out, rows, outputs, eps, inputs: tl.constexpr,
    bits: tl.constexpr, group: tl.constexpr, biased: tl.constexpr, normed: tl.constexpr, added: tl.constexpr,
    gated: tl.constexpr, activation: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    dependent: tl.constexpr,
):  # fmt: skip
    """One program per `block_n` outputs of a row; those of all rows are neighbors, which share the weights in L2."""
    row, n = tl.program_id(0) % rows, (tl.program_id(0) // rows).to(tl.int64) * block_n + tl.arange(0, block_n)
    x += row * inputs
    mask = n < outputs
    w = _load(weight, n, mask, 0, inputs, bits, group, block_k)
    if dependent:
        gdc_launch_dependents()
        gdc_wait()
    y, squares = _dot(x, weight, scales, minimums, norm, n, mask, w, inputs, bits, group, normed, block_n, block_k)
    rms = 1.0
    if normed:
        rms = tl.rsqrt(squares / inputs + eps)
        y *= rms
    if biased:
        y += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    y = _activate(y, activation)
    if gated:
        n_up = n + outputs
        w = _load(weight, n_up, mask, 0, inputs, bits, group, block_k)
        up, _ = _dot(x, weight, scales, minimums, norm, n_up, mask, w, inputs, bits, group, normed, block_n, block_k)
        up *= rms
        if biased:
            up += tl.load(bias + n_up, mask=mask, other=0.0).to(tl.float32)
        y *= up
    if added:
        y += tl.load(residual + row * outputs + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + n, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def dequantize(
    weight, scales, minimums, out, outputs, inputs: tl.constexpr, bits: tl.constexpr, group: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """One program per tile of weights: words to (N, K)."""
    n = tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n)
    start, mask = tl.program_id(1) * block_k, n < outputs
    words: tl.constexpr = group * bits // 32
    groups = (start // group + tl.arange(0, block_k // group))[:, None, None]
    valid = mask[None, :, None] & (groups < inputs // group)
    w = _load(weight, n, mask, start, inputs, bits, group, block_k)
    if bits == 4:
        at = n[None, :, None] * (inputs // group) + groups
        scale = tl.load(scales + at, mask=valid, other=0.0).to(tl.float32)
        minimum = tl.load(minimums + at, mask=valid, other=0.0).to(tl.float32)
    else:
        scale = tl.load(scales + n, mask=mask, other=0.0)[None, :, None]
        minimum = 0.0
    for index in tl.static_range(32 // bits):
        values = (_as_float(w, index, bits) - _offset(index, bits)) * scale + minimum
        at = n[None, :, None] * inputs + groups * group + index * words + tl.arange(0, words)[None, None, :]
        tl.store(out + at, values.to(out.dtype.element_ty), mask=valid)


@triton.jit
def gate(x, out, features: tl.constexpr, activation: tl.constexpr, block: tl.constexpr, dependent: tl.constexpr):
    """One program per row and block: act(x[:, :F]) · x[:, F:]."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    if dependent:
        gdc_launch_dependents()
        gdc_wait()
    mask = column < features
    at = x + row * 2 * features + column
    y = _activate(tl.load(at, mask=mask, other=0.0).to(tl.float32), activation)
    y *= tl.load(at + features, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * features + column, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm(x, weight, out, eps, features: tl.constexpr, block: tl.constexpr, dependent: tl.constexpr):
    """One program per row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    mask = column < features
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if dependent:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row * features + column, mask=mask, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / features + eps) * gain
    tl.store(out + row * features + column, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def begin_step(
    ids, rows, numbers, last_tokens, positions, frequencies, out_ids, cosines, sines, rotated: tl.constexpr,
    half: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program per token: its id, which may be the last token of its row, and its rotary cosines and sines."""
    token = tl.program_id(0)
    number = tl.load(numbers + tl.load(rows + token))
    given = tl.load(ids + token)
    tl.store(out_ids + token, tl.where(given < 0, tl.load(last_tokens + number).to(tl.int32), given))
    if rotated:
        column = tl.arange(0, block)
        angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + column, mask=column < half, other=0.0)
        tl.store(cosines + token * half + column, tl.cos(angle), mask=column < half)
        tl.store(sines + token * half + column, tl.sin(angle), mask=column < half)
