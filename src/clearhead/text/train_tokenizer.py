"""Train tokenizers, and load those of GPT-2 and BERT from their original files.

char       characters
word       words and punctuation marks
bpe        byte pair encoding of characters, spaces as ▁
byte-bpe   byte pair encoding of bytes, as GPT-2: lossless for any text
wordpiece  WordPiece, as BERT: longest match first
unigram    unigram language model, spaces as ▁
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from clearhead.config.data import Kind
from clearhead.errors import UserError
from clearhead.files import parse_json, read_lines, read_regular_lines, read_text
from clearhead.limits import MAX_JSON_BYTES, MAX_TOKENS
from clearhead.text.engine_errors import engine_errors
from clearhead.text.roles import ROLES, Role, default_spelling
from clearhead.text.tokenizer import Tokenizer

KINDS: tuple[Kind, ...] = get_args(Kind)
BYTE_ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def train(
    texts: Iterable[str],
    kind: Kind,
    vocab_size: int,
    roles: Sequence[Role] = ("pad", "begin", "end", "unknown"),
    lowercase: bool = False,
    progress: bool = False,
    exact: bool = False,
    where: str = "",
) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` tokens, including special tokens.

    WordPiece always keeps every character, so it can exceed a small `vocab_size`. With `exact`, a text that does not
    support `vocab_size` tokens is an error, except for characters and words. `where` prefixes error messages.
    """
    if kind not in KINDS:
        raise UserError(f"kind: {kind!r} is not allowed; use {', '.join(KINDS)}")
    unknown = default_spelling("unknown")
    # byte-level tokenizers encode any text, so they have no unknown token
    byte_level = kind == "byte-bpe"
    special = [default_spelling(role) for role in ROLES if role in roles and not (role == "unknown" and byte_level)]
    if not byte_level and unknown not in special:
        special.append(unknown)
    min_size = len(special) + (len(BYTE_ALPHABET) if byte_level else 1)
    if vocab_size < min_size:
        raise UserError(f"vocab_size: {vocab_size} is too small for {kind}; it needs {min_size} or more")
    engine = _untrained(kind, unknown)
    if lowercase:
        normalizer = [engine.normalizer] if engine.normalizer else []
        engine.normalizer = normalizers.Sequence([*normalizer, normalizers.Lowercase()])
    # Unigram would match special tokens among its pieces in plain text, so they are added after training
    added_later = [token for token in special if token != unknown] if kind == "unigram" else []
    trained_with = [token for token in special if token not in added_later]
    checked = _CheckedTexts(texts, vocab_size - len(special) if kind == "unigram" else None)
    with engine_errors(f"vocab_size: {vocab_size:,} does not work for this text", "choose another size"):
        trainer = _trainer(kind, vocab_size - len(added_later), trained_with, unknown, progress)
        engine.train_from_iterator(iter(checked), trainer)
    if not checked.characters:
        raise UserError(f"{where}there is no text to train a tokenizer on; give files that are not empty")
    engine.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in added_later])
    tokenizer = Tokenizer(engine)
    if exact and kind not in ("char", "word") and len(tokenizer) < vocab_size:
        raise UserError(
            f"{where}vocab_size: {vocab_size:,} tokens were requested, but the text supports only {len(tokenizer):,}; "
            "ask for at most that many, or give more text"
        )
    return tokenizer


def train_files(paths: Sequence[Path], kind: Kind, vocab_size: int, **options: Any) -> Tokenizer:
    """Train on the lines of files, plain or gzip."""
    where = f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: " if paths else ""
    return train((line for path in paths for line in read_lines(path)), kind, vocab_size, where=where, **options)


def load_folder(folder: Path) -> tuple[Tokenizer, ...]:
    """Load the tokenizers of a folder: one, or source and target; or the original files of GPT-2 or BERT."""
    if (folder / "encoder.json").exists():
        return (from_gpt2(folder),)
    if (folder / "vocab.txt").exists():
        return (from_bert(folder),)
    if (folder / "tokenizer.source.json").exists():
        return tuple(Tokenizer.load(folder / f"tokenizer.{side}.json") for side in ("source", "target"))
    return (Tokenizer.load(folder),)


