"""Rules of the repository: layering, file length, vocabulary, unsafe calls, what `model/` may contain."""

import ast
import importlib
import logging.config
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_packages_import_only_from_packages_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlinter.cli import lint_imports

    monkeypatch.setattr(logging.config, "dictConfig", lambda _: None)  # it would disable all other loggers
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_have_a_docstring(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    assert ast.get_docstring(ast.parse(text)), "the first line must state the purpose of the file"


def test_no_pickle_no_eval_no_exec() -> None:
    unsafe = re.compile(
        r"\bimport pickle\b|\bpickle\.load|(?<!safetensors\.)\btorch\.load\(|(?<![\w.])(eval|exec)\(|yaml\.unsafe"
    )
    found = [str(path) for path in SOURCES if unsafe.search(path.read_text(encoding="utf-8"))]
    assert not found


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, clearhead, clearhead.config, clearhead.cli; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ci_only_calls_the_readme_test_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if "make" in line] == ["exec make test"]


def test_packaged_models_are_small_and_have_complete_cards() -> None:
    models = [folder for folder in (ROOT / "src/clearhead/models").iterdir() if folder.is_dir()]
    sizes = {folder.name: sum(path.stat().st_size for path in folder.iterdir()) for folder in models}
    assert sizes
    assert max(sizes.values()) <= 6_000_000
    assert sum(sizes.values()) <= 24_000_000
    for folder in models:
        card = (folder / "README.md").read_text(encoding="utf-8")
        for part in ("## Use", "## Data", "## Scores", "## Recipe", "## License"):
            assert part in card, folder.name


# Words of an earlier private vocabulary; each has a name in the field (see CONTRIBUTING.md, "Style").
OLD_WORDS = re.compile(
    r"\bslopes?\b|\bin_bytes\b|stored in bytes|half.bytes?\b|brings? home|brought home|light_translator|\blighten\b"
    r"|by_products|ff_width|head_width|word_loss|for_reading|hold_freed|\bastray\b|\bquantis|\boptimis(?!m|t)"
    r"|\blabelled\b|\bgoes on to the bit\b|\bmay look\b|\bgive back\b|\bso many\b|\bwidened\b|\bnarrowed\b"
    r"|\bthe rooms\b|\btwin\b|\bchances\b|\bword scores?\b",
    re.IGNORECASE,
)
# The reader of format version 1, and the synthetic corpus, whose texts are ordinary English.
OLD_WORDS_ALLOWED = ("checkpoint/version1.py", "data/grammar/")


def test_the_vocabulary_is_the_fields() -> None:
    files = [
        *SOURCES,
        *(ROOT / "src").rglob("*.yaml"),
        *(ROOT / "src").rglob("*.c"),
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in sorted(files)
        if not any(part in path.as_posix() for part in OLD_WORDS_ALLOWED)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if (match := OLD_WORDS.search(line))
    ]
    assert found == []


def test_the_model_core_is_short_and_knows_nothing_of_speed() -> None:
    core = sorted((ROOT / "src/clearhead/model").glob("*.py"))
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in core) <= 1400
    speed = re.compile(r"is_compiling|ctypes|triton|is_cuda|is_cpu|device\.type|quantiz|autocast|torch\.distributed")
    for path in core:
        match = speed.search(path.read_text(encoding="utf-8"))
        assert match is None, f"{path.name}: {match and match.group()}"


def test_the_model_core_imports_only_dispatch_functions_from_ops() -> None:
    allowed = {"clearhead.ops.attention", "clearhead.ops.gelu", "clearhead.ops.masks"}
    for path in (ROOT / "src/clearhead/model").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clearhead.ops"):
                assert node.module in allowed, f"{path.name}: {node.module}"


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("bench/*.py"), *ROOT.glob("tools/*.py")]), ids=lambda path: path.stem
)
def test_benches_and_tools_import_names_that_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("clearhead", "tests"):
            names = {each.name for each in node.names}
            found = vars(importlib.import_module(str(node.module))).keys() | _parts(str(node.module))
            assert names <= found, names - found


def _parts(package: str) -> set[str]:
    paths = getattr(importlib.import_module(package), "__path__", [])
    return {module.name for module in pkgutil.iter_modules(paths)}
