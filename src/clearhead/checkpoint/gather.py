"""Full weights and optimizer state by parameter name, gathered from and loaded into any number of ranks (DDP, FSDP2).

`network` is always the unwrapped module (of DDP: `ddp.module`) whose parameters the optimizer holds.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead.checkpoint.tensors import check_fit, named_tensors
from clearhead.errors import UserError

NO_STATE = "untouched"  # key of a parameter that has had no gradient yet, and so no optimizer state


def gather_state(network: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return full weights and optimizer state on the CPU; every rank must call it, and ranks other than 0 get {}.

    Tensors on the CPU are not copied: write them before the next step.
    """
    return _full_tensors(named_tensors(network)), optimizer_state(network, optimizer)


def gather_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return full weights on the CPU; every rank must call it, and ranks other than 0 get {}."""
    return _full_tensors(named_tensors(network))


def load_state(
    network: nn.Module, optimizer: Optimizer, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Load the result of `gather_state` into a network and its optimizer; every rank passes the same full tensors."""
    load_weights(network, weights)
    load_optimizer_state(network, optimizer, state)


def load_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy full weights into the network's own tensors."""
    own = named_tensors(network)
    check_fit(own, weights, "weights")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_shard_like(weights[name].to(tensor.dtype), tensor))


def optimizer_state(network: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors, named like `exp_avg/decoder.norm.weight`, on rank 0; every rank must call it."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _parameters(network, optimizer):
        state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if value is not None}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{key} of {name} is {type(value).__name__}; only tensors are stored")
            tensors[f"{key}/{name}"] = value
        if not state:
            tensors[f"{NO_STATE}/{name}"] = torch.empty(0, dtype=torch.uint8)
    return _full_tensors(tensors)


def load_optimizer_state(network: nn.Module, optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    """Load the optimizer's tensors bit-exactly; parameter groups may differ from those that were saved."""
    parameters = _parameters(network, optimizer)
    by_name: dict[str, dict[str, Tensor]] = {}
    for path, tensor in state.items():
        key, _, name = path.partition("/")
        by_name.setdefault(name, {})[key] = tensor
    created = _created_state(optimizer)
    for problem in _problems(parameters, created, by_name):
        raise UserError(f"optimizer state: {problem}; it belongs to another model or optimizer")
    for name, parameter in parameters:
        optimizer.state.pop(parameter, None)
        for key, value in by_name[name].items():
            if key != NO_STATE:
                optimizer.state[parameter][key] = _shard_like(value, created[parameter][key]).clone()


def _created_state(optimizer: Optimizer) -> dict[Any, dict[str, Tensor]]:
    """Return the state that the optimizer creates for its parameters: names, shapes, dtypes, devices and shards.

    It creates them in a step with gradients and a learning rate of 0, which changes no weight.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state, grads = optimizer.state, [parameter.grad for parameter in parameters]
    lrs = [group["lr"] for group in optimizer.param_groups]
    try:
        optimizer.state = defaultdict(dict)
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return {
            parameter: {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
            for parameter in parameters
        }
    finally:
        optimizer.state = state
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


def _problems(
    parameters: list[tuple[str, nn.Parameter]],
    created: Mapping[Any, Mapping[str, Tensor]],
    by_name: Mapping[str, Mapping[str, Tensor]],
) -> Iterator[str]:
    """Yield every mismatch between the state that the optimizer creates and the stored tensors."""
    for name in sorted(by_name.keys() - {name for name, _ in parameters}):
        yield f"{name} is not a parameter of this model"
    for name, parameter in parameters:
        values, expected = by_name.get(name, {}), created[parameter]
        if not values:
            yield f"nothing is stored for {name}"
        if values.keys() == {NO_STATE}:
            continue
        for key in sorted(expected.keys() - values.keys()):
            yield f"{key}/{name} is missing"
        for key, value in values.items():
            if key not in expected:
                yield f"{key}/{name} is not a tensor of this optimizer"
            elif value.shape != expected[key].shape:
                yield f"{key}/{name} has shape {tuple(value.shape)} instead of {tuple(expected[key].shape)}"
            elif value.dtype != expected[key].dtype:
                yield f"{key}/{name} holds {value.dtype} instead of {expected[key].dtype}"


def _parameters(network: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return every parameter of the optimizer with its name in the network."""
    names = {id(tensor): name for name, tensor in named_tensors(network).items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in parameters):
        raise ValueError("the optimizer holds a parameter that the network does not have; pass both of the same model")
    return [(names[id(parameter)], parameter) for parameter in parameters]


def _full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the full tensors on the CPU of rank 0, and {} on other ranks."""
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    full = {}
    for name, tensor in sorted(tensors.items()):  # every rank in the same order, as below
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()  # collective: all ranks must call it
        if is_first:
            full[name] = tensor.detach().cpu()
    return full


def _shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Move a full tensor to the device of `like` and shard it the same way."""
    value = value.to(like.device)
    if not hasattr(like, "full_tensor") or value.dim() == 0:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    if value.shape != like.shape:
        raise ValueError(f"a tensor of shape {tuple(value.shape)} cannot be sharded like one of {tuple(like.shape)}")
    # src_data_rank=None: every rank has the full tensor.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
