"""The most likely tokens of each row of logits, with their log-probabilities.   M rows · V vocabulary"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.ops.native.structs import check, level, step_library


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest of log_softmax(logits) (M, V), highest first, and their tokens: (M, k) each.

    In one native pass on a CPU; log_softmax and topk elsewhere.
    """
    lib = step_library()
    native = lib is not None and logits.is_cpu and logits.dtype == torch.float32 and logits.stride(1) == 1
    if not native or not 0 < k <= logits.shape[1]:
        values, tokens = logits.topk(min(k, logits.shape[1]), dim=1)
        return values - logits.logsumexp(dim=1, keepdim=True), tokens
    rows, count = logits.shape
    values, tokens = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int32)
    sizes, pointers = (rows, logits.stride(0), count, k), (values.data_ptr(), tokens.data_ptr())
    check(lib.clearhead_top_logprobs(logits.data_ptr(), *sizes, *pointers, level(), torch.get_num_threads()))  # type: ignore[union-attr]
    return values, tokens.long()


def top_values(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest of each row of x (M, V), highest first, and their tokens: (M, k) each."""
    _, tokens = top_logprobs(x, k)
    return x.gather(1, tokens), tokens
