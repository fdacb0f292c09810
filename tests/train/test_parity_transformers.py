"""Fine-tuning beside transformers, step by step: without dropout, losses and lengths of gradients are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from clearhead.checkpoint.model_folder import with_weights
from clearhead.checkpoint.formats import read_foreign
from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.data import IGNORED, Batch
from clearhead.train.distributed import DistContext
from clearhead.train.lr_schedule import lr_at_step
from clearhead.train.objective import Objective
from clearhead.train.optimizer import build_optimizer
from clearhead.train.updater import Progress, Updater

HERE = DistContext(torch.device("cpu"))
ROWS, LONGEST, WORDS, STEPS = 6, 12, 50, 12
KINDS: dict[str, Any] = {
    "classification": transformers.BertForSequenceClassification,
    "tagging": transformers.BertForTokenClassification,
    "answering": transformers.BertForQuestionAnswering,
}


def batch(task: str, draw: torch.Generator) -> Batch:
    """Rows of random words with random answers."""

    def below(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=draw)

    lengths = 2 + below(LONGEST - 2, ROWS)
    lengths[: ROWS if task == "answering" else 1] = LONGEST  # transformers lets answers begin in the padding
    real = torch.arange(LONGEST) < lengths[:, None]
    ids = (1 + below(WORDS - 1, ROWS, LONGEST)) * real
    segments = (torch.arange(LONGEST) >= lengths[:, None] // 2) * real
    tensors = {"ids": ids, "segments": segments.long(), "ids_lengths": lengths}
    if task == "classification":
        tensors["labels"] = below(3, ROWS)
    elif task == "tagging":
        tensors["labels"] = below(3, ROWS, LONGEST).masked_fill(~real, IGNORED)
    else:
        tensors["first_token"] = torch.zeros(ROWS, dtype=torch.long)
        tensors["last_token"] = below(LONGEST, ROWS)
    return Batch(tensors, int(lengths.sum()))


def answers(task: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers calls them."""
    if task == "answering":
        return {"start_positions": tensors["first_token"], "end_positions": tensors["last_token"]}
    return {"labels": tensors["labels"]}


@pytest.mark.parametrize("task", KINDS)
def test_every_step_is_that_of_transformers(task: str, tmp_path: Path) -> None:
    settings = TrainConfig(steps=STEPS, lr=3e-3, warmup=3, schedule="linear", weight_decay=0.1, grad_clip=0.5)
    torch.manual_seed(0)
    shape = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    if task == "answering":
        shape.num_labels = 2
    peer = KINDS[task](shape).double()
    peer.save_pretrained(tmp_path)
    found = read_foreign(tmp_path)
    network = with_weights(found.config, found.weights, "transformers").double()
    objective = Objective(network, DataConfig(task=task, max_length=LONGEST), settings).train()
    updater = Updater(objective, objective, build_optimizer(network, settings), settings, HERE, torch.float64)
    decayed = [p for p in peer.parameters() if p.dim() >= 2]
    groups = [{"params": decayed}, {"params": [p for p in peer.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    betas = (settings.beta1, settings.beta2)
    adam = torch.optim.AdamW(groups, betas=betas, eps=settings.eps, weight_decay=settings.weight_decay)
    draw, losses = torch.Generator().manual_seed(0), []
    peer.train()
    for step in range(1, STEPS + 1):
        items = batch(task, draw)
        t = items.tensors
        real = (torch.arange(LONGEST) < t["ids_lengths"][:, None]).long()
        given = {"input_ids": t["ids"], "attention_mask": real, "token_type_ids": t["segments"]}
        for group in adam.param_groups:
            group["lr"] = lr_at_step(settings, step, settings.steps)
        loss = peer(**given, **answers(task, t)).loss
        loss.backward()
        length = torch.nn.utils.clip_grad_norm_(peer.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
        progress = Progress()
        ours = updater.update((items,), step, progress)
        assert progress.means(HERE)["loss"] == pytest.approx(loss.item(), abs=1e-6), step
        assert float(ours) == pytest.approx(float(length), rel=1e-5), step
        losses.append(loss.item())
    assert max(losses) - min(losses) > 1e-3  # the steps do something
