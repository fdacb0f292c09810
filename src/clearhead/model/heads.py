"""What is read off the hidden states: words, next sentence, classes, tags, answer spans.

B rows · T tokens · D width · V words
"""

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.feedforward import ACTIVATIONS
from clearhead.model.norms import build_norm
from clearhead.ops.masks import Documents


class LMHead(nn.Module):
    """A score for every word: (B, T, D) to (B, T, V). Section 3.4 shares its matrix with the embedding."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.transform = MLMTransform(config) if config.family == "encoder" else None
        self.proj = nn.Linear(config.dim, config.target_vocab, bias=config.output_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.proj(hidden if self.transform is None else self.transform(hidden))


class MLMTransform(nn.Module):
    """The layer that BERT puts before the scores: linear, activation, norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        # A head reads single positions, so it never normalizes over a batch.
        self.norm = build_norm(config.model_copy(update={"norm": "layer"}) if config.norm == "batch" else config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.linear(hidden)))


class LabelHead(nn.Module):
    """A score for every label, from a pooled (B, D) or from every token (B, T, D), behind dropout."""

    def __init__(self, config: ModelConfig, labels: int):
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.proj = nn.Linear(config.dim, labels)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.proj(self.dropout(hidden))


class Pooler(nn.Module):
    """BERT's summary of a row: tanh of a layer over its first token, or over the mean of all."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Heads(nn.Module):
    """The heads that `config.outputs` names; one that is not there is None."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.first = config.family == "encoder"  # an encoder sums a row up in its first token, a decoder in its last
        self.mean = config.pooling == "mean"
        outputs = config.outputs
        self.pooler = Pooler(config) if config.pooler else None
        self.lm_head = LMHead(config) if "lm" in outputs else None
        self.next_sentence = nn.Linear(config.dim, 2) if "next-sentence" in outputs else None
        self.classes = LabelHead(config, config.labels) if "classes" in outputs else None
        self.tags = LabelHead(config, config.labels) if "tags" in outputs else None
        self.span = nn.Linear(config.dim, 2) if "span" in outputs else None  # scores of being first and last

    def pool(self, hidden: Tensor, lengths: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        """One vector for each row (or document) of hidden (B, T, D): (B, D), what next_sentence and classes read."""
        x = (mean_pool if self.mean else self.summary)(hidden, lengths, documents)
        return x if self.pooler is None else self.pooler(x)

    def summary(self, hidden: Tensor, lengths: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        """The token of each row that has seen the whole of it, as it is: (B, T, D) to (B, D)."""
        if documents is not None:
            starts = documents.starts.long()
            return hidden[0, starts[:-1] if self.first else starts[1:] - 1]
        if self.first:
            return hidden[:, 0]
        if lengths is None:
            return hidden[:, -1]
        return hidden[torch.arange(len(hidden), device=hidden.device), (lengths - 1).clamp(min=0)]


def mean_pool(hidden: Tensor, lengths: Tensor | None = None, documents: Documents | None = None) -> Tensor:
    """The mean of each row's (or document's) real tokens: (B, T, D) to (B, D)."""
    if documents is not None:
        wide = hidden[0].to(torch.promote_types(hidden.dtype, torch.float32))  # a GPU adds up in the dtype it is given
        sums = wide.new_zeros(len(documents.lengths), wide.shape[-1]).index_add(0, documents.index, wide)
        return (sums / documents.lengths[:, None].clamp(min=1)).to(hidden.dtype)
    if lengths is None:
        return hidden.mean(1)
    real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
    return (hidden * real[..., None]).sum(1) / lengths[:, None].clamp(min=1)
