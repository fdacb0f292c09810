"""`hf:organization/name[@revision]`: downloaded once at a commit, without pickles or code, and found offline."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import clearhead
from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import hub, pull
from clearhead.cli import app
from clearhead.errors import UserError
from clearhead.predict.find import find_model
from tests.checkpoint.formats.fake_hub import fake_hub
from tests.checkpoint.formats.peers import saved

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
MAIN, OTHER = "a" * 40, "b" * 40


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub with a Llama, also at another revision, and one with a pickle only."""
    saved("llama2", tmp_path / "model")
    for name in ("pytorch_model.bin", "modeling_evil.py", "README.md", "onnx/model.onnx", "onnx/config.json"):
        file = tmp_path / "model" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("never downloaded")
    (tmp_path / "pickled").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "pickled")
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    revisions = {"main": MAIN, "v2": OTHER, "refs/pr/3": OTHER}
    repositories = {"some-one/a-model.v1": (tmp_path / "model", revisions)}
    repositories["some-one/pickled"] = (tmp_path / "pickled", {"main": MAIN})
    with fake_hub(repositories, monkeypatch) as made:
        yield made


def test_a_model_is_downloaded_by_its_name_and_then_used_offline(
    requests: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = clearhead.load("hf:some-one/a-model.v1", device="cpu")
    assert f"hf:some-one/a-model.v1 at commit {MAIN}: " in caplog.text
    fetched = {request.rpartition(f"{MAIN}/")[2] for request in requests if request.startswith("GET /some-one")}
    assert fetched == {"config.json", "generation_config.json", "model.safetensors"}, "neither pickles nor code"
    assert model.extra["source"] == f"hf:some-one/a-model.v1@{MAIN}"
    assert MAIN in (find_model("hf:some-one/a-model.v1") / "README.md").read_text()
    before = len(requests)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    again = clearhead.load("hf:some-one/a-model.v1", device="cpu")
    ids = torch.arange(2, 9)[None]
    assert again.logits(ids).equal(model.logits(ids))
    assert len(requests) == before
    assert list(pull.pulled_models()) == ["hf:some-one/a-model.v1"]


@pytest.mark.parametrize("revision", ["v2", "refs/pr/3", OTHER])
def test_a_revision_is_pinned_and_kept_apart(requests: list[str], revision: str) -> None:
    name = f"hf:some-one/a-model.v1@{revision}"
    folder = pull.pull(name)
    assert load_model(folder).extra["source"] == f"hf:some-one/a-model.v1@{OTHER}"
    assert find_model(name) == folder == pull.pulled_models()[name]
    assert find_model("hf:some-one/a-model.v1") != folder


def test_what_cannot_be_downloaded_is_one_line(requests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, message in {
        "hf:some-one/pickled": "has no weights in safetensors; other formats may run code",
        "hf:some-one/nothing": "could not be fetched .*needs a network and a public repository",
        "hf:some-one/a-model.v1@v9": "could not be fetched",
        "hf:some-one": "is no name on the Hub; write hf:organization/name",
        "hf:../a-model": "is no name on the Hub",
        "hf:some-one/a-model.v1@../x": "is no name on the Hub",
    }.items():
        with pytest.raises(UserError, match=message) as error:
            find_model(name)
        assert "\n" not in str(error.value)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(UserError, match=r"hf:some-one/a-model\.v1 could not be fetched .*it needs a network"):
        find_model("hf:some-one/a-model.v1")
    assert not pull.pulled_models()


@pytest.mark.parametrize("name", ["hf:a/b", "hf:a/b@main", "hf:a-b.c/d_e@refs/pr/12", "hf:a/b--c@v1.0"])
def test_a_name_is_read_back_from_its_folder(name: str) -> None:
    parsed = hub.parse_name(name)
    assert parsed is not None
    assert "/" not in parsed.folder
    assert hub.name_of_folder(parsed.folder) == name == str(parsed)


def test_pulled_models_are_listed(requests: list[str]) -> None:
    runner = CliRunner()
    empty = runner.invoke(app, ["pull"])
    assert empty.exit_code == 0
    assert "no models in" in empty.output
    pull.pull("hf:some-one/a-model.v1@v2")
    listed = runner.invoke(app, ["pull"]).output
    assert listed.startswith("hf:some-one/a-model.v1@v2")
    assert f"hf:some-one/a-model.v1@{OTHER}" in listed
