"""Linear layers for inference: packed, int8 and int4 weights."""
