"""Every script of examples/, and the notebook cell by cell, runs to its end."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
EXPECTED = {
    "fine_tune_classifier.py": "Classification(label='good'",
    "inspect_attention.py": "Logit lens",
    "stream_text.py": "The five most likely next tokens",
    "translate_files.py": "Zwei Hunde spielen im Schnee.",
}


def run(script: Path, folder: Path) -> str:
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_is_short(name: str, tmp_path: Path) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 40
    assert EXPECTED[name] in run(EXAMPLES / name, tmp_path)


def test_the_notebook_runs_and_stores_no_output(tmp_path: Path) -> None:
    notebook: dict[str, Any] = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    script = tmp_path / "tour.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells) + "\n", encoding="utf-8")
    assert "Zwei Hunde spielen im Schnee." in run(script, tmp_path)
