"""The checkpoints of a run as models, so that the page can show how attention formed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clearhead.checkpoint.model_folder import build_with_weights
from clearhead.checkpoint.training_checkpoint import checkpoint_folders, read_checkpoint
from clearhead.predict import Model

MAX_CHECKPOINTS = 16  # of a run; evenly spaced among those that are there


def checkpoint_models(run: str | Path, model: Model, name: str) -> dict[str, Model]:
    """Models of the checkpoints of a run folder by name, oldest first; none for any other folder."""
    found = checkpoint_folders(Path(run))[::-1]
    if len(found) > MAX_CHECKPOINTS:
        last = len(found) - 1
        found = [found[round(n * last / (MAX_CHECKPOINTS - 1))] for n in range(MAX_CHECKPOINTS)]
    models = {}
    for step, folder in found:
        weights = read_checkpoint(folder, step).weights()
        network = build_with_weights(model.config, weights, folder).to(model.device).eval()
        label = f"{name} step-{step}"
        models[label] = replace(model, network=network, name=label, folder=None)
    return models
