"""Tokenizers and their special tokens."""

from clearhead.config.data import Kind
from clearhead.text.roles import ROLES, Role
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.train_tokenizer import KINDS, from_bert, from_gpt2, load_folder, train, train_files

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
