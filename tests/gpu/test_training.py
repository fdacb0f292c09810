"""The Triton cross-entropy and captured training steps equal the plain ones."""

from typing import Any

import numpy as np
import pytest
import torch

from clearhead.config import preset
from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.data import Batch
from clearhead.data.batch import collate
from clearhead.model import build
from clearhead.model.heads import LMHead
from clearhead.ops.cross_entropy import cross_entropy_chunk
from clearhead.ops.triton.cross_entropy import triton_cross_entropy_chunk
from clearhead.train.cuda_graph import WARMUP_STEPS, GraphUpdater, capture_steps
from clearhead.train.distributed import DistContext, apply_compile, compute_dtype
from clearhead.train.losses import lm_loss
from clearhead.train.objective import Objective
from clearhead.train.optimizer import build_optimizer
from clearhead.train.updater import Metrics, Updater

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 1003, 9000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_triton_cross_entropy_equals_the_reference(
    dtype: torch.dtype, vocab_size: int, bias: bool, label_smoothing: float
) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 32, device="cuda", dtype=dtype) for n in (200, vocab_size))
    offset = torch.randn(vocab_size, device="cuda", dtype=dtype) if bias else None
    labels = torch.randint(vocab_size, (200,), device="cuda")
    labels[::7] = -100
    chunk, expected = (
        chunk_fn(x, weight, offset, labels, label_smoothing)
        for chunk_fn in (triton_cross_entropy_chunk, cross_entropy_chunk)
    )
    tolerance = {"atol": 1e-3, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2e-2}
    computed = 4 if label_smoothing else 3  # the mean only with label smoothing
    torch.testing.assert_close(chunk.stats[:computed], expected.stats[:computed], **tolerance)
    torch.testing.assert_close(chunk.logits_grad, expected.logits_grad, **tolerance)


@pytest.mark.parametrize("bias", [False, True])
def test_chunked_cross_entropy_has_the_gradients_of_the_full_one(bias: bool) -> None:
    torch.manual_seed(0)
    config = preset("tiny-gpt", ["vocab_size=1000", f"output_bias={str(bias).lower()}", "tie=none"])
    head = LMHead(config).cuda()
    hidden = torch.randn(3, 100, config.dim, device="cuda", requires_grad=True)
    labels = torch.randint(1000, (3, 100), device="cuda")
    leaves = [hidden, *head.parameters()]
    with torch.autocast("cuda", torch.bfloat16):
        total = lm_loss(hidden, head, labels, 0.1, max_bytes=1000 * 2 * 128, chunk_fn=triton_cross_entropy_chunk).total
    grads = torch.autograd.grad(total, leaves)
    expected = torch.autograd.grad(lm_loss(hidden, head, labels, 0.1).total, leaves)
    for a, b in zip(grads, expected, strict=True):
        assert a.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.9995


def windows(number: int) -> Batch:
    """A batch of fixed-length language model windows."""
    ids = torch.randint(50, (4, 33), generator=torch.Generator().manual_seed(number))
    return Batch({"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}, 128)


def pairs(number: int) -> Batch:
    """A packed translation batch; all of them have the same shape once rounded."""
    rng = np.random.default_rng(number)
    lengths = {side: rng.integers(3, 12, 20) for side in ("source", "target")}
    values = [rng.integers(1, 50, lengths[side].sum()) for side in ("source", "target", "target")]
    sides = {"source": {"source": values[0]}, "target": {"target": values[1], "labels": values[2]}}
    return collate(sides, lengths, True, {})


@pytest.mark.parametrize(
    ("name", "task", "make", "precision_", "compile_mode"),
    [
        ("tiny-gpt", "language-model", windows, "fp32", "auto"),
        ("tiny-gpt", "language-model", windows, "bf16", "auto"),
        ("tiny-gpt", "language-model", windows, "bf16", "whole"),
        ("tiny-llama", "language-model", windows, "bf16", "whole"),
        ("tiny-translator", "translation", pairs, "fp32", "auto"),
        ("tiny-translator", "translation", pairs, "bf16", "auto"),
    ],
)
def test_a_captured_step_equals_an_eager_step(
    name: str, task: str, make: Any, precision_: str, compile_mode: str
) -> None:
    config = preset(name, ["vocab_size=50", "max_positions=32", "dropout=0.0", "attention_dropout=0.0"])
    data = DataConfig(task=task, max_length=32, batch_tokens=128, packed=task == "translation")
    device, batches, runs = torch.device("cuda"), [make(number) for number in range(12)], []
    for wrap in (lambda updater: updater, capture_steps):
        mode = compile_mode if wrap is capture_steps else "off"
        settings = TrainConfig(steps=100, lr=1e-2, warmup=5, precision=precision_, compile=mode)
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
            compute_dtype(settings, device),
        )
        wrapped, losses = wrap(updater), []
        for number, batch in enumerate(batches):
            metrics = Metrics()
            norm = wrapped.update((batch,), number + 1, metrics)
            losses.append([metrics.means(DistContext(device))["loss"], float(norm)])
        runs.append(torch.tensor(losses))
    assert isinstance(wrapped, GraphUpdater)
    assert len(wrapped.graphs) == 1
    assert len(batches) > WARMUP_STEPS
    for column, fp32_tolerance in ((0, 1e-4), (1, 1e-3)):  # losses, and gradient norms, where differences accumulate
        tolerance = fp32_tolerance if precision_ == "fp32" else 2e-2
        torch.testing.assert_close(runs[1][:, column], runs[0][:, column], atol=tolerance, rtol=tolerance)
