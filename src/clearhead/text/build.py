"""Tokenizers trained from texts, one recipe for each kind, and those of GPT-2 and BERT from their published files.

char       every character a token
word       words and punctuation marks
bpe        pairs of characters joined by frequency, spaces as ▁
byte-bpe   pairs of bytes joined by frequency, as GPT-2: any text can be written, and comes back exactly
wordpiece  as BERT: the longest known piece first
unigram    the most probable pieces, spaces as ▁
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from clearhead.config.data import Kind
from clearhead.errors import UserError
from clearhead.files import read_lines, read_text
from clearhead.text.roles import ROLES, Role, spelling
from clearhead.text.tokenizer import Tokenizer

KINDS: tuple[Kind, ...] = get_args(Kind)
BYTES = pre_tokenizers.ByteLevel.alphabet()


def train(
    texts: Iterable[str],
    kind: Kind,
    size: int,
    roles: Sequence[Role] = ("pad", "begin", "end", "unknown"),
    lowercase: bool = False,
    progress: bool = False,
    exact: bool = False,
    where: str = "",
) -> Tokenizer:
    """A tokenizer of at most `size` tokens, special ones included, learned from texts.

    WordPiece always has every letter that stands inside a word, so it may have a few more where `size` is small.
    `where` names the text in errors. With `exact`, a text that does not support so many is an error; characters and
    words are as many as there are.
    """
    if kind not in KINDS:
        raise UserError(f"kind: {kind!r} is not allowed; use {', '.join(KINDS)}")
    unknown = spelling("unknown")
    # A byte-level tokenizer knows every text, so it gets no token for what it does not know.
    wanted = [spelling(role) for role in ROLES if role in roles and not (role == "unknown" and kind == "byte-bpe")]
    if kind != "byte-bpe" and unknown not in wanted:
        wanted.append(unknown)
    least = len(wanted) + (len(BYTES) if kind == "byte-bpe" else 1)
    if size < least:
        raise UserError(f"size: {size} is too small for {kind}; it needs {least} for its special tokens and letters")
    engine = _empty(kind, unknown)
    if lowercase:
        before = [engine.normalizer] if engine.normalizer else []
        engine.normalizer = normalizers.Sequence([*before, normalizers.Lowercase()])
    # A special token among Unigram's pieces would be found in ordinary text, so it comes after them.
    later = [token for token in wanted if token != unknown] if kind == "unigram" else []
    now = [token for token in wanted if token not in later]
    seen = _Counted(texts, size - len(wanted) if kind == "unigram" else None)
    try:
        engine.train_from_iterator(iter(seen), _trainer(kind, size - len(later), now, unknown, progress))
    except UserError:
        raise
    except Exception as error:  # the library's own findings come as plain Exception
        raise UserError(f"size: {size:,} does not work for this text ({error}); ask for another size") from None
    if not seen.characters:
        raise UserError(
            f"{where.removesuffix('tokenizer.')}there is no text to train a tokenizer on; give files that are not empty"
        )
    engine.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in later])
    made = Tokenizer(engine)
    if exact and kind not in ("char", "word") and len(made) < size:
        raise UserError(
            f"{where}size: {size:,} tokens were asked for, but the text supports only {len(made):,}; ask for at most "
            "that many, or give more text"
        )
    return made


def train_files(paths: Sequence[Path], kind: Kind, size: int, **options: Any) -> Tokenizer:
    """`train` on the lines of files, plain or gzip."""
    where = f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: " if paths else ""
    return train((line for path in paths for line in read_lines(path)), kind, size, where=where, **options)


def load_folder(folder: Path) -> tuple[Tokenizer, ...]:
    """The tokenizers of a folder, whoever wrote it: ours (one, or a source's and a target's), GPT-2's or BERT's."""
    if (folder / "encoder.json").exists():
        return (from_gpt2(folder),)
    if (folder / "vocab.txt").exists():
        return (from_bert(folder),)
    if (folder / "tokenizer.source.json").exists():
        return tuple(Tokenizer.load(folder / f"tokenizer.{side}.json") for side in ("source", "target"))
    return (Tokenizer.load(folder),)


def from_gpt2(folder: Path) -> Tokenizer:
    """GPT-2's tokenizer from `encoder.json` and `vocab.bpe`."""
    file = folder / "encoder.json"
    try:
        vocabulary = json.loads(read_text(file, 1 << 26))
    except (json.JSONDecodeError, RecursionError):
        raise UserError(f"{file} is not valid JSON; fetch it again") from None
    if not isinstance(vocabulary, dict) or not all(isinstance(number, int) for number in vocabulary.values()):
        raise UserError(f"{file} is no vocabulary: expected tokens with their numbers")
    lines = read_text(folder / "vocab.bpe", 1 << 26).split("\n")
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or any(part not in vocabulary for part in (*pair, "".join(pair))):
            raise UserError(f"{folder / 'vocab.bpe'}, line {number}: expected two tokens of encoder.json to join")
        merges.append((pair[0], pair[1]))
    engine = Engine(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    _byte_level(engine)
    if "<|endoftext|>" in vocabulary:
        engine.add_special_tokens([AddedToken("<|endoftext|>", normalized=False, special=True)])
    return Tokenizer(engine)


def from_bert(folder: Path, lowercase: bool = True) -> Tokenizer:
    """BERT's tokenizer from `vocab.txt`, a piece a line."""
    file = folder / "vocab.txt"
    pieces = list(read_lines(file))
    while pieces and not pieces[-1]:
        pieces.pop()
    if "[UNK]" not in pieces:
        raise UserError(f"{file} has no line [UNK]; it is no BERT vocabulary")
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    engine = Engine(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    _bert_like(engine, lowercase)
    special = [token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if token in vocabulary]
    engine.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return Tokenizer(engine)


def _empty(kind: Kind, unknown: str) -> Engine:
    """An engine of a kind that has learned nothing yet."""
    match kind:
        case "byte-bpe":
            engine = Engine(models.BPE())
            _byte_level(engine)
        case "bpe":
            engine = Engine(models.BPE(unk_token=unknown))
            _spaces_visible(engine)
        case "unigram":
            engine = Engine(models.Unigram())
            _spaces_visible(engine)
        case "wordpiece":
            engine = Engine(models.WordPiece(unk_token=unknown))
            _bert_like(engine, lowercase=False)
        case "word":
            engine = Engine(models.WordLevel(unk_token=unknown))
            engine.pre_tokenizer = pre_tokenizers.Whitespace()
            engine.decoder = decoders.WordPiece(cleanup=True)  # a full stop stands right behind its word
        case "char":
            engine = Engine(models.WordLevel(unk_token=unknown))
            engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            engine.decoder = decoders.Fuse()
    return engine


def _byte_level(engine: Engine) -> None:
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()


def _spaces_visible(engine: Engine) -> None:
    engine.normalizer = normalizers.NFKC()
    # A mark is a token of its own: else `dog.` and `dog,` would be two words, each to be learned by itself.
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    engine.decoder = decoders.Metaspace()


def _bert_like(engine: Engine, lowercase: bool) -> None:
    engine.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()


def _trainer(kind: Kind, size: int, special: list[str], unknown: str, progress: bool) -> Any:
    common: dict[str, Any] = {"vocab_size": size, "special_tokens": special, "show_progress": progress}
    match kind:
        case "byte-bpe":
            return trainers.BpeTrainer(initial_alphabet=BYTES, **common)
        case "bpe":
            return trainers.BpeTrainer(limit_alphabet=max(1, size // 2), **common)
        case "wordpiece":
            return trainers.WordPieceTrainer(limit_alphabet=max(1, size - len(special)), **common)
        case "unigram":
            return trainers.UnigramTrainer(unk_token=unknown, **common)
    return trainers.WordLevelTrainer(**common)


class _Counted:
    """Texts passing by: training on nothing is refused, and so are more letters than there is room for."""

    def __init__(self, texts: Iterable[str], room: int | None):
        self.texts, self.room, self.characters, self.letters = texts, room, 0, set[str]()

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.characters += len(text)
            if self.room is not None:
                self.letters.update(text)
            yield text
        # Unigram keeps every letter; with less room, the library does not come to an end.
        if self.room is not None and len(self.letters) + 1 > self.room:
            needed = len(self.letters) + 1 - self.room
            raise UserError(
                f"size: too small for the {len(self.letters):,} letters of this text; ask for {needed:,} more"
            )
