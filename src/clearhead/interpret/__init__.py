"""What happened inside: attention weights and per-head updates."""

from clearhead.interpret.attention import AttentionTrace, capture_attention

__all__ = ["AttentionTrace", "capture_attention"]
