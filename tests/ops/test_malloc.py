"""Freed memory on a CPU: it is held where glibc is, and left alone elsewhere and where the user has decided."""

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
from clearhead.inference import optimize as reading
from clearhead.model import build
from clearhead.ops.malloc import OWN, tune_malloc
from clearhead.train import distributed as parallel
from clearhead.train.objective import Objective
from tests.train.tiny import recipe, run

FAULTS = """
import resource, sys
from clearhead.ops.malloc import tune_malloc
if sys.argv[1] == "held":
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
def _undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OWN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(not _has_glibc(), reason="there is no glibc here")
def test_what_is_freed_is_used_again_and_no_more_is_needed() -> None:
    faults = {}
    for way in ("held", "as ever"):
        done = subprocess.run([sys.executable, "-c", FAULTS, way], capture_output=True, text=True, check=True)
        faults[way], more = map(int, done.stdout.split())
        assert more < 10_000, "kilobytes"
    assert faults["held"] < 1000 < faults["as ever"]


def test_it_says_whether_it_was_done() -> None:
    assert tune_malloc() == _has_glibc()
    assert tune_malloc() == _has_glibc()
    assert torch.ones(1 << 22).sum() == 1 << 22


@pytest.mark.parametrize("name", OWN)
def test_what_the_user_has_decided_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "65536")
    assert not tune_malloc()


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert not tune_malloc()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(ctypes, "CDLL")
    assert not tune_malloc()


def test_training_on_a_cpu_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(parallel, "tune_malloc", lambda: called.append(True))
    run(tmp_path, recipe("gpt", steps=1))
    assert called == [True]


def test_reading_on_a_cpu_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(reading, "tune_malloc", lambda: called.append(True))
    reading.optimize_for_inference(build(preset("tiny-gpt")).eval())
    assert called == [True]
    reading.optimize_for_inference(build(preset("tiny-gpt"), "meta").eval())
    assert called == [True]


def test_other_devices_want_neither_that_nor_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "tune_malloc", lambda: pytest.fail("on another device"))
    monkeypatch.setattr(parallel, "_check_compiler", lambda: pytest.fail("on another device"))
    settings, data = TrainConfig(steps=1, compile="on"), DataConfig(task="language-model")
    objective = Objective(build(preset("tiny-gpt")), data, settings)
    parallel.apply_compile(objective, settings, parallel.DistContext(torch.device("meta")))
    with pytest.raises(pytest.fail.Exception):
        parallel.apply_compile(objective, settings, parallel.DistContext(torch.device("cpu")))
