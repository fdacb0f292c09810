"""A bare app with small models of the three families, and a client that unpacks answers."""

from functools import cache
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

from clearhead.config import preset
from clearhead.model import build
from clearhead.predict import Model
from clearhead.serve.inspect import mount_inspect
from clearhead.serve.inspect.frame import unframe
from clearhead.text import ROLES, train
from tests.predict.task_models import task_model

TEXT = "a man sees the dog in the snow, and two dogs see a café. 猫坐在垫子上。"
PRESETS = {"translator": "tiny-translator", "llama": "tiny-llama", "gpt": "tiny-gpt", "bert": "tiny-encoder"}


@cache
def small(name: str) -> Model:
    """A random model with a byte-level tokenizer."""
    torch.manual_seed(1)
    tokenizer = train([TEXT] * 9, "byte-bpe", 320, roles=ROLES)
    sizes = ["dim=16", "heads=4", "ff_dim=32", "max_positions=128", f"vocab_size={len(tokenizer)}"]
    sizes += ["kv_heads=2", "head_dim=4"] if name == "llama" else []
    network = build(preset(PRESETS[name], sizes)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return Model(network, (tokenizer,), {}, name)


@cache
def client() -> TestClient:
    """A client of an app with all small models."""
    app = FastAPI()
    models = {name: small(name) for name in PRESETS}
    models |= {output: task_model(output) for output in ("classes", "tags", "span")}
    mount_inspect(app, models)
    return TestClient(app)


def ask(route: str, **body: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Post a body; return the header and the tensors of the answer."""
    answer = client().post(f"/inspect/{route}", json=body)
    assert answer.status_code == 200, answer.text
    return unframe(answer.content)
