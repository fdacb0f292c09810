"""Dense causal attention against window, strided and fixed: time and peak memory, 1k to 32k tokens.

    python -m bench.attention                       on this machine's GPU, or its CPU
    python -m bench.attention --backward            forward and backward

The dense peer is torch's scaled_dot_product_attention with is_causal=True, in the same run. Strided and fixed
alternate two patterns over layers (window and column, block and summary); their row is the mean of the two.
"""

import argparse
import datetime
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.timing import machine, matrix_ceiling, measure
from clearhead.model import Mask, Pattern, attend
from clearhead.model.cost import visible_keys
from clearhead.ops.attention import choose_backend

WINDOW, STRIDE, SUMMARY = 512, 128, 8
PATTERNS = {
    "window": [Pattern("window", WINDOW)],
    "strided": [Pattern("window", STRIDE + 1), Pattern("column", STRIDE)],
    "fixed": [Pattern("block", STRIDE), Pattern("summary", STRIDE, SUMMARY)],
}


def main() -> None:
    """Parse options, measure every length, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", default="1024,2048,4096,8192,16384,32768", help="lengths, separated by commas")
    parser.add_argument("--rows", type=int, help="batch size (4 on a GPU, 1 on a CPU)")
    parser.add_argument("--heads", type=int, help="heads (16 on a GPU, 8 on a CPU)")
    parser.add_argument("--head-dim", type=int, default=64)
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
    print(f"matmul reaches {ceiling / 1e12:.2f} TFLOP/s here; MFU = useful FLOPs / time / that\n")
    columns = f"{'ms':>10} {'speedup':>8} {'MFU':>6} {'peak MB':>9} {'of dense':>8}"
    print(f"{'tokens':>7}  {'attention':<18} {'backend':<12} {columns}")
    for tokens in map(int, options.tokens.split(",")):
        torch.compiler.reset()  # let FlexAttention compile for each length
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
    """Measure one length: the dense peer, then each pattern and its parts."""
    q, k, v = (
        torch.randn(rows, tokens, heads, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_(backward)
        for _ in range(3)
    )
    pair_flops = (14 if backward else 4) * rows * heads * dim  # of a query and a key: 2 matmuls, 7 with backward

    def show(name: str, backend: str, seconds: float, peak: float, pairs: float) -> None:
        mfu = pair_flops * pairs / seconds / ceiling
        memory = f"{peak / 1e6:>9.1f} {peak / max(dense[1], 1):>8.2f}"
        ratio = f"{dense[0] / seconds:>7.2f}x"
        print(f"{tokens:>7}  {name:<18} {backend:<12} {1e3 * seconds:>10.3f} {ratio} {mfu:>6.0%} {memory}", flush=True)

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

    def forward_backward() -> None:
        forward().sum().backward()
        for x in inputs:  # every call starts with the same memory
            x.grad = None

    return forward_backward


def _pairs(pattern: Pattern, tokens: int) -> float:
    """Estimate the query-key pairs of a causal row from a sample of positions."""
    sample = range(0, tokens, max(1, tokens // 997))
    return tokens * sum(visible_keys(pattern, position + 1) for position in sample) / len(sample)


if __name__ == "__main__":
    main()
