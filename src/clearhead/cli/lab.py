"""`clearhead lab`: list and run experiments, and write their report."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.language import language
from clearhead.cli.options import utf8_path
from clearhead.cli.output import echo, echo_json, say
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.lab.experiment import Experiment

app = typer.Typer(help="Test claims about Transformers by experiment.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Results = Annotated[Path, typer.Option("--out", callback=utf8_path, help="Folder of the results.")]
FOLDER = Path("runs/lab")


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the experiments with their claims.

    Example: clearhead lab list
    """
    from clearhead.lab.registry import all_experiments

    index = 1 if language() == "zh" else 0
    rows = [
        {"name": e.name, "claim": e.claim[index], "checklist": e.checklist, "predictions": len(e.predictions)}
        for e in all_experiments().values()
    ]
    if as_json:
        echo_json(rows, indent=2)
        return
    for row in rows:
        echo(f"{row['name']:<24} {row['claim']}")


@app.command()
def run(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Experiments, or Python files that define one.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Run all experiments.")] = False,
    full: Annotated[bool, typer.Option("--full/--quick", help="Full size for a GPU, or minutes on two cores.")] = False,
    out: Results = FOLDER,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    budget: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="Seconds after which no part starts; run again to resume."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run experiments: store the predictions, train, measure, and decide. Finished parts are kept and not run again.

    Example: clearhead lab run pre-norm
    Example: clearhead lab run --all --full --device cuda --out results
    """
    import torch

    from clearhead.lab.registry import all_experiments, find
    from clearhead.lab.runner import OutOfTimeError, Run, run_experiment

    if every == bool(names):
        raise UserError("lab run: give names of experiments, or --all; see: clearhead lab list")
    if device != "cpu" and not (device.partition(":")[0] == "cuda" and torch.cuda.is_available()):
        raise UserError(f"--device: {device!r} is not available; use cpu" + (" or cuda" * torch.cuda.is_available()))
    experiments = list(all_experiments().values()) if every else [find(name) for name in names or ()]
    deadline = float("inf") if budget is None else time.monotonic() + budget
    failed: list[str] = []
    for experiment in experiments:
        command = f"clearhead lab run {experiment.name} {'--full' if full else '--quick'} --device {device}"
        work = Run(experiment, out, "full" if full else "quick", device, deadline, lambda line: echo(line, err=True))
        try:
            run_experiment(work, command)
        except OutOfTimeError:
            echo("The time budget is spent; run the same command again to continue.", err=True)
            break
        except Exception as error:  # such as a missing corpus, or too little memory; the others can run
            if len(experiments) == 1:
                raise
            failed.append(experiment.name)
            echo(f"{experiment.name}: {type(error).__name__}: {error}", err=True)
    _print_verdicts(out, experiments, as_json)
    if failed:
        raise UserError(f"lab run: {len(failed)} experiments could not run: {', '.join(failed)}; see above")


def _print_verdicts(folder: Path, experiments: "list[Experiment]", as_json: bool) -> None:
    """Print the verdicts of the finished experiments among `experiments`, corrected over these."""
    from clearhead.lab.runner import load_results
    from clearhead.lab.verdict import judge
    from clearhead.lab.wording import OUTCOMES, effect, means

    records = load_results(folder)
    finished = {e.name: (e, records[e.name]["results"]) for e in experiments if e.name in records}
    verdicts = judge(finished)
    if as_json:
        rows: list[dict[str, Any]] = []
        for name, (experiment, _) in finished.items():
            pairs = zip(experiment.predictions, verdicts[name], strict=True)
            outcomes = [vars(verdict) | {"prediction": prediction.text.en} for prediction, verdict in pairs]
            rows.append({"name": name, "seconds": records[name]["seconds"], "predictions": outcomes})
        echo_json(rows, indent=2)
        return
    index = 1 if language() == "zh" else 0
    for name, (experiment, results) in finished.items():
        echo(f"\n{name}: {experiment.claim[index]}")
        for prediction, verdict in zip(experiment.predictions, verdicts[name], strict=True):
            numbers = f"{means(prediction, results, index)}{(': ', '：')[index]}{effect(prediction, verdict)}"
            echo(f"  {OUTCOMES[verdict.outcome][index]:<14} {prediction.text[index]}")
            echo(f"  {'':<14} {numbers}, n = {verdict.seeds}")


@app.command()
def report(
    results: Results = FOLDER,
    html: Annotated[
        Path | None, typer.Option(callback=utf8_path, help="HTML file to write. Default: report.html in that folder.")
    ] = None,
) -> None:
    """Write the report of all finished experiments: one HTML file in English and Chinese.

    Example: clearhead lab report
    """
    from clearhead.files import write_text
    from clearhead.lab.registry import all_experiments
    from clearhead.lab.report import report as page
    from clearhead.lab.runner import load_results

    records = load_results(results)
    experiments = all_experiments()
    if not any(name in experiments for name in records):
        raise UserError(f"{results}: no finished experiments; run some first: clearhead lab run --all")
    path = html or results / "report.html"
    write_text(path, page(experiments, records))
    say(f"{path} written")
