"""The peer in bench.finetune trains with the recipe's settings: without dropout, it ends with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bench import finetune
from clearhead.checkpoint import load_model
from clearhead.config.recipe import Recipe
from clearhead.train.init_from import class_weights
from tests.train.tiny import TRAIN, prepared, recipe, run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A tiny mrpc-after-stsb: swapped pairs, mean pooling, class weights, initialized from a regression run."""
    folder = tmp_path_factory.mktemp("chain")
    run(folder / "bert", recipe("bert", steps=3))
    file = folder / "pairs.csv"
    file.write_text("".join(f"{'cat ' * (n % 7 + 1)}{n},{'dog ' * (n % 3 + 1)}{n},{n % 2}\n" for n in range(60)))
    data: dict[str, Any] = {"train": {"format": "csv", "files": [str(file)]}, "text_pairs": True, "held_out": 0.3}
    data |= {"max_length": 32, "batch_tokens": 300, "workers": 0}
    model = {"pooling": "mean", "dropout": 0.0, "attention_dropout": 0.0}
    plain = {"data": data | {"task": "regression"}, "train": TRAIN | {"steps": 2}}
    run(folder / "values", Recipe.build(plain | {"model": model | {"init_from": str(folder / "bert")}}))
    settings = TRAIN | {"steps": 8, "validate_every": 8, "metric": "f1", "class_weights": {"1": 3.0}}
    both = data | {"task": "classification", "swap_pairs": True}
    return Recipe.build({"model": model | {"init_from": str(folder / "values")}, "data": both, "train": settings})


def test_both_start_from_the_same_weights(made: Recipe, tmp_path: Path) -> None:
    data, ours = prepared(made)
    peer = finetune.start(made, data, tmp_path)
    theirs = finetune.imported(peer, made, data, tmp_path).network
    assert theirs.config.pooling == "mean"
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, weights in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], weights), name
    assert {module.p for module in peer.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}


def test_both_end_with_the_same_weights(made: Recipe, tmp_path: Path) -> None:
    run(tmp_path / "ours", made)
    ours = load_model(tmp_path / "ours" / "last").network.state_dict()
    best, apart = finetune.fine_tune(made, CPU, tmp_path / "theirs")
    theirs = best.network.state_dict()
    initial = prepared(made)[1].state_dict()
    assert apart < 1e-6
    for name, weights in ours.items():
        torch.testing.assert_close(theirs[name], weights, atol=2e-4, rtol=0, msg=name)
    moved = max(float((ours[name] - initial[name]).abs().max()) for name in ours)
    assert moved > 0.02, "eight steps move weights a hundred times as far as the two differ"


def test_class_weights_and_mean_pooling_affect_the_peers_loss(made: Recipe, tmp_path: Path) -> None:
    data, _ = prepared(made)
    peer, weights = finetune.start(made, data, tmp_path).eval(), class_weights(made, data)
    assert weights is not None
    batch = next(finetune.padded(made, data))
    weighted, plain = (float(finetune.loss(peer, made, batch, w).detach()) for w in (weights, None))
    cls_pooled = made.model_copy(update={"model": made.model | {"pooling": "cls"}})
    assert abs(float(finetune.loss(peer, cls_pooled, batch, None).detach()) - plain) > 1e-6
    assert 1.1 * plain < weighted < 3 * plain
    logits, labels = torch.randn(4, 5, 3), torch.randint(3, (4, 5))
    labels[1, 2:] = -100
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    by_class = torch.tensor([1.0, 2.0, 0.5])
    expected = (losses * by_class[labels.flatten().clamp(min=0)]).sum() / 17
    assert torch.allclose(finetune.cross_entropy(logits, labels, by_class), expected)
