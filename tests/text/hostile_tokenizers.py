"""Random tokenizer.json files of every component, with random and extreme parameters, and what loading and use do.

As a script: python -m tests.text.hostile_tokenizers FIRST_SEED COUNT
"""

import base64
import faulthandler
import json
import os
import random
import resource
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from clearhead.errors import UserError
from clearhead.text import Tokenizer

PIECES = [
    "a", "b", " ", "▁", "Ġ", "##a", "ab", "</w>", "<s>", "</s>", "<unk>", "[UNK]", "<0xE4>", "ö", "你", "🐈", "\n", "",
]  # fmt: skip
REGEXES = [
    r"\s+", r"\p{L}+|\p{N}", r" ?[^\s\p{L}\p{N}]+", r"(a|a)*[bc]", r"(\w+\s*)+[!?]", r"[\s\S]*[\s\S]*(?=[^\s\S])",
    r"[\s\S]*[^\s\S]", r"(?:(?:a{1000}){1000}){1000}", r"(?=(a*))\1*[bc]", "(", "[", r"\p{Nothing}", "", "a*", "(?:)",
    r"(?<n>a|b\g<n>c)", r".*?", r"$", r"^", r"\b", r"(?i:'s|'t)", r"\x{10FFFF}", r"\Z", "x" * 9000, r"(?<=a|b)",
]  # fmt: skip
TEXTS = [
    "", " ", "a", "ab ab  a", "Hello world </s> <s>", "ö你🐈\n\t", "a" * 300, "\u0378\ufdd0\x00", "ﷺ" * 20, " a" * 200,
]  # fmt: skip
MAX_SECONDS, MAX_MEGABYTES = 1, 200
NUMBERS = [-1, 0, 1, 2, 7, 100, 1 << 31, 1 << 40, (1 << 64) - 1, 1 << 64, 0.5, True, None, "1"]


