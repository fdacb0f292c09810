"""The texts that the browser tests show, and what the network computes for them without the page's routes."""

from typing import Any

import torch

from clearhead.interpret import capture_attention
from tests.explore.models import small

TEXT = "a man sees the dog"
MASKED = "a [MASK] sees the dog"
VIEWS = {
    "translator": ("tokens", "attention", "steps", "next", "translate", "switches", "compare", "tour"),
    "llama": ("tokens", "attention", "steps", "next", "switches", "compare", "tour"),
    "bert": ("tokens", "attention", "steps", "switches", "understand", "compare", "tour"),
}
MODULES = {
    "translator": ("cross", "decoder.layers.1.cross_attention"),
    "llama": ("decoder", "decoder.layers.1.attention"),
    "bert": ("encoder", "encoder.layers.1.attention"),
}


def ids_of(name: str) -> list[torch.Tensor]:
    """What the network reads for the text, computed without the page's routes."""
    model = small(name)
    if name == "bert":
        inspection = model.inspect(MASKED)
    elif name == "translator":
        inspection = model.inspect(TEXT, "the dog sees")
    else:
        inspection = model.inspect(TEXT)
    return [torch.tensor([side.ids]) for side in (inspection.source, inspection.target) if side is not None]


def trace_of(name: str) -> Any:
    with capture_attention(small(name).network) as traces, torch.no_grad():
        small(name).network(*ids_of(name))
    return traces[MODULES[name][1]]


def state_of(name: str, view: str, **more: Any) -> dict[str, Any]:
    state = {"m": name, "v": view, "t": MASKED if name == "bert" else TEXT, **more}
    return state | ({"y": "the dog sees"} if name == "translator" else {})
