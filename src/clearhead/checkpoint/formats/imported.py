"""What every importer gives: a model in our terms, not yet on disk."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.checkpoint.card import model_card
from clearhead.checkpoint.folder import save_model, with_weights
from clearhead.config import ModelConfig
from clearhead.text import Tokenizer


class Imported(NamedTuple):
    """A foreign model, and what config.json should say beside its architecture.

    `extra` may hold `begin` (ids before every text), `ends` (ids that end one), `source_end` (False: sources have no
    end token), `banned` (rows of ids that are never written), `pad`, `chat_template`, `task`, `labels`, `pooling`,
    `normalized`, `longest`.
    """

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizers: tuple[Tokenizer, ...]
    extra: dict[str, Any]
    kind: str  # what it was, for the card
    license: str = ""

    def save(self, folder: Path, source: str, dtype: torch.dtype | None = None) -> None:
        """Write it as a model folder."""
        network = with_weights(self.config, self.weights, source)
        card = model_card(
            folder.name, f"{self.kind}, imported from {source}.", (), "# trained elsewhere", (), self.license
        )
        save_model(folder, network, self.tokenizers, self.extra | {"imported": self.kind}, card, dtype)