class Maker:
    """Make one file from a seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.rate = self.random.choice([0, 0.01, 0.03])

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def rarely(self, value: Any, usual: Any) -> Any:
        """An extreme value now and then."""
        return value if self.random.random() < self.rate else usual

    def string(self) -> Any:
        extreme = self.pick("", "a" * 1000, "▁" * 70, "x" * 100_000, None, 5, "\ud7ff", "ﷺ" * 300, "aa", "\0")
        return self.rarely(extreme, self.pick(*PIECES, "ab ", "<s>a"))

    def letter(self) -> Any:
        return self.rarely(self.pick("", "ab", None), self.pick("▁", " ", "a", "Ġ", "你"))

    def number(self) -> Any:
        return self.rarely(self.pick(*NUMBERS), self.random.randrange(12))

    def flag(self) -> Any:
        return self.rarely(self.pick(None, 3, "yes"), self.pick(True, False))

    def pattern(self) -> Any:
        regex = {"Regex": self.pick(*REGEXES)}
        return self.rarely(self.pick({}, "a", None, {"String": ""}), self.pick({"String": self.string()}, regex, regex))

    def behavior(self) -> str:
        return str(self.pick("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"))

    def charsmap(self) -> Any:
        units = self.random.randrange(0, 600)
        trie = b"".join(struct.pack("<I", self.pick(0, 1 << 8, self.random.getrandbits(32))) for _ in range(units))
        texts = b"\0".join(self.pick(b"a", b"", b"\xff", b"ab" * 9000, "ﷺ".encode()) for _ in range(8)) + b"\0"
        size = self.rarely(self.random.getrandbits(32), len(trie))
        table = base64.b64encode(struct.pack("<I", size) + trie + texts).decode()
        return self.rarely(self.pick("", "AAAA", "?", None, 3), table)

    def normalizer(self) -> dict[str, Any]:
        kind = self.pick(
            "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
            "Replace", "Replace", "Strip", "StripAccents",
        )  # fmt: skip
        fields: dict[str, Any] = {}
        if kind == "BertNormalizer":
            names = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
            fields = {name: self.flag() for name in names}
        elif kind == "Precompiled":
            fields = {"precompiled_charsmap": self.charsmap()}
        elif kind == "Prepend":
            fields = {"prepend": self.string()}
        elif kind == "Replace":
            fields = {"pattern": self.pattern(), "content": self.string()}
        elif kind == "Strip":
            fields = {"strip_left": self.flag(), "strip_right": self.flag()}
        return {"type": kind, **fields}

    def pre_tokenizer(self) -> dict[str, Any]:
        kind = self.pick(
            "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation",
            "Split", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
        )  # fmt: skip
        fields: dict[str, Any] = {}
        if kind == "ByteLevel":
            fields = {name: self.flag() for name in ("add_prefix_space", "trim_offsets", "use_regex")}
        elif kind == "CharDelimiterSplit":
            fields = {"delimiter": self.letter()}
        elif kind == "Digits":
            fields = {"individual_digits": self.flag()}
        elif kind == "FixedLength":
            fields = {"length": self.number()}
        elif kind == "Metaspace":
            scheme = self.rarely("x", self.pick("always", "first", "never"))
            fields = {"replacement": self.letter(), "prepend_scheme": scheme, "split": self.flag()}
        elif kind == "Punctuation":
            fields = {"behavior": self.behavior()}
        elif kind == "Split":
            fields = {"pattern": self.pattern(), "behavior": self.behavior(), "invert": self.flag()}
        return {"type": kind, **fields}

    def processor(self) -> dict[str, Any]:
        kind = self.pick("BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing")
        pair = [self.string(), self.number()]
        if kind == "BertProcessing":
            return {"type": kind, "sep": pair, "cls": [self.string(), self.number()]}
        if kind == "ByteLevel":
            return {"type": kind, "add_prefix_space": self.flag(), "trim_offsets": self.flag(), "use_regex": True}
        if kind == "RobertaProcessing":
            flags = {name: self.flag() for name in ("trim_offsets", "add_prefix_space")}
            return {"type": kind, "sep": pair, "cls": pair, **flags}
        text, other = ({"Sequence": {"id": each, "type_id": self.number()}} for each in "AB")
        special = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        usual = self.pick([text], [special, text], [text, special])
        single = self.rarely(self.pick([], [other], [text, text], [special] * 2000, [text] * 5000, None, [{}]), usual)
        token = {"id": "<s>", "ids": [self.number() for _ in range(self.random.randrange(3))], "tokens": ["<s>"]}
        names = self.rarely(self.pick({}, [token], None), {"<s>": token})
        return {"type": kind, "single": single, "pair": self.pick([text, other], [other], []), "special_tokens": names}

    def decoder(self) -> dict[str, Any]:
        kind = self.pick(
            "BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"
        )
        fields: dict[str, Any] = {}
        if kind == "BPEDecoder":
            fields = {"suffix": self.string()}
        elif kind == "CTC":
            fields = {"pad_token": self.string(), "word_delimiter_token": self.string(), "cleanup": self.flag()}
        elif kind == "ByteLevel":
            fields = {name: self.flag() for name in ("add_prefix_space", "trim_offsets", "use_regex")}
        elif kind == "Metaspace":
            fields = {"replacement": self.letter(), "prepend_scheme": self.pick("always", "never"), "split": True}
        elif kind == "Replace":
            fields = {"pattern": self.pattern(), "content": self.string()}
        elif kind == "Strip":
            fields = {"content": self.letter(), "start": self.number(), "stop": self.number()}
        elif kind == "WordPiece":
            fields = {"prefix": self.string(), "cleanup": self.flag()}
        return {"type": kind, **fields}

    def chain(self, step: Any, children: str) -> Any:
        count = self.rarely(self.pick(40, 200), self.random.randrange(4))
        if count == 0:
            return self.rarely(self.pick({}, [], "x", {"type": "Nothing", children: [step()]}), None)
        steps = [step() for _ in range(count)]
        if self.random.random() < self.rate:  # the same one again and again
            steps = [steps[0]] * self.pick(2, 4, 30)
        return steps[0] if len(steps) == 1 else {"type": "Sequence", children: steps}

    def model(self) -> Any:
        kind = self.pick("BPE", "Unigram", "WordLevel", "WordPiece")
        names = [*PIECES[:12], *(str(self.string()) for _ in range(self.random.randrange(20)))]
        names = [*dict.fromkeys(names)]
        if kind == "Unigram":
            scores = [self.rarely(self.pick(0.0, 1e308, -1e308, 5), -self.random.random() * 9) for _ in names]
            return {
                "type": kind, "unk_id": self.rarely(self.number(), self.pick(0, None)), "byte_fallback": self.flag(),
                "vocab": [[name, score] for name, score in zip(names, scores, strict=True)],
            }  # fmt: skip
        vocabulary = {name: self.rarely(self.number(), number) for number, name in enumerate(names)}
        unknown = self.rarely(self.string(), "<unk>")
        if kind == "WordLevel":
            return {"type": kind, "vocab": vocabulary, "unk_token": unknown}
        if kind == "WordPiece":
            longest = self.rarely(self.pick(*NUMBERS), 100)
            return {
                "type": kind, "vocab": vocabulary, "unk_token": unknown, "continuing_subword_prefix": self.string(),
                "max_input_chars_per_word": longest,
            }  # fmt: skip
        merges = [self.rarely(self.pick("a  b", [self.string()], 5, "b b"), ["a", "b"])] * self.pick(0, 0, 1)
        affixes = ("continuing_subword_prefix", "end_of_word_suffix")
        optional = {name: self.pick(None, self.string()) for name in affixes}
        flags = {name: self.flag() for name in ("fuse_unk", "byte_fallback", "ignore_merges")}
        dropout = self.rarely(self.pick(0.5, 2.0, -1, 1e-9), None)
        return {
            "type": kind, "vocab": vocabulary, "merges": merges, "dropout": dropout, "unk_token": unknown, **optional,
            **flags,
        }  # fmt: skip

    def file(self) -> str:
        added = [
            {
                "id": self.rarely(self.number(), self.random.randrange(30)), "content": self.string(),
                **{name: self.flag() for name in ("single_word", "lstrip", "rstrip", "normalized", "special")},
            }
            for _ in range(self.rarely(300, self.random.randrange(4)))
        ]  # fmt: skip
        padding = {
            "strategy": self.pick("BatchLongest", {"Fixed": 1_000_000_000}), "direction": "Right",
            "pad_to_multiple_of": self.number(), "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
        }  # fmt: skip
        truncation = {"direction": "Right", "max_length": self.number(), "strategy": "LongestFirst", "stride": 9}
        settings = {
            "version": "1.0", "truncation": self.rarely(truncation, None),
            "padding": self.rarely(padding, None), "added_tokens": added,
            "normalizer": self.chain(self.normalizer, "normalizers"),
            "pre_tokenizer": self.chain(self.pre_tokenizer, "pretokenizers"),
            "post_processor": self.chain(self.processor, "processors"),
            "decoder": self.chain(self.decoder, "decoders"), "model": self.model(),
        }  # fmt: skip
        text = json.dumps(settings)
        if self.random.random() < self.rate:  # damage it
            place = self.random.randrange(len(text))
            text = text[:place] + self.pick("", "[", '{"', "0", "\\") + text[place + 1 :]
        return text


def use(folder: Path) -> str:
    """Load and use a tokenizer; "works", or how it was refused."""
    try:
        tokenizer = Tokenizer.load(folder)
    except UserError as error:
        _check_message(error, folder)
        return "refused"
    outcome, ids = "works", list(range(min(len(tokenizer), 40)))
    uses = [
        *(lambda text=text: ids.extend(tokenizer.encode(text)[:200]) for text in TEXTS),
        *(lambda text=text: tokenizer.encode(text, special_tokens=True) for text in TEXTS),
        lambda: tokenizer.encode_batch(TEXTS), lambda: tokenizer.offsets_batch(TEXTS), lambda: tokenizer.decode(ids),
        lambda: tokenizer.decode(ids, special_tokens=True), lambda: list(tokenizer.stream(ids)),
        tokenizer.continuation_flags, lambda: [tokenizer.id_to_token(each) for each in ids],
        lambda: tokenizer.save(folder / "again"),
    ]  # fmt: skip
    for each in uses:
        try:
            each()
        except UserError as error:
            _check_message(error, folder)
            outcome = "error in use"
    return outcome


def _check_message(error: UserError, folder: Path) -> None:
    text = str(error)
    assert str(folder) in text or text.startswith(("id ", "text ")), text
    assert "\n" not in text, text


def main(first: int, count: int) -> int:
    """Load and use `count` files; print what happened; return the number of failures."""
    counts: dict[str, int] = {}
    stderr = os.fdopen(os.dup(2), "w")  # loading may have redirected it
    slowest, largest, failures = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        for seed in range(first, first + count):
            (Path(name) / "tokenizer.json").write_text(Maker(seed).file(), encoding="utf-8", errors="replace")
            faulthandler.dump_traceback_later(120, exit=True, file=stderr)  # a hang cannot be interrupted
            started, memory = time.process_time(), _peak_memory()
            try:
                outcome = use(Path(name))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a panic is one
                outcome = "TRACEBACK"
                print(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            seconds, megabytes = time.process_time() - started, _peak_memory() - memory
            slowest, largest = max(slowest, seconds), max(largest, megabytes)
            if outcome == "TRACEBACK" or seconds > MAX_SECONDS or megabytes > MAX_MEGABYTES:
                failures += 1
                print(f"seed {seed}: {outcome}, {seconds:.1f} s, {megabytes} MB more", file=sys.stderr)
            counts[outcome] = counts.get(outcome, 0) + 1
    faulthandler.cancel_dump_traceback_later()
    stderr.close()
    print(f"{count} files from seed {first}: {counts}; slowest {slowest:.2f} s, {largest} MB; {failures} failures")
    return failures


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
