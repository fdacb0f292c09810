"""What happens inside a network: attention, Q/K/V, per-head updates, logit lens."""

from clearhead.interpret.attention import AttentionTrace, AttentionTraces, capture_attention
from clearhead.interpret.inspect import Inspection, LogitLens, Tokens, inspect_network

__all__ = [
    "AttentionTrace",
    "AttentionTraces",
    "Inspection",
    "LogitLens",
    "Tokens",
    "capture_attention",
    "inspect_network",
]
