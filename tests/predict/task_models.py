"""Small encoders and decoders with any head and any tokenizer."""

from typing import Any

import torch

from clearhead.config import preset
from clearhead.model import build
from clearhead.predict import Model
from clearhead.text import Kind
from tests.data.helpers import tokenizer

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TASKS = {"lm": "masked-language-model", "classes": "classification", "tags": "tagging", "span": "answering"}
SMALL = ("dim=16", "heads=2", "ff_dim=32", "max_positions=48")


def task_model(
    output: str = "", kind: Kind = "byte-bpe", family: str = "tiny-encoder", seed: int = 0, **data: Any
) -> Model:
    """A model with random weights, large enough that its answers differ."""
    torch.manual_seed(seed)
    tokens = tokenizer(kind)
    layers = "encoder_layers=2" if family == "tiny-encoder" else "decoder_layers=2"
    labels = len(LABELS) if output in ("classes", "tags") else 0
    changes = [*SMALL, layers, f"vocab_size={len(tokens)}", f"outputs=[{output}]", f"labels={labels}"]
    changes += ["pooler=false"] if family == "tiny-encoder" else []
    network = build(preset(family, changes)).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith("heads"):
                parameter.normal_(0, 1)
            elif parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    task = TASKS.get(output, "similarity")
    labeled = list(LABELS) if labels else []
    settings = {"task": task, "max_length": 48, "stride": 8, **data}
    return Model(network, (tokens,), {"task": task, "labels": labeled, "data": settings}, "small")
