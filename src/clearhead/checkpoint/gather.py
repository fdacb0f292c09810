"""Weights and optimizer state by parameter name, whole, from one process or many (DDP, FSDP2), and back into them.

`network` is always the bare one (of DDP: `ddp.module`), with the parameters that the optimizer holds.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead.checkpoint.tensors import check_fit, tensors_of
from clearhead.errors import UserError

Named = tuple[str, nn.Parameter, dict[str, Any]]  # a parameter with its name and its group in the optimizer
UNTOUCHED = "untouched"  # marks a parameter that has had no gradient yet, and so has no state


def gather(network: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and optimizer state as whole tensors on the CPU; every rank calls it, rank 0 gets them, others {}.

    What lies on the CPU already is not copied: write it before the next step.
    """
    return _whole(tensors_of(network)), optimizer_state(network, optimizer)


def gather_weights(network: nn.Module) -> dict[str, Tensor]:
    """The weights alone, as `gather` gives them."""
    return _whole(tensors_of(network))


def scatter(
    network: nn.Module, optimizer: Optimizer, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Put what `gather` gave into a network and its optimizer, whatever the number of processes; every rank calls it
    with the same tensors, and keeps its part."""
    load_weights(network, weights)
    load_optimizer_state(network, optimizer, state)


def load_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the network's own tensors."""
    own = tensors_of(network)
    check_fit(own, weights, "weights")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_part(weights[name].to(tensor.dtype), tensor))


def optimizer_state(network: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors, by names like `exp_avg/decoder.norm.weight`; every rank calls it, rank 0 gets them."""
    found: dict[str, Tensor] = {}
    for name, parameter, _ in _parameters(network, optimizer):
        state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if value is not None}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{key} of {name} is {type(value).__name__}; only tensors are stored")
            found[f"{key}/{name}"] = value
        if not state:
            found[f"{UNTOUCHED}/{name}"] = torch.empty(0, dtype=torch.uint8)
    return _whole(found)


def load_optimizer_state(network: nn.Module, optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    """Give the optimizer its tensors back, to the bit; how parameters are grouped plays no part."""
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
            if key != UNTOUCHED:
                # torch's own optimizers count their steps on the CPU, unless all runs on the device
                stays = key == "step" and not (group.get("capturable") or group.get("fused"))
                optimizer.state[parameter][key] = value.clone() if stays else _part(value, parameter).clone()


def _problems(parameters: list[Named], by_name: Mapping[str, Mapping[str, Tensor]]) -> Iterator[str]:
    """What does not fit between the parameters and the tensors stored for them."""
    for name in sorted(by_name.keys() - {name for name, _, _ in parameters}):
        yield f"{name} is no parameter here"
    needed: dict[Any, set[str]] = {}  # what others of the same group and number of axes have, a parameter must have
    for name, parameter, group in parameters:
        needed.setdefault((id(group), parameter.dim()), set()).update(by_name.get(name, {}).keys() - {UNTOUCHED})
    for name, parameter, group in parameters:
        values = by_name.get(name, {})
        if not values:
            yield f"nothing is stored for {name}"
        if UNTOUCHED not in values:
            for key in sorted(needed[id(group), parameter.dim()] - values.keys()):
                yield f"{key}/{name} is missing"
        for key, value in values.items():
            if not _fits(value, parameter):
                yield f"{key}/{name} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"


def _parameters(network: nn.Module, optimizer: Optimizer) -> list[Named]:
    """Every parameter of the optimizer, with its name in the network and its group."""
    names = {id(tensor): name for name, tensor in tensors_of(network).items()}
    found = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter, _ in found):
        raise ValueError("the optimizer holds a parameter that the network does not have; give both of the same model")
    return [(names[id(parameter)], parameter, group) for parameter, group in found]


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, put together from all ranks; on other ranks than 0, nothing."""
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    whole = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()  # all ranks take part
        if first:
            whole[name] = tensor.detach().cpu()
    return whole


def _part(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as `like` holds it: on its device, and of a sharded one this rank's part."""
    value = value.to(like.device)
    if not hasattr(like, "full_tensor") or value.dim() == 0:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    if value.shape != like.shape:
        raise ValueError(f"a tensor of shape {tuple(value.shape)} cannot be sharded like one of {tuple(like.shape)}")
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # every rank has it whole


def _fits(value: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor can belong to a parameter: a count, its shape, or (Adafactor) its rows or columns."""
    if value.dim() == 0 or value.numel() == 0:
        return True
    if value.dim() != parameter.dim():
        return False
    return all(size in (1, whole) for size, whole in zip(value.shape, parameter.shape, strict=True))
