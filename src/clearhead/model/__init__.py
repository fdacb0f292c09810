"""Ids to hidden states to logits: one Transformer core for every family."""

from clearhead.model.cache import Cache, Tree
from clearhead.model.network import Decoder, Encoder, EncoderDecoder, Memory, Network, build
from clearhead.ops.attention.dispatch import attend, backend
from clearhead.ops.masks import Documents, Mask, Pattern

__all__ = [
    "Cache",
    "Decoder",
    "Documents",
    "Encoder",
    "EncoderDecoder",
    "Mask",
    "Memory",
    "Network",
    "Pattern",
    "Tree",
    "attend",
    "backend",
    "build",
]
