"""The Transformer as one small, fast package: translator, BERT, GPT and Llama by config."""

__version__ = "0.1.0"
