"""The lab's claim and verdict behind a step."""

from pathlib import Path

import pytest

from clearhead.lab.registry import all_experiments
from clearhead.lab.runner import FORMAT, write_json
from clearhead.serve.inspect import lab_notes
from tests.explore.models import client


def test_every_step_names_an_experiment_of_the_lab() -> None:
    assert set(lab_notes.OF_STEP.values()) <= all_experiments().keys()
    for step in lab_notes.OF_STEP:
        answer = client().get(f"/inspect/lab/{step}").json()
        assert answer["claim"]["en"]
        assert answer["claim"]["zh"]
    assert client().get("/inspect/lab/norm").status_code == 400


def test_every_step_shows_a_verdict_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_notes, "FOLDER", tmp_path / "none")
    for step in lab_notes.OF_STEP:
        answer = client().get(f"/inspect/lab/{step}").json()
        assert answer["predictions"], step
        assert not answer["here"]
        assert answer["hardware"]


def test_the_report_is_a_page_without_scripts() -> None:
    answer = client().get("/inspect/lab/report")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert all(f'id="{name}"' in answer.text for name in lab_notes.OF_STEP.values())


def test_a_run_of_ones_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_notes, "FOLDER", tmp_path)
    experiment = all_experiments()["mask-order"]
    cells = {prediction.of: {} for prediction in experiment.predictions}
    for prediction in experiment.predictions:
        effect = 10 * prediction.at_least * (-1 if prediction.direction == "lower" else 1)
        base = 1.0 if isinstance(prediction.against, str) else prediction.against
        if isinstance(prediction.against, str):
            cells.setdefault(prediction.against, {})[prediction.metric] = [base] * 5
        cells.setdefault(prediction.of, {})[prediction.metric] = [base + effect] * 5
    (tmp_path / "mask-order").mkdir()
    record = {"format": FORMAT, "name": "mask-order", "results": cells, "seconds": 1}
    write_json(tmp_path / "mask-order" / "result.json", record)
    answer = client().get("/inspect/lab/mask").json()
    assert answer["here"]
    shown = answer["predictions"]
    assert len(shown) == len(experiment.predictions)
    assert all(each["text"]["en"] and each["outcome"] for each in shown)
