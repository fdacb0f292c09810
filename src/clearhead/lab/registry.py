"""All experiments: modules of `lab/experiments` that define EXPERIMENT, and files of the user; and our own results."""

import difflib
import importlib
import importlib.util
import json
import pkgutil
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from clearhead.errors import UserError
from clearhead.lab import experiments
from clearhead.lab.experiment import Experiment


def all_experiments() -> dict[str, Experiment]:
    """Return the experiments of the package, by name, in the order of their first checklist number."""
    modules = [
        importlib.import_module(f"{experiments.__name__}.{module.name}")
        for module in pkgutil.iter_modules(experiments.__path__)
    ]
    found = [_experiment(module) for module in modules]
    return {experiment.name: experiment for experiment in sorted(found, key=lambda e: (e.checklist, e.name))}


def find(name: str) -> Experiment:
    """Return an experiment by its name, or from a Python file of the user."""
    if name.endswith(".py"):
        return from_file(Path(name))
    known = all_experiments()
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else "see: clearhead lab list"
        raise UserError(f"lab: no experiment {name!r}; {hint}")
    return known[name]


def from_file(path: Path) -> Experiment:
    """Load the EXPERIMENT of a Python file; the file is run as a program."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path of a Python file that defines EXPERIMENT")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _experiment(module)


def committed_records() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the records that come with the package, in full and in quick size, by name; see tools/guide.py."""
    folder = resources.files("clearhead.lab") / "results"
    full, quick = (json.loads((folder / f"{size}.json").read_text(encoding="utf-8")) for size in ("full", "quick"))
    return full, quick


def _experiment(module: ModuleType) -> Experiment:
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise UserError(f"{module.__file__}: it does not define EXPERIMENT; see docs/lab.md")
    return replace(experiment, source=module.__file__ or "")
