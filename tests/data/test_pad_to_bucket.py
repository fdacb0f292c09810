"""Padding packed batches to bucketed shapes: same losses and gradients, fewer shapes."""

import numpy as np
import pytest
import torch

from clearhead.config import preset
from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.data.batch import DOCUMENT_MULTIPLE, TOKEN_MULTIPLE, Batch, collate
from clearhead.model import build
from clearhead.train.objective import Objective


def translation(sizes: list[tuple[int, int]], seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = {side: np.array([pair[n] for pair in sizes]) for n, side in enumerate(("source", "target"))}
    values = {side: rng.integers(1, 40, lengths[side].sum()) for side in lengths}
    labels = rng.integers(1, 40, lengths["target"].sum())
    sides = {"source": {"source": values["source"]}, "target": {"target": values["target"], "labels": labels}}
    return collate(sides, lengths, True, {})


def windows(sizes: list[int]) -> Batch:
    rng = np.random.default_rng(1)
    fields = {name: rng.integers(1, 40, sum(sizes)) for name in ("ids", "labels")}
    return collate({"ids": fields}, {"ids": np.array(sizes)}, True, {})


def losses(name: str, task: str, batch: Batch) -> list[torch.Tensor]:
    torch.manual_seed(0)
    network = build(preset(name, ["vocab_size=40", "dropout=0.0", "max_positions=64"])).double()
    objective = Objective(network, DataConfig(task=task, packed=True), TrainConfig(steps=1)).train()
    loss = objective(batch)["lm"]
    loss.total.backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    return [loss.total.detach(), loss.count, loss.correct, *gradients]


@pytest.mark.parametrize("seed", range(4))
def test_padding_to_a_bucket_keeps_losses_and_gradients(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = [(int(a), int(b)) for a, b in rng.integers(1, 30, (int(rng.integers(1, 70)), 2))]
    cases = [
        ("tiny-translator", "translation", translation(pairs, seed)),
        ("tiny-llama", "language-model", windows([a for a, _ in pairs])),
    ]
    for name, task, batch in cases:
        rounded = batch.pad_to_bucket(64)
        for side, documents in rounded.documents.items():
            assert documents.total % TOKEN_MULTIPLE == 0
            assert len(documents.lengths) % DOCUMENT_MULTIPLE == 0
            assert int(documents.lengths.sum()) == documents.total == rounded[side].shape[1]
            assert int(documents.lengths.max()) <= documents.max_length <= 64
        assert rounded.num_tokens == batch.num_tokens
        for a, b in zip(losses(name, task, rounded), losses(name, task, batch), strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_many_batches_share_few_shapes() -> None:
    rng = np.random.default_rng(0)
    shapes, rounded = set(), set()
    for seed in range(60):
        pairs = [(int(a), int(b)) for a, b in rng.integers(8, 24, (int(rng.integers(58, 63)), 2))]
        batch = translation(pairs, seed)
        shapes.add(batch.shape_key)
        rounded.add(batch.pad_to_bucket(64).shape_key)
    assert len(shapes) == 60
    assert len(rounded) <= 12
