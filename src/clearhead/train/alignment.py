"""Word alignment of a finished translator: the attention heads that align best, stored in its model folders."""

from __future__ import annotations

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.model_folder import CARD
from clearhead.errors import UserError
from clearhead.evaluate.alignment import alignment_of_corpora
from clearhead.files import read_text
from clearhead.predict import Model
from clearhead.train.state import RunState


def store_alignment(run: RunState) -> None:
    """Measure and store `alignment` in config.json of the best and the last model."""
    if not run.dist.is_main or run.recipe.data.task != "translation":
        return
    for name in ("best", "last"):
        folder = run.out / name
        if not (folder / "config.json").exists():
            continue
        loaded = load_model(folder)
        model = Model(loaded.network, loaded.tokenizers, loaded.extra, name)
        try:
            measured = alignment_of_corpora(model, run.recipe.data)
        except UserError as error:  # the training files may be gone: the run itself is complete
            run.log(f"word alignment was not measured: {error}")
            return
        if measured is not None:
            extra = loaded.extra | {"alignment": measured}
            save_model(folder, loaded.network, loaded.tokenizers, extra, read_text(folder / CARD))
