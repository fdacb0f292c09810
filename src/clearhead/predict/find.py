"""Find the folder of a model: by path, run folder or name."""

import errno
import logging
from importlib import resources
from pathlib import Path

from clearhead.checkpoint import disk
from clearhead.checkpoint.formats.hub import PREFIX, parse_name
from clearhead.checkpoint.formats.pull import PACKAGES, pull, pulled_models
from clearhead.config.recipe import recipe_names
from clearhead.config.settings import nearest
from clearhead.errors import UserError
from clearhead.predict.check_arguments import as_path

EMBEDDED = resources.files("clearhead") / "models"
RUNS = Path("runs")
PARTS = ("best", "last")  # model folders of a run
CONFIG = "config.json"
log = logging.getLogger("clearhead")


def packaged_models() -> dict[str, Path]:
    """The models of the package, by name."""
    if not EMBEDDED.is_dir():
        return {}
    with resources.as_file(EMBEDDED) as folder:
        return {path.name: path for path in sorted(folder.iterdir()) if (path / CONFIG).exists()}


def local_models() -> dict[str, Path]:
    """The best (else the last) model of each run in ./runs, by the run's path."""
    models = {}
    for run in sorted(RUNS.iterdir()) if RUNS.is_dir() else ():
        folder = next((run / part for part in PARTS if disk.has_file(run / part, CONFIG)), None)
        if folder is not None:
            models[run.as_posix()] = folder
    return models


def find_model(name: str | Path) -> Path:
    """Return the model folder of a name, a model folder, or a run folder (its best, else its last).

    A name like hf:organization/name is downloaded from the Hugging Face Hub where it is not in the cache yet.
    A folder comes before a model of the package or a pulled one with the same name, with a warning.
    """
    path, known = as_path("load", name), packaged_models() | pulled_models()
    try:
        for folder in (path, *(path / part for part in PARTS)) if "\0" not in str(name) else ():
            if disk.has_file(folder, CONFIG):
                if str(name) in known:
                    log.warning("%s is taken from the folder %s, not from `clearhead models`", name, folder.absolute())
                return folder
        if str(name) in known:
            return known[str(name)]
        if path.is_dir():
            raise UserError(
                f"{path} contains no model (config.json, or best/ and last/ of a run, are missing){_hint(path)}"
            )
        if path.is_file():
            raise UserError(
                f"{path} is a file; give a model folder, a run folder, or a name from `clearhead models`{_hint(path)}"
            )
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # a text given as a name is an unknown model
            raise UserError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from None
    if parse_name(str(name)) is not None:
        return pull(str(name), log.warning)
    if str(name).startswith(PREFIX):
        raise UserError(f"{str(name)!r:.80} is no name on the Hub; write hf:organization/name or …/name@revision")
    if str(name) in PACKAGES:
        raise UserError(f"{name} is not downloaded yet; run: clearhead pull {name}")
    if path.parent == RUNS and path.name in recipe_names():
        raise UserError(f"{path.as_posix()} does not exist yet; run: clearhead train {path.name}")
    names = [*known, *local_models()]
    near = nearest(str(name), names) if names else "; train one with `clearhead train`"
    raise UserError(f"no model {str(name)!r:.80}: neither a folder nor a name from `clearhead models`{near}")


def _hint(path: Path) -> str:
    """How to use a GGUF file, or a folder with one."""
    if path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf"))):
        return f"; to use the GGUF file, run: clearhead import {path} MODEL"
    return ""
