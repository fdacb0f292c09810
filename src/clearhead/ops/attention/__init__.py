"""Attention: one dispatch, the reference formula, and the backends that must equal it.

dispatch.py       `attend`: the first backend that accepts the mask, dtype and device
reference.py      the formula of the paper
sdpa.py           torch's scaled_dot_product_attention, and matmuls where those are faster on a CPU
varlen.py         packed rows on a GPU: variable-length flash attention
flex.py           windows and summaries on a GPU: FlexAttention
sparse.py         sparse patterns in plain torch, on any device
packed_cpu.py     packed rows on a CPU: runs of equally long documents
cpu_training.py   fp32 training on a CPU, by batched matmuls
"""

from clearhead.ops.attention.dispatch import attend, attention_backend, attention_with_weights, choose_backend
from clearhead.ops.attention.reference import attention

__all__ = ["attend", "attention", "attention_backend", "attention_with_weights", "choose_backend"]
