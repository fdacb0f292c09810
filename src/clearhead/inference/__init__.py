"""Network and ids to ids: greedy, sampling, beam and speculative search, streams, alignments, the batching engine."""

from clearhead.inference.alignment import hard, moses, soft
from clearhead.inference.alternatives import alternatives
from clearhead.inference.engine import Engine, Job, QueueFull, in_order
from clearhead.inference.generate import generate, translate
from clearhead.inference.optimize import for_reading
from clearhead.inference.output import Output
from clearhead.inference.replay import use_graphs
from clearhead.inference.speculative import DraftModel, PromptLookup
from clearhead.inference.step import Step
from clearhead.inference.stop_strings import Stops
from clearhead.inference.stream import stream, stream_text
from clearhead.inference.worker import Worker
from clearhead.ops.linear.int4 import INT4

__all__ = [
    "INT4",
    "DraftModel",
    "Engine",
    "Job",
    "Output",
    "PromptLookup",
    "QueueFull",
    "Step",
    "Stops",
    "Worker",
    "alternatives",
    "for_reading",
    "generate",
    "hard",
    "in_order",
    "moses",
    "soft",
    "stream",
    "stream_text",
    "translate",
    "use_graphs",
]
