"""Predictions come first, parts are cached, killed runs resume."""

from pathlib import Path
from typing import Any

import pytest

from clearhead.errors import UserError
from clearhead.lab.experiment import Experiment, Prediction, Results, Text
from clearhead.lab.runner import OutOfTimeError, Run, load_results, read_json, run_experiment

calls: list[str] = []
NO_TEXT = Text("", "")


def measure(run: Run) -> Results:
    """Two parts; each notes that it was computed."""
    results: Results = {}
    for name in ("a", "b"):
        results |= run.part(name, lambda name=name: (calls.append(name), {name: {"loss": [1.0, 2.0]}})[1])  # type: ignore[misc]
    return results


def experiment(at_least: float = 0.5, **settings: Any) -> Experiment:
    prediction = Prediction(NO_TEXT, "loss", "a", "b", "same", at_least)
    values = {"title": NO_TEXT, "claim": NO_TEXT, "checklist": (1,), "predictions": (prediction,), "measure": measure}
    return Experiment("test", **{**values, **settings})


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def test_finished_parts_are_not_computed_again(tmp_path: Path) -> None:
    first = run_experiment(Run(experiment(), tmp_path), "clearhead lab run test")
    again = run_experiment(Run(experiment(), tmp_path))
    assert calls == ["a", "b"]
    assert again["results"] == first["results"] == {name: {"loss": [1.0, 2.0]} for name in ("a", "b")}
    assert load_results(tmp_path)["test"]["prediction_hash"] == experiment().hash()
    run_experiment(Run(experiment(), tmp_path, scale="full"))
    assert calls == ["a", "b"] * 2


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    def killed(run: Run) -> Results:
        run.part("a", lambda: (calls.append("a"), {"a": {"loss": [1.0, 2.0]}})[1])  # type: ignore[misc]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(Run(experiment(measure=killed), tmp_path))
    assert not load_results(tmp_path)
    run_experiment(Run(experiment(), tmp_path))
    assert calls == ["a", "b"]


def test_the_budget_ends_a_run_between_parts(tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError):
        run_experiment(Run(experiment(), tmp_path, deadline=0))
    assert not calls


def test_the_prediction_is_stored_before_the_first_part(tmp_path: Path) -> None:
    def check(run: Run) -> Results:
        assert read_json(tmp_path / "test" / "prediction.json")["hash"] == run.experiment.hash()
        return measure(run)

    run_experiment(Run(experiment(measure=check), tmp_path))


def test_changed_predictions_are_refused(tmp_path: Path) -> None:
    run_experiment(Run(experiment(), tmp_path))
    with pytest.raises(UserError, match="changed after the first run"):
        run_experiment(Run(experiment(at_least=0.1), tmp_path))


def test_a_missing_cell_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no 'loss' of 'b' in the results"):
        run_experiment(Run(experiment(measure=lambda run: {"a": {"loss": [1.0]}}), tmp_path))


def test_damaged_results_are_refused(tmp_path: Path) -> None:
    run_experiment(Run(experiment(), tmp_path))
    (tmp_path / "test" / "result.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_results(tmp_path)
