"""What makes training fast on a GPU changes nothing: the loss kernel, the recorded update."""

from typing import Any

import numpy as np
import pytest
import torch

from clearhead.config import preset
from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.data import Batch
from clearhead.data.batch import arrange
from clearhead.model import build
from clearhead.model.heads import LMHead
from clearhead.ops.cross_entropy import cross_entropy_chunk
from clearhead.ops.triton.cross_entropy import triton_cross_entropy_chunk
from clearhead.train.cuda_graph import WARM, GraphUpdater, capture_steps
from clearhead.train.distributed import DistContext, apply_compile, precision
from clearhead.train.losses import lm_loss
from clearhead.train.objective import Objective
from clearhead.train.optimizer import build_optimizer
from clearhead.train.updater import Progress, Updater

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [7, 1003, 9000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_kernel_gives_the_losses_and_gradients_of_the_formula(
    dtype: torch.dtype, words: int, bias: bool, smoothing: float
) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 32, device="cuda", dtype=dtype) for n in (200, words))
    offset = torch.randn(words, device="cuda", dtype=dtype) if bias else None
    labels = torch.randint(words, (200,), device="cuda")
    labels[::7] = -100
    ours, theirs = (
        work(x, weight, offset, labels, smoothing) for work in (triton_cross_entropy_chunk, cross_entropy_chunk)
    )
    loose = {"atol": 1e-3, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2e-2}
    made = 4 if smoothing else 3  # the mean only where it is asked for
    torch.testing.assert_close(ours.rows[:made], theirs.rows[:made], **loose)
    torch.testing.assert_close(ours.scores, theirs.scores, **loose)


@pytest.mark.parametrize("bias", [False, True])
def test_scores_in_pieces_give_the_gradients_of_the_whole(bias: bool) -> None:
    torch.manual_seed(0)
    config = preset("tiny-gpt", ["vocab_size=1000", f"output_bias={str(bias).lower()}", "tie=none"])
    head = LMHead(config).cuda()
    hidden = torch.randn(3, 100, config.dim, device="cuda", requires_grad=True)
    labels = torch.randint(1000, (3, 100), device="cuda")
    learned = [hidden, *head.parameters()]
    with torch.autocast("cuda", torch.bfloat16):
        total = lm_loss(hidden, head, labels, 0.1, limit=1000 * 2 * 128, compiled=triton_cross_entropy_chunk).total
    found = torch.autograd.grad(total, learned)
    expected = torch.autograd.grad(lm_loss(hidden, head, labels, 0.1).total, learned)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.9995


def windows(number: int) -> Batch:
    ids = torch.randint(50, (4, 33), generator=torch.Generator().manual_seed(number))
    return Batch({"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}, 128)


def pairs(number: int) -> Batch:
    """Translations in packed rows, all of which have one shape once they are rounded."""
    draw = np.random.default_rng(number)
    lengths = {side: draw.integers(3, 12, 20) for side in ("source", "target")}
    values = [draw.integers(1, 50, lengths[side].sum()) for side in ("source", "target", "target")]
    sides = {"source": {"source": values[0]}, "target": {"target": values[1], "labels": values[2]}}
    return arrange(sides, lengths, True, {})


@pytest.mark.parametrize(
    ("name", "task", "make", "precision_", "compile_"),
    [
        ("tiny-gpt", "language-model", windows, "fp32", "auto"),
        ("tiny-gpt", "language-model", windows, "bf16", "auto"),
        ("tiny-gpt", "language-model", windows, "bf16", "whole"),
        ("tiny-llama", "language-model", windows, "bf16", "whole"),
        ("tiny-translator", "translation", pairs, "fp32", "auto"),
        ("tiny-translator", "translation", pairs, "bf16", "auto"),
    ],
)
def test_a_recorded_update_is_the_ordinary_one(name: str, task: str, make: Any, precision_: str, compile_: str) -> None:
    config = preset(name, ["vocab_size=50", "max_positions=32", "dropout=0.0", "attention_dropout=0.0"])
    data = DataConfig(task=task, max_length=32, batch_tokens=128, packed=task == "translation")
    device, batches, found = torch.device("cuda"), [make(number) for number in range(12)], []
    for wrap in (lambda updater: updater, capture_steps):
        how = compile_ if wrap is capture_steps else "off"
        settings = TrainConfig(steps=100, lr=1e-2, warmup=5, precision=precision_, compile=how)
        torch.manual_seed(0)
        network = build(config).to(device)
        objective = Objective(network, data, settings).train()
        apply_compile(objective, settings, DistContext(device))
        updater = Updater(
            objective,
            objective,
            build_optimizer(network, settings),
            settings,
            DistContext(device),
            precision(settings, device),
        )
        way, losses = wrap(updater), []
        for number, batch in enumerate(batches):
            progress = Progress()
            norm = way.update((batch,), number + 1, progress)
            losses.append([progress.means(DistContext(device))["loss"], float(norm)])
        found.append(torch.tensor(losses))
    assert isinstance(way, GraphUpdater)
    assert len(way.recordings) == 1
    assert len(batches) > WARM
    for column, close in ((0, 1e-4), (1, 1e-3)):  # losses, and lengths of gradients, which the steps before have moved
        close = close if precision_ == "fp32" else 2e-2
        torch.testing.assert_close(found[1][:, column], found[0][:, column], atol=close, rtol=close)
