"""Output heads on the hidden states: logits, next sentence, classes, tags, answer spans.

B batch · T tokens · D model dim · V vocabulary
"""

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.feedforward import ACTIVATIONS
from clearhead.model.norms import build_norm
from clearhead.ops.masks import Documents


class LMHead(nn.Module):
    """Logits over the vocabulary: (B, T, D) to (B, T, V). Its matrix may be tied to the embedding (section 3.4)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.transform = MLMTransform(config) if config.family == "encoder" else None
        self.proj = nn.Linear(config.dim, config.target_vocab, bias=config.output_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.proj(hidden if self.transform is None else self.transform(hidden))


class MLMTransform(nn.Module):
    """BERT's layer before the logits: linear, activation, norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        # Called on selected positions only, so batch statistics would not be those of the batch.
        self.norm = build_norm(config.model_copy(update={"norm": "layer"}) if config.norm == "batch" else config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.linear(hidden)))


class LabelHead(nn.Module):
    """Dropout and a linear layer to label logits, from pooled (B, D) or per-token (B, T, D) hidden states."""

    def __init__(self, config: ModelConfig, labels: int):
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.proj = nn.Linear(config.dim, labels)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.proj(self.dropout(hidden))


class Pooler(nn.Module):
    """BERT's pooler: linear and tanh on a pooled hidden state (B, D); DistilBERT's has relu."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear = nn.Linear(config.dim, config.dim)
        self.activation = torch.tanh if config.pooler_activation == "tanh" else torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class Heads(nn.Module):
    """The heads listed in `config.outputs`; the others are None."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.pools_first = config.family == "encoder"  # an encoder pools its first token, a decoder its last
        self.pools_mean = config.pooling == "mean"
        outputs = config.outputs
        self.pooler = Pooler(config) if config.pooler else None
        self.lm_head = LMHead(config) if "lm" in outputs else None
        self.next_sentence = nn.Linear(config.dim, 2) if "next-sentence" in outputs else None
        self.classes = LabelHead(config, config.labels) if "classes" in outputs else None
        self.tags = LabelHead(config, config.labels) if "tags" in outputs else None
        self.span = nn.Linear(config.dim, 2) if "span" in outputs else None  # logits of the answer's start and end

    def pool(self, hidden: Tensor, lengths: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        """Pool each row (or document) of hidden (B, T, D) into one vector (B, D), for next_sentence and classes."""
        x = (mean_pool if self.pools_mean else self.token_pool)(hidden, lengths, documents)
        return x if self.pooler is None else self.pooler(x)

    def token_pool(self, hidden: Tensor, lengths: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        """Return the first (encoder) or last (decoder) token of each row or document: (B, T, D) to (B, D)."""
        if documents is not None:
            starts = documents.starts.long()
            return hidden[0, starts[:-1] if self.pools_first else starts[1:] - 1]
        if self.pools_first:
            return hidden[:, 0]
        if lengths is None:
            return hidden[:, -1]
        return hidden[torch.arange(len(hidden), device=hidden.device), (lengths - 1).clamp(min=0)]


def mean_pool(hidden: Tensor, lengths: Tensor | None = None, documents: Documents | None = None) -> Tensor:
    """Average the tokens of each row or document, padding excluded: (B, T, D) to (B, D)."""
    if documents is not None:
        x = hidden[0].to(torch.promote_types(hidden.dtype, torch.float32))  # index_add would sum in bf16
        sums = x.new_zeros(len(documents.lengths), x.shape[-1]).index_add(0, documents.index, x)
        return (sums / documents.lengths[:, None].clamp(min=1)).to(hidden.dtype)
    if lengths is None:
        return hidden.mean(1)
    padding_mask = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]  # (B, T)
    return (hidden * padding_mask[..., None]).sum(1) / lengths[:, None].clamp(min=1)
