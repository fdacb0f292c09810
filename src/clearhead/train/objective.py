"""What is made small: every task's loss of a batch, behind one `forward`, so that one loop trains them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from clearhead.config.data import DataConfig
from clearhead.config.train import TrainConfig
from clearhead.data import IGNORED, Batch
from clearhead.model import Decoder, Documents, Encoder, EncoderDecoder, Network
from clearhead.model.heads import mean_pool
from clearhead.ops.cross_entropy import Chunk
from clearhead.train import losses
from clearhead.train.losses import Loss
from clearhead.train.scheduled_sampling import probability, scheduled_inputs

NUMERIC = ("regression", "similarity")  # tasks whose answer is a number, so that none is simply right


class Draws(NamedTuple):
    """What a training pass may draw at random from, and how far training has come."""

    step: int
    generator: torch.Generator


class Objective(nn.Module):
    """A network with the losses of its task, by name: usually one, two for BERT's pretraining."""

    class_weights: Tensor | None

    def __init__(self, network: Network, data: DataConfig, train: TrainConfig, class_weights: Tensor | None = None):
        super().__init__()
        self.network, self.data, self.train_settings = network, data, train
        self.register_buffer("class_weights", class_weights, persistent=False)  # (C,)
        self.piece: Callable[..., Chunk] | None = None  # a compiled `losses.piece`, put on from outside

    def counts(self, batch: Batch) -> dict[str, int]:
        """How many items of each loss a batch has; known before the pass, so that its loss can be a share of all."""
        labels = batch["labels" if "labels" in batch.tensors else "first_token"]
        name: str = self.data.task if self.network.heads.lm_head is None else "words"
        found = {name: int((labels != IGNORED).sum())}
        if "next_sentence" in batch.tensors:
            found["next_sentence"] = int((batch["next_sentence"] != IGNORED).sum())
        return found

    def forward(self, batch: Batch, draws: Draws | None = None) -> dict[str, Loss]:
        """The losses of a batch; `draws` when it is for training."""
        match self.data.task:
            case "translation":
                return {"words": self._translation(batch, draws)}
            case "language-model":
                decoder = cast(Decoder, self.network)
                return {"words": self._words(decoder.decode(batch["ids"], documents=batch.documents.get("ids")), batch)}
            case "masked-language-model":
                return self._masked(batch)
            case "similarity":
                first, second = (self.embed(batch, side) for side in ("first", "second"))
                if self.data.contrastive:
                    return {"similarity": losses.contrastive_loss(first, second)}
                return {"similarity": losses.cosine_loss(first, second, batch["labels"])}
        hidden = self._hidden(batch)
        heads, lengths, documents = self.network.heads, batch.get("ids_lengths"), batch.documents.get("ids")
        match self.data.task:
            case "tagging":
                assert heads.tags is not None
                return {"tagging": losses.tag_loss(heads.tags(hidden), batch["labels"], self.class_weights)}
            case "answering":
                assert heads.span is not None
                scores = heads.span(hidden)
                if documents is not None:  # two scores a token: cheap to give every row its own line
                    scores, lengths = documents.pad(scores[:, None])[:, 0], documents.lengths
                assert lengths is not None
                return {"answering": losses.span_loss(scores, batch["first_token"], batch["last_token"], lengths)}
        assert heads.classes is not None
        scores = heads.classes(heads.pool(hidden, lengths, documents))
        if self.data.task == "regression":
            return {"regression": losses.regression_loss(scores, batch["labels"])}
        return {"classification": losses.class_loss(scores, batch["labels"], self.class_weights)}

    def _words(self, hidden: Tensor, batch: Batch) -> Loss:
        head = self.network.heads.lm_head
        assert head is not None
        smoothing = self.train_settings.label_smoothing if self.training else 0.0
        return losses.lm_loss(hidden, head, batch["labels"], smoothing, compiled=self.piece)

    def _translation(self, batch: Batch, draws: Draws | None) -> Loss:
        network = cast(EncoderDecoder, self.network)
        target = batch["target"]
        lengths = batch.get("source_lengths"), batch.get("target_lengths")
        packed: Mapping[str, Documents] = batch.documents
        documents = packed.get("source"), packed.get("target")
        sampling = self.train_settings.scheduled_sampling
        if sampling is not None and draws is not None:
            share = probability(sampling.decay, draws.step, sampling.decay_steps, sampling.min_prob)
            target = scheduled_inputs(
                network,
                batch["source"],
                target,
                *lengths,
                share,
                draws.generator,
                source_documents=documents[0],
                target_documents=documents[1],
            )
        encoder_output = network.encode(batch["source"], lengths[0], documents=documents[0])
        return self._words(network.decode(target, encoder_output, lengths[1], documents=documents[1]), batch)

    def _masked(self, batch: Batch) -> dict[str, Loss]:
        hidden = self._hidden(batch)
        found = {"words": self._words(hidden, batch)}
        heads = self.network.heads
        if heads.next_sentence is not None:
            pooled = heads.pool(hidden, batch.get("ids_lengths"), batch.documents.get("ids"))
            found["next_sentence"] = losses.next_sentence(heads.next_sentence(pooled), batch["next_sentence"])
        return found

    def _hidden(self, batch: Batch, side: str = "ids") -> Tensor:
        """Hidden states of one side, whichever way the network reads: (B, T, D), or (1, N, D) packed."""
        lengths, documents = batch.get(f"{side}_lengths"), batch.documents.get(side)
        if isinstance(self.network, Encoder):
            segments = batch.get("segments") if self.network.config.segments else None
            return self.network.encode(batch[side], lengths, documents=documents, segments=segments)
        return cast(Decoder, self.network).decode(batch[side], lengths, documents=documents)

    def embed(self, batch: Batch, side: str) -> Tensor:
        """One vector for each text, (B, D), by the pooling that the data asks for."""
        hidden, lengths, documents = self._hidden(batch, side), batch.get(f"{side}_lengths"), batch.documents.get(side)
        pool = mean_pool if self.data.pooling == "mean" else self.network.heads.summary
        return pool(hidden, lengths, documents)
