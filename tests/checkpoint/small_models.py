"""Small networks, tokenizers and optimizers for the checkpoint tests."""

from pathlib import Path

import torch
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.model import Network, build
from clearhead.text import Tokenizer, train
from tests.strategies import logits, tokens

TEXTS = ["the cat sat on the mat", "die Katze saß auf der Matte", "猫坐在垫子上"] * 3
CONFIG = ModelConfig.build(
    {"family": "decoder", "decoder_layers": 2, "dim": 8, "heads": 2, "ff_dim": 12, "vocab_size": 300}
    | {"tie": "output", "position": "rotary", "max_positions": 64}
)


def tokenizer(size: int = 280) -> Tokenizer:
    return train(TEXTS, "byte-bpe", size)


def network(seed: int = 0, config: ModelConfig = CONFIG) -> Network:
    torch.manual_seed(seed)
    return build(config)


def trained(seed: int = 0, steps: int = 2) -> tuple[Network, torch.optim.AdamW]:
    """A network after a few training steps, and its optimizer with parameter groups for matrices and vectors."""
    model = network(seed)
    optimizer = adam(model)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def adam(model: torch.nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor | None = None) -> None:
    optimizer.zero_grad()
    logits(model.train(), tokens(2, 5) if ids is None else ids).square().mean().backward()  # type: ignore[arg-type]
    optimizer.step()


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether names, dtypes and bits are equal."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file in a folder, recursively."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
