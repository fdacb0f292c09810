"""Model folders and training checkpoints on disk: atomic, checksummed, safetensors and JSON only."""

from clearhead.checkpoint.averaging import average_weights
from clearhead.checkpoint.card import Card, Score, model_card, read_card
from clearhead.checkpoint.gather import (
    gather_state,
    gather_weights,
    load_optimizer_state,
    load_state,
    load_weights,
    optimizer_state,
)
from clearhead.checkpoint.model_folder import LoadedModel, build_with_weights, load_model, save_model
from clearhead.checkpoint.summary import ModelFolderInfo, model_folder_info
from clearhead.checkpoint.tensors import save_tensors
from clearhead.checkpoint.training_checkpoint import (
    TrainingCheckpoint,
    checkpoint_folder,
    checkpoint_folders,
    delete_checkpoint,
    newest_checkpoint,
    read_checkpoint,
    run_lock,
    write_checkpoint,
)

__all__ = [
    "Card",
    "LoadedModel",
    "ModelFolderInfo",
    "Score",
    "TrainingCheckpoint",
    "average_weights",
    "build_with_weights",
    "checkpoint_folder",
    "checkpoint_folders",
    "delete_checkpoint",
    "gather_state",
    "gather_weights",
    "load_model",
    "load_optimizer_state",
    "load_state",
    "load_weights",
    "model_card",
    "model_folder_info",
    "newest_checkpoint",
    "optimizer_state",
    "read_card",
    "read_checkpoint",
    "run_lock",
    "save_model",
    "save_tensors",
    "write_checkpoint",
]
