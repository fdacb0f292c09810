"""Texts as vectors, and the texts that are most like a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import UserError
from clearhead.model import Documents, Encoder, EncoderDecoder
from clearhead.model.heads import mean_pool
from clearhead.predict.encode_batch import read, rows

if TYPE_CHECKING:
    from clearhead.predict.model import Model

POOLINGS = ("mean", "cls")
Vectors = NDArray[np.float32]


class Match(NamedTuple):
    """A text by its number, and the cosine of its vector with the query's."""

    position: int
    score: float


def embed(
    model: Model, texts: Sequence[str], pooling: str | None = None, normalize: bool = True, cut: bool = False
) -> Vectors:
    """A vector for each text, (N, D): the mean of its tokens, or the one that sums it up; of length 1 by default."""
    if isinstance(model.network, EncoderDecoder):
        model._as(Encoder, "embed")
    pooling = pooling or (model.extra.get("pooling", "mean") if model.data is None else model.data.pooling)
    if pooling not in POOLINGS:
        raise UserError(f"pooling: {pooling!r} is not allowed; use {' or '.join(POOLINGS)}")
    pool = mean_pool if pooling == "mean" else model.inference_network.heads.summary

    def each(hidden: Tensor, documents: Documents, chosen: list[int]) -> list[Vectors]:
        vectors = pool(hidden, None, documents).float()
        return list((F.normalize(vectors, dim=-1) if normalize else vectors).cpu().numpy())

    found = read(model, rows(model, texts, cut=cut), each)
    return np.stack(found) if found else np.zeros((0, model.config.dim), np.float32)


def nearest(queries: Vectors, vectors: Vectors, top: int = 5) -> list[list[Match]]:
    """For each query the `top` vectors with the greatest cosine, by comparing with all; all of length 1."""
    scores = queries @ vectors.T
    best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    return [[Match(int(n), float(row[n])) for n in order] for row, order in zip(scores, best, strict=True)]
