"""An ensemble trains each member as if it were alone."""

import time

import pytest
import torch
from torch.nn import functional as F

from clearhead.config import ModelConfig
from clearhead.lab.ensemble import Batch, Ensemble, Training, Variant, cross_entropy, forward, greedy
from clearhead.lab.parts import BagOfWords, word2vec
from clearhead.model import build
from clearhead.ops.attention import attention_backend

CONFIG = ModelConfig(family="decoder", decoder_layers=1, dim=16, heads=2, vocab_size=11, position="rotary")
SEEDS = (0, 1, 2)


def copy_task(rows: int = 64, tokens: int = 8) -> Batch:
    """Return rows whose second half repeats the first."""
    first = torch.randint(2, 11, (rows, tokens // 2))
    ids = torch.cat([first, first], 1)
    labels = ids.roll(-1, 1)
    labels[:, : tokens // 2 - 1] = labels[:, -1] = -100
    return {"ids": ids, "labels": labels}


def trained(seeds: tuple[int, ...] = SEEDS, lrs: tuple[float, ...] = (1e-3, 1e-2), **settings: object) -> Ensemble:
    torch.manual_seed(5)
    data = copy_task()
    variant = Variant("copy", **settings)  # type: ignore[arg-type]
    ensemble = Ensemble(CONFIG, variant, seeds, "cpu")
    ensemble.train(data, Training(steps=12, batch=8, lrs=lrs), variant, seeds)
    return ensemble


def test_a_member_equals_a_model_trained_alone() -> None:
    together, alone = trained(), trained(seeds=(1,), lrs=(1e-2,))
    for name, weights in together.weights.items():
        torch.testing.assert_close(weights[3 + 1], alone.weights[name][0], rtol=1e-4, atol=1e-5)


def test_the_step_is_adamw_with_clipping() -> None:
    ensemble = trained(seeds=(1,), lrs=(1e-2,))
    torch.manual_seed(5)
    data = copy_task()
    torch.manual_seed(1)
    network = build(CONFIG)
    decayed = [p for p in network.parameters() if p.dim() > 1]
    groups = [{"params": decayed}, {"params": [p for p in network.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    rows = torch.cat([torch.randperm(64, generator=generator) for _ in range(2)])
    for step in range(12):
        batch = {name: values[rows[step * 8 : step * 8 + 8]] for name, values in data.items()}
        with attention_backend("reference"):
            loss = F.cross_entropy(forward(network, batch).flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        progress = torch.tensor((step + 1) / 12)
        rate = min(1.0, (step + 1) / 1.2) * (0.55 + 0.45 * torch.cos(torch.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * float(rate)
        optimizer.step()
    for name, weight in network.named_parameters():
        torch.testing.assert_close(ensemble.weights[name][0], weight.detach(), rtol=2e-3, atol=2e-4)


def test_the_same_seed_gives_the_same_numbers() -> None:
    torch.testing.assert_close(trained().weights, trained().weights, rtol=0, atol=0)


def test_network_has_the_weights_of_its_seed() -> None:
    ensemble = trained()
    ensemble.select(1)
    data = copy_task(4)
    stacked = ensemble.map(lambda forward, batch: forward(batch), data)
    assert stacked.shape == (3, 4, 8, 11)
    torch.testing.assert_close(forward(ensemble.network(2), data), stacked[2])


def test_training_learns_and_evaluates_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble = trained(lrs=(1e-2,))
    data = copy_task(50)
    whole = ensemble.evaluate(data)
    assert max(whole["loss"]) < 2.5
    monkeypatch.setattr("clearhead.lab.ensemble.EVALUATION_TOKENS", 200)
    assert ensemble.evaluate(data)["loss"] == pytest.approx(whole["loss"])


def test_label_smoothing_is_torchs() -> None:
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    labels[0, 0] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(cross_entropy(logits, labels, 0.1), expected)


def test_greedy_equals_decoding_alone() -> None:
    config = {"family": "encoder-decoder", "encoder_layers": 1, "decoder_layers": 1, "dim": 16, "heads": 2}
    ensemble = Ensemble(ModelConfig(**config, vocab_size=11), Variant("x"), SEEDS, "cpu")
    batch = {"source": torch.randint(2, 11, (4, 5)), "source_lengths": torch.tensor([5, 3, 2, 4])}
    generated = ensemble.map(lambda forward, batch: greedy(forward, batch, 1, 6), batch)
    network = ensemble.network(1)
    ids = torch.ones(4, 1, dtype=torch.long)
    for _ in range(6):
        following = forward(network, batch | {"ids": ids})[:, -1].argmax(-1)
        ids = torch.cat([ids, following[:, None]], 1)
    assert torch.equal(generated[1], ids[:, 1:])


def test_training_time_is_measured_several_times() -> None:
    variant = Variant("copy")
    ensemble = Ensemble(CONFIG, variant, SEEDS, "cpu")
    start = time.perf_counter()
    seconds = ensemble.train(copy_task(), Training(steps=12, batch=8, lrs=(1e-3, 1e-2)), variant, SEEDS)
    whole = time.perf_counter() - start
    assert len(set(seconds)) == len(SEEDS)
    members = 2 * len(SEEDS)
    assert 0 < sum(seconds) / len(SEEDS) * members <= whole


def test_given_word_vectors_stay_fixed() -> None:
    batch = {"ids": torch.randint(3, 9, (40, 6)), "lengths": torch.full((40,), 6)}
    batch["labels"] = torch.full((40, 6), -100)
    batch["labels"][:, 0] = batch["ids"][:, 1] % 2
    vectors = word2vec(batch, 11, 8)
    assert vectors[3:9].abs().sum(1).min() > 0
    assert not vectors[[0, 1, 2, 9, 10]].any()  # not in the text
    variant = Variant("bag", build=lambda: BagOfWords(11, 8, 2, vectors))
    ensemble = Ensemble(None, variant, SEEDS, "cpu")
    assert set(ensemble.weights) == {"output.weight", "output.bias"}
    ensemble.train(batch, Training(steps=3, batch=8, lrs=(1e-2,)), variant, SEEDS)
    assert torch.equal(ensemble.network(0).vectors.weight, vectors)
