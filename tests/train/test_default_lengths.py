"""Defaults of data.max_length and data.stride: no more than the model has positions for, known before any work."""

from pathlib import Path
from typing import Any

import pytest

from clearhead.config import preset, preset_names
from clearhead.config.load import read_yaml
from clearhead.config.recipe import TASK_REQUIREMENTS, Recipe, dump_recipe
from clearhead.errors import ConfigError
from clearhead.train import api
from clearhead.train.dry_run import dry_run
from tests.train.tiny import FAMILIES, TRAIN, recipe, run


def minimal(name: str, task: str, **data: Any) -> dict[str, Any]:
    """The settings that a recipe must have."""
    return {"model": {"preset": name}, "data": {"task": task, **data}, "train": {"steps": 1}}


@pytest.mark.parametrize("name", preset_names())
def test_a_minimal_recipe_of_every_preset_fits_the_model(name: str) -> None:
    config = preset(name)
    task = next(task for task, (families, _) in TASK_REQUIREMENTS.items() if config.family in families)
    built = Recipe.build(minimal(name, task))
    assert built.data.max_length == min(512, config.max_positions)
    assert Recipe.build(read_yaml(dump_recipe(built), "dumped")) == built


def test_a_given_length_that_is_too_large_stays_an_error() -> None:
    with pytest.raises(ConfigError, match=r"data\.max_length: 512 tokens, but the model has 256 positions; lower it"):
        Recipe.build(minimal("tiny-gpt", "language-model", max_length=512))


def test_the_default_stride_leaves_room_for_the_context() -> None:
    assert Recipe.build(minimal("tiny-encoder", "answering", max_length=64)).data.stride == 16
    assert Recipe.build(minimal("bert-base", "answering")).data.stride == 128
    assert Recipe.build(minimal("tiny-encoder", "tagging", max_length=64)).data.stride == 128  # not used


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 positions."""
    out = tmp_path_factory.mktemp("runs") / "gpt"
    run(out, recipe("gpt", steps=1))
    return out / "last"


def fine_tuning(folder: Path, **changes: Any) -> Recipe:
    data = FAMILIES["gpt"]["data"] | {"workers": 0} | changes
    data = {key: value for key, value in data.items() if value is not None}
    return Recipe.build({"model": {"init_from": str(folder)}, "data": data, "train": TRAIN | {"steps": 1}})


def test_fine_tuning_has_the_positions_of_the_initial_model(folder: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", fine_tuning(folder, max_length=None))
    recipe = read_yaml((tmp_path / "run" / "recipe.yaml").read_text(), "recipe.yaml")
    assert recipe["data"]["max_length"] == 64
    assert any("max_length: 64" in line for line in dry_run(fine_tuning(folder, max_length=None), lambda line: None))


def test_python_overrides_keep_defaults_open(folder: Path, tmp_path: Path) -> None:
    result = api.train(fine_tuning(folder, max_length=None), tmp_path / "run", overrides={"train.log_every": 1})
    assert result.finished


def test_a_length_that_does_not_fit_the_initial_model_is_refused_before_tokenizing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"data\.max_length: 65 tokens, but the model has 64 positions; lower it$"):
        run(tmp_path / "run", fine_tuning(folder, max_length=65))
    assert list(tmp_path.iterdir()) == []
