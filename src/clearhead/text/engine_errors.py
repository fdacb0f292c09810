"""Errors of the tokenizers library as UserError, and a try-out of what a tokenizer.json makes it do."""

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from clearhead.errors import UserError

MAX_TRY_CHARS = 1 << 14
MAX_TRY_PIECES = 100
SECONDS_PER_CHAR = 1e-5  # published tokenizers need a twentieth of it
START_SECONDS = 0.02
MAX_GROWTH = 16  # normalized characters, or tokens, for each character
LINES = (
    "Hello world, it's 2024!\n\tdef f(x):\r\n    return x\n«Grüße…» 你好,世界。 Привет мир 🐈 http://a.b/c [x] <y>\n"
)
NO_MODEL: dict[str, Any] = {
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    "added_tokens": [],
    "post_processor": None,
    "decoder": None,
}
ODD_TEXTS = ("", " ", "\x00a", "\u0378\ufdd0\x00", "\u0301\u00ad\u200d", "\ufdfa\u0130\u1e9e")


class Unusable(ValueError):
    """What is wrong with a tokenizer that was tried out."""


@contextlib.contextmanager
def engine_errors(what: str, advice: str = "download or train it again") -> Iterator[None]:
    """Turn whatever the library raises into a UserError of one line: what fails, the reason, the advice."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # a panic of Rust code is a BaseException of a class that cannot be imported
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise UserError(f"{what} ({reason:.200}); {advice}") from None


def try_steps(settings: Mapping[str, Any]) -> None:
    """Try the steps before the model, then what they make of added tokens, which the engine normalizes as it loads.

    The engine never ends when a token becomes empty, and splits n spaces into n overlapping rows for one that strips.
    """
    engine = tokenizers.Tokenizer.from_str(json.dumps({**settings, **NO_MODEL}))
    engine.no_padding()
    engine.no_truncation()
    try_out(engine, {})
    started, total = time.thread_time(), 0
    for token in settings.get("added_tokens") or ():
        content = token["content"]
        forms = {content} if engine.normalizer is None else {content, engine.normalizer.normalize_str(content)}
        if "" in forms - {content}:
            raise Unusable(f"the normalizer makes nothing of the added token {content!r:.40}")
        if (token.get("lstrip") or token.get("rstrip")) and not all(form.strip() for form in forms):
            raise Unusable(f"the added token {content!r:.40} is of spaces and strips those beside it")
        total += len(content)
        if time.thread_time() - started > START_SECONDS + SECONDS_PER_CHAR * total:
            raise Unusable(f"the normalizer is slow: {total:,} characters of added tokens take too long")


def try_out(engine: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> None:
    """Encode and decode more and more text, then odd texts; raise Unusable where this is slow or makes too much of it.

    Slow on any text means a regex that backtracks; the engine itself gives up on exponential ones. Errors other than
    panics are those of a text, such as a letter that the vocabulary lacks: they are raised where it is used.
    """
    size = 64
    while size <= MAX_TRY_CHARS:
        limit = START_SECONDS + SECONDS_PER_CHAR * size
        if (seconds := _try_size(engine, vocabulary, size)) > limit:
            # Once more: a process that a busy machine interrupts is charged for what it did not do.
            seconds = min(seconds, _try_size(engine, vocabulary, size), _try_size(engine, vocabulary, size))
        if seconds > limit:
            raise Unusable(f"{size:,} characters take {seconds:.2g} seconds")
        size *= 2
    for ids in ([], *([piece] for piece in itertools.islice(vocabulary.values(), MAX_TRY_PIECES))):
        with contextlib.suppress(Exception):
            engine.decode(ids, skip_special_tokens=False)
    added = itertools.islice(engine.get_added_tokens_decoder().values(), MAX_TRY_PIECES)
    engine.encode_special_tokens = False
    for text in (*ODD_TEXTS, *(f"a{token.content} {token.content}{token.content}  b" for token in added)):
        with contextlib.suppress(Exception):
            engine.encode(text, add_special_tokens=False)


def _try_size(engine: tokenizers.Tokenizer, vocabulary: Mapping[str, int], size: int) -> float:
    """Encode and decode a text of this many characters; return the seconds that it takes."""
    text, made, started = _text_of(size), 0, time.thread_time()
    with contextlib.suppress(Exception):
        made = len(engine.normalizer.normalize_str(text)) if engine.normalizer else 0
        if made <= MAX_GROWTH * size:
            made = len(engine.encode(text, add_special_tokens=False).ids)
    with contextlib.suppress(Exception):
        if engine.decoder:
            engine.decoder.decode([text])
        engine.decode(_ids_of(vocabulary, size), skip_special_tokens=False)
    if made > MAX_GROWTH * size:
        raise Unusable(f"it makes {made:,} characters or tokens of {size:,} characters")
    return time.thread_time() - started


def _ids_of(vocabulary: Mapping[str, int], size: int) -> list[int]:
    """Ids of the first tokens, again and again: together at most `size` characters."""
    ids, total = [], 0
    for token, token_id in itertools.islice(itertools.cycle(vocabulary.items()), size):
        total += len(token)
        if total > size:
            break
        ids.append(token_id)
    return ids


def _text_of(size: int) -> str:
    """Lines of many kinds, and long words, numbers and spaces."""
    lines = (LINES * (size // len(LINES) + 1))[: size // 2]
    return "".join([lines, *(letter * (size // 8) for letter in "a1 \n")])


class _Quiet:
    """Standard error, discarded while any thread wants it so; each by itself could restore another's discarding."""

    def __init__(self) -> None:
        self.lock, self.threads, self.saved = threading.Lock(), 0, -1

    def __enter__(self) -> None:
        with self.lock:
            self.threads += 1
            if self.threads > 1:
                return
            with contextlib.suppress(OSError):  # closed
                self.saved = os.dup(2)
                with open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), 2)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.threads -= 1
            if not self.threads and self.saved >= 0:
                os.dup2(self.saved, 2)
                os.close(self.saved)
                self.saved = -1


_quiet = _Quiet()


def quiet_stderr() -> contextlib.AbstractContextManager[None]:
    """Discard what native code writes to standard error: the library prints a panic before it raises it."""
    return _quiet
