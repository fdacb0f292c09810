"""Model folders and training checkpoints on disk: atomic, checksummed, safetensors and JSON only."""

from clearhead.checkpoint.averaging import average
from clearhead.checkpoint.card import Card, Score, model_card, read_card
from clearhead.checkpoint.gather import (
    gather,
    gather_weights,
    load_optimizer_state,
    load_weights,
    optimizer_state,
    scatter,
)
from clearhead.checkpoint.model_folder import Loaded, load_model, save_model, with_weights
from clearhead.checkpoint.state import State, discard_state, newest_state, read_state, run_lock, save_state
from clearhead.checkpoint.summary import ModelFolderInfo, model_folder_info
from clearhead.checkpoint.tensors import save_tensors

__all__ = [
    "Card",
    "Loaded",
    "ModelFolderInfo",
    "Score",
    "State",
    "average",
    "discard_state",
    "gather",
    "gather_weights",
    "load_model",
    "load_optimizer_state",
    "load_weights",
    "model_card",
    "model_folder_info",
    "newest_state",
    "optimizer_state",
    "read_card",
    "read_state",
    "run_lock",
    "save_model",
    "save_state",
    "save_tensors",
    "scatter",
    "with_weights",
]
