"""Network and ids to ids: greedy, sampling, beam and speculative search, streams, alignments, the batching engine."""

from clearhead.decode.alignment import hard, moses, soft
from clearhead.decode.alternatives import alternatives
from clearhead.decode.engine import Engine, Job, QueueFull, in_order
from clearhead.decode.graphs import use_graphs
from clearhead.decode.output import Output
from clearhead.decode.reading import for_reading
from clearhead.decode.search import generate, translate
from clearhead.decode.small import INT4
from clearhead.decode.speculative import DraftModel, PromptLookup
from clearhead.decode.step import Step
from clearhead.decode.stops import Stops
from clearhead.decode.stream import stream, stream_text
from clearhead.decode.worker import Worker

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
