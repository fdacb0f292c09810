"""glibc malloc settings for a CPU: keep freed memory in the process, so that the next step causes no page faults."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameter numbers of mallopt(3)
TRIM_THRESHOLD = 1 << 30  # bytes that may stay free at the top of the heap
MMAP_THRESHOLD = 1 << 25  # bytes from which a block is mapped by itself; glibc's maximum
USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # environment variables


def tune_malloc() -> bool:
    """Let glibc keep freed memory from now on; return False without glibc, or if the user has set its thresholds."""
    if sys.platform != "linux" or any(name in os.environ for name in USER_SETTINGS):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # Linux with another libc, such as musl
        return False
    return bool(library.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD) and library.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD))
