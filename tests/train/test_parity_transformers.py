"""Fine-tuning against transformers, step by step: without dropout, losses and gradient norms are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from clearhead.checkpoint.formats import read_foreign
from clearhead.checkpoint.model_folder import build_with_weights
from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.data import IGNORED, Batch
from clearhead.train.distributed import DistContext
from clearhead.train.lr_schedule import lr_at_step
from clearhead.train.objective import Objective
from clearhead.train.optimizer import build_optimizer
from clearhead.train.updater import Metrics, Updater

DIST = DistContext(torch.device("cpu"))
ROWS, MAX_LENGTH, VOCAB, STEPS = 6, 12, 50, 12
MODELS: dict[str, Any] = {
    "classification": transformers.BertForSequenceClassification,
    "tagging": transformers.BertForTokenClassification,
    "answering": transformers.BertForQuestionAnswering,
}


def batch(task: str, generator: torch.Generator) -> Batch:
    """Rows of random tokens with random labels."""

    def randint(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    lengths = 2 + randint(MAX_LENGTH - 2, ROWS)
    lengths[: ROWS if task == "answering" else 1] = MAX_LENGTH  # transformers does not mask spans in the padding
    padding_mask = torch.arange(MAX_LENGTH) < lengths[:, None]
    ids = (1 + randint(VOCAB - 1, ROWS, MAX_LENGTH)) * padding_mask
    segments = (torch.arange(MAX_LENGTH) >= lengths[:, None] // 2) * padding_mask
    tensors = {"ids": ids, "segments": segments.long(), "ids_lengths": lengths}
    if task == "classification":
        tensors["labels"] = randint(3, ROWS)
    elif task == "tagging":
        tensors["labels"] = randint(3, ROWS, MAX_LENGTH).masked_fill(~padding_mask, IGNORED)
    else:
        tensors["first_token"] = torch.zeros(ROWS, dtype=torch.long)
        tensors["last_token"] = randint(MAX_LENGTH, ROWS)
    return Batch(tensors, int(lengths.sum()))


def label_arguments(task: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The labels by their names in transformers."""
    if task == "answering":
        return {"start_positions": tensors["first_token"], "end_positions": tensors["last_token"]}
    return {"labels": tensors["labels"]}


@pytest.mark.parametrize("task", MODELS)
def test_every_step_equals_transformers(task: str, tmp_path: Path) -> None:
    settings = TrainConfig(steps=STEPS, lr=3e-3, warmup=3, schedule="linear", weight_decay=0.1, grad_clip=0.5)
    torch.manual_seed(0)
    shape = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    if task == "answering":
        shape.num_labels = 2
    peer = MODELS[task](shape).double()
    peer.save_pretrained(tmp_path)
    imported = read_foreign(tmp_path)
    network = build_with_weights(imported.config, imported.weights, "transformers").double()
    objective = Objective(network, DataConfig(task=task, max_length=MAX_LENGTH), settings).train()
    updater = Updater(objective, objective, build_optimizer(network, settings), settings, DIST, torch.float64)
    matrices = [p for p in peer.parameters() if p.dim() >= 2]
    groups = [{"params": matrices}, {"params": [p for p in peer.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    betas = (settings.beta1, settings.beta2)
    adam = torch.optim.AdamW(groups, betas=betas, eps=settings.eps, weight_decay=settings.weight_decay)
    generator, losses = torch.Generator().manual_seed(0), []
    peer.train()
    for step in range(1, STEPS + 1):
        data = batch(task, generator)
        t = data.tensors
        attention_mask = (torch.arange(MAX_LENGTH) < t["ids_lengths"][:, None]).long()
        inputs = {"input_ids": t["ids"], "attention_mask": attention_mask, "token_type_ids": t["segments"]}
        for group in adam.param_groups:
            group["lr"] = lr_at_step(settings, step, settings.steps)
        loss = peer(**inputs, **label_arguments(task, t)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(peer.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
        metrics = Metrics()
        ours = updater.update((data,), step, metrics)
        assert metrics.means(DIST)["loss"] == pytest.approx(loss.item(), abs=1e-6), step
        assert float(ours) == pytest.approx(float(norm), rel=1e-5), step
        losses.append(loss.item())
    assert max(losses) - min(losses) > 1e-3  # the weights change
