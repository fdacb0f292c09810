"""What experiments read from trained models: hidden states, attention, linear probes.   T tokens · D model dim"""

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.predict.inspect import inspect_text
from clearhead.predict.model import Model


def hidden_states(model: Model, text: str) -> tuple[list[str], Tensor]:
    """Return the tokens of a text, and their hidden states after the embedding and each layer: (layers + 1, T, D)."""
    network = model.network
    stack = network.encoder if model.config.family == "encoder" else network.decoder
    states: list[Tensor] = []
    handles = [
        module.register_forward_hook(lambda _, args, output: states.append(output[0].detach().cpu()))
        for module in (stack.embedding, *stack.layers)
    ]
    try:
        inspection = inspect_text(model, text)
    finally:
        for handle in handles:
            handle.remove()
    tokens = inspection.source or inspection.target
    assert tokens is not None
    return [token.strip() for token in tokens.texts], torch.stack(states)


def mean_attention(model: Model, text: str) -> tuple[list[str], Tensor]:
    """Return the tokens of a text and the attention weights averaged over layers and heads: (T, T)."""
    inspection = inspect_text(model, text)
    tokens = inspection.source or inspection.target
    traces = inspection.encoder or inspection.decoder
    assert tokens is not None
    weights = torch.stack([trace.weights.mean(0) for trace in traces]).mean(0)
    return [token.strip() for token in tokens.texts], weights.cpu()


def probe_accuracy(states: Tensor, labels: Tensor, seed: int, ridge: float = 10.0) -> float:
    """Accuracy on one half of a linear classifier fit on the other: states (N, D), labels (N,), least squares."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    half = len(labels) // 2
    x = torch.cat([F.normalize(states.double(), dim=-1) * 10, torch.ones(len(labels), 1, dtype=torch.double)], 1)
    train, test = x[order[:half]], x[order[half:]]
    targets = F.one_hot(labels[order[:half]]).double()
    gram = train.T @ train + ridge * torch.eye(x.shape[1], dtype=torch.double)
    weights = torch.linalg.solve(gram, train.T @ targets)
    return ((test @ weights).argmax(-1) == labels[order[half:]]).double().mean().item()
