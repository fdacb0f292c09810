"""Dense causal attention against window, strided and fixed: time and peak memory, 1k to 32k tokens.

    python -m bench.attention                       on this machine's GPU, or its CPU
    python -m bench.attention --backward            a training step's share: forward and backward

The dense peer is torch's scaled_dot_product_attention with is_causal=True, in the same run. Strided and fixed are
two layers that alternate (local and column, block and summary); their row is the mean of the two.
"""

import argparse
import datetime
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.timing import machine, matrix_ceiling, measure
from clearhead.model import Mask, Pattern, attend
from clearhead.model.cost import keys_seen
from clearhead.ops.attention.dispatch import choose_backend

WINDOW, STRIDE, SUMMARY = 512, 128, 8
PATTERNS = {
    "window": [Pattern("window", WINDOW)],
    "strided": [Pattern("window", STRIDE + 1), Pattern("column", STRIDE)],
    "fixed": [Pattern("block", STRIDE), Pattern("summary", STRIDE, SUMMARY)],
}


def main() -> None:
    """Parse the options, run every length, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", default="1024,2048,4096,8192,16384,32768", help="lengths, separated by commas")
    parser.add_argument("--rows", type=int, help="batch size (4 on a GPU, 1 on a CPU)")
    parser.add_argument("--heads", type=int, help="heads (16 on a GPU, 8 on a CPU)")
    parser.add_argument("--head-width", type=int, default=64)
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rows, heads = options.rows or (4 if on_gpu else 1), options.heads or (16 if on_gpu else 8)
    ceiling = matrix_ceiling(device, dtype)
    work = "forward and backward" if options.backward else "forward"
    print(f"{datetime.date.today()}  {machine(device)}  {str(dtype).removeprefix('torch.')}  {work}")
    print(f"{rows} rows, {heads} heads of {options.head_dim}; window {WINDOW}, stride {STRIDE}, summary {SUMMARY}")
    print(f"matrix products reach {ceiling / 1e12:.2f} TFLOP/s here; share = useful FLOPs / time / that\n")
    columns = f"{'ms':>10} {'faster':>8} {'share':>6} {'peak MB':>9} {'of dense':>8}"
    print(f"{'tokens':>7}  {'attention':<18} {'backend':<8} {columns}")
    for tokens in map(int, options.tokens.split(",")):
        torch.compiler.reset()  # FlexAttention compiles for each length, as in a training run of one length
        compare(tokens, rows, heads, options.head_dim, device, dtype, options.backward, ceiling)


def compare(
    tokens: int,
    rows: int,
    heads: int,
    dim: int,
    device: torch.device,
    dtype: torch.dtype,
    backward: bool,
    ceiling: float,
) -> None:
    """One length: the dense peer, then each pattern and its parts."""
    q, k, v = (
        torch.randn(rows, tokens, heads, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_(backward)
        for _ in range(3)
    )
    unit = (14 if backward else 4) * rows * heads * dim  # FLOPs of each pair: 2 products, 7 with backward

    def show(name: str, backend: str, seconds: float, peak: float, pairs: float) -> None:
        share = unit * pairs / seconds / ceiling
        memory = f"{peak / 1e6:>9.1f} {peak / max(dense[1], 1):>8.2f}"
        ratio = f"{dense[0] / seconds:>7.2f}x"
        print(f"{tokens:>7}  {name:<18} {backend:<8} {1e3 * seconds:>10.3f} {ratio} {share:>6.0%} {memory}", flush=True)

    dense = measure(_work(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), backward), device)
    show("dense", "sdpa", *dense, pairs=tokens * (tokens + 1) / 2)
    for name, parts in PATTERNS.items():
        results = []
        for part in parts:
            mask = Mask(True, part).simplified(tokens)
            work = _work(lambda mask=mask: attend(q, k, v, mask), (q, k, v), backward)  # type: ignore[misc]
            results.append((*measure(work, device), _pairs(part, tokens), choose_backend(q, k, mask), part.kind))
        mean = [sum(column) / len(parts) for column in list(zip(*results, strict=True))[:3]]
        show(name, results[0][3] if len(parts) == 1 else "", mean[0], max(r[1] for r in results), mean[2])
        if len(parts) > 1:
            for seconds, peak, pairs, backend, kind in results:
                show(f"  {kind}", backend, seconds, peak, pairs)


def _work(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], backward: bool) -> Callable[[], object]:
    if not backward:
        return torch.no_grad()(forward)

    def both() -> None:
        forward().sum().backward()
        for x in inputs:  # so that every call begins with the same memory
            x.grad = None

    return both


def _pairs(pattern: Pattern, tokens: int) -> float:
    """Queries and keys that meet in a causal row, from a sample of positions."""
    sample = range(0, tokens, max(1, tokens // 997))
    return tokens * sum(keys_seen(pattern, position + 1) for position in sample) / len(sample)


if __name__ == "__main__":
    main()
