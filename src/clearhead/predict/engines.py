"""The engines of a model: one that its calls share, and new ones for streams of prompts and servers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

from clearhead.config.generation import EngineConfig
from clearhead.inference import Engine, SharedEngine, StepNetwork, default_cache_tokens, has_hooks, pack_for_steps
from clearhead.model import Decoder, EncoderDecoder, Network
from clearhead.ops.linear.quantized_tensor import dequantize_network, has_quantized

if TYPE_CHECKING:
    from clearhead.predict.model import Model

MAX_BATCH_SIZE, MAX_QUEUE = 128, 1 << 24  # of the shared engine


def step_network(model: Model) -> StepNetwork:
    """What an engine runs: the network packed for native steps if they can run it, else the inference network."""
    if has_hooks(model.network):
        return cast(Any, model.network)
    if "packed" not in model.engines:
        model.engines["packed"] = pack_for_steps(model.network, model.dtype)
    return model.engines["packed"] or cast(Any, model.inference_network)


def reference_network(model: Model) -> Network:
    """The network itself or, if its weights are quantized, a copy in fp32: each op would dequantize them again."""
    if not has_quantized(model.network):
        return model.network
    if "reference" not in model.engines:
        shared: dict[int, Any] = {
            id(tensor): tensor for tensor in (*model.network.parameters(), *model.network.buffers())
        }
        model.engines["reference"] = copy.deepcopy(model.network, shared)
        dequantize_network(model.engines["reference"])
    return cast(Network, model.engines["reference"])


def new_engine(model: Model, limits: dict[str, Any]) -> Engine:
    """An engine for a translator or a decoder; limits are those of EngineConfig, like max_batch_size=64."""
    model.check_family(EncoderDecoder if isinstance(model.network, EncoderDecoder) else Decoder, "generate")
    network = step_network(model)
    config = EngineConfig.build({"cache_tokens": default_cache_tokens(network), **limits})
    return Engine(network, eos_ids=model.special_tokens.eos_ids, tokenizer=model.tokenizers[-1], config=config)


def shared_engine(model: Model) -> SharedEngine:
    """The engine behind `generate`, `translate`, `stream` and `chat`; a new one while hooks watch the network."""
    shared: SharedEngine | None = model.engines.get("shared")
    if has_hooks(model.network) or shared is None or shared.failed:
        shared = SharedEngine(new_engine(model, {"max_batch_size": MAX_BATCH_SIZE, "max_queue": MAX_QUEUE}))
        if not has_hooks(model.network):
            model.engines["shared"] = shared
    return shared
