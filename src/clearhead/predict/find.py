"""Where a model is: a model folder, a run folder, or a name."""

from importlib import resources
from pathlib import Path

from clearhead.checkpoint.foreign.pull import PACKAGES, pulled_models
from clearhead.config.settings import nearest
from clearhead.errors import UserError

EMBEDDED = resources.files("clearhead") / "models"


def embedded_models() -> dict[str, Path]:
    """The models that come with the package, by name."""
    if not EMBEDDED.is_dir():
        return {}
    with resources.as_file(EMBEDDED) as folder:
        return {path.name: path for path in sorted(folder.iterdir()) if (path / "config.json").exists()}


def find_model(name: str | Path) -> Path:
    """The model folder that a name, a model folder or a run folder (its best, else its last) stands for."""
    path = Path(name)
    if (path / "config.json").exists():
        return path
    for part in ("best", "last"):
        if (path / part / "config.json").exists():
            return path / part
    known = embedded_models() | pulled_models()
    if str(name) in known:
        return known[str(name)]
    if path.is_dir():
        raise UserError(f"{path} holds no model (config.json, or best/ and last/ of a run, are missing)")
    if str(name) in PACKAGES or str(name).startswith("hf:"):
        raise UserError(f"{name} is not here yet; fetch it with: clearhead pull {name}")
    near = nearest(str(name), [*known]) if known else ""
    raise UserError(f"no model {str(name)!r}: neither a folder nor the name of an embedded or pulled model{near}")
