"""Full weights and optimizer state by parameter name, gathered from and loaded into any number of ranks (DDP, FSDP2).

`network` is always the unwrapped module (of DDP: `ddp.module`) whose parameters the optimizer holds.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead.checkpoint.tensors import FLOAT_DTYPES, check_fit, named_tensors
from clearhead.errors import UserError

NamedParameter = tuple[str, nn.Parameter, dict[str, Any]]  # name, parameter, parameter group of the optimizer
NO_STATE = "untouched"  # key of a parameter that has had no gradient yet, and so no optimizer state


def gather_state(network: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return full weights and optimizer state on the CPU; every rank must call it, ranks other than 0 get {}.

    Tensors on the CPU are not copied: write them before the next step.
    """
    return _full_tensors(named_tensors(network)), optimizer_state(network, optimizer)


def gather_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return full weights on the CPU; every rank must call it, ranks other than 0 get {}."""
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
    for name, parameter, _ in _parameters(network, optimizer):
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
    for problem in _problems(parameters, by_name):
        raise UserError(f"optimizer state: {problem}; it is of another model or optimizer")
    for name, parameter, group in parameters:
        optimizer.state.pop(parameter, None)
        for key, value in by_name[name].items():
            if key != NO_STATE:
                # torch's optimizers keep `step` on the CPU unless capturable or fused
                on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
                optimizer.state[parameter][key] = value.clone() if on_cpu else _shard_like(value, parameter).clone()


def _problems(parameters: list[NamedParameter], by_name: Mapping[str, Mapping[str, Tensor]]) -> Iterator[str]:
    """Yield every mismatch between the parameters and the stored tensors."""
    for name in sorted(by_name.keys() - {name for name, _, _ in parameters}):
        yield f"{name} is not a parameter of this model"
    needed: dict[Any, set[str]] = {}  # keys by group and number of dimensions; all parameters of a kind have the same
    for name, parameter, group in parameters:
        needed.setdefault((id(group), parameter.dim()), set()).update(by_name.get(name, {}).keys() - {NO_STATE})
    for name, parameter, group in parameters:
        values = by_name.get(name, {})
        if not values:
            yield f"nothing is stored for {name}"
        if NO_STATE not in values:
            for key in sorted(needed[id(group), parameter.dim()] - values.keys()):
                yield f"{key}/{name} is missing"
        for key, value in values.items():
            if key != NO_STATE and value.is_floating_point() and value.dtype not in FLOAT_DTYPES:
                yield f"{key}/{name} is of dtype {value.dtype}"
            elif key != NO_STATE and not _fits(value, parameter):
                yield f"{key}/{name} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"


def _parameters(network: nn.Module, optimizer: Optimizer) -> list[NamedParameter]:
    """Return every parameter of the optimizer with its name in the network and its group."""
    names = {id(tensor): name for name, tensor in named_tensors(network).items()}
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter, _ in parameters):
        raise ValueError("the optimizer holds a parameter that the network does not have; pass both of the same model")
    return [(names[id(parameter)], parameter, group) for parameter, group in parameters]


def _full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the full tensors on the CPU of rank 0, and {} on other ranks."""
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    full = {}
    for name, tensor in tensors.items():
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


def _fits(value: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor can be state of a parameter: a scalar, its shape, or (Adafactor) its rows or columns."""
    if value.dim() == 0:
        return True
    if value.dim() != parameter.dim():
        return False
    return all(size in (1, full) for size, full in zip(value.shape, parameter.shape, strict=True))
