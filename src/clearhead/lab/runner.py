"""Run experiments: predictions first, then parts that are cached, so that a killed run resumes.

DIR/NAME/prediction.json   hash of claim and predictions, written before the first part
DIR/NAME/parts/KEY.json    the metrics of one part, such as a trained variant
DIR/NAME/result.json       all metrics for each seed, with hardware, date and command
DIR/NAME/figure-N.svg      the figures, in English
"""

import hashlib
import json
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from clearhead.errors import UserError
from clearhead.files import read_text, write_text
from clearhead.lab.ensemble import Batch, Ensemble, Training, Variant
from clearhead.lab.experiment import Experiment, Results
from clearhead.lab.figure import draw
from clearhead.limits import MAX_RECORD_BYTES

Scale = Literal["quick", "full"]
Metrics = dict[str, list[float]]
After = Callable[[Ensemble], Mapping[str, Metrics]]
SEEDS = {"quick": 5, "full": 8}
FORMAT = 1


class OutOfTimeError(Exception):
    """The time budget is spent; finished parts are kept."""


@dataclass
class Run:
    """What `Experiment.measure` works with: scale, device, seeds, and cached parts."""

    experiment: Experiment
    folder: Path
    scale: Scale = "quick"
    device: str = "cpu"
    deadline: float = float("inf")  # of time.monotonic()
    report: Callable[[str], None] = lambda line: None
    seconds: float = 0.0  # spent in parts, those of earlier runs included
    seeds: Sequence[int] = field(default=())
    max_steps: int | None = None  # to try an experiment without training it
    settings: list[dict[str, Any]] = field(default_factory=list)  # of each comparison, for the record

    def __post_init__(self) -> None:
        self.seeds = self.seeds or range(SEEDS[self.scale])

    def pick(self, quick: Any, full: Any) -> Any:
        """Return one of two settings, by scale."""
        return quick if self.scale == "quick" else full

    def steps(self, steps: int) -> int:
        """Limit a number of training steps to `max_steps`."""
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def part(self, name: str, compute: Callable[[], Mapping[str, Metrics]]) -> Results:
        """Return the results of a part: from an earlier run with the same code, scale and seeds, or computed now."""
        key = [self.experiment.hash(), self._code, name, self.scale, list(self.seeds), self.device.partition(":")[0]]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
        path = self.folder / self.experiment.name / "parts" / f"{_file_name(name)}-{digest}.json"
        if path.exists():
            stored = read_json(path)
            self.seconds += stored["seconds"]
            return stored["results"]
        if time.monotonic() > self.deadline:
            raise OutOfTimeError
        start = time.perf_counter()
        torch.manual_seed(0)
        results = {cell: dict(metrics) for cell, metrics in compute().items()}
        seconds = time.perf_counter() - start
        self.seconds += seconds
        write_json(path, {"part": name, "seconds": round(seconds, 3), "results": results})
        self.report(f"{self.experiment.name}: {name}, {seconds:.1f} s")
        return results

    def compare(
        self,
        base: Mapping[str, Any],
        variants: Sequence[Variant],
        data: Batch,
        valid: Batch,
        tests: Mapping[str, Batch],
        training: Training,
        after: After | None = None,
    ) -> Results:
        """Train each variant with every learning rate and seed, keep the learning rate that is best on `valid`, test.

        Results have a cell for each variant, or "variant|test" if there are several tests.
        """
        results: Results = {}
        size = {"examples": len(data["labels"]), "tokens per row": data["labels"].shape[1]}
        self.settings.append({"model": dict(base), "training": asdict(training), **size})
        for variant in variants:

            def train(variant: Variant = variant) -> Results:
                return self.train(base, variant, data, valid, tests, training, after)

            results |= self.part(variant.name, train)
        return results

    def train(
        self,
        base: Mapping[str, Any],
        variant: Variant,
        data: Batch,
        valid: Batch,
        tests: Mapping[str, Batch],
        training: Training,
        after: After | None = None,
    ) -> Results:
        """Train one variant and measure it, see `compare`."""
        from clearhead.config import ModelConfig

        training = replace(training, steps=self.steps(training.steps))
        config = None if variant.build else ModelConfig(**{**base, **variant.model})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*batching rule.*")
            ensemble = Ensemble(config, variant, self.seeds, self.device)
            seconds = ensemble.train(data, training, variant, self.seeds)
            lrs = variant.lrs or training.lrs
            losses = torch.tensor(ensemble.evaluate(valid)["loss"]).view(len(lrs), -1).mean(1)
            best = int(losses.argmin())
            ensemble.select(best)
            one_test = len(tests) == 1
            results: Results = {}
            for test, batch in tests.items():
                results[variant.name if one_test else f"{variant.name}|{test}"] = ensemble.evaluate(batch)
            first = next(iter(results))
            count = len(self.seeds)
            results[first] |= {"lr": [lrs[best]] * count, "parameters": [ensemble.parameters] * count}
            results[first]["train seconds"] = seconds
            for cell, metrics in (after(ensemble) if after else {}).items():
                name = variant.name + cell
                results[name] = results.get(name, {}) | metrics
        return results

    @cached_property
    def _code(self) -> str:
        source = Path(self.experiment.source)
        return hashlib.sha256(source.read_bytes()).hexdigest() if self.experiment.source else ""


def run_experiment(run: Run, command: str = "") -> dict[str, Any]:
    """Run an experiment or resume it, and return its record, which is also in result.json."""
    experiment = run.experiment
    folder = run.folder / experiment.name
    predicted_at = register_prediction(experiment, folder)
    results = experiment.measure(run)
    record = {
        "format": FORMAT,
        "name": experiment.name,
        "prediction_hash": experiment.hash(),
        "predicted_at": predicted_at,
        "date": _now(),
        "scale": run.scale,
        "seeds": len(run.seeds),
        "hardware": hardware(run.device),
        "torch": torch.__version__,
        "command": command,
        "seconds": round(run.seconds, 1),
        "settings": run.settings,
        "results": results,
    }
    for prediction in experiment.predictions:
        prediction.effects(results)  # raises if the measurement lacks something
    write_json(folder / "result.json", record)
    for index, figure in enumerate(experiment.figures, 1):
        write_text(folder / f"figure-{index}.svg", draw(figure, results))
    return record


def register_prediction(experiment: Experiment, folder: Path) -> str:
    """Store the hash of the predictions before the first run; refuse predictions that changed afterwards."""
    path = folder / "prediction.json"
    if path.exists():
        stored = read_json(path)
        if stored["hash"] != experiment.hash():
            raise UserError(
                f"{path}: the prediction was changed after the first run; undo the change, or delete {folder} to "
                "start over with the new prediction"
            )
        return stored["date"]
    stored = {"hash": experiment.hash(), "date": _now()}
    write_json(path, stored)
    return stored["date"]


def load_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records of all finished experiments of a folder, by name."""
    records = {}
    for path in sorted(folder.glob("*/result.json")):
        record = read_json(path)
        if record.get("format") != FORMAT:
            raise UserError(f"{path}: format {record.get('format')!r} of results; run the experiment again")
        records[record["name"]] = record
    return records


def hardware(device: str) -> str:
    """Name the processor or GPU."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    threads = torch.get_num_threads()
    unit = "thread" if threads == 1 else "threads"
    return f"{name}, {threads} {unit}"


def read_json(path: Path) -> Any:
    """Read a JSON file of the lab."""
    try:
        return json.loads(read_text(path, MAX_RECORD_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not valid JSON; delete it and run the experiment again") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)[:60]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
