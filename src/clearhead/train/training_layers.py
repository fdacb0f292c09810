"""The parts of a network as a GPU learns them fastest, put on from outside.   B rows · T tokens · D width

Each equals what it stands for, up to rounding, and runs as that wherever it is not compiled to learn on a GPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.model.attention import Attention, Rope, split_heads
from clearhead.model.embedding import Embedding
from clearhead.model.feedforward import FeedForward
from clearhead.model.layer import Layer
from clearhead.ops import cublas
from clearhead.ops.cross_entropy import matmul_dtype
from clearhead.ops.gelu import gelu_tanh
from clearhead.ops.triton import backward_kernels as slopes
from clearhead.ops.triton.backward_kernels import BiasGelu, MatmulGelu, PositionAdd, ResidualLayerNorm, SplitQKV


def fuse(network: nn.Module) -> None:
    """Give the parts of a network that is on a GPU these forms; what they hold stays as it is."""
    for part in network.modules() if slopes.WORK else ():
        part.__class__ = FORMS.get(type(part), type(part))


def learns(x: Tensor) -> bool:
    """Whether this is being compiled to learn on a GPU."""
    return torch.compiler.is_compiling() and torch.is_grad_enabled() and x.is_cuda and x.dtype != torch.float64


def biased(*parts: nn.Module) -> bool:
    """Whether these are linear layers as torch has them, with biases."""
    return all(type(part) is nn.Linear and part.bias is not None for part in parts)


class TrainingAttention(Attention):
    """One product for queries, keys and values."""

    def project_qkv(self, x: Tensor, rotation: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, E), keys and values (B, G, T, E) of the same tokens."""
        parts = self.query, self.key, self.value
        if not (learns(x) and biased(*parts)):
            return super().project_qkv(x, rotation)
        q, k, v = together(x, *parts)
        return (
            split_heads(q, self.heads, rotation),
            split_heads(k, self.kv_heads, rotation),
            split_heads(v, self.kv_heads),
        )


def together(x: Tensor, *parts: nn.Linear) -> tuple[Tensor, ...]:
    """x (…, D) through several layers by one product."""
    weights, biases = tuple(part.weight for part in parts), tuple(part.bias for part in parts)
    joined = F.linear(x, torch.cat(weights), torch.cat(biases).detach())
    found: tuple[Tensor, ...] = SplitQKV.apply(joined, *biases)  # type: ignore[no-untyped-call]
    return found


class TrainingFeedForward(FeedForward):
    """GELU and its slope inside the products that cuBLAS has for them; else with the bias's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        if not (self.activation in (F.gelu, gelu_tanh) and learns(x) and biased(self.up, self.down)):
            return super().forward(x)
        up, down, dtype = self.up, self.down, matmul_dtype(x)
        if self.activation is gelu_tanh and cublas.works(dtype, up.in_features, up.out_features):
            rows, *weights = (t.to(dtype) for t in (x.reshape(-1, x.shape[-1]), up.weight, up.bias, down.weight))
            out: Tensor = MatmulGelu.apply(rows, *weights)  # type: ignore[no-untyped-call]
            return out.view(x.shape) + down.bias.to(dtype)
        hidden = F.linear(x, up.weight, up.bias.detach())
        return down(BiasGelu.apply(hidden, up.bias, self.activation is F.gelu))  # type: ignore[no-untyped-call]


class TrainingLayer(Layer):
    """Norms beside their residuals."""

    def _add(self, x: Tensor, norm: nn.Module, real: Tensor | None, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        whole = isinstance(norm, nn.LayerNorm) and norm.bias is not None and x.shape[-1] <= slopes.WIDEST
        if not (self.pre and whole and learns(x)):
            return super()._add(x, norm, real, sublayer)
        x, normed = ResidualLayerNorm.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
        return x + self.dropout(sublayer(normed))


class TrainingEmbedding(Embedding):
    """The gradient of positions by a product."""

    def placed(self, x: Tensor, place: Tensor) -> Tensor:
        """The vectors of tokens (B, T, D) and of positions (B or 1, T, D), summed."""
        if len(place) > 1 or not learns(x):
            return super().add_positions(x, place)
        out: Tensor = PositionAdd.apply(x, place)  # type: ignore[no-untyped-call]
        return out


FORMS: dict[type[nn.Module], type[nn.Module]] = {
    Attention: TrainingAttention,
    FeedForward: TrainingFeedForward,
    Layer: TrainingLayer,
    Embedding: TrainingEmbedding,
}
