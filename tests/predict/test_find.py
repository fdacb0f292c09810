"""Finding models by name and path: what cannot be one is a one-line error with the fix."""

from pathlib import Path

import pytest

from clearhead.errors import UserError
from clearhead.predict import find_model


def test_a_text_given_as_a_model_name_is_refused_in_one_line() -> None:
    for name in ("A quiet, moving film. " * 30, "a/" * 3000):
        with pytest.raises(UserError, match=r"^no model '[^\n]{1,90}: neither a folder nor a name[^\n]*$"):
            find_model(name)


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists

    def closed(path: Path) -> bool:
        if path.is_relative_to(tmp_path):
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", closed)
    with pytest.raises(UserError, match=r"model cannot be read \(Permission denied\); check the path"):
        find_model(tmp_path / "model")


def test_a_run_folder_gives_its_best_model_else_its_last(tmp_path: Path) -> None:
    for part in ("last", "best"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text("{}")
        assert find_model(tmp_path) == tmp_path / part
    with pytest.raises(UserError, match="is a file; give a model folder"):
        find_model(tmp_path / "best" / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="contains no model"):
        find_model(tmp_path / "empty")


def test_a_missing_run_of_a_known_recipe_names_the_command_that_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="runs/mini-bert does not exist yet; run: clearhead train mini-bert"):
        find_model("runs/mini-bert")
    with pytest.raises(UserError, match="no model 'runs/mini-bird'"):
        find_model("runs/mini-bird")
