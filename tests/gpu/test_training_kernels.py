"""The kernels of training equal the formulas. With TRITON_INTERPRET=1 they run, slowly, on a CPU that has Triton."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.config import preset
from clearhead.model import build
from clearhead.ops import adamw as adam
from clearhead.ops import cublas
from clearhead.ops.triton.backward_kernels import BiasGelu, MatmulGelu, ResidualLayerNorm
from clearhead.ops.triton.cross_entropy import triton_cross_entropy_chunk
from clearhead.train.training_layers import fuse, together

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"), reason="needs a CUDA device"),
]


def gradients(run: Callable[..., tuple[Tensor, ...]], *leaves: Tensor) -> list[Tensor]:
    """What comes out of a function, and the gradients by all leaves."""
    inputs = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = run(*inputs)
    draw = torch.Generator().manual_seed(5)
    torch.autograd.backward(out, [torch.randn(each.shape, generator=draw).to(each) for each in out])
    return [*(each.detach() for each in out), *(leaf.grad for leaf in inputs if leaf.grad is not None)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(3, 100, 70), (2, 5, 256), (700, 33)])
def test_gelu_gives_the_bias_before_it_its_gradient(exact: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(shape, device=DEVICE), torch.randn(shape[-1], device=DEVICE)
    form = "none" if exact else "tanh"
    ours = gradients(lambda x, b: (BiasGelu.apply(x + b.detach(), b, exact),), x, bias)
    theirs = gradients(lambda x, b: (F.gelu(x + b, approximate=form),), x, bias)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_gelu_takes_rows_and_gradients_as_they_lie() -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(3, 5, 70, device=DEVICE), torch.randn(70, device=DEVICE)
    ours = gradients(lambda x, b: (BiasGelu.apply(x.mT + b.detach(), b, True).mT,), x.mT.contiguous(), bias)
    theirs = gradients(lambda x, b: (F.gelu(x.mT + b).mT,), x.mT.contiguous(), bias)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("even", [False, True])
def test_adam_in_one_kernel_is_torchs(even: bool) -> None:
    torch.manual_seed(0)
    shapes = [(64, 96), (4096,), (16, 16), (32,)] if even else [(70, 90), (5000,), (3, 3), (1,)]
    first = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
    second = [nn.Parameter(p.detach().clone()) for p in first]

    def torchs(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
        groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]
        rate = torch.tensor(0.01, device=DEVICE)
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True, capturable=DEVICE == "cuda")

    ours, theirs = torchs(first), torchs(second)
    one = adam.Adam(ours, {"a": first[0], "b": first[2]}, torch.bfloat16)
    for step in range(5):
        grads = [torch.randn_like(p).bfloat16() for p in first]
        if step == 3:
            grads[2][0, 0] = torch.nan  # nothing is learned from this one
        one.copies["a"].grad, one.copies["b"].grad = grads[0], grads[2]
        first[1].grad, first[3].grad = grads[1].float(), None if step == 4 else grads[3].float()
        for p, grad in zip(second, grads, strict=True):
            p.grad = grad.float()
        if step == 4:
            second[3].grad = None
        norm = nn.utils.clip_grad_norm_(second, 1.0)
        if step != 3:
            theirs.step()
        torch.testing.assert_close(one.step(1.0, one.places()), norm, equal_nan=True, atol=1e-3, rtol=1e-5)
        assert all(p.grad is None for p in (*first, *one.copies.values()))
    torch.testing.assert_close(first, second, atol=2e-6, rtol=1e-5)
    for p, q in zip(first, second, strict=True):
        for key, value in theirs.state[q].items():
            torch.testing.assert_close(ours.state[p][key], value.to(ours.state[p][key].device), atol=1e-6, rtol=1e-4)
    narrow = first[0].detach().bfloat16()
    torch.testing.assert_close(one.copies["a"].detach(), narrow, atol=0 if DEVICE == "cuda" else 0.04, rtol=0)
    with torch.no_grad():
        first[0].add_(1)
    one.refresh()
    torch.testing.assert_close(one.copies["a"].detach(), first[0].detach().bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize("words", [7, 8192, 9000])
def test_what_is_in_a_row_that_does_not_count_makes_no_gradient(words: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 16, device=DEVICE), torch.randn(words, 16, device=DEVICE)
    x[1] = torch.tensor(torch.inf)
    found = triton_cross_entropy_chunk(x, weight, None, torch.tensor([2, -100, 5], device=DEVICE), 0.1)
    assert not found.scores[1].any()
    assert found.scores[[0, 2]].isfinite().all()
    assert found.rows[:, [0, 2]].isfinite().all()


@pytest.mark.parametrize("shape", [(3, 50, 70), (2, 5, 768), (100, 33)])
def test_a_norm_beside_its_residual_has_the_gradients_of_both(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(shape[-1], device=DEVICE)
    leaves = torch.randn(shape, device=DEVICE), *torch.randn(2, shape[-1], device=DEVICE)

    def ours(x: Tensor, *learned: Tensor) -> tuple[Tensor, ...]:
        return ResidualLayerNorm.apply(x * 1, *learned, norm.eps)  # type: ignore[no-untyped-call, no-any-return]

    def theirs(x: Tensor, *learned: Tensor) -> tuple[Tensor, ...]:
        return x, F.layer_norm(x, shape[-1:], *learned, norm.eps)

    torch.testing.assert_close(gradients(ours, *leaves), gradients(theirs, *leaves), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("rows", "dim"), [((3, 50), 70), ((700,), 33), ((2, 4), 256)])
def test_projections_together_are_the_projections(rows: tuple[int, ...], dim: int) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(dim, out, device=DEVICE) for out in (40, 256, 300)]
    x = torch.randn(*rows, dim, device=DEVICE)

    def run(form: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        found = gradients(lambda x: form(x, *parts), x)
        found += [p.grad for part in parts for p in part.parameters() if p.grad is not None]
        for part in parts:
            part.zero_grad()
        return found

    ours, theirs = run(together), run(lambda x, *parts: tuple(part(x) for part in parts))
    assert len(ours) == len(theirs) == 10
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 100, 1003])
def test_gelu_inside_the_products_is_gelu_between_them(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x, up, bias, down = (torch.randn(size, device=DEVICE) for size in ((rows, 64), (256, 64), (256,), (64, 256)))
    leaves = x, up / 8, bias, down / 16
    assert cublas.works(dtype, 64, 256)
    for transposed, epilogue in ((True, cublas.GELU_AUX_BIAS), (False, cublas.DGELU)):
        assert cublas._plan(x.to(dtype), 256, transposed, epilogue) is not None, "cuBLAS must do it, and not torch"
    ours = gradients(lambda *each: (MatmulGelu.apply(*each),), *(leaf.to(dtype) for leaf in leaves))
    theirs = gradients(lambda x, u, b, d: (F.gelu(F.linear(x, u, b), approximate="tanh") @ d.T,), *leaves)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b).norm() / b.norm() < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_compiled_layer_of_all_these_learns_as_the_written_one() -> None:
    torch.manual_seed(0)
    network = build(preset("tiny-gpt", ["vocab_size=100", "dropout=0.0", "attention_dropout=0.0"])).to(DEVICE)
    ids, aim = torch.randint(100, (3, 50), device=DEVICE), torch.randn(3, 50, network.config.dim, device=DEVICE)

    def grads(dtype: torch.dtype | None) -> dict[str, Tensor]:
        network.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            (network.decoder(ids) * aim).sum().backward()
        found = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
        return {name: grad for name, grad in found.items() if not name.endswith("key.bias")}  # whose gradient is 0

    expected = grads(None)
    fuse(network)
    network.decoder.compile(fullgraph=True)
    for dtype, close in ((None, 2e-3), (torch.bfloat16, 4e-2)):
        found = grads(dtype)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            assert (found[name] - grad).norm() / grad.norm() < close, (name, dtype)
