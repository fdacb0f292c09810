"""Attention: one dispatch, the reference, and its backends."""
