"""What happens inside a network: attention step by step, the residual stream, logit lens, ablation."""

from clearhead.interpret.attention import AttentionTrace, AttentionTraces, capture_attention
from clearhead.interpret.inspect import Inspection, LogitLens, Tokens, inspect_network
from clearhead.interpret.switches import Effect, Switch, switched_off
from clearhead.interpret.trace import HeadSteps, Trace, own_copy, trace_network

__all__ = [
    "AttentionTrace",
    "AttentionTraces",
    "Effect",
    "HeadSteps",
    "Inspection",
    "LogitLens",
    "Switch",
    "Tokens",
    "Trace",
    "capture_attention",
    "inspect_network",
    "own_copy",
    "switched_off",
    "trace_network",
]
