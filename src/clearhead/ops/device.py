"""Device names: parse them and check that the device is available."""

import torch

from clearhead.errors import UserError


def choose_device(name: str, local: int = 0) -> torch.device:
    """Return the device called `name`; `auto` is a GPU if there is one. `local` is the local rank of this process."""
    if not isinstance(name, str):
        raise UserError(f"device: {type(name).__name__} is not a name; use auto, cpu, cuda or cuda:0")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda was requested, but torch sees no GPU here; use cpu")
    if device.type == "cuda" and (device.index or local) >= torch.cuda.device_count():
        raise UserError(
            f"device: {name} was requested, but there are {torch.cuda.device_count()} GPUs; use a lower number"
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", local)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device: mps was requested, but torch sees no Apple GPU here; use cpu")
    if device.type not in ("cuda", "cpu", "mps"):
        raise UserError(f"device: {name!r} is not supported; use auto, cpu, cuda or cuda:0")
    return device
