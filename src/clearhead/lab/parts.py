"""Replaced parts for experiments: attention, layers and baselines that the package's own model does not need.

B batch · T tokens · H heads · E head dim · D model dim
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.lab.ensemble import Batch
from clearhead.model.attention import Attention, Rope, split_heads
from clearhead.model.layer import Layer
from clearhead.model.norms import BatchNorm
from clearhead.ops.attention import attention_with_weights
from clearhead.ops.masks import Mask
from clearhead.text.corpus import encode
from clearhead.text.word2vec import Word2VecSettings
from clearhead.text.word2vec import train as train_word2vec

Change = Callable[[nn.Module], None]


def swap(old: type[nn.Module], new: type[nn.Module]) -> Change:
    """Return a change that turns every `old` module of a network into a `new` one with the same weights."""

    def change(network: nn.Module) -> None:
        for module in network.modules():
            if type(module) is old:
                module.__class__ = new

    return change


def replace_attention(build: Callable[[int], nn.Module]) -> Change:
    """Return a change that replaces self-attention by `build(dim)`, which is called as (x, mask, …)."""

    def change(network: nn.Module) -> None:
        for layer in network.modules():
            if isinstance(layer, Layer):
                layer.attention = build(layer.attention.query.in_features)  # type: ignore[assignment]

    return change


# Attention


class UnscaledAttention(Attention):
    """softmax(q kᵀ) v, without division by √E."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return super().attend(q * math.sqrt(q.shape[-1]), k, v, mask)


class MaskAfterSoftmax(Attention):
    """Weights of masked keys are set to 0 after the softmax, so that the rest sums to less than 1."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        dense = mask.dense(q.shape[2], k.shape[2], q.device)
        return (weights if dense is None else weights * dense) @ v


class LookAheadAttention(Attention):
    """Without the causal mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return super().attend(q, k, v, replace(mask, causal=False))


