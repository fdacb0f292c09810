"""What one step has freed, the next one uses: on a CPU it need not go to the system and come back as new pages."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's names and numbers, see mallopt(3)
HELD = 1 << 30  # bytes that may lie free at the end of the heap; those between others stay in any case
LARGEST = 1 << 25  # bytes of a block that is taken from what is held; glibc allows no more
OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # by which users decide themselves


def tune_malloc() -> bool:
    """Let glibc hold what this process frees, from now on; False where there is no glibc, or the user has decided."""
    if sys.platform != "linux" or any(name in os.environ for name in OWN):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # Linux with another library
        return False
    return bool(library.mallopt(M_MMAP_THRESHOLD, LARGEST) and library.mallopt(M_TRIM_THRESHOLD, HELD))
