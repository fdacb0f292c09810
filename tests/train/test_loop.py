"""Results of a run: models and their cards, averaged checkpoints, fine-tuning, dry runs."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.checkpoint import average_weights, load_model
from clearhead.checkpoint.disk import atomic_folder
from clearhead.config.recipe import Recipe, load_recipe
from clearhead.data import Loader
from clearhead.errors import UserError
from clearhead.model import Network
from clearhead.train import loop
from clearhead.train.dry_run import dry_run
from clearhead.train.objective import Objective
from clearhead.train.state import RunState
from tests.train.tiny import EMBEDDED, FAMILIES, TRAIN, distance, events, losses, prepared, recipe, run, tensors

LABELED: dict[str, Any] = {"train": EMBEDDED | {"count": 60}, "max_length": 40, "batch_tokens": 9000, "workers": 0}
LABELED["valid"] = EMBEDDED | {"count": 15, "split": "valid"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_best_and_the_last_model_load(family: str, tmp_path: Path) -> None:
    summary = run(tmp_path, recipe(family, steps=6, validate_every=3))
    values = [event["loss"] for event in events(tmp_path, "validation")]
    assert summary.best == min(values)
    for name in ("best", "last"):
        loaded = load_model(tmp_path / name)
        assert loaded.extra["task"] == FAMILIES[family]["data"]["task"]
        assert loaded.extra["step"] == (6 if name == "last" else 3 * (1 + values.index(min(values))))
        card = (tmp_path / name / "README.md").read_text()
        assert f"| loss | {values[loaded.extra['step'] // 3 - 1]:.4g} | validation data |" in card
        assert ("nrefs:1" in card) == (family == "translator"), "BLEU has its signature"
    assert distance(weights(load_model(tmp_path / "last").network), newest_weights(tmp_path)) == 0
    assert "<html" in (tmp_path / "report.html").read_text()
    assert load_recipe(str(tmp_path / "recipe.yaml")) == recipe(family, steps=6, validate_every=3)


def weights(network: Network) -> dict[str, Tensor]:
    """The weights by their names in a checkpoint."""
    state, seen = {}, set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            state[name] = tensor.detach()
        seen.add(id(tensor))
    return state


def newest_weights(out: Path) -> dict[str, Tensor]:
    return {name.removeprefix("weights "): x for name, x in tensors(out).items() if name.startswith("weights ")}


def test_the_last_model_is_the_mean_of_the_newest_checkpoints(tmp_path: Path) -> None:
    run(tmp_path, recipe("gpt", save_every=3, keep_checkpoints=4, average_checkpoints=3))
    folders = [tmp_path / "checkpoints" / f"step-{step:08}" for step in (6, 9, 10)]
    mean = average_weights(folders)
    by_hand = sum(load_weights(folder)["decoder.norm.weight"].double() for folder in folders) / 3
    last = weights(load_model(tmp_path / "last").network)
    assert distance(last, mean) == 0
    assert last["decoder.norm.weight"] == pytest.approx(by_hand.float())
    assert distance(last, newest_weights(tmp_path)) > 0, "the checkpoint itself is not averaged: the run may resume"
    assert [event["step"] for event in events(tmp_path, "validation")] == [10, 10]
    assert next(event for event in events(tmp_path, "note"))["average"] == 3
    card = (tmp_path / "last" / "README.md").read_text()
    assert f"| loss | {events(tmp_path, 'validation')[-1]['loss']:.4g} |" in card


def load_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "weights.safetensors")


def test_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    run(tmp_path, recipe("gpt", save_every=2, keep_checkpoints=2))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000008", "step-00000010"]


def test_without_validation_data_there_is_a_last_model_but_no_best(tmp_path: Path) -> None:
    summary = run(tmp_path, recipe("gpt", "data.valid=[]", validate_every=2))
    assert summary.best is None
    assert not (tmp_path / "best").exists()
    load_model(tmp_path / "last")


@pytest.mark.parametrize(
    ("task", "more", "head"),
    [
        ("classification", {}, "classes"),
        ("tagging", {}, "tags"),
        ("answering", {"stride": 4, "max_length": 60}, "span"),
        ("similarity", {}, None),
        ("regression", {}, "classes"),
    ],
)
@pytest.mark.parametrize("base", ["bert", "gpt"])
def test_a_pretrained_model_is_fine_tuned_with_fresh_heads(
    task: str, more: dict[str, Any], head: str | None, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "base", recipe(base, steps=5))
    folder = tmp_path / "base" / "last"
    data = LABELED | {"task": task} | more
    if task in ("similarity", "regression"):  # the embedded corpus has no numeric labels
        rows = [f"a dog ran {n}\ta cat sat {n}\t{n / 10}" for n in range(10)]
        (tmp_path / "numbers.tsv").write_text("\n".join(rows * 4))
        corpus = {"format": "tsv", "files": [str(tmp_path / "numbers.tsv")]}
        data |= {"train": corpus, "valid": corpus} | ({} if task == "similarity" else {"text_pairs": True})
    initial: list[dict[str, Tensor]] = []
    global_batches = loop.global_batches

    def recorded(run: RunState) -> Any:
        initial.append({name: x.clone() for name, x in weights(run.network).items()})
        return global_batches(run)

    monkeypatch.setattr(loop, "global_batches", recorded)
    settings = TRAIN | {"steps": 12, "lr": 0.01}
    plain = {
        "model": {"init_from": str(folder), "dropout": 0.0, "attention_dropout": 0.0},
        "data": data,
        "train": settings,
    }
    run(tmp_path / "out", Recipe.build(plain))
    before, start = weights(load_model(folder).network), initial[0]
    copied = {name for name in start if name in before and torch.equal(start[name], before[name])}
    stack = "encoder." if base == "bert" else "decoder."
    assert {name for name in before if name.startswith((stack, "heads.pooler"))} - copied <= (
        set()
        if task in ("classification", "regression")
        else {"heads.pooler.linear.weight", "heads.pooler.linear.bias"}
    )
    assert {name for name in start if name not in copied} == {
        name for name in start if head is not None and name.startswith(f"heads.{head}.")
    }
    loaded = load_model(tmp_path / "out" / "best")
    assert loaded.config.dropout == 0
    assert loaded.extra["task"] == task
    logged = losses(tmp_path / "out")
    assert logged[-1] < 0.995 * logged[0], "the loss falls"
    assert ("accuracy" in events(tmp_path / "out", "validation")[-1]) == (task not in ("similarity", "regression"))


def test_fresh_heads_depend_on_the_seed_and_pretrained_weights_do_not(tmp_path: Path) -> None:
    run(tmp_path / "base", recipe("bert", steps=2))
    models = []
    for seed in (0, 1):
        plain = {"model": {"init_from": str(tmp_path / "base" / "last")}, "data": LABELED | {"task": "classification"}}
        out = tmp_path / str(seed)
        run(out, Recipe.build(plain | {"train": TRAIN | {"steps": 1, "seed": seed, "lr": 1e-30}}))
        models.append(weights(load_model(out / "last").network))
    differing = {name for name in models[0] if not torch.equal(models[0][name], models[1][name])}
    assert differing == {"heads.classes.proj.weight"} | (differing & {"heads.classes.proj.bias"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dry_run_writes_nothing_and_prints_the_recipe(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = recipe(family)
    lines = dry_run(made, lambda line: None)
    assert not list(tmp_path.iterdir())
    (tmp_path / "again.yaml").write_text("\n".join(lines))
    assert load_recipe(str(tmp_path / "again.yaml")) == made, "the output is a recipe"
    facts = {line.split()[1]: line for line in lines if line.startswith("# ")}
    network = load_model_of(made, tmp_path)
    assert facts["parameters"] == f"# parameters    {sum(p.numel() for p in network.parameters()):,}"
    assert facts.keys() == {"parameters", "memory", "samples", "validation", "time"}
    assert "for 10 steps" in facts["time"]


def load_model_of(made: Recipe, folder: Path) -> Network:
    run(folder / "run", made)
    return load_model(folder / "run" / "last").network


def test_a_dry_run_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Objective, "forward", fails)
    with pytest.raises(ValueError, match=r"out of memory; raise train\.grad_accum"):
        dry_run(recipe("gpt"), lambda line: None)


def test_workers_change_neither_order_nor_losses(tmp_path: Path) -> None:
    run(tmp_path / "none", recipe("bert"))
    run(tmp_path / "three", recipe("bert", "data.workers=3"))
    assert losses(tmp_path / "three") == losses(tmp_path / "none")


def test_every_token_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logged speed counts every token once, for any number of micro-batches."""
    made = recipe("translator", steps=4, grad_accum=3, log_every=2)
    seen: list[int] = []
    log_step = loop.log_step
    monkeypatch.setattr(loop, "log_step", lambda run: (seen.append(run.metrics.tokens), log_step(run))[1])
    run(tmp_path, made)
    steps = Loader(prepared(made)[0].train, batch_tokens=made.data.batch_tokens, workers=0)
    counts = [sum(batch.num_tokens for batch in step.batches) for step, _ in zip(steps, range(4), strict=False)]
    assert seen == [sum(counts[:2]), sum(counts[2:])]


def test_a_folder_whose_name_is_not_utf8_is_refused_before_training(tmp_path: Path) -> None:
    name = Path(os.fsdecode(bytes(tmp_path) + b"/run-\xff"))
    with pytest.raises(UserError, match="the name is not UTF-8"):
        loop.train(recipe("gpt", steps=1), name)
    with pytest.raises(UserError, match="the name is not UTF-8"), atomic_folder(name):
        pass
    assert not list(tmp_path.iterdir())
