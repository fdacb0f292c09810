"""Fine-tuning: a pretrained encoder or decoder with a fresh head, for every task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.checkpoint import load_model, save_model
from clearhead.config.grid import GridPoint
from clearhead.config.recipe import Recipe
from clearhead.data import Batch
from clearhead.errors import ConfigError, UserError
from clearhead.evaluate.model import evaluate
from clearhead.predict import load
from clearhead.train.finite import Diverged
from clearhead.train.init_from import class_weights
from clearhead.train.loop import Summary
from clearhead.train.objective import Objective
from clearhead.train.sweep import sweep
from tests.train.tiny import TEXTS, TRAIN, distance, events, losses, prepared, recipe, run, tensors

TASKS: dict[str, dict[str, Any]] = {
    "classification": {"task": "classification"},
    "tagging": {"task": "tagging"},
    "answering": {"task": "answering", "stride": 4},
    "similarity": {"task": "similarity", "contrastive": True},
}
METRICS = {"classification": "matthews", "tagging": "f1", "answering": "exact", "similarity": "accuracy"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders of a pretrained encoder and of a pretrained decoder."""
    folder = tmp_path_factory.mktemp("bases")
    for family in ("bert", "gpt"):
        run(folder / family, recipe(family, steps=3))
    return {family: folder / family for family in ("bert", "gpt")}


