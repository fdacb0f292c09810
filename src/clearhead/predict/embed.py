"""Texts as vectors, and exact nearest-neighbor search.   N texts · Q queries · D model dim"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import UserError
from clearhead.model import Documents, Encoder, EncoderDecoder
from clearhead.model.heads import mean_pool
from clearhead.predict.check_arguments import check_number
from clearhead.predict.encode_batch import encode_packed, rows
from clearhead.predict.results import Match

if TYPE_CHECKING:
    from clearhead.predict.model import Model

POOLINGS = ("mean", "cls")
Vectors = NDArray[np.float32]


def embed(
    model: Model, texts: Sequence[str], pooling: str | None = None, normalize: bool = True, truncate: bool = False
) -> Vectors:
    """Vectors (N, D): the mean over tokens or the summary token, as in training; of norm 1 by default."""
    if isinstance(model.network, EncoderDecoder):
        model.inference_network_for(Encoder, "embed")
    pooling = pooling or (model.extra.get("pooling", "mean") if model.data is None else model.data.pooling)
    if pooling not in POOLINGS:
        raise UserError(f"pooling: {pooling!r} is not allowed; use {' or '.join(POOLINGS)}")
    pool = mean_pool if pooling == "mean" else model.inference_network.heads.token_pool

    def pool_rows(hidden: Tensor, documents: Documents, numbers: list[int]) -> list[Vectors]:
        vectors = pool(hidden, None, documents).float()
        return list((F.normalize(vectors, dim=-1) if normalize else vectors).cpu().numpy())

    vectors = encode_packed(model, rows(model, texts, truncate=truncate), pool_rows)
    return np.stack(vectors) if vectors else np.zeros((0, model.config.dim), np.float32)


def nearest(queries: Vectors, vectors: Vectors, texts: Sequence[str], top: int = 5) -> list[list[Match]]:
    """The `top` texts with the highest cosine similarity to each query; queries (Q, D) and vectors (N, D) of norm 1."""
    check_number("top", top, 1)
    scores = queries @ vectors.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    return [[Match(texts[n], int(n), float(row[n])) for n in best] for row, best in zip(scores, order, strict=True)]
