"""Two processes (gloo), whole copies (DDP) or shards (FSDP2), learn what one does, and go on with each other's runs."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead.checkpoint import load_model
from clearhead.config.recipe import Recipe
from tests.train.tiny import distance, events, losses, recipe, run, tensors

STILL = ("model.dropout=0", "model.attention_dropout=0")
KINDS = ("ddp", "fsdp")
FAMILIES = ("translator", "bert", "llama")
STEPS = 30
PATH = Path(__file__).with_name("processes.py")


def settings(family: str, **changes: Any) -> Recipe:
    """Thirty steps with everything on: smoothing, decoded scores, a mean of checkpoints, parts."""
    known: dict[str, Any] = {"steps": STEPS, "smoothing": 0.1, "save_every": 12, "average": 2, "accumulation": 2}
    known["validate_every"] = 15
    more = ("data.packed=true",) if family == "bert" else ()
    return recipe(family, *STILL, *more, **(known | changes))


def free_ports() -> Iterator[int]:
    """Ports to listen at, below those that a system gives to whoever connects, which may be gone a second later."""
    for port in range(10_000 + os.getpid() % 200 * 100, 32_768):  # workers of one test run stay apart
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            yield port


def launch(folder: Path, jobs: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Do the jobs in two processes, told of each other as torchrun does it: how each ended, and what it said."""
    for job, port in zip(jobs, free_ports(), strict=False):
        job["port"] = str(port)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PYTHONFAULTHANDLER": "1"}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(
            [sys.executable, str(PATH), str(folder / "jobs.json")],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    ends: list[tuple[int, str]] = []
    try:
        for child in children:
            if any(code for code, _ in ends):
                child.kill()  # it would wait for the other
            errors = child.communicate(timeout=100)[1].decode()[-3000:]
            ends.append((child.returncode, errors))
    finally:
        for child in children:
            child.kill()
    return ends


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of two processes, done at once: starting them takes most of the time.

    Once in dozens of times a process died inside torch (SIGSEGV). Then it says where, and all begin anew, once.
    """
    folder, ends = _runs(tmp_path_factory.mktemp("processes"))
    if ends[0][0] < 0:
        warnings.warn(f"a process died by signal {-ends[0][0]}: {ends[0][1]}", stacklevel=1)
        folder, ends = _runs(tmp_path_factory.mktemp("processes"))
    for code, errors in ends:
        assert code == 0, errors
    return folder


def _runs(folder: Path) -> tuple[Path, list[tuple[int, str]]]:
    jobs: list[dict[str, Any]] = []

    def job(name: str, made: Recipe, **more: Any) -> None:
        jobs.append({"recipe": made.model_dump(mode="json"), "out": str(folder / name)} | more)

    run(folder / "one then both", settings("translator", steps=10, precision="fp64", schedule="constant"))
    for kind in KINDS:
        for family in FAMILIES:
            job(f"{family} fp64 {kind}", settings(family, precision="fp64", parallel=kind))
        job(f"translator fp32 {kind}", settings("translator", parallel=kind, metric="bleu"))
        job(f"few {kind}", recipe("translator", *STILL, "data.batch_tokens=1", precision="fp64", parallel=kind))
        job(f"stopped {kind}", settings("gpt", precision="fp64", parallel=kind), stop=7)
    again = {"precision": "fp64", "schedule": "constant"}
    job("one then both", settings("translator", steps=20, parallel="ddp", **again))
    job("one then both", settings("translator", steps=25, parallel="fsdp", **again))
    job("two then one", settings("translator", steps=20, parallel="fsdp", **again))
    return folder, launch(folder, jobs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_learn_what_one_does(family: str, kind: str, place: Path, tmp_path: Path) -> None:
    run(tmp_path, settings(family, precision="fp64"))
    both = place / f"{family} fp64 {kind}"
    compare(both, tmp_path, 1e-9)
    assert [event["epoch"] for event in events(both, "step")] == [event["epoch"] for event in events(tmp_path, "step")]
    found, expected = events(both, "validation"), events(tmp_path, "validation")
    assert [event["step"] for event in found] == [15, 30, 30]
    for name in expected[0].keys() - {"kind", "samples", "signature", "exposure"}:
        assert [event[name] for event in found] == pytest.approx([event[name] for event in expected], rel=1e-9), name
    for name in ("samples", "exposure"):
        assert [event.get(name) for event in found] == [event.get(name) for event in expected]
    ends = [json.loads(Path(f"{both}-rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert ends[0] == ends[1], "both know the best"
    last = [load_model(folder / "last").network.state_dict() for folder in (both, tmp_path)]
    assert distance(last[0], last[1]) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_in_single_precision_too(kind: str, place: Path, tmp_path: Path) -> None:
    run(tmp_path, settings("translator", metric="bleu"))
    compare(place / f"translator fp32 {kind}", tmp_path, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_one_sample_is_enough_for_two_processes(kind: str, place: Path, tmp_path: Path) -> None:
    run(tmp_path, recipe("translator", *STILL, "data.batch_tokens=1", precision="fp64"))
    compare(place / f"few {kind}", tmp_path, 1e-9)


def test_every_number_of_processes_goes_on_with_any_run(place: Path, tmp_path: Path) -> None:
    again: dict[str, Any] = {"precision": "fp64", "schedule": "constant"}
    run(tmp_path / "one", settings("translator", steps=STEPS, **again))
    run(place / "one then both", settings("translator", steps=STEPS, **again), resume=True)
    run(place / "two then one", settings("translator", steps=STEPS, **again), resume=True)
    for name in ("one then both", "two then one"):
        compare(place / name, tmp_path / "one", 1e-9)
    starts = [(event["step"], event["processes"]) for event in events(place / "one then both", "start")]
    assert starts == [(0, 1), (10, 2), (20, 2), (25, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_all_processes_stop_when_one_is_asked_to(kind: str, place: Path, tmp_path: Path) -> None:
    ends = [json.loads(Path(f"{place}/stopped {kind}-rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert ends == [[7, None, True]] * 2
    run(tmp_path, settings("gpt", precision="fp64"))
    assert losses(place / f"stopped {kind}") == pytest.approx(losses(tmp_path)[:7], rel=1e-9)


def compare(both: Path, one: Path, tolerance: float) -> None:
    assert losses(both) == pytest.approx(losses(one), rel=tolerance)
    assert len(losses(both)) == events(both, "end")[-1]["step"]
    if tolerance < 1e-8:  # in fp32, Adam makes much of what should be no gradient at all, like that of a key's bias
        assert distance(tensors(both), tensors(one)) < tolerance
