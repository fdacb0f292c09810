"""The experiment that docs/lab.md shows runs from the command line, stops, resumes, and is reported."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clearhead.cli import app
from tools.guide import DOCS


@pytest.fixture
def example(tmp_path: Path) -> Path:
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "lab.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(code.splitlines()) < 80
    path = tmp_path / "width.py"
    path.write_text(code, encoding="utf-8")
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["lab", "run", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_documented_example_runs_resumes_and_repeats(example: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    assert "time budget is spent" in run(example, "--out", out, "--budget", 0)
    assert (out / "width" / "prediction.json").exists()
    run(example, "--out", out)
    output = run(example, "--out", out, "--json")  # from the cache
    first = json.loads(output[output.index("[") :])
    assert first[0]["predictions"][0]["seeds"] == 5
    losses = json.loads((out / "width" / "result.json").read_text(encoding="utf-8"))["results"]
    assert set(losses) == {"ff_dim|16", "ff_dim|64"}
    again = tmp_path / "again"
    run(example, "--out", again)
    repeated = json.loads((again / "width" / "result.json").read_text(encoding="utf-8"))["results"]
    for name, cell in losses.items():
        assert repeated[name]["loss"] == cell["loss"]
