"""malloc settings: applied for glibc on a CPU, not elsewhere and not over the user's own."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clearhead.config import preset
from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.inference import optimize
from clearhead.model import build
from clearhead.ops.malloc import USER_SETTINGS, tune_malloc
from clearhead.train import distributed
from clearhead.train.objective import Objective
from tests.train.tiny import recipe, run

FAULTS = """
import resource, sys
from clearhead.ops.malloc import tune_malloc
if sys.argv[1] == "tuned":
    assert tune_malloc()
def step():
    blocks = [bytearray(8 << 20) for _ in range(5)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF)
for _ in range(10):
    step()
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_minflt - before.ru_minflt, after.ru_maxrss - before.ru_maxrss)
"""


def _has_glibc() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


@pytest.fixture(autouse=True)
def _without_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USER_SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(not _has_glibc(), reason="needs glibc")
def test_freed_memory_is_reused_and_peak_memory_does_not_grow() -> None:
    faults = {}
    for mode in ("tuned", "default"):
        done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
        faults[mode], growth = map(int, done.stdout.split())
        assert growth < 10_000, "kilobytes"
    assert faults["tuned"] < 1000 < faults["default"]


def test_it_returns_whether_it_was_applied() -> None:
    assert tune_malloc() == _has_glibc()
    assert tune_malloc() == _has_glibc()
    assert torch.ones(1 << 22).sum() == 1 << 22


@pytest.mark.parametrize("name", USER_SETTINGS)
def test_settings_of_the_user_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "65536")
    assert not tune_malloc()


def test_systems_without_glibc_are_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert not tune_malloc()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(ctypes, "CDLL")
    assert not tune_malloc()


def test_training_on_a_cpu_tunes_malloc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(distributed, "tune_malloc", lambda: called.append(True))
    run(tmp_path, recipe("gpt", steps=1))
    assert called == [True]


def test_inference_on_a_cpu_tunes_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(optimize, "tune_malloc", lambda: called.append(True))
    optimize.optimize_for_inference(build(preset("tiny-gpt")).eval())
    assert called == [True]
    optimize.optimize_for_inference(build(preset("tiny-gpt"), "meta").eval())
    assert called == [True]


def test_other_devices_need_neither_malloc_settings_nor_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "tune_malloc", lambda: pytest.fail("called for another device"))
    monkeypatch.setattr(distributed, "_check_compiler", lambda: pytest.fail("called for another device"))
    settings, data = TrainConfig(steps=1, compile="on"), DataConfig(task="language-model")
    objective = Objective(build(preset("tiny-gpt")), data, settings)
    distributed.apply_compile(objective, settings, distributed.DistContext(torch.device("meta")))
    with pytest.raises(pytest.fail.Exception):
        distributed.apply_compile(objective, settings, distributed.DistContext(torch.device("cpu")))
