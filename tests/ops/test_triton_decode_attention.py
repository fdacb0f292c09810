"""The kernel for one new token a row: its results in Triton's interpreter (see tests/gpu for the real thing)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clearhead.ops.triton import decode_attention as kernel
from clearhead.ops.triton.decode_attention import BLOCK, ENOUGH, FINE, PROGRAMS, cut, kernel_supports, triton_works


def test_it_holds_in_the_interpreter() -> None:
    """In a process of its own: what triton is, is settled when it is first imported."""
    pytest.importorskip("triton", reason="there is no triton for this platform")
    held = str(Path(__file__).with_name("interpreted.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "--import-mode=importlib", held]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 15, 16, 32, 500])
@pytest.mark.parametrize("slots", [16, 512, 1024, 131072])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (256, torch.float32)])
def test_there_is_work_for_all_multiprocessors_and_none_for_nothing(
    rows: int, slots: int, dim: int, dtype: torch.dtype
) -> None:
    keys = torch.empty(rows, 8, slots, dim, dtype=dtype, device="meta")
    block, shares = cut(keys)
    assert block in ((16,) if dim == 256 else (BLOCK, FINE))
    assert (shares - 1) * block < slots, "no share is always empty"
    if rows * 8 >= ENOUGH:
        assert shares == 1
    else:
        assert rows * 8 * shares >= PROGRAMS or shares * block >= slots
        assert rows * 8 * (shares - 1) < PROGRAMS


def test_it_is_not_for_a_cpu() -> None:
    assert kernel_supports(torch.empty(1, 6, 64), torch.empty(1, 2, 512, 64)), "but for where they are"
    assert not triton_works(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with CUDA kernels may well run")
def test_where_kernels_cannot_be_made_steps_go_without_them_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel, "triton", object())
    triton_works.cache_clear()
    assert not triton_works(torch.device("cuda"))
    triton_works.cache_clear()
    [record] = caplog.records
    assert "without Triton's kernels" in record.getMessage()
    assert "\n" not in record.getMessage()
