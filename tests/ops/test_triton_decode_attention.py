"""The Triton decode attention kernel, in Triton's interpreter (tests/gpu runs it on a GPU)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clearhead.ops.triton import decode_attention as kernel
from clearhead.ops.triton.decode_attention import (
    FULL_GRID,
    MAX_BLOCK,
    MAX_SPLIT_BLOCK,
    TARGET_PROGRAMS,
    split_cache,
    triton_decode_attention_supports,
    triton_works,
)


def test_the_kernel_equals_the_reference_in_the_interpreter() -> None:
    """In a separate process, because TRITON_INTERPRET is read when triton is first imported."""
    pytest.importorskip("triton", reason="there is no triton for this platform")
    path = str(Path(__file__).with_name("interpreted.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "--import-mode=importlib", path]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 15, 16, 32, 500])
@pytest.mark.parametrize("slots", [16, 512, 1024, 131072])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (256, torch.float32)])
def test_the_grid_fills_the_gpu_and_no_split_is_always_empty(
    rows: int, slots: int, dim: int, dtype: torch.dtype
) -> None:
    keys = torch.empty(rows, 8, slots, dim, dtype=dtype, device="meta")
    block, splits = split_cache(keys)
    assert block in ((16,) if dim == 256 else (MAX_BLOCK, MAX_SPLIT_BLOCK))
    assert (splits - 1) * block < slots, "no split is always empty"
    if rows * 8 >= FULL_GRID:
        assert splits == 1
    else:
        assert rows * 8 * splits >= TARGET_PROGRAMS or splits * block >= slots
        assert rows * 8 * (splits - 1) < TARGET_PROGRAMS


def test_the_kernel_is_not_used_on_a_cpu() -> None:
    assert triton_decode_attention_supports(torch.empty(1, 6, 64), torch.empty(1, 2, 512, 64)), (
        "shapes and dtypes are supported"
    )
    assert not triton_works(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with CUDA kernels may well run")
def test_a_failed_launch_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel, "triton", object())
    triton_works.cache_clear()
    assert not triton_works(torch.device("cuda"))
    triton_works.cache_clear()
    [record] = caplog.records
    assert "without Triton's kernels" in record.getMessage()
    assert "\n" not in record.getMessage()
