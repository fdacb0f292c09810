"""Updates against torch's own optimizers; weight decay, freezing, and clipping, also of sharded gradients."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from clearhead.config import preset
from clearhead.config.train import OptimizerConfig
from clearhead.errors import ConfigError, UserError
from clearhead.model import Network, build
from clearhead.train.optimizer import build_optimizer, clip_grad_norm, freeze, set_lr

SMALL = ["vocab_size=20", "dim=8", "heads=2", "ff_dim=12"]


def network_of(name: str = "tiny-translator") -> Network:
    return build(preset(name, SMALL)).double()


def names(network: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    known = {parameter: name for name, parameter in network.named_parameters()}
    return [known[parameter] for parameter in parameters]


def test_weight_decay_applies_to_matrices_only() -> None:
    network = network_of("tiny-encoder")
    decaying, others = (group["params"] for group in build_optimizer(network, OptimizerConfig()).param_groups)
    assert set(names(network, decaying)) | set(names(network, others)) == {n for n, _ in network.named_parameters()}
    assert "encoder.embedding.tokens.weight" in names(network, decaying)
    assert all("norm" not in name and not name.endswith("bias") for name in names(network, decaying))
    assert all("norm" in name or name.endswith("bias") for name in names(network, others))
    assert len(others) > 10


def test_a_tied_matrix_is_updated_once() -> None:
    network = network_of()
    assert network.heads.lm_head is not None
    shared = network.heads.lm_head.proj.weight
    groups = build_optimizer(network, OptimizerConfig()).param_groups
    assert shared is network.encoder.embedding.tokens.weight
    assert sum(parameter is shared for group in groups for parameter in group["params"]) == 1


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_updates_equal_torch(kind: str) -> None:
    model, other = (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double() for _ in range(2))
    other.load_state_dict(model.state_dict())
    ours = build_optimizer(model, OptimizerConfig.build({"optimizer": kind}))
    if kind == "adam":  # section 5.3
        theirs: torch.optim.Optimizer = torch.optim.Adam(other.parameters(), lr=0.1, betas=(0.9, 0.98), eps=1e-9)
    else:
        groups = [{"params": [other[0].weight], "weight_decay": 0.01}]
        groups += [{"params": [other[0].bias, *other[1].parameters()], "weight_decay": 0.0}]
        theirs = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.999), eps=1e-8, foreach=False)
    set_lr(ours, 0.1)
    x = torch.randn(5, 4).double()
    for _ in range(4):
        for net, opt in ((model, ours), (other, theirs)):
            opt.zero_grad()
            net(x).pow(3).sum().backward()
            opt.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_learning_rate_is_zero_until_set() -> None:
    model = nn.Linear(3, 2)
    before, opt = model.weight.detach().clone(), build_optimizer(model, OptimizerConfig())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    assert torch.equal(model.weight, before)


def test_adam_with_weight_decay_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight_decay: 0\.1, but adam has none; set it to 0, or optimizer=adamw"):
        OptimizerConfig.build({"optimizer": "adam", "weight_decay": 0.1})


def test_frozen_parameters_do_not_change() -> None:
    network = network_of()
    frozen = freeze(network, ["encoder.layers.*", "*.cross_attention.*"])
    assert frozen == [n for n, _ in network.named_parameters() if n.startswith("encoder.layers.") or "cross_att" in n]
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    opt = build_optimizer(network, OptimizerConfig())
    assert all(parameter.requires_grad for group in opt.param_groups for parameter in group["params"])
    set_lr(opt, 0.1)
    network(torch.randint(20, (2, 4)), torch.randint(20, (2, 5))).pow(2).sum().backward()
    opt.step()
    unchanged = [name for name, parameter in network.named_parameters() if torch.equal(parameter, before[name])]
    assert unchanged == frozen


def test_a_tied_matrix_is_frozen_by_any_of_its_names() -> None:
    network = network_of()
    assert freeze(network, ["heads.lm_head.proj.weight"]) == ["heads.lm_head.proj.weight"]
    assert not network.encoder.embedding.tokens.weight.requires_grad


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["encoder.layer.*"], r"freeze: 'encoder.layer.\*' matches no parameter; did you mean .*encoder.layers.\*"),
        (["encoder"], r"did you mean .*encoder\.\*"),
        (
            ["decoder.*", "xyz"],
            r"'xyz' matches no parameter; the top-level modules are encoder.\*, decoder.\*, heads.\*$",
        ),
        (["*"], "nothing would be left to train"),
        (["encoder.*", "decoder.*", "heads.*"], "nothing would be left to train"),
    ],
)
def test_a_wrong_pattern_is_an_error_and_freezes_nothing(patterns: list[str], message: str) -> None:
    network = network_of()
    with pytest.raises(UserError, match=message):
        freeze(network, patterns)
    assert all(parameter.requires_grad for parameter in network.parameters())


def parameters_with(*grads: list[float]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(len(grad)).double()) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = torch.tensor(grad).double()
    return parameters


def test_clipping_uses_the_global_norm() -> None:
    parameters = [*parameters_with([3.0, 0.0], [4.0]), nn.Parameter(torch.zeros(1))]  # the last has no gradient
    assert clip_grad_norm(parameters, 1.0) == 5
    torch.testing.assert_close(parameters[0].grad, torch.tensor([0.6, 0.0]).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(parameters[1].grad, torch.tensor([0.8]).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_norm", [5.1, None])
def test_gradients_below_the_maximum_norm_are_unchanged(max_norm: float | None) -> None:
    parameters = parameters_with([3.0], [4.0])
    assert clip_grad_norm(parameters, max_norm) == 5
    assert [parameter.grad.item() for parameter in parameters if parameter.grad is not None] == [3, 4]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_gives_a_non_finite_norm(bad: float) -> None:
    assert not clip_grad_norm(parameters_with([1.0, bad], [2.0]), 1.0).isfinite()


def test_clipping_does_not_sync_the_device() -> None:
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    parameter.grad = torch.zeros_like(parameter)
    assert clip_grad_norm([parameter], 1.0).shape == ()


def clip_sharded(rank: int, store: str) -> None:
    """One of two processes, each with a shard of the gradients."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    parameters = []
    for full in (torch.tensor([3.0, 0.0, 0.0]), torch.tensor([[0.0], [4.0]])):
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(full, mesh, [Shard(0)])
        parameters.append(parameter)
    norm = clip_grad_norm(parameters, 1.0)
    assert not isinstance(norm, DTensor)
    assert norm == 5
    grads = [parameter.grad.full_tensor() for parameter in parameters]
    torch.testing.assert_close(grads, [torch.tensor([0.6, 0.0, 0.0]), torch.tensor([[0.0], [0.8]])])
    dist.barrier()  # no process exits while the other still reads
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_sharded_gradients_are_clipped_by_their_global_norm(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(clip_sharded, (str(tmp_path / "store"),), nprocs=2)
