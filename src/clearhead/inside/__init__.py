"""What happened inside: attention weights and per-head updates."""

from clearhead.inside.attention import Look, watch

__all__ = ["Look", "watch"]
