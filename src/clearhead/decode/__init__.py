"""Network and ids to ids: greedy search, sampling, beam search, speculative decoding, streams, alignments."""

from clearhead.decode.alignment import hard, moses, soft
from clearhead.decode.alternatives import alternatives
from clearhead.decode.output import Output
from clearhead.decode.reading import for_reading
from clearhead.decode.search import generate, translate
from clearhead.decode.speculative import DraftModel, PromptLookup
from clearhead.decode.step import Step
from clearhead.decode.stops import Stops
from clearhead.decode.stream import stream, stream_text

__all__ = [
    "DraftModel",
    "Output",
    "PromptLookup",
    "Step",
    "Stops",
    "alternatives",
    "for_reading",
    "generate",
    "hard",
    "moses",
    "soft",
    "stream",
    "stream_text",
    "translate",
]