def from_gpt2(folder: Path) -> Tokenizer:
    """Load GPT-2's tokenizer from `encoder.json` and `vocab.bpe`."""
    file = folder / "encoder.json"
    text = read_text(file, MAX_JSON_BYTES)
    try:
        vocabulary = parse_json(text)
    except ValueError as error:
        raise UserError(f"{file}: {error}; download it again") from None
    ids = vocabulary.values() if isinstance(vocabulary, dict) else [None]
    if not all(type(token_id) is int for token_id in ids) or sorted(ids) != list(range(len(ids))):
        raise UserError(f"{file}: not a vocabulary; expected an object of tokens and the ids from 0 on")
    lines = read_text(folder / "vocab.bpe", MAX_JSON_BYTES).split("\n")
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or any(part not in vocabulary for part in (*pair, "".join(pair))):
            raise UserError(f"{folder / 'vocab.bpe'}, line {number}: expected two known tokens; download it again")
        merges.append((pair[0], pair[1]))
    with engine_errors(f"{file}: not a vocabulary", "download it again"):
        engine = Engine(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    _byte_level(engine)
    if "<|endoftext|>" in vocabulary:
        engine.add_special_tokens([AddedToken("<|endoftext|>", normalized=False, special=True)])
    return Tokenizer(engine, str(file))


def from_bert(folder: Path, lowercase: bool = True) -> Tokenizer:
    """Load BERT's tokenizer from `vocab.txt`."""
    file = folder / "vocab.txt"
    pieces = list(read_regular_lines(file, MAX_TOKENS))
    while pieces and not pieces[-1]:
        pieces.pop()
    if "[UNK]" not in pieces:
        raise UserError(f"{file}: has no line [UNK]; give the vocab.txt of a BERT model")
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    engine = Engine(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    _bert_like(engine, lowercase)
    special = [token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if token in vocabulary]
    engine.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return Tokenizer(engine, str(file))


def _untrained(kind: Kind, unknown: str) -> Engine:
    """Return an untrained tokenizer with the normalizer, pre-tokenizer and decoder of its kind."""
    match kind:
        case "byte-bpe":
            engine = Engine(models.BPE())
            _byte_level(engine)
        case "bpe":
            engine = Engine(models.BPE(unk_token=unknown))
            _metaspace(engine)
        case "unigram":
            engine = Engine(models.Unigram())
            _metaspace(engine)
        case "wordpiece":
            engine = Engine(models.WordPiece(unk_token=unknown))
            _bert_like(engine, lowercase=False)
        case "word":
            engine = Engine(models.WordLevel(unk_token=unknown))
            engine.pre_tokenizer = pre_tokenizers.Whitespace()
            engine.decoder = decoders.WordPiece(cleanup=True)  # no space before punctuation
        case "char":
            engine = Engine(models.WordLevel(unk_token=unknown))
            engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            engine.decoder = decoders.Fuse()
    return engine


def _byte_level(engine: Engine) -> None:
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()


def _metaspace(engine: Engine) -> None:
    engine.normalizer = normalizers.NFKC()
    # split punctuation, else `dog.` and `dog,` would become two tokens
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
            return trainers.BpeTrainer(initial_alphabet=BYTE_ALPHABET, **common)
        case "bpe":
            return trainers.BpeTrainer(limit_alphabet=max(1, size // 2), **common)
        case "wordpiece":
            return trainers.WordPieceTrainer(limit_alphabet=max(1, size - len(special)), **common)
        case "unigram":
            return trainers.UnigramTrainer(unk_token=unknown, **common)
    return trainers.WordLevelTrainer(**common)


class _CheckedTexts:
    """Count characters while iterating; refuse more distinct characters than `max_alphabet`."""

    def __init__(self, texts: Iterable[str], max_alphabet: int | None):
        self.texts, self.max_alphabet = texts, max_alphabet
        self.characters, self.alphabet = 0, set[str]()

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.characters += len(text)
            if self.max_alphabet is not None:
                self.alphabet.update(text)
            yield text
        # Unigram keeps every character; its trainer never terminates with fewer tokens
        if self.max_alphabet is not None and len(self.alphabet) + 1 > self.max_alphabet:
            missing = len(self.alphabet) + 1 - self.max_alphabet
            raise UserError(
                f"vocab_size: too small for the {len(self.alphabet):,} letters of this text; raise it by {missing:,}"
            )
