"""Inference on token ids: greedy and beam search, sampling, speculative decoding, streaming, the batching engine."""

from clearhead.inference.alignment import (
    alignment_links,
    alignment_weights,
    cross_attention_weights,
    default_alignment_heads,
    format_alignment,
)
from clearhead.inference.alternatives import alternatives
from clearhead.inference.cuda_graph_replay import enable_cuda_graphs
from clearhead.inference.engine import Engine, EngineStats, QueueFull
from clearhead.inference.engine_thread import EngineThread
from clearhead.inference.generate import generate, translate
from clearhead.inference.make_runner import StepNetwork, default_cache_tokens, pack_for_steps
from clearhead.inference.model_runner import ModelRunner
from clearhead.inference.optimize import has_hooks, optimize_for_inference
from clearhead.inference.output import GenerationOutput
from clearhead.inference.request import Constraint, EngineRequest
from clearhead.inference.run_in_order import run_in_order
from clearhead.inference.shared_engine import SharedEngine
from clearhead.inference.speculative import DraftModel, PromptLookup
from clearhead.inference.stop_strings import StopStrings
from clearhead.inference.stream import stream, stream_text
from clearhead.ops.linear.quantized import INT4

__all__ = [
    "INT4",
    "Constraint",
    "DraftModel",
    "Engine",
    "EngineRequest",
    "EngineStats",
    "EngineThread",
    "GenerationOutput",
    "ModelRunner",
    "PromptLookup",
    "QueueFull",
    "SharedEngine",
    "StepNetwork",
    "StopStrings",
    "alignment_links",
    "alignment_weights",
    "alternatives",
    "cross_attention_weights",
    "default_alignment_heads",
    "default_cache_tokens",
    "enable_cuda_graphs",
    "format_alignment",
    "generate",
    "has_hooks",
    "optimize_for_inference",
    "pack_for_steps",
    "run_in_order",
    "stream",
    "stream_text",
    "translate",
]
