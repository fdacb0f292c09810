"""Time and peak memory of a function, and the machine's matmul throughput."""

import ctypes
import gc
import platform
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch


def measure(work: Callable[[], object], device: torch.device, seconds: float = 1.0) -> tuple[float, float]:
    """Return the median seconds of `work` after a warm-up, and its peak memory in bytes beyond what was in use."""
    work()  # warms up allocators and compiles kernels
    peak = peak_memory(work, device)
    start, times = time.perf_counter(), []
    while len(times) < 3 or (time.perf_counter() - start < seconds and len(times) < 100):
        times.append(_once(work, device))
        if len(times) >= 2 and time.perf_counter() - start > 10 * seconds:
            break
    return statistics.median(times), peak


def _once(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        # Ten in a row, so that launches overlap with execution as in a deep network.
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(10):
            work()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 10_000
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_memory(work: Callable[[], object], device: torch.device) -> float:
    """Return the peak memory of `work` in bytes, beyond what was in use before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc: return freed memory to the system
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):  # Linux: reset the high-water mark
        Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    work()
    return max(0.0, _resident("VmHWM") - before)


def _resident(field: str) -> float:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return float(line.split()[1]) * 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def matrix_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matmul, the practical limit for other kernels."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds, _ = measure(lambda: a @ b, device)
    return 2 * size**3 / seconds


def machine(device: torch.device) -> str:
    """Describe the machine, for the head of a table."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.processor()
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"
