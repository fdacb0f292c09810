"""Damaged and malicious tokenizer.json files: one line that names the file, no panics, bounded time and memory."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from clearhead.errors import UserError
from clearhead.text import Tokenizer
from clearhead.text.engine_errors import engine_errors

FILES = int(os.environ.get("CLEARHEAD_TOKENIZERS", "200"))
CHUNK = 2000  # files of one process
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
CUBIC = r"[\s\S]*[\s\S]*(?=[^\s\S])"
SPACED = {"type": "CTC", "pad_token": "a", "word_delimiter_token": "", "cleanup": True}
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
SLOW = {"type": "Replace", "pattern": {"Regex": CUBIC}, "content": ""}
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def settings(**changes: Any) -> dict[str, Any]:
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "b": 2}, "unk_token": "<unk>"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **empty, "added_tokens": [], "model": model} | changes


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def added(content: str, **changes: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return {"id": 3, "content": content, "normalized": True, **flags, **changes}


def template(*pieces: Any) -> dict[str, Any]:
    pair = [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"]
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": pair, "special_tokens": {}}


def load(folder: Path, content: Any) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return Tokenizer.load(folder)


def test_random_files_never_panic_and_stay_within_a_second_and_200_megabytes() -> None:
    for first in range(0, FILES, CHUNK):
        command = [sys.executable, "-m", "tests.text.hostile_tokenizers", str(first), str(min(CHUNK, FILES - first))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        # a regex that backtracks on some text only is found in use, where the library prints before we can raise
        print(done.stdout.rstrip(), f"{done.stderr.count('panicked')} messages of the library", sep="; ")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 4}}, "may make more than"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30}}, "may make more than"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Nmt"}] * 99}}, "more than 64 steps"),
        ({"normalizer": {"type": "None", "normalizers": [REPLACE] * 4}}, "type 'None' is not supported"),
        ({"normalizer": {"normalizers": [REPLACE] * 4}}, "type None is not supported"),
        ({"normalizer": {**REPLACE, "pattern": {"Regex": "[a-z]"}}}, "it makes [0-9,]* characters or tokens of 64"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////fw=="}}, "table is cut off"),
        ({"normalizer": STRIP, "added_tokens": [added("\n")]}, "makes nothing of the added token"),
        ({"added_tokens": [added(" ", rstrip=True)]}, "of spaces and strips"),
        ({"normalizer": {"type": "NFC"}, "added_tokens": [added("a" * 200)]}, "has more than 128 characters"),
        ({"pre_tokenizer": split(CUBIC)}, "characters take"),
        ({"pre_tokenizer": split(r"(?:\w|\w)*(?=[^\s\S])")}, "retry-limit-in-match over"),
        ({"pre_tokenizer": split("a" * 10_000)}, "more than 8,192 characters"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "length is not a positive number"),
        ({"decoder": {"type": "Sequence", "decoders": [REPLACE] * 4}}, "decoder: its steps may make more than"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, SLOW]}}, "characters take"),
        ({"decoder": {"type": "Sequence", "decoders": [SPACED] * 30}}, "decoder: its steps may make more than"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 2}}, "index out of bounds"),
        ({"post_processor": template({"Sequence": {"id": "B", "type_id": 0}})}, "does not have the text"),
        ({"post_processor": template(*[{"Sequence": {"id": "A", "type_id": 0}}] * 2)}, "does not have the text"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 1 << 31}, "unk_token": "a"}}, "ids range from 0"),
        ({"model": {"type": "WordLevel", "vocab": {"a" * 5000: 1}, "unk_token": "a"}}, "more than 1,024 characters"),
    ],
)
def test_what_grows_without_bound_or_panics_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], reason: str
) -> None:
    begun = time.process_time()
    with pytest.raises(UserError, match=reason) as caught:
        load(tmp_path, settings(**changes))
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.process_time() - begun < 1
    assert capfd.readouterr().err == ""  # the library prints panics


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    twice = json.dumps(settings()).replace('"normalizer": null', '"normalizer": null, "normalizer": null')
    with pytest.raises(UserError, match="given twice"):
        load(tmp_path, twice)


def test_padding_of_a_file_is_not_used(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0}
    tokenizer = load(tmp_path, settings(padding={**padding, "pad_type_id": 0, "pad_token": "a"}))
    assert tokenizer.encode("a") == [1]


def test_a_panic_in_use_is_one_line_and_interruptions_pass() -> None:
    engine = Engine(models.WordLevel({"a": 0}, unk_token="a"))
    engine.decoder = decoders.Strip("a", 0, 2)
    with pytest.raises(UserError, match=r"^tokenizer: the tokenizer fails \(index out of bounds.*; download"):
        Tokenizer(engine).decode([0])
    with pytest.raises(KeyboardInterrupt), engine_errors("x"):
        raise KeyboardInterrupt


def test_a_text_that_the_vocabulary_cannot_encode_is_one_line(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    tokenizer = load(tmp_path, settings(model=model))
    assert tokenizer.encode("a") == [0]
    for use in (tokenizer.encode, tokenizer.offsets):
        with pytest.raises(UserError, match=r"tokenizer\.json: the tokenizer fails \(.*UNK"):
            use("b")


def byte_level_bpe(regex: str) -> Engine:
    engine = Engine(models.BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), byte_level])
    engine.post_processor = processors.ByteLevel(trim_offsets=False)
    engine.decoder = decoders.ByteLevel()
    return engine


def unigram() -> Engine:
    engine = Engine(models.Unigram([("<unk>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in LETTERS)], 0))
    steps = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.NFKD(), normalizers.StripAccents()]
    engine.normalizer = normalizers.Sequence([normalizers.Replace("``", '"'), *steps, normalizers.Lowercase()])
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return engine


def llama2() -> Engine:
    letters = ["<unk>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    model = models.BPE({letter: number for number, letter in enumerate(letters)}, [], unk_token="<unk>", fuse_unk=True)
    model.byte_fallback = True
    engine = Engine(model)
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    end = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), *end])
    return engine


def clip() -> Engine:
    engine = byte_level_bpe(r"<\|startoftext\|>|'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    steps = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    engine.normalizer = normalizers.Sequence(steps)
    engine.post_processor = processors.RobertaProcessing(("!", 0), ("!", 0), trim_offsets=False, add_prefix_space=False)
    return engine


WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {  # shapes of published tokenizers, with small vocabularies
    "llama3": lambda: byte_level_bpe(r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + SPACES),
    "gpt4o": lambda: byte_level_bpe(r"[^\r\n\p{L}\p{N}]?" + WORD + r"|\p{N}{1,3}" + SPACES),
    "olmo": lambda: byte_level_bpe(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))|[^\r\n\p{L}\p{N}]?\p{L}+" + SPACES),
    "bloom": lambda: byte_level_bpe(r" ?[^(\s|[.,!?…。，、।۔،])]+"),
    "deepseek": lambda: byte_level_bpe(
        r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s+"
    ),
    "xlnet": unigram,
    "llama2": llama2,
    "clip": clip,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokenizers_of_published_shape_are_read(tmp_path: Path, name: str) -> None:
    engine = PUBLISHED[name]()
    tokenizer = load(tmp_path, engine.to_str())
    text = "Hello  world, it's 12345!\n\n  x "
    assert tokenizer.encode(text) == engine.encode(text, add_special_tokens=False).ids


def test_special_tokens_among_the_pieces_of_a_vocabulary_stay_text() -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), *((letter, -9.0) for letter in "</sab>")]
    engine = Engine(models.Unigram(pieces, 0))
    engine.normalizer = normalizers.Lowercase()
    engine.add_special_tokens([AddedToken("</s>", normalized=False), AddedToken("<unk>", normalized=False)])
    tokenizer = Tokenizer(engine)
    for text in ("a</s>b", "a</S>b"):
        assert engine.encode(text).ids.count(1) == 1
        assert tokenizer.encode(text) == [
            *tokenizer.encode("a"),
            *map(tokenizer.vocabulary.get, "</s>"),
            *tokenizer.encode("b"),
        ]
        assert [each for each, *_ in tokenizer.offsets(text)] == tokenizer.encode(text)
    assert tokenizer.encode("a</s>b", special_tokens=True).count(1) == 1
    assert 0 in tokenizer.encode("ö")  # the unknown token is no marker


def test_threads_never_use_each_others_setting() -> None:
    engine = Engine(models.BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    engine.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer, forged, stop = Tokenizer(engine), [], threading.Event()

    def write_specials() -> None:
        while not stop.is_set():
            tokenizer.encode("<s>", special_tokens=True)

    thread = threading.Thread(target=write_specials)
    thread.start()
    forged = [ids for _ in range(2000) if tokenizer.special_tokens["<s>"] in (ids := tokenizer.encode("a<s>b" * 20))]
    stop.set()
    thread.join()
    assert not forged
