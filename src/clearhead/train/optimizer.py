"""AdamW with weight decay on matrices only, parameter freezing, and gradient clipping."""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from clearhead.config.train import OptimizerConfig
from clearhead.errors import UserError


def build_optimizer(network: nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
    """Return the optimizer of all trainable parameters; its learning rate is 0 until `set_lr`.

    Weight decay applies to matrices, embeddings included, not to biases and norms; a tied matrix is one parameter.
    Without decay, AdamW is Adam. The fused form is 4 to 6 times as fast on a CPU.
    """
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    on_gpu = trainable[0].device.type == "cuda"  # there lr is a tensor, which a captured step reads at every replay
    return torch.optim.AdamW(
        [
            {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=torch.zeros((), device=trainable[0].device) if on_gpu else 0.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
        capturable=on_gpu,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def freeze(network: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Freeze the parameters that match a pattern (`encoder.*`, `*.embedding.*`); return their names.

    A tied matrix matches by each of its names; frozen under one, it is frozen under all.
    """
    named = dict(network.named_parameters(remove_duplicate=False))
    matched: dict[str, nn.Parameter] = {}
    for pattern in patterns:
        matches = {name: parameter for name, parameter in named.items() if fnmatchcase(name, pattern)}
        if not matches:
            raise UserError(f"freeze: {pattern!r} matches no parameter; {_suggestion(pattern, network)}")
        matched |= matches
    frozen = set(matched.values())
    if not any(parameter.requires_grad and parameter not in frozen for parameter in named.values()):
        raise UserError("freeze: nothing would be left to train; remove a pattern")
    for parameter in frozen:
        parameter.requires_grad_(False)
    return list(matched)


def _suggestion(pattern: str, network: nn.Module) -> str:
    """The closest parameters and modules (as `module.*`) to a pattern."""
    known = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    known += [f"{name}.*" for name, part in network.named_modules() if name and any(True for _ in part.parameters())]
    close = difflib.get_close_matches(pattern, known, n=3)
    modules = [f"{name}.*" for name, _ in network.named_children()]
    return f"did you mean {' or '.join(close)}?" if close else f"the top-level modules are {', '.join(modules)}"


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Clip gradients to a global norm of at most `max_norm` (None: no clipping); return the norm before clipping.

    A norm that is not finite means that the update must be skipped. Sharded gradients count as a whole.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    total_norm = get_total_norm([parameter.grad for parameter in with_grad if parameter.grad is not None])
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    # A CPU skips scaling by 1; on a GPU the comparison would be a sync.
    if max_norm is not None and (total_norm.device.type != "cpu" or not max_norm / (total_norm + 1e-6) >= 1):
        clip_grads_with_norm_(with_grad, max_norm, total_norm)
    return total_norm
