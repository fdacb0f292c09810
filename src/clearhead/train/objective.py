"""The training objective: a network and the losses of its task behind one `forward`."""

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
from clearhead.ops.cross_entropy import CrossEntropyChunk
from clearhead.train import losses
from clearhead.train.losses import Loss
from clearhead.train.scheduled_sampling import sampling_prob, scheduled_inputs

NO_ACCURACY = ("regression", "similarity")  # tasks with a numeric target


class StepContext(NamedTuple):
    """The step and the random generator of a training pass, for scheduled sampling."""

    step: int
    generator: torch.Generator


class Objective(nn.Module):
    """A network with the losses of its task by name: usually one, two for BERT pretraining."""

    class_weights: Tensor | None

    def __init__(self, network: Network, data: DataConfig, train: TrainConfig, class_weights: Tensor | None = None):
        super().__init__()
        self.network, self.data, self.train_settings = network, data, train
        self.register_buffer("class_weights", class_weights, persistent=False)  # (C,)
        self.chunk_fn: Callable[..., CrossEntropyChunk] | None = (
            None  # a fast `cross_entropy_chunk`, set by `apply_compile`
        )

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The names of the losses, that of the task first."""
        heads = self.network.heads
        name: str = self.data.task if heads.lm_head is None else "lm"
        return (name,) if heads.next_sentence is None else (name, "next_sentence")

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return the labeled items of each loss in a batch, known before the forward pass to normalize its losses."""
        labels = batch["labels" if "labels" in batch.tensors else "first_token"]
        counts = {self.loss_names[0]: int((labels != IGNORED).sum())}
        if "next_sentence" in batch.tensors:
            counts["next_sentence"] = int((batch["next_sentence"] != IGNORED).sum())
        return counts

    def forward(self, batch: Batch, context: StepContext | None = None) -> dict[str, Loss]:
        """Return the losses of a batch; `context` is given in training."""
        match self.data.task:
            case "translation":
                return {"lm": self._translation(batch, context)}
            case "language-model":
                hidden = cast(Decoder, self.network).decode(batch["ids"], documents=batch.documents.get("ids"))
                return {"lm": self._lm_loss(hidden, batch)}
            case "masked-language-model":
                return self._masked_lm(batch)
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
                logits = heads.span(hidden)
                if documents is not None:  # two logits per token: unpacking them into padded rows is cheap
                    logits, lengths = documents.pad(logits[:, None])[:, 0], documents.lengths
                assert lengths is not None
                return {"answering": losses.span_loss(logits, batch["first_token"], batch["last_token"], lengths)}
        assert heads.classes is not None
        logits = heads.classes(heads.pool(hidden, lengths, documents))
        if self.data.task == "regression":
            return {"regression": losses.regression_loss(logits, batch["labels"])}
        return {"classification": losses.class_loss(logits, batch["labels"], self.class_weights)}

    def _lm_loss(self, hidden: Tensor, batch: Batch) -> Loss:
        head = self.network.heads.lm_head
        assert head is not None
        label_smoothing = self.train_settings.label_smoothing if self.training else 0.0
        return losses.lm_loss(hidden, head, batch["labels"], label_smoothing, chunk_fn=self.chunk_fn)

    def _translation(self, batch: Batch, context: StepContext | None) -> Loss:
        network = cast(EncoderDecoder, self.network)
        target = batch["target"]
        lengths = batch.get("source_lengths"), batch.get("target_lengths")
        packed: Mapping[str, Documents] = batch.documents
        documents = packed.get("source"), packed.get("target")
        sampling = self.train_settings.scheduled_sampling
        if sampling is not None and context is not None:
            target = scheduled_inputs(
                network,
                batch["source"],
                target,
                *lengths,
                sampling_prob(sampling.decay, context.step, sampling.decay_steps, sampling.min_prob),
                context.generator,
                source_documents=documents[0],
                target_documents=documents[1],
            )
        encoder_output = network.encode(batch["source"], lengths[0], documents=documents[0])
        return self._lm_loss(network.decode(target, encoder_output, lengths[1], documents=documents[1]), batch)

    def _masked_lm(self, batch: Batch) -> dict[str, Loss]:
        hidden = self._hidden(batch)
        result = {"lm": self._lm_loss(hidden, batch)}
        heads = self.network.heads
        if heads.next_sentence is not None:
            pooled = heads.pool(hidden, batch.get("ids_lengths"), batch.documents.get("ids"))
            logits = heads.next_sentence(pooled)
            result["next_sentence"] = losses.next_sentence_loss(logits, batch["next_sentence"])
        return result

    def _hidden(self, batch: Batch, side: str = "ids") -> Tensor:
        """Hidden states of one side, from an encoder or a decoder: (B, T, D), or (1, N, D) packed."""
        lengths, documents = batch.get(f"{side}_lengths"), batch.documents.get(side)
        if isinstance(self.network, Encoder):
            segments = batch.get("segments") if self.network.config.segments > 1 else None
            return self.network.encode(batch[side], lengths, documents=documents, segments=segments)
        return cast(Decoder, self.network).decode(batch[side], lengths, documents=documents)

    def embed(self, batch: Batch, side: str) -> Tensor:
        """Return one embedding per text (B, D), pooled as `data.pooling` specifies."""
        hidden, lengths, documents = self._hidden(batch, side), batch.get(f"{side}_lengths"), batch.documents.get(side)
        pool = mean_pool if self.data.pooling == "mean" else self.network.heads.token_pool
        return pool(hidden, lengths, documents)
