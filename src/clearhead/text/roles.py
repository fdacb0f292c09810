"""Special tokens by role: what each is for, and how the libraries of the field spell it.

A tokenizer never says "token 0": it says `tokenizer.id("pad")`. The role of a token follows from its spelling, so a
single tokenizer.json holds everything.
"""

from typing import Literal, get_args

Role = Literal["pad", "begin", "end", "unknown", "mask", "class", "separator", "system", "user", "assistant"]
ROLES: tuple[Role, ...] = get_args(Role)

# The first spelling is ours; the others are read when a foreign vocabulary has them.
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


def spelling(role: Role) -> str:
    """How we write a role when we make a vocabulary ourselves."""
    return SPELLINGS[role][0]


def roles_in(vocabulary: dict[str, int]) -> dict[Role, int]:
    """The roles that a vocabulary has a token for, with its id."""
    return {
        role: vocabulary[found]
        for role, names in SPELLINGS.items()
        if (found := next((name for name in names if name in vocabulary), None)) is not None
    }
