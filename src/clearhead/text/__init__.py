"""Strings to ids and back: tokenizers and their special tokens."""

from clearhead.text.build import KINDS, Kind, from_bert, from_gpt2, train, train_files
from clearhead.text.roles import ROLES, Role
from clearhead.text.tokenizer import Tokenizer

__all__ = ["KINDS", "ROLES", "Kind", "Role", "Tokenizer", "from_bert", "from_gpt2", "train", "train_files"]
