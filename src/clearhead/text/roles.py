"""Roles of special tokens, and their spellings in common vocabularies.

Special tokens are addressed by role, as in `tokenizer.id("pad")`. The role of a token follows from its spelling, so
tokenizer.json needs no extra fields.
"""

from typing import Literal, get_args

Role = Literal["pad", "begin", "end", "unknown", "mask", "class", "separator", "system", "user", "assistant"]
ROLES: tuple[Role, ...] = get_args(Role)

# The first spelling is used for new vocabularies; the others are recognized in foreign ones.
SPELLINGS: dict[Role, tuple[str, ...]] = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "begin": ("<begin>", "<s>", "<bos>", "<|begin_of_text|>", "<|im_start|>", "[BOS]"),
    "end": ("<end>", "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[EOS]"),
    "unknown": ("<unknown>", "[UNK]", "<unk>"),
    "mask": ("<mask>", "[MASK]"),
    "class": ("<class>", "[CLS]"),
    "separator": ("<separator>", "[SEP]"),
    "system": ("<system>", "<|system|>"),
    "user": ("<user>", "<|user|>"),
    "assistant": ("<assistant>", "<|assistant|>"),
}


def default_spelling(role: Role) -> str:
    """Return the spelling of a role in new vocabularies."""
    return SPELLINGS[role][0]


def find_roles(vocabulary: dict[str, int]) -> dict[Role, int]:
    """Map the roles present in a vocabulary to their ids."""
    return {
        role: vocabulary[token]
        for role, spellings in SPELLINGS.items()
        if (token := next((spelling for spelling in spellings if spelling in vocabulary), None)) is not None
    }
