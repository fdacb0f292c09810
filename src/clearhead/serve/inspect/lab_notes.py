"""The routes of the lab: the claim behind a step with the verdict of its experiment, and the whole report."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from clearhead.errors import UserError
from clearhead.lab.registry import all_experiments, committed_records
from clearhead.lab.report import report
from clearhead.lab.runner import load_results
from clearhead.lab.verdict import Verdict, judge
from clearhead.serve.inspect.explorer import InspectRoute
from clearhead.serve.inspect.frame import finite

router = APIRouter(route_class=InspectRoute)
REPORT_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
FOLDER = Path("runs/lab")  # where `clearhead lab run` writes by default
OF_STEP = {  # the experiment that tests what is said about a step
    "embedding": "senses",
    "x": "norm-axis",
    "q": "projections",
    "k": "grouped-query",
    "v": "value-matrix",
    "rope": "positions",
    "scores": "scaling",
    "scaled": "scaling",
    "mask": "mask-order",
    "weights": "attention-weight",
    "sum": "heads-off",
    "residual": "residual",
    "feed_forward": "feed-forward",
    "sampling": "sampling",
    "forced": "exposure-bias",
    "effect": "heads-off",
}


@router.get("/lab/report", include_in_schema=False, response_class=HTMLResponse)
def lab_report() -> HTMLResponse:
    """The report of the results that come with the package."""
    return HTMLResponse(_report(), headers=REPORT_HEADERS)


@router.get("/lab/{step}")
def lab(step: str) -> dict[str, Any]:
    """The claim in both languages, and outcome, effect and interval of each prediction, as run here or by us."""
    if step not in OF_STEP:
        raise UserError(f"lab: no experiment about {step[:40]!r}; there is one about {', '.join(OF_STEP)}")
    name = OF_STEP[step]
    experiment = all_experiments()[name]
    records = load_results(FOLDER) if FOLDER.is_dir() else {}
    here = name in records
    if here:
        finished = {each: (all_experiments()[each], record["results"]) for each, record in records.items()}
    record, verdicts = (records[name], judge(finished)[name]) if here else _committed()[name]
    predictions: list[dict[str, Any]] = []
    for prediction, verdict in zip(experiment.predictions, verdicts, strict=True):
        text = {"en": prediction.text.en, "zh": prediction.text.zh}
        interval = {"effect": verdict.effect, "low": verdict.low, "high": verdict.high, "seeds": verdict.seeds}
        predictions.append({"text": text, "outcome": verdict.outcome, **interval})
    claim = {"en": experiment.claim.en, "zh": experiment.claim.zh}
    facts = {"here": here, "hardware": record.get("hardware", ""), "scale": record.get("scale", "")}
    result: dict[str, Any] = finite({"name": name, "claim": claim, "predictions": predictions, **facts})
    return result


@cache
def _committed() -> dict[str, tuple[dict[str, Any], list[Verdict]]]:
    """The records that come with the package, and their verdicts."""
    full, quick = committed_records()
    records, experiments = {**quick, **full}, all_experiments()
    verdicts = judge({name: (experiments[name], record["results"]) for name, record in records.items()})
    return {name: (records[name], verdicts[name]) for name in records}


@cache
def _report() -> str:
    return report(all_experiments(), *committed_records())
