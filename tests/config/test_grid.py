"""Overrides with several values: which settings take them, and the recipes of the grid."""

import pytest

from clearhead.config.grid import load_grid, point_name, short_names, split_changes, takes_one_value
from clearhead.errors import ConfigError

SWEPT = """train.lr model.heads model.norm model.preset model.bias data.train.level train.patience train.compile
train.scheduled_sampling.decay tokenizer.vocab_size data.held_out"""
NOT_SWEPT = """data.labels data.train.files model.attention data.source_url model.init_from tokenizer.path train.device
train.freeze data.columns.text train.lrr model lr a.b.c ."""


@pytest.mark.parametrize("key", SWEPT.split())
def test_numbers_switches_and_one_of_a_few_names_take_several_values(key: str) -> None:
    assert takes_one_value(key)


@pytest.mark.parametrize("key", NOT_SWEPT.split())
def test_lists_strings_groups_and_unknown_keys_do_not(key: str) -> None:
    assert not takes_one_value(key)


def test_only_plain_text_with_commas_is_split() -> None:
    changes = ["data.labels=a,b", "train.class_weights={spam: 5, ham: 1}", "model.attention=[full, window]"]
    assert split_changes(changes) == (changes, {})
    swept = {"train.lr": ["1e-4", "3e-4"], "model.bias": ["true", "false"], "train.patience": ["1", "null"]}
    assert split_changes(["train.lr=1e-4,3e-4", "model.bias = true, false", "train.patience=1,null"]) == ([], swept)
    assert split_changes(["train.lr=1e-4,0.0001,2e-4"])[1] == {"train.lr": ["1e-4", "2e-4"]}, "equal values are one"
    assert split_changes(["train.lr=1,2", "train.lr=3"]) == (["train.lr=3"], {}), "the later one counts"


def test_a_grid_has_every_combination_the_last_key_varying_fastest() -> None:
    grid = load_grid("mini-en-de", ["train.lr=1e-4,3e-4", "model.heads=4,8", "train.steps=7"])
    assert [(p.recipe.train.lr, p.recipe.model["heads"]) for p in grid] == [(1e-4, 4), (1e-4, 8), (3e-4, 4), (3e-4, 8)]
    assert [dict(p.values) for p in grid][1] == {"train.lr": 1e-4, "model.heads": 8}
    assert {p.recipe.train.steps for p in grid} == {7}
    assert point_name(grid[1].values) == "lr-0.0001-heads-8-"
    [single] = load_grid("mini-en-de", ["train.steps=7"])
    assert dict(single.values) == {}
    assert short_names(["a.x", "b.x", "b.y"]) == {"a.x": "a.x", "b.x": "b.x", "b.y": "y"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.lr=1e-4,", "train.lr: '1e-4,' has an empty value"),
        ("train.seed=1,2", "give the number of seeds with --seeds"),
        ("train.metric=bleu,loss", "the runs are compared by one metric"),
        ("train.lr=1e-4,big", "train.lr: 'big' is not a number"),
        ("model.heads=4,3", "heads"),
        ("train.lrr=1,2", "train.lrr: unknown setting; did you mean lr"),
    ],
)
def test_wrong_values_are_refused_before_any_work(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_grid("mini-en-de", [change])


def test_the_number_of_runs_is_bounded() -> None:
    lrs = "train.lr=" + ",".join(f"{n}e-5" for n in range(1, 102))
    with pytest.raises(ConfigError, match=r"303 runs are too many for a sweep: 101 \(train.lr\) × 3 \(seeds\)"):
        load_grid("mini-en-de", [lrs], seeds=3)
