"""Finding models by name and path: what cannot be one is a one-line error with the fix."""

from pathlib import Path

import pytest

from clearhead.errors import UserError
from clearhead.predict import find_model
from clearhead.predict.find import local_models


def test_a_text_given_as_a_model_name_is_refused_in_one_line() -> None:
    for name in ("A quiet, moving film. " * 30, "a/" * 3000, "a\0b"):
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
    (tmp_path / "empty" / "tiny.gguf").touch()
    for path in (tmp_path / "empty", tmp_path / "empty" / "tiny.gguf"):
        with pytest.raises(UserError, match="to use the GGUF file, run: clearhead import"):
            find_model(path)


def test_best_is_found_between_the_two_renames_of_its_replacement(tmp_path: Path) -> None:
    for part in (".best.old", "last"):
        (tmp_path / "runs" / "one" / part).mkdir(parents=True)
        (tmp_path / "runs" / "one" / part / "config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert find_model("runs/one") == Path("runs/one/best")
        assert local_models() == {"runs/one": Path("runs/one/best")}


def test_a_folder_with_the_name_of_a_packaged_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model("en-de").is_absolute()
    (tmp_path / "en-de").mkdir()
    (tmp_path / "en-de" / "config.json").write_text("{}")
    assert find_model("./en-de") == find_model(tmp_path / "en-de").relative_to(tmp_path)
    assert not caplog.records
    assert find_model("en-de") == Path("en-de")
    assert caplog.messages == [f"en-de is taken from the folder {tmp_path / 'en-de'}, not from `clearhead models`"]


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="no model"):
        find_model(tmp_path / "loop")


def test_a_missing_run_of_a_known_recipe_names_the_command_that_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="runs/mini-bert does not exist yet; run: clearhead train mini-bert"):
        find_model("runs/mini-bert")
    with pytest.raises(UserError, match="no model 'runs/mini-bird'"):
        find_model("runs/mini-bird")
