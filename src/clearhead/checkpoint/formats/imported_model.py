"""The result of every importer: a model in our settings and tensor names, not yet on disk."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.checkpoint.card import model_card
from clearhead.checkpoint.model_folder import build_with_weights, save_model
from clearhead.config import ModelConfig
from clearhead.config.extra import checked_extra
from clearhead.text import Tokenizer


class ImportedModel(NamedTuple):
    """A foreign model with the additional keys of config.json.

    `extra` may have `begin` (ids before every text), `eos_ids`, `source_begin` (ids before every source), `source_end`
    (False: sources have no end token), `languages` (codes to ids), `src_lang` and `tgt_lang` (those to use by default),
    `banned_ids` (sequences of ids that are never generated), `pad`, `chat_template`, `sampling`, `task`, `labels`,
    `pooling`, `normalized`, `max_length`.
    """

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizers: tuple[Tokenizer, ...]
    extra: dict[str, Any]
    kind: str  # format and architecture, for the model card
    license: str = ""

    def save(self, folder: Path, source: str, dtype: torch.dtype | None = None) -> None:
        """Write a model folder."""
        extra = checked_extra(self.extra, source)
        network = build_with_weights(self.config, self.weights, source)
        card = model_card(
            folder.name, f"{self.kind}, imported from {source}.", (), "# trained elsewhere", (), self.license
        )
        save_model(folder, network, self.tokenizers, extra | {"imported": self.kind}, card, dtype)
