"""`clearhead train` and `clearhead recipes` in a subprocess."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from clearhead.checkpoint import newest_checkpoint
from clearhead.config.recipe import dump_recipe, recipe_names
from clearhead.train.run_log import read_log
from clearhead.train.signals import SIGNALS
from tests.train.tiny import recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the recipe `mine.yaml`."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "mine.yaml").write_text(dump_recipe(recipe("translator", steps=6, validate_every=3, log_every=2)))
    return folder


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"CLEARHEAD_CACHE": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "clearhead", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def clearhead(folder: Path, *arguments: str) -> tuple[int, str, str]:
    child = start(folder, *arguments)
    output, errors = child.communicate(timeout=60)
    return child.returncode, output, errors


def test_a_run_prints_plain_lines(folder: Path) -> None:
    code, output, errors = clearhead(folder, "train", "mine.yaml", "train.seed=3", "--out", "first", "--device", "cpu")
    assert (code, output) == (0, ""), errors
    lines = errors.splitlines()
    steps = [line for line in lines if line.startswith("step ") and "validation" not in line]
    assert [line.split(" · ")[0] for line in steps] == ["step 2/6", "step 4/6", "step 6/6"]
    assert all("loss " in line and line.endswith(" tokens/s") for line in steps)
    assert [line.split(" · ")[0] for line in lines if "validation" in line] == [
        "step 3 validation",
        "step 6 validation",
    ]
    assert lines[-1].startswith("done: 6 steps; best loss ")
    assert lines[-1].endswith("report: first/report.html")
    assert "\x1b" not in errors, "no colors or bars in a pipe"
    saved = yaml.safe_load((folder / "first" / "recipe.yaml").read_text())
    assert saved["train"]["seed"] == 3
    assert newest_checkpoint(folder / "first")[0].step == 6  # type: ignore[union-attr]

    code, _, errors = clearhead(folder, "train", "mine.yaml", "train.seed=3", "--out", "first")
    assert code == 2
    assert errors == "clearhead: first exists already; continue with --resume, or choose another --out\n"

    code, _, errors = clearhead(folder, "train", "mine.yaml", "--seed=3", "train.steps=8", "--out", "first", "--resume")
    assert code == 0, errors
    assert errors.splitlines()[0] == "resuming from step 6 of 8"
    assert [line["step"] for line in read_log(folder / "first" / "log.jsonl") if line["kind"] == "step"] == [2, 4, 6, 8]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_a_checkpoint_and_exits_with_128_and_its_number(number: signal.Signals, folder: Path) -> None:
    out = folder / f"stopped-{number.name}"
    child = start(folder, "train", "mine.yaml", "train.steps=100000", "--seed", "3", "--out", out.name)
    assert child.stderr is not None
    while not child.stderr.readline().startswith("step 4/"):
        assert child.poll() is None
    child.send_signal(number)
    errors = child.communicate(timeout=60)[1]
    assert child.returncode == 128 + number, errors
    state, refused = newest_checkpoint(out)
    assert state is not None
    assert refused == []
    command = f"clearhead train mine.yaml train.steps=100000 train.seed=3 --out {out.name} --resume"
    assert errors.splitlines()[-1] == f"stopped at step {state.step:,} of 100,000; continue with: {command}"
    assert (out / "last" / "model.safetensors").exists()


def test_a_dry_run_prints_the_resolved_recipe(folder: Path) -> None:
    before = sorted(folder.iterdir())
    code, output, errors = clearhead(folder, "train", "mine.yaml", "train.lr=0.5", "--dtype", "float32", "--dry-run")
    assert code == 0, errors
    assert [path for path in sorted(folder.iterdir()) if path not in before] in ([], [folder / "cache"])
    loaded = yaml.safe_load(output)
    assert loaded["train"]["lr"] == 0.5
    assert loaded["train"]["precision"] == "fp32"
    assert loaded["train"]["beta1"] == 0.9, "every default is written out"
    assert "# parameters " in output


def test_several_values_and_seeds_are_a_sweep_that_resumes(folder: Path) -> None:
    grid = ("train", "mine.yaml", "train.lr=1e-3,1e-2", "model.norm=layer,rms", "train.steps=3", "--out", "grid")
    code, output, errors = clearhead(folder, *grid)
    assert code == 0, errors
    assert errors.splitlines()[0] == "sweep: recipes 4, seeds 1, runs 4; compared by loss"
    assert errors.splitlines()[-1] == "done; best model: grid/best; report: grid/report.html"
    head, _, *rows = output.splitlines()
    assert head == "| lr | norm | seeds | loss (mean ± std) | per seed |"
    losses = [float(row.split(" | ")[-1].removesuffix(" |")) for row in rows]
    assert len(losses) == 4
    assert losses == sorted(losses), "best first"
    assert (folder / "grid" / "lr-0.001-norm-rms-seed-0" / "report.html").is_file()
    code, again, errors = clearhead(folder, *grid, "--resume")
    assert (code, again) == (0, output), errors
    assert "step" not in errors, "nothing is trained again"
    code, _, errors = clearhead(folder, *grid, "train.grad_clip=0.5", "--resume")
    assert code == 2
    assert "was started with other settings (train.grad_clip" in errors


def test_recipes_are_listed_with_descriptions(folder: Path) -> None:
    code, output, _ = clearhead(folder, "recipes", "--json")
    assert code == 0
    rows = json.loads(output)
    assert [row["name"] for row in rows] == recipe_names()
    assert all(row["description"] and row["task"] for row in rows)
