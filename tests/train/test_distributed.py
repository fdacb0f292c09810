"""Two processes (gloo), with DDP or FSDP2, train as one does, and any number of processes resumes any run."""

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

NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0")
PARALLEL = ("ddp", "fsdp")
FAMILIES = ("translator", "bert", "llama")
STEPS = 30
PATH = Path(__file__).with_name("processes.py")


def settings(family: str, **changes: Any) -> Recipe:
    """Thirty steps with label smoothing, decoding, averaged checkpoints and gradient accumulation."""
    known: dict[str, Any] = {"steps": STEPS, "label_smoothing": 0.1, "save_every": 12, "validate_every": 15}
    known |= {"average_checkpoints": 2, "grad_accum": 2}
    more = ("data.packed=true",) if family == "bert" else ()
    return recipe(family, *NO_DROPOUT, *more, **(known | changes))


def free_ports() -> Iterator[int]:
    """Free ports below the ephemeral range, whose ports may be taken a second later."""
    for port in range(10_000 + os.getpid() % 200 * 100, 32_768):  # test workers use different ranges
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            yield port


def launch(folder: Path, jobs: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Run the jobs in two processes with torchrun's environment; return exit codes and stderr."""
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
                child.kill()  # it would wait for the failed one
            errors = child.communicate(timeout=100)[1].decode()[-3000:]
            ends.append((child.returncode, errors))
    finally:
        for child in children:
            child.kill()
    return ends


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all two-process runs, done by one pair of processes, as starting them takes most of the time.

    Rarely, a process dies inside torch (SIGSEGV): then warn with its traceback and run everything once more.
    """
    folder, ends = _run_all(tmp_path_factory.mktemp("processes"))
    if ends[0][0] < 0:
        warnings.warn(f"a process died by signal {-ends[0][0]}: {ends[0][1]}", stacklevel=1)
        folder, ends = _run_all(tmp_path_factory.mktemp("processes"))
    for code, errors in ends:
        assert code == 0, errors
    return folder


def _run_all(folder: Path) -> tuple[Path, list[tuple[int, str]]]:
    jobs: list[dict[str, Any]] = []

    def job(name: str, made: Recipe, **more: Any) -> None:
        jobs.append({"recipe": made.model_dump(mode="json"), "out": str(folder / name)} | more)

    run(folder / "one then two", settings("translator", steps=10, precision="fp64", schedule="constant"))
    for kind in PARALLEL:
        for family in FAMILIES:
            job(f"{family} fp64 {kind}", settings(family, precision="fp64", parallel=kind))
        job(f"translator fp32 {kind}", settings("translator", parallel=kind, metric="bleu"))
        job(f"few {kind}", recipe("translator", *NO_DROPOUT, "data.batch_tokens=1", precision="fp64", parallel=kind))
        job(f"stopped {kind}", settings("gpt", precision="fp64", parallel=kind), stop=7)
    again = {"precision": "fp64", "schedule": "constant"}
    job("one then two", settings("translator", steps=20, parallel="ddp", **again))
    job("one then two", settings("translator", steps=25, parallel="fsdp", **again))
    job("two then one", settings("translator", steps=20, parallel="fsdp", **again))
    return folder, launch(folder, jobs)


@pytest.mark.parametrize("kind", PARALLEL)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_as_one(family: str, kind: str, runs: Path, tmp_path: Path) -> None:
    run(tmp_path, settings(family, precision="fp64"))
    two = runs / f"{family} fp64 {kind}"
    compare(two, tmp_path, 1e-9)
    assert [event["epoch"] for event in events(two, "step")] == [event["epoch"] for event in events(tmp_path, "step")]
    validations, expected = events(two, "validation"), events(tmp_path, "validation")
    assert [event["step"] for event in validations] == [15, 30, 30]
    for name in [name for name, value in expected[0].items() if isinstance(value, int | float)]:
        assert [event[name] for event in validations] == pytest.approx([event[name] for event in expected], rel=1e-9), (
            name
        )
    for name in ("samples", "exposure"):
        assert [event.get(name) for event in validations] == [event.get(name) for event in expected]
    ends = [json.loads(Path(f"{two}-rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert ends[0] == ends[1], "both have the best metric"
    last = [load_model(folder / "last").network.state_dict() for folder in (two, tmp_path)]
    assert distance(last[0], last[1]) < 1e-9


@pytest.mark.parametrize("kind", PARALLEL)
def test_two_processes_train_as_one_in_fp32(kind: str, runs: Path, tmp_path: Path) -> None:
    run(tmp_path, settings("translator", metric="bleu"))
    compare(runs / f"translator fp32 {kind}", tmp_path, 1e-4)


@pytest.mark.parametrize("kind", PARALLEL)
def test_a_batch_of_one_sample_is_enough_for_two_processes(kind: str, runs: Path, tmp_path: Path) -> None:
    run(tmp_path, recipe("translator", *NO_DROPOUT, "data.batch_tokens=1", precision="fp64"))
    compare(runs / f"few {kind}", tmp_path, 1e-9)


def test_any_number_of_processes_resumes_any_run(runs: Path, tmp_path: Path) -> None:
    again: dict[str, Any] = {"precision": "fp64", "schedule": "constant"}
    run(tmp_path / "one", settings("translator", steps=STEPS, **again))
    run(runs / "one then two", settings("translator", steps=STEPS, **again), resume=True)
    run(runs / "two then one", settings("translator", steps=STEPS, **again), resume=True)
    for name in ("one then two", "two then one"):
        compare(runs / name, tmp_path / "one", 1e-9)
    starts = [(event["step"], event["processes"]) for event in events(runs / "one then two", "start")]
    assert starts == [(0, 1), (10, 2), (20, 2), (25, 1)]


@pytest.mark.parametrize("kind", PARALLEL)
def test_all_processes_stop_when_one_is_signaled(kind: str, runs: Path, tmp_path: Path) -> None:
    ends = [json.loads(Path(f"{runs}/stopped {kind}-rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert ends == [[7, None, True]] * 2
    run(tmp_path, settings("gpt", precision="fp64"))
    assert losses(runs / f"stopped {kind}") == pytest.approx(losses(tmp_path)[:7], rel=1e-9)


def compare(two: Path, one: Path, tolerance: float) -> None:
    assert losses(two) == pytest.approx(losses(one), rel=tolerance)
    assert len(losses(two)) == events(two, "end")[-1]["step"]
    if tolerance < 1e-8:  # in fp32, Adam amplifies rounding where the exact gradient is 0, as for key biases
        assert distance(tensors(two), tensors(one)) < tolerance
