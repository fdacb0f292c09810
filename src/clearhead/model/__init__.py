"""The model core: token ids → hidden states → logits, for encoder-decoders, encoders and decoders.

Read in this order: `network`, `stack`, `embedding`, `positions`, `layer`, `norms`, `attention`, `feedforward`, `heads`;
then `cache`, `init_weights` and `cost`. Masks are in `ops.masks`, attention itself in `ops.attention`.
"""

from clearhead.model.attention import Attention
from clearhead.model.cache import KVCache, LayerKVCache
from clearhead.model.feedforward import FeedForward
from clearhead.model.heads import Heads, LMHead
from clearhead.model.layer import Layer
from clearhead.model.network import Decoder, Encoder, EncoderDecoder, EncoderOutput, Network, build
from clearhead.model.stack import Stack
from clearhead.ops.attention import attend, attention_backend
from clearhead.ops.masks import Documents, Mask, Pattern

__all__ = [
    "Attention",
    "Decoder",
    "Documents",
    "Encoder",
    "EncoderDecoder",
    "EncoderOutput",
    "FeedForward",
    "Heads",
    "KVCache",
    "LMHead",
    "Layer",
    "LayerKVCache",
    "Mask",
    "Network",
    "Pattern",
    "Stack",
    "attend",
    "attention_backend",
    "build",
]
