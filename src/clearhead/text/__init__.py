"""Strings to ids and back: tokenizers and their special tokens."""

from clearhead.config.data import Kind
from clearhead.text.build import KINDS, from_bert, from_gpt2, load_folder, train, train_files
from clearhead.text.roles import ROLES, Role
from clearhead.text.tokenizer import Tokenizer

__all__ = [
    "KINDS",
    "ROLES",
    "Kind",
    "Role",
    "Tokenizer",
    "from_bert",
    "from_gpt2",
    "load_folder",
    "train",
    "train_files",
]
