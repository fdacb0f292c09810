"""Ids to hidden states to logits: one Transformer core for every family."""

from clearhead.model.cache import KVCache, TreeCache
from clearhead.model.network import Decoder, Encoder, EncoderDecoder, EncoderOutput, Network, build
from clearhead.ops.attention.dispatch import attend, attention_backend
from clearhead.ops.masks import Documents, Mask, Pattern

__all__ = [
    "Decoder",
    "Documents",
    "Encoder",
    "EncoderDecoder",
    "EncoderOutput",
    "KVCache",
    "Mask",
    "Network",
    "Pattern",
    "TreeCache",
    "attend",
    "attention_backend",
    "build",
]
