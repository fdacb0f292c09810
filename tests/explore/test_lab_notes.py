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
    assert client().get("/inspect/lab/scores").status_code == 400


def test_the_verdict_is_shown_where_the_experiment_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_notes, "FOLDER", tmp_path)
    assert client().get("/inspect/lab/mask").json()["predictions"] == []
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
    shown = client().get("/inspect/lab/mask").json()["predictions"]
    assert len(shown) == len(experiment.predictions)
    assert all(each["text"]["en"] and each["outcome"] for each in shown)
