"""The house rules that a machine can check: the order of the rooms, the length of files, what code may not do."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_rooms_import_only_from_rooms_above_them() -> None:
    from importlinter.cli import lint_imports

    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    assert ast.get_docstring(ast.parse(text)), "the first line says what the file is for"


def test_no_code_reads_pickles_or_runs_strings() -> None:
    unsafe = re.compile(r"\bimport pickle\b|\bpickle\.load|\btorch\.load\(|(?<![\w.])(eval|exec)\(|yaml\.unsafe")
    found = [str(path) for path in SOURCES if unsafe.search(path.read_text(encoding="utf-8"))]
    assert not found


def test_the_package_imports_without_torch_until_it_is_needed() -> None:
    code = "import sys, clearhead, clearhead.config, clearhead.cli; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ci_only_calls_the_readme_test_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if "make" in line] == ["exec make test"]
