"""Ids to hidden states to logits: one Transformer core for every family."""

from clearhead.model.backends import attend, backend
from clearhead.model.cache import Cache, Tree
from clearhead.model.masks import Documents, Mask, Pattern
from clearhead.model.network import Decoder, Encoder, EncoderDecoder, Memory, Network, build

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
