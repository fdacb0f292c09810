"""What is told about a run beside its losses: the model card, the machine, the share of what its GPU can do."""

from collections.abc import Mapping
from typing import Any

import torch

from clearhead.checkpoint import Score, model_card
from clearhead.config.recipe import Recipe, dump_recipe
from clearhead.model import Network
from clearhead.model.cost import flops_per_token
from clearhead.train.distributed import DistContext

PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # dense bf16 FLOPs a second


def model_card_of_run(name: str, recipe: Recipe, step: int, validation: Mapping[str, Any]) -> str:
    """The model card: what a model was made of and, where it was validated, how good it is."""
    data, signatures = recipe.data, validation.get("signature", {})
    scores = [
        Score(metric, value, "validation data", signatures.get(metric, ""))
        for metric, value in validation.items()
        if isinstance(value, float) and metric != "seconds"
    ]
    made = [", ".join(corpus.files) or f"{corpus.format}, made by Clearhead itself" for corpus in data.train]
    made += [f"published at {data.source_url}"] if data.source_url else []
    summary = f"A model for {data.task}, trained with Clearhead for {step:,} steps."
    return model_card(name, summary, made, dump_recipe(recipe), scores, "That of the data.")


def machine(place: DistContext) -> dict[str, Any]:
    """What a run is computed on."""
    name = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else place.device.type
    return {"device": name, "processes": place.world_size, "torch": torch.__version__}


def mfu(network: Network, context: int, tokens: float, place: DistContext) -> float | None:
    """What part of the GPUs' peak so many tokens a second are; forward and backward are three forward passes."""
    if place.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(place.device)
    peak = next((peak for known, peak in PEAK.items() if known in name), None)
    return None if peak is None else 3 * flops_per_token(network, context) * tokens / peak / place.world_size