def tuned(base: Path, task: str, *, train: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """A recipe that fine-tunes a model on the embedded corpus."""
    data = TEXTS | TASKS.get(task, {"task": task}) | {"max_length": 48, "batch_tokens": 300, "workers": 0} | changes
    settings = TRAIN | {"metric": METRICS.get(task, "loss"), "steps": 6, "validate_every": 3} | (train or {})
    return Recipe.build({"model": {"init_from": str(base)}, "data": data, "train": settings}, where="test")


@pytest.mark.parametrize("family", ["bert", "gpt"])
@pytest.mark.parametrize("task", TASKS)
def test_validation_metrics_equal_evaluate(task: str, family: str, bases: dict[str, Path], tmp_path: Path) -> None:
    run(tmp_path / "run", tuned(bases[family], task))
    validations = events(tmp_path / "run", "validation")
    metrics = evaluate(load(tmp_path / "run" / "last", "cpu"))
    metric = METRICS[task]
    assert metrics[metric] == pytest.approx(validations[-1][metric])
    assert metrics["texts"] > 5
    if task in ("classification", "tagging"):
        assert validations[-1]["confusion"] == metrics["confusion"]
        assert "True labels down, predictions across" in (tmp_path / "run" / "report.html").read_text()
    if task != "similarity":
        assert len(validations[-1]["samples"]) == 5


@pytest.mark.parametrize("task", TASKS)
def test_half_precision_is_evaluated_on_a_cpu(task: str, bases: dict[str, Path], tmp_path: Path) -> None:
    run(tmp_path / "run", tuned(bases["bert"], task, train={"precision": "bf16", "steps": 2, "validate_every": 2}))
    assert np.isfinite(events(tmp_path / "run", "validation")[-1][METRICS[task]])


def test_regression_and_similarity_are_evaluated_by_correlation(bases: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    rows = [f"{'cat ' * (n % 7 + 1)},{'dog ' * (n % 3 + 1)},{n % 7 - n % 3 + 2}" for n in range(60)]
    file.write_text("\n".join(rows) + "\n")
    corpus = {"format": "csv", "files": [str(file)]}
    for task, more in (("regression", {"text_pairs": True}), ("similarity", {"max_score": 10.0})):
        data = {
            "task": task,
            "train": corpus,
            "valid": corpus,
            "max_length": 24,
            "batch_tokens": 300,
            "workers": 0,
            **more,
        }
        plain = {"model": {"init_from": str(bases["bert"])}, "data": data, "train": TRAIN | {"metric": "spearman"}}
        out = tmp_path / task
        run(out, Recipe.build(plain | {"train": plain["train"] | {"steps": 8, "validate_every": 4}}))
        metrics = evaluate(load(out / "last", "cpu"))
        assert metrics["spearman"] == pytest.approx(events(out, "validation")[-1]["spearman"])
    assert evaluate(load(tmp_path / "regression", "cpu"), unseen=True)["unseen_texts"] == 0


def test_empty_rows_are_left_out_of_metrics_as_of_losses(bases: dict[str, Path], tmp_path: Path) -> None:
    rows = "".join(f"the cat {number}\tthe dog\t{number % 2}\n" for number in range(9))
    (tmp_path / "rows.tsv").write_text(rows)
    (tmp_path / "holes.tsv").write_text(rows + "\tthe dog\t1\n \t \t0\nthe cat\t\t1\n")
    train, valid = ({"format": "tsv", "files": [str(tmp_path / name)]} for name in ("rows.tsv", "holes.tsv"))
    made = tuned(bases["bert"], "classification", text_pairs=True, train={"steps": 3})
    data = made.data.model_dump(mode="json") | {"train": [train], "valid": [valid], "held_out": 0.0}
    made = Recipe.build(made.model_dump(mode="json") | {"data": data}, where="test")
    valid_set = prepared(made)[0].valid
    assert valid_set is not None
    assert valid_set.num_samples(0) == 9
    run(tmp_path / "run", made)
    assert evaluate(load(tmp_path / "run" / "last", "cpu"))["texts"] == 9
    with pytest.raises(UserError, match=r"holes\.tsv, line 10: empty; give some text"):
        evaluate(load(tmp_path / "run" / "last", "cpu"), made.data.valid)


def test_pretrained_weights_are_kept_and_the_head_is_fresh(bases: dict[str, Path], tmp_path: Path) -> None:
    made = tuned(bases["bert"], "classification")
    (data, network), pretrained = prepared(made), load_model(bases["bert"] / "last").network
    for name, weights in pretrained.encoder.state_dict().items():
        assert torch.equal(network.encoder.state_dict()[name], weights)
    assert data.tokenizers[0].engine.to_str() == load(bases["bert"]).tokenizer.engine.to_str()
    run(tmp_path / "run", made)
    again = tuned(tmp_path / "run" / "last", "classification")
    head = load_model(tmp_path / "run" / "last").network.heads.classes
    assert head is not None
    kept = prepared(again)[1].heads.classes
    assert torch.equal(kept.proj.weight, head.proj.weight), "the same labels keep their head"  # type: ignore[union-attr]
    other = tuned(tmp_path / "run" / "last", "classification", train=None)
    reversed_labels = other.data.model_copy(update={"labels": data.labels[::-1]})
    other = other.model_copy(update={"data": reversed_labels})
    fresh = prepared(other)[1].heads.classes
    assert not torch.equal(fresh.proj.weight, head.proj.weight), "labels in another order need a fresh head"  # type: ignore[union-attr]


def pairs(folder: Path) -> dict[str, Any]:
    """Data settings with a file of text pairs whose label is 0 or 1."""
    file = folder / "pairs.csv"
    file.write_text("".join(f"{'cat ' * (n % 7 + 1)}{n},{'dog ' * (n % 3 + 1)}{n},{n % 2}\n" for n in range(60)))
    return {"train": {"format": "csv", "files": [str(file)]}, "text_pairs": True, "held_out": 0.3}


def test_classification_starts_from_encoder_and_pooler_of_a_regression(bases: dict[str, Path], tmp_path: Path) -> None:
    """As mrpc-after-stsb starts from stsb-for-mrpc: from a run folder, with only the head fresh."""
    settings = {"max_length": 32, "batch_tokens": 300, "workers": 0, **pairs(tmp_path)}
    model = {"init_from": str(bases["bert"]), "pooling": "mean"}
    train = TRAIN | {"metric": "spearman", "steps": 6, "validate_every": 3}
    run(tmp_path / "values", Recipe.build({"model": model, "data": settings | {"task": "regression"}, "train": train}))
    after = {"model": {"init_from": str(tmp_path / "values")}, "data": settings | {"task": "classification"}}
    made = Recipe.build(after | {"train": train | {"metric": "f1"}})
    before = load_model(tmp_path / "values" / "best").network
    network = prepared(made)[1]
    heads = {name for name in network.state_dict() if name.startswith("heads.classes.")}
    assert network.config.pooling == "mean"
    assert (before.config.labels, network.config.labels) == (1, 2)
    assert network.state_dict().keys() == before.state_dict().keys()
    for name, weights in before.state_dict().items():
        assert name in heads or torch.equal(network.state_dict()[name], weights), name
    assert "heads.pooler.linear.weight" in before.state_dict()
    run(tmp_path / "classes", made)
    assert evaluate(load(tmp_path / "classes" / "last", "cpu"))["texts"] > 5


def test_swapped_pairs_resume_where_they_stopped(bases: dict[str, Path], tmp_path: Path) -> None:
    settings = {"task": "classification", "max_length": 32, "batch_tokens": 300, "workers": 0, "swap_pairs": True}
    plain = {"model": {"init_from": str(bases["bert"])}, "data": settings | pairs(tmp_path)}
    full, half = (
        Recipe.build(plain | {"train": TRAIN | {"schedule": "constant", "steps": steps, "save_every": 5}})
        for steps in (20, 10)
    )
    run(tmp_path / "uninterrupted", full)
    run(tmp_path / "resumed", half)
    run(tmp_path / "resumed", full, resume=True)
    assert distance(tensors(tmp_path / "uninterrupted"), tensors(tmp_path / "resumed")) == 0
    assert losses(tmp_path / "uninterrupted") == losses(tmp_path / "resumed")
    one = plain | {"data": settings | pairs(tmp_path) | {"swap_pairs": False}}
    run(tmp_path / "one", Recipe.build(one | {"train": TRAIN | {"schedule": "constant", "steps": 20}}))
    assert losses(tmp_path / "one") != losses(tmp_path / "uninterrupted"), "the swapped order is trained on"


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_classification_with_mean_pooling(family: str, bases: dict[str, Path], tmp_path: Path) -> None:
    made = tuned(bases[family], "classification")
    made = made.model_copy(update={"model": made.model | {"pooling": "mean"}})
    run(tmp_path, made)
    model = load(tmp_path / "last", "cpu")
    assert model.network.config.pooling == "mean"
    assert evaluate(model)["matthews"] == pytest.approx(events(tmp_path, "validation")[-1]["matthews"])


@pytest.mark.parametrize("task", TASKS)
def test_packed_and_padded_rows_have_the_same_loss(task: str, bases: dict[str, Path]) -> None:
    totals = []
    for packed in (False, True):
        made = tuned(bases["bert"], task, packed=packed)
        data, network = prepared(made)
        objective = Objective(network, made.data, made.train).eval()
        batch: Batch = data.train.batch(np.arange(8), 0, 0)
        totals.append(float(objective(batch)[task].total.detach()))
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)


def test_balanced_class_weights_give_all_classes_the_same_total(bases: dict[str, Path]) -> None:
    for task in ("classification", "tagging"):
        made = tuned(bases["bert"], task, train={"class_weights": "balanced"})
        data, _ = prepared(made)
        weights = class_weights(made, data)
        assert weights is not None
        batch = data.train.batch(np.arange(data.train.num_samples(0)), 0, 0)
        labels = batch["labels"][batch["labels"] >= 0]
        total = torch.bincount(labels, weights[labels].double(), minlength=len(weights))
        assert total[total > 0].tolist() == pytest.approx(
            [float(total[total > 0].mean())] * int((total > 0).sum()), rel=1e-4
        )
    named = tuned(bases["bert"], "classification", train={"class_weights": {"past": 5.0}})
    data, network = prepared(named)
    weights = class_weights(named, data)
    assert weights is not None
    assert dict(zip(data.labels, weights.tolist(), strict=True))["past"] == 5.0
    objective = Objective(network, named.data, named.train, weights).eval()
    plain = Objective(objective.network, named.data, named.train).eval()
    batch = data.train.batch(np.arange(20), 0, 0)
    weighted, unweighted = (each(batch)["classification"].total.detach() for each in (objective, plain))
    assert float(weighted) > float(unweighted)
    with pytest.raises(UserError, match=r"train.class_weights: no label 'pasd'; did you mean past"):
        class_weights(tuned(bases["bert"], "classification", train={"class_weights": {"pasd": 5.0}}), data)
    with pytest.raises(
        ConfigError, match=r"train.class_weights: for classification and tagging; the task is answering"
    ):
        tuned(bases["bert"], "answering", train={"class_weights": "balanced"})


def test_a_metric_that_the_task_does_not_have_is_refused(bases: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"train.metric: spearman is not available here; use loss or accuracy or f1"):
        tuned(bases["bert"], "tagging", train={"metric": "spearman"})


def test_truncated_texts_are_named_in_the_log_and_the_report(bases: dict[str, Path], tmp_path: Path) -> None:
    lines: list[str] = []
    made = tuned(bases["bert"], "classification", max_length=8)
    run(tmp_path / "run", made, log=lines.append)
    [start] = events(tmp_path / "run", "start")
    assert start["truncated"].endswith("are longer than data.max_length (8 tokens) and were truncated")
    assert start["truncated"] in lines
    assert start["truncated"] in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    [*_, validation] = events(tmp_path / "run", "validation")
    assert all(each["output"] != each["reference"] for each in validation["mistakes"])


def test_a_sweep_makes_a_table_and_copies_the_best_model(bases: dict[str, Path], tmp_path: Path) -> None:
    made, out = tuned(bases["bert"], "classification", train={"metric": "loss"}), tmp_path / "grid"

    def compare(resume: bool = False, **changes: Any) -> list[dict[str, Any]]:
        train = made.train.model_copy(update=changes)
        recipes = [made.model_copy(update={"train": train.model_copy(update={"lr": lr})}) for lr in (1e-4, 1e-2)]
        grid = [GridPoint({"train.lr": each.train.lr}, each) for each in recipes]
        table = sweep(grid, 2, out, resume, lambda line: None, lambda event: None)
        assert table is not None
        return table

    table = compare()
    best = table[0]
    assert best["loss"] == min(line["loss"] for line in table)
    for line in table:
        assert line["runs"] == [f"lr-{line['settings']['train.lr']:g}-seed-{seed}" for seed in (0, 1)]
        runs = [events(out / name, "validation") for name in line["runs"]]
        values = [min(event["loss"] for event in run_events) for run_events in runs]
        assert line["values"] == pytest.approx(values)
        assert values[0] != values[1], "another seed is another run"
        assert line["loss"] == pytest.approx(sum(values) / 2)
        assert line["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert json.loads((out / "table.json").read_text()) == table
    seed = int(np.argmin(best["values"]))
    expected = load_model(out / best["runs"][seed] / "best").network.state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in load(out).network.state_dict().items())
    with pytest.raises(UserError, match="exists already"):
        compare()
    before = (out / "lr-0.0001-seed-0" / "log.jsonl").read_bytes()
    assert compare(resume=True) == table
    with pytest.raises(UserError, match=r"lr-0.0001-seed-0: .*other settings \(train.grad_clip: .* is now 0.5\)"):
        compare(resume=True, grad_clip=0.5)
    assert (out / "lr-0.0001-seed-0" / "log.jsonl").read_bytes() == before
    compare(resume=True, steps=made.train.steps + 1)
    assert events(out / "lr-0.0001-seed-0", "end")[-1]["step"] == made.train.steps + 1, "finished runs go on"


def test_a_sweep_over_any_setting_has_one_report_and_survives_a_diverged_run(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out, lines = (
        tuned(bases["bert"], "classification", train={"metric": "loss", "steps": 4}),
        tmp_path,
        list[str](),
    )
    recipes = [made.model_copy(update={"model": made.model | {"dropout": dropout}}) for dropout in (0.0, 0.4)]
    grid = [GridPoint({"model.dropout": each.model["dropout"]}, each) for each in recipes]

    def diverging(recipe: Recipe, folder: Path, **options: Any) -> Summary:
        summary = run(folder, recipe, **options)
        if recipe.model["dropout"] and recipe.train.seed == 1:
            log = folder / "log.jsonl"
            log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))  # without its end
            raise Diverged("step 3: the gradient was not finite")
        return summary

    monkeypatch.setattr("clearhead.train.sweep.train", diverging)
    table = sweep(grid, 2, out / "grid", False, lines.append, lambda event: None)
    assert table is not None
    assert lines[0] == "sweep: recipes 2, seeds 2, runs 4; compared by loss", "said before any work"
    assert [row["settings"] for row in table] == [{"model.dropout": 0.0}, {"model.dropout": 0.4}]
    assert (table[1]["loss"], table[1]["values"][1]) == (None, None)
    assert "| 0.4 | 2 | diverged |" in (out / "grid" / "table.md").read_text()
    text = (out / "grid" / "report.html").read_text()
    for fact in (
        "dropout 0.0",
        "dropout 0.4",
        "2 recipes, 4 runs",
        'href="dropout-0.0-seed-1/report.html"',
        "diverged",
    ):
        assert fact in text
    assert text.count('aria-label="Validation loss"') == 1
    assert "<script" not in text


def test_a_fine_tuned_decoder_keeps_its_chat_template(bases: dict[str, Path], tmp_path: Path) -> None:
    base = load_model(bases["gpt"] / "last")
    kept = {
        "chat_template": "{{ messages }}",
        "sampling": {"temperature": 0.5},
        "eos_ids": [base.tokenizers[0].id("end")],
    }
    save_model(tmp_path / "base", base.network, base.tokenizers, base.extra | kept)
    run(tmp_path / "run", tuned(tmp_path / "base", "language-model", train={"metric": "loss"}))
    extra = load_model(tmp_path / "run" / "last").extra
    assert {key: extra[key] for key in kept} == kept
    run(tmp_path / "labels", tuned(tmp_path / "base", "classification"))
    assert not kept.keys() & load_model(tmp_path / "labels" / "last").extra.keys()
