"""The route of the lab: the claim behind a step, and the verdict of its experiment where it was run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter

from clearhead.errors import UserError
from clearhead.lab.registry import all_experiments
from clearhead.lab.runner import load_results
from clearhead.lab.verdict import judge
from clearhead.serve.inspect.explorer import InspectRoute
from clearhead.serve.inspect.frame import finite

router = APIRouter(route_class=InspectRoute)
FOLDER = Path("runs/lab")  # where `clearhead lab run` writes by default
OF_STEP = {  # the experiment that tests what is said about a step
    "q": "projections",
    "k": "grouped-query",
    "v": "value-matrix",
    "rope": "positions",
    "mask": "mask-order",
    "weights": "attention-weight",
    "sum": "heads-off",
    "residual": "residual",
    "feed_forward": "feed-forward",
}


@router.get("/lab/{step}")
def lab(step: str) -> dict[str, Any]:
    """The claim in both languages, and outcome, effect and interval of each prediction; no predictions if not run."""
    if step not in OF_STEP:
        raise UserError(f"lab: no experiment about {step[:40]!r}; there is one about {', '.join(OF_STEP)}")
    name = OF_STEP[step]
    experiment = all_experiments()[name]
    records = load_results(FOLDER) if FOLDER.is_dir() else {}
    predictions: list[dict[str, Any]] = []
    if name in records:
        finished = {each: (all_experiments()[each], record["results"]) for each, record in records.items()}
        for prediction, verdict in zip(experiment.predictions, judge(finished)[name], strict=True):
            text = {"en": prediction.text.en, "zh": prediction.text.zh}
            interval = {"effect": verdict.effect, "low": verdict.low, "high": verdict.high, "seeds": verdict.seeds}
            predictions.append({"text": text, "outcome": verdict.outcome, **interval})
    claim = {"en": experiment.claim.en, "zh": experiment.claim.zh}
    result: dict[str, Any] = finite({"name": name, "claim": claim, "predictions": predictions})
    return result
