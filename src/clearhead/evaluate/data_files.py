"""Which data files an evaluation reads: a model that came from somewhere else never names files of this machine.

The data settings in a model's config.json are used without asking only if they name no files (synthetic data). Files
that they name are read if the model is one of the package, was made in Python, or is `best` or `last` of a run folder
(or of a sweep) whose recipe.yaml names the same files: that folder is the user's own, and the files are logged.
Otherwise the user names them. The cache folder is always the user's, never that of the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from clearhead.config.data import Corpus, DataConfig
from clearhead.config.load import read_yaml
from clearhead.errors import UserError
from clearhead.files import read_text
from clearhead.predict import Model
from clearhead.predict.find import PARTS, packaged_models

RECIPE, SWEPT = "recipe.yaml", "*seed-*/recipe.yaml"  # of a run, and of the runs of a sweep
MAX_SHOWN = 5  # files in a message


def check_files(model: Model, corpora: Iterable[Corpus], log: Callable[[str], None]) -> None:
    """Refuse to read files that only the model's config.json names; log those of a run."""
    files = list(dict.fromkeys(file for corpus in corpora for file in corpus.files))
    if not files or model.folder is None or model.folder in packaged_models().values():
        return
    rest = f" and {len(files) - MAX_SHOWN} more" if len(files) > MAX_SHOWN else ""
    shown = ", ".join(f"{file!r:.200}" for file in files[:MAX_SHOWN]) + rest
    run = model.folder.parent
    recipe = next((path for path in (run / RECIPE, *sorted(run.glob(SWEPT))) if path.is_file()), None)
    if model.folder.name not in PARTS or recipe is None or not set(files) <= _files_of_recipe(recipe):
        raise UserError(
            f"{model.label}: its config.json names data files ({shown}), which are read only from a run folder whose "
            f"{RECIPE} names them; name them with --data"
        )
    log(f"reading {shown}, named by {recipe}")


def _files_of_recipe(path: Path) -> set[str]:
    data = DataConfig.build(read_yaml(read_text(path), str(path)).get("data"), where=f"{path}: data")
    return {file for corpus in (*data.train, *data.valid, *data.test) for file in corpus.files}
