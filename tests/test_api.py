"""`clearhead.train` and `clearhead.evaluate` from Python."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import clearhead
from clearhead.config.recipe import load_recipe
from clearhead.errors import UserError
from clearhead.train.api import override

SMALL = {
    "train.steps": 2,
    "train.validate_every": 2,
    "train.save_every": 2,
    "data.train.count": 300,
    "data.valid.count": 20,
    "tokenizer.vocab_size": 200,
}


def test_a_recipe_trains_in_python_and_its_result_loads(tmp_path: Path) -> None:
    events: list[str] = []
    result = clearhead.train(
        "mini-en-de",
        tmp_path / "run",
        overrides=SMALL,
        train__seed=5,
        on_event=lambda event: events.append(event["kind"]),
    )
    assert (result.folder, result.steps, result.metric, result.finished) == (tmp_path / "run", 2, "bleu", True)
    assert result.best is not None
    assert "validation" in events
    assert load_recipe(str(tmp_path / "run" / "recipe.yaml")).train.seed == 5
    model = result.load("cpu")
    assert len(model.translate("A man sleeps.", max_new_tokens=5).ids) == 5
    scores = clearhead.evaluate(model, beam=1)
    assert scores["texts"] == 20
    assert scores.to_dict()["beam"] == 1
    (tmp_path / "en").write_text("A man sleeps.\n")
    (tmp_path / "de").write_text("Ein Mann schläft.\n")
    assert clearhead.evaluate(tmp_path / "run", [tmp_path / "en", tmp_path / "de"], beam=1)["texts"] == 1
    with pytest.raises(UserError, match="data: missing; format, columns and labels describe its files"):
        clearhead.evaluate(model, format="tsv")
    again = clearhead.train(
        load_recipe(str(tmp_path / "run" / "recipe.yaml")), tmp_path / "run", resume=True, train__steps=3
    )
    assert again.steps == 3


def test_wrong_settings_are_named_before_anything_is_trained() -> None:
    with pytest.raises(UserError, match=r"mini-en-de: train.step: unknown setting; did you mean steps\?"):
        clearhead.train("mini-en-de", train__step=1)
    with pytest.raises(UserError, match="no recipe 'mini-en-dee'; did you mean mini-en-de"):
        clearhead.train("mini-en-dee")
    with pytest.raises(UserError, match="out: missing; name the run folder"):
        clearhead.train({})
    with pytest.raises(UserError, match=r"a\.b\.c: a\.b is 1, not a group of settings"):
        override({"a": {"b": 1}}, {"a.b.c": 2})


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([5], {}, "recipe: int is not a recipe; give a name from"),
        ([None], {}, "recipe: NoneType is not a recipe"),
        (["copy"], {"out": 5}, "out: int is not a path; give a string or a Path"),
        (["copy"], {"overrides": "train.steps=2"}, "overrides: 'train.steps=2' is not a dict of names and values"),
        (["copy"], {"overrides": ["train.steps=2"]}, "overrides: ['train.steps=2'] is not a dict of names"),
        (["copy"], {"overrides": 5}, "overrides: 5 is not a dict of names"),
        (["copy"], {"overrides": {5: 1}}, "overrides: {5: 1} is not a dict of names"),
        (["copy"], {"log": "x"}, "log: str is not a function"),
        (["copy"], {"ovverides": {}}, "ovverides: unknown argument; did you mean overrides?"),
        (["copy"], {"steps": 5}, "steps: unknown argument; known: "),
    ],
)
def test_wrong_arguments_of_train_are_named(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        clearhead.train(*arguments, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": 5}, "data: 5 is neither a file nor a list of files"),
        ({"data": [5]}, "data: [5] is neither a file nor a list of files"),
        ({"data": []}, "data: [] is neither a file nor a list of files"),
        ({"beam": "x"}, "beam: str is not a whole number"),
        ({"beam": 0}, "beam: 0 is too small; use 1 or more"),
        ({"data": "x.csv", "columns": ["a"]}, "columns: list is not a dict; write it like {'text': 1, 'label': 2}"),
        ({"data": "x.csv", "labels": "a"}, "labels: str is not a dict; write it like {'1': 'World'}"),
        ({"alignment": 5}, "alignment: int is not a text"),
    ],
)
def test_wrong_arguments_of_evaluate_are_named(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        clearhead.evaluate("en-de", **options)


def test_the_package_functions_work_whichever_module_is_imported_first() -> None:
    code = (
        "import sys, clearhead\n"
        "assert not {'torch', 'pydantic'} & set(sys.modules)\n"
        "dir(clearhead), clearhead.train\n"
        "assert 'torch' not in sys.modules\n"
        "import clearhead.train.loop, clearhead.evaluate.model\n"
        "assert callable(clearhead.train) and callable(clearhead.evaluate)\n"
        "assert clearhead.train.loop.train\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
