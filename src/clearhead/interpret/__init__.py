"""What happened inside: attention weights and per-head updates."""

from clearhead.interpret.attention import Look, watch

__all__ = ["Look", "watch"]
