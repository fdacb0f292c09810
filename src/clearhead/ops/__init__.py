"""Functions with a PyTorch reference and faster backends behind one dispatch each.

attention/          attention for any mask, and its backends; masks.py: masks as values
cross_entropy.py    cross-entropy over chunks of the vocabulary
gelu.py             GELU's tanh approximation
linear/             packed, int8 and int4 linear layers
adamw.py            AdamW
triton/, native/    GPU and C kernels
device.py           device names; malloc.py: glibc's allocator settings; openmp.py: how threads wait in training
"""