class PaddingBlindAttention(Attention):
    """Without the padding mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return super().attend(q, k, v, replace(mask, lengths=None))


class SharedQueryKey(Attention):
    """Queries are the keys' projection: q = k."""

    def project_q(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        return split_heads(self.key(x), self.heads, None, rope)


class SharedKeyValue(Attention):
    """Values are the keys' projection: v = k."""

    def project_kv(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        return split_heads(self.key(x), self.kv_heads, None, rope), split_heads(self.key(x), self.kv_heads)


class WithoutProjections(Attention):
    """Queries, keys and values are the input itself, cut into heads."""

    def project_q(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        return split_heads(x, self.heads, None, rope)

    def project_kv(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        return split_heads(x, self.kv_heads, None, rope), split_heads(x, self.kv_heads)


class FullValueAttention(nn.Module):
    """Each head has a full D × D value matrix, and the heads' outputs are summed."""

    def __init__(self, attention: Attention):
        super().__init__()
        dim = attention.query.in_features
        self.heads, self.query, self.key = attention.heads, attention.query, attention.key
        self.value = nn.Linear(dim, self.heads * dim)
        nn.init.normal_(self.value.weight, std=0.02)
        nn.init.zeros_(self.value.bias)

    def forward(self, x: Tensor, mask: Mask, encoder_output: Any, rope: Rope | None, cache: Any) -> Tensor:
        q, k = (split_heads(project(x), self.heads, None, rope) for project in (self.query, self.key))
        _, weights = attention_with_weights(q, k, k, mask)
        return (weights @ split_heads(self.value(x), self.heads)).sum(1)  # (B, T, D)


def full_value(network: nn.Module) -> None:
    """Replace the factored value and output matrices of every layer by full value matrices."""
    for layer in network.modules():
        if isinstance(layer, Layer):
            layer.attention = FullValueAttention(layer.attention)  # type: ignore[assignment]


# Baselines in place of self-attention


class Recurrence(nn.Module):
    """An LSTM over the tokens, left to right: (B, T, D) to (B, T, D)."""

    def __init__(self, dim: int):
        super().__init__()
        self.input, self.hidden = nn.Linear(dim, 4 * dim), nn.Linear(dim, 4 * dim, bias=False)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        gates = self.input(x)  # (B, T, 4D)
        hidden = cell = torch.zeros_like(x[:, 0])
        states = []
        for step in range(x.shape[1]):
            i, f, o, g = (gates[:, step] + self.hidden(hidden)).chunk(4, -1)
            cell = (f + 1).sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            states.append(hidden)
        return self.output(torch.stack(states, 1))


class Convolution(nn.Module):
    """A causal convolution over the last `SIZE` tokens with a gate: (B, T, D) to (B, T, D)."""

    SIZE = 3

    def __init__(self, dim: int):
        super().__init__()
        self.input, self.output = nn.Linear(self.SIZE * dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        padded = torch.cat([torch.zeros_like(x[:, : self.SIZE - 1]), x], 1)
        windows = torch.cat([padded[:, shift : shift + x.shape[1]] for shift in range(self.SIZE)], -1)
        value, gate = self.input(windows).chunk(2, -1)
        return self.output(value * gate.sigmoid())


class Nothing(nn.Module):
    """No mixing of tokens: zeros."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return torch.zeros_like(x)


# Layers and norms


class WithoutResidual(Layer):
    """Sublayers replace their input instead of adding to it."""

    def _add(
        self, x: Tensor, norm: nn.Module, norm_mask: Tensor | None, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        return self.dropout(sublayer(norm(x, norm_mask)))


class WithoutFeedForward(Layer):
    """Attention only."""

    def forward(self, x: Tensor, mask: Mask, rope: Rope | None = None, *args: Any, **kwargs: Any) -> Tensor:
        return self._add(x, self.attention_norm, None, lambda h: self.attention(h, mask, None, rope))


def without_feed_forward(network: nn.Module) -> None:
    """Remove the feed-forward sublayer of every layer."""
    for layer in network.modules():
        if isinstance(layer, Layer):
            layer.__class__ = WithoutFeedForward
            del layer.feed_forward, layer.feed_forward_norm


class SampleNorm(nn.LayerNorm):
    """Normalize over all tokens and features of a sample: (B, T, D)."""

    def forward(self, x: Tensor, norm_mask: Tensor | None = None) -> Tensor:
        centered = x - x.mean((1, 2), keepdim=True)
        scale = (centered.square().mean((1, 2), keepdim=True) + self.eps).rsqrt()
        return centered * scale * self.weight + self.bias


class PaddedBatchNorm(BatchNorm):
    """Batch norm that counts padding."""

    def forward(self, x: Tensor, norm_mask: Tensor | None = None) -> Tensor:
        return super().forward(x, None)


class BagOfWords(nn.Module):
    """Mean of word vectors and a linear classifier; labels are predicted at the first position.

    The vectors (V, D) are learned, or given and fixed.
    """

    def __init__(self, vocab_size: int, dim: int, classes: int, vectors: Tensor | None = None):
        super().__init__()
        self.vectors, self.output = nn.Embedding(vocab_size, dim), nn.Linear(dim, classes)
        if vectors is not None:
            del self.vectors.weight
            self.vectors.register_buffer("weight", vectors)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        is_token = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None])[..., None]
        mean = (self.vectors(ids) * is_token).sum(1, keepdim=True) / lengths[:, None, None]
        return self.output(mean).expand(-1, ids.shape[1], -1)  # (B, T, classes), the same at every token


def word2vec(batch: Batch, vocab_size: int, dim: int) -> Tensor:
    """Train word2vec on the sentences of a batch and return the vectors of their tokens: (V, D)."""
    sentences = [
        " ".join(f"w{token}" for token in row[1:length])
        for row, length in zip(batch["ids"].tolist(), batch["lengths"].tolist(), strict=True)
    ]
    found = train_word2vec(encode([sentences], 1), Word2VecSettings(dim=dim, epochs=20))
    vectors = torch.zeros(vocab_size, dim)
    vectors[[int(word[1:]) for word in found.words]] = found.vectors
    return vectors
