"""The house rules that a machine can check: the order of the rooms, the length of files, what code may not do."""

import ast
import importlib
import pkgutil
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


def test_models_of_the_package_are_small_and_say_where_they_come_from() -> None:
    models = [folder for folder in (ROOT / "src/clearhead/models").iterdir() if folder.is_dir()]
    sizes = {folder.name: sum(path.stat().st_size for path in folder.iterdir()) for folder in models}
    assert sizes
    assert max(sizes.values()) <= 6_000_000
    assert sum(sizes.values()) <= 24_000_000
    for folder in models:
        card = (folder / "README.md").read_text(encoding="utf-8")
        for part in ("## Use", "## Data", "## Scores", "## Recipe", "## License"):
            assert part in card, folder.name


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("bench/*.py"), *ROOT.glob("tools/*.py")]), ids=lambda path: path.stem
)
def test_what_benches_import_from_us_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("clearhead", "tests"):
            names = {each.name for each in node.names}
            found = vars(importlib.import_module(str(node.module))).keys() | _parts(str(node.module))
            assert names <= found, names - found


def _parts(package: str) -> set[str]:
    paths = getattr(importlib.import_module(package), "__path__", [])
    return {module.name for module in pkgutil.iter_modules(paths)}
