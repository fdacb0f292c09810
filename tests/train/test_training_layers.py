"""The forms that a GPU learns fastest change nothing: as they stand, and compiled, with formulas for the kernels."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from clearhead.config import preset
from clearhead.model import build
from clearhead.ops.triton import backward_kernels as slopes
from clearhead.train import training_layers as fused

SIZES = ["vocab_size=40", "max_positions=32", "dropout=0.0", "attention_dropout=0.0"]


def norm_slope(ctx: object, beside: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The formula of what `_norm_slope` does."""
    x, weight, mean, scale = ctx.saved_tensors  # type: ignore[attr-defined]
    x, grad = (x - mean) * scale, grad.float()
    inner = grad * weight
    slope = inner - inner.mean(-1, keepdim=True) - x * (inner * x).mean(-1, keepdim=True)
    return beside + slope * scale, (grad * x).flatten(0, -2).sum(0), grad.flatten(0, -2).sum(0), None


def joined(ctx: object, *grads: Tensor) -> tuple[Tensor, ...]:
    """The formula of what `_place` does."""
    return torch.cat(grads, -1), *(grad.float().flatten(0, -2).sum(0) for grad in grads)


def gelu_slope(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The formula of what `_gelu_slope` does."""
    (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
    form = "none" if ctx.exact else "tanh"  # type: ignore[attr-defined]
    found = torch.ops.aten.gelu_backward(grad, x, approximate=form)
    return found, found.float().flatten(0, -2).sum(0), None


def network_of(name: str) -> nn.Module:
    """A small network, with weights that matter."""
    torch.manual_seed(0)
    network = build(preset(name, SIZES))
    for p in network.parameters():
        nn.init.normal_(p, std=0.3)
    return network


def learned(network: nn.Module) -> dict[str, Tensor]:
    """The gradients of some loss by all that it depends on."""
    network.zero_grad()
    torch.manual_seed(1)
    ids = torch.randint(1, 40, (3, 12))
    both = hasattr(network, "encoder") and hasattr(network, "decoder")
    out = network(ids, ids.flip(1)) if both else network(ids)
    out = out if isinstance(out, Tensor) else next(each for each in out if isinstance(each, Tensor))
    (out * torch.randn_like(out)).sum().backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """How far gradients are off; not those of biases of keys, which move no weight of attention: they are nothing."""
    assert found.keys() == expected.keys()
    names = [name for name in expected if not name.endswith("key.bias")]
    return {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in names}


def compiled_equals_written(name: str, inside: bool, varied: bool) -> None:
    """Run where torch compiles, for shapes that may vary or not."""
    fused.learns = lambda x: torch.compiler.is_compiling()
    slopes.WORK, fused.cublas.works = True, lambda *sizes: inside
    slopes.ResidualLayerNorm.backward = staticmethod(norm_slope)
    slopes.SplitQKV.backward, slopes.BiasGelu.backward = staticmethod(joined), staticmethod(gelu_slope)
    network = network_of(name)
    expected = learned(network)
    with torch.autocast("cpu", torch.bfloat16):
        rounding = errors(learned(network), expected)
    fused.fuse(network)
    used: dict[str, int] = {}

    def counted(side: str, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        used[side] = sum("autograd_function_apply" in str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for side in ("encoder", "decoder"):
        if (stack := getattr(network, side, None)) is not None:
            stack.compile(backend=partial(counted, side), fullgraph=True, dynamic=varied)
    assert max(errors(learned(network), expected).values()) < 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        for name, error in errors(learned(network), expected).items():
            assert error < 1e-2 + 1.5 * rounding[name], f"{name}: {error:.1e}, as it was {rounding[name]:.1e}"
    print(sum(used.values()))


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-encoder", "tiny-translator", "tiny-llama"])
def test_as_it_stands_a_fused_network_is_the_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slopes, "WORK", True)
    network = network_of(name)
    expected, names = learned(network), list(network.state_dict())
    fused.fuse(network)
    assert any(type(part) is fused.TrainingAttention for part in network.modules())
    found = learned(network)
    assert list(network.state_dict()) == names
    for key, grad in expected.items():
        assert torch.equal(found[key], grad), key


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize(
    ("name", "inside", "forms"),
    [
        ("tiny-gpt", False, 1 + 2 * 4),  # positions; of each layer the projections, two norms, GELU
        ("tiny-gpt", True, 1 + 2 * 4),
        ("tiny-encoder", False, 1 + 2 * 2),  # its norms come behind
        ("tiny-translator", False, 2 + 2),  # it has relu; attention to the source has no projections to join
    ],
)
def test_compiled_the_forms_learn_what_the_parts_learn(name: str, inside: bool, forms: int, varied: bool) -> None:
    code = f"from tests.train.test_training_layers import *; compiled_equals_written({name!r}, {inside}, {varied})"
    env = os.environ | {"TORCHDYNAMO_DISABLE": "0", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == forms


def test_only_compiled_learning_on_a_gpu_uses_the_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU(Tensor):
        is_cuda = True

    x = torch.ones(2).as_subclass(OnGPU)
    assert not fused.learns(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert fused.learns(x)
    assert not fused.learns(torch.ones(2))
    assert not fused.learns(x.double())
    with torch.no_grad():
        assert not fused.learns(x)
