"""Fused AdamW, Triton cross-entropy and compiled layers equal torch. TRITON_INTERPRET=1 runs the kernels on a CPU."""

import os

import pytest
import torch
from torch import Tensor, nn

from clearhead.config import preset
from clearhead.model import build
from clearhead.ops import adamw
from clearhead.ops.triton.cross_entropy import triton_cross_entropy_chunk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("aligned", [False, True])
def test_fused_adamw_equals_torch(aligned: bool) -> None:
    torch.manual_seed(0)
    shapes = [(64, 96), (4096,), (16, 16), (32,)] if aligned else [(70, 90), (5000,), (3, 3), (1,)]
    first = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
    second = [nn.Parameter(p.detach().clone()) for p in first]

    def torch_adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
        groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]
        lr = torch.tensor(0.01, device=DEVICE)
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True, capturable=DEVICE == "cuda")

    ours, theirs = torch_adamw(first), torch_adamw(second)
    fused = adamw.FusedAdamW(ours, {"a": first[0], "b": first[2]}, torch.bfloat16)
    for step in range(5):
        grads = [torch.randn_like(p).bfloat16() for p in first]
        if step == 3:
            grads[2][0, 0] = torch.nan  # this step is skipped
        fused.bf16_weights["a"].grad, fused.bf16_weights["b"].grad = grads[0], grads[2]
        first[1].grad, first[3].grad = grads[1].float(), None if step == 4 else grads[3].float()
        for p, grad in zip(second, grads, strict=True):
            p.grad = grad.float()
        if step == 4:
            second[3].grad = None
        norm = nn.utils.clip_grad_norm_(second, 1.0)
        if step != 3:
            theirs.step()
        torch.testing.assert_close(
            fused.step(1.0, fused.new_grad_pointers()), norm, equal_nan=True, atol=1e-3, rtol=1e-5
        )
        assert all(p.grad is None for p in (*first, *fused.bf16_weights.values()))
    torch.testing.assert_close(first, second, atol=2e-6, rtol=1e-5)
    for p, q in zip(first, second, strict=True):
        for key, value in theirs.state[q].items():
            torch.testing.assert_close(ours.state[p][key], value.to(ours.state[p][key].device), atol=1e-6, rtol=1e-4)
    bf16 = first[0].detach().bfloat16()
    torch.testing.assert_close(fused.bf16_weights["a"].detach(), bf16, atol=0 if DEVICE == "cuda" else 0.04, rtol=0)
    with torch.no_grad():
        first[0].add_(1)
    fused.refresh_copies()
    torch.testing.assert_close(fused.bf16_weights["a"].detach(), first[0].detach().bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize("vocab_size", [7, 8192, 9000])
def test_ignored_rows_have_no_gradient_even_with_infinite_logits(vocab_size: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 16, device=DEVICE), torch.randn(vocab_size, 16, device=DEVICE)
    x[1] = torch.tensor(torch.inf)
    chunk = triton_cross_entropy_chunk(x, weight, None, torch.tensor([2, -100, 5], device=DEVICE), 0.1)
    assert not chunk.logits_grad[1].any()
    assert chunk.logits_grad[[0, 2]].isfinite().all()
    assert chunk.stats[:, [0, 2]].isfinite().all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_compiled_layers_have_the_gradients_of_eager_layers() -> None:
    torch.manual_seed(0)
    network = build(preset("tiny-gpt", ["vocab_size=100", "dropout=0.0", "attention_dropout=0.0"])).to(DEVICE)
    ids, weights = torch.randint(100, (3, 50), device=DEVICE), torch.randn(3, 50, network.config.dim, device=DEVICE)

    def gradients(dtype: torch.dtype | None) -> dict[str, Tensor]:
        network.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            (network.decoder(ids) * weights).sum().backward()
        grads = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
        return {name: grad for name, grad in grads.items() if not name.endswith("key.bias")}  # its gradient is 0

    expected = gradients(None)
    network.decoder.compile(fullgraph=True)
    for dtype, tolerance in ((None, 2e-3), (torch.bfloat16, 4e-2)):
        grads = gradients(dtype)
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            assert (grads[name] - grad).norm() / grad.norm() < tolerance, (name, dtype)
