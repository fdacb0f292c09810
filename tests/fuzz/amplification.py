"""Amplification meter: files made to be larger in memory, or slower to read, than they are long (`make torture`).

    python -m tests.fuzz.amplification [COUNT] [SEED]

Every input is read in a forked process of its own, which may take 20 × the file + 300 MB and 2 s a megabyte + 2 s, and
ends with a result or a UserError. Prints a line for each input that does not, then the counts and the worst of each.
"""
# ruff: noqa: E501

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import shutil
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from clearhead.checkpoint import load_model, model_folder_info, read_card, save_model
from clearhead.checkpoint.formats import read_foreign
from clearhead.config.data import DataConfig
from clearhead.config.load import preset
from clearhead.config.recipe import load_recipe, recipe_text
from clearhead.data import prepare
from clearhead.errors import UserError
from clearhead.model import build
from clearhead.text import Tokenizer, load_folder, train
from clearhead.text.corpus import read_corpus
from clearhead.text.word_similarity import score_analogies, score_pairs
from clearhead.text.word_vectors import WordVectors
from tests.checkpoint.formats import mutate
from tests.checkpoint.small_models import CONFIG, TEXTS

MEMORY_FACTOR, MEMORY, SECONDS_PER_MB, SECONDS = 20, 300_000_000, 2.0, 2.0
HUGE = (
    0,
    -1,
    1,
    1 << 10,
    1 << 16,
    1 << 20,
    1 << 24,
    1 << 31,
    1 << 40,
    1 << 62,
    1 << 63,
    1e308,
    None,
    True,
    "x",
    [],
    {},
)
UNITS = [
    *("a", " ", "\n", "\r", "\t", ",", '"', "'", "[", "{", "[[", '{"":', "]", "}", "[],", "{},", '{"":0},', "0,", "-9,", "\\"),
    *("a ", "a\n", "a b\n", "a\tb\n", "a,b\n", '"a","b"\n', '"\n","', "ab ", "a. ", "1 ", "!", "`", "```yaml\n", "# a\n", "= a =\n"),
    *("\ufdfa", "e\u0301", "\u0130", "\U0001f600", "猫", "猫 ", "\u2028", "\u00a0", "\ufeff", "'s", "aA", "0", "1e9 ", "x:y z\n"),
    *("- ", "- a\n", "a: ", "? ", "&a ", "*a ", "!!x ", "|\n ", "{a: ", "- - ", "a:\n ", "## ", "| a | 1 | b | c |\n", "\\|", "EU B-ORG\n"),
]  # fmt: skip
TASKS = {
    "text": ["language-model", "masked-language-model"],
    "parallel": ["translation"],
    "tsv": ["translation", "classification", "regression", "similarity", "language-model"],
    "csv": ["translation", "classification", "similarity", "language-model"],
    "jsonl": ["translation", "classification", "tagging", "answering", "language-model", "masked-language-model"],
    "conll": ["tagging"],
    "squad": ["answering"],
    "trec": ["classification"],
}
KEYS = ("source", "target", "text", "second", "label", "tokens", "tags", "context", "question", "answer", "start")


class Case(NamedTuple):
    """A name, the files that were written, and the call that reads them."""

    name: str
    files: list[Path]
    read: Callable[[], object]
    unpacked: int = 0  # bytes, if the files are gzipped


class Result(NamedTuple):
    """How reading ended, its peak memory in bytes and its CPU time in seconds."""

    outcome: str
    memory: int
    seconds: float
    detail: str = ""


class Meter:
    """Writes hostile files and reads them."""

    def __init__(self, folder: Path):
        self.folder, self.work = folder, folder / "work"
        self.tokenizers: dict[str, Tokenizer] = {
            kind: train(TEXTS, kind, 300, roles=("pad", "begin", "end", "unknown", "class", "separator", "mask"))  # type: ignore[arg-type]
            for kind in ("byte-bpe", "bpe", "wordpiece", "word", "char")
        }
        for name, dtype in (("model-fp32", None), ("model-int8", torch.int8)):
            save_model(folder / name, build(CONFIG), train(TEXTS, "byte-bpe", 280), {"task": "language"}, dtype=dtype)
        self.sources = sorted(path for path in folder.glob("*") if path.is_dir() and path != self.work)

    def case(self, number: int) -> Case:
        """Write the files of an input."""
        rng = random.Random(number)
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        kinds = [self.data] * 6 + [self.words, self.settings, self.card, self.vocabulary, self.vectors]
        kinds += [self.model] * 4 + [self.foreign] * 4 + [self.gguf] * 2
        return rng.choice(kinds)(rng)

    def data(self, rng: random.Random) -> Case:
        format = rng.choice(sorted(TASKS))
        task = rng.choice(TASKS[format])
        files = [self.work / f"file{n}" for n in range(2 if format == "parallel" else 1)]
        packed = rng.random() < 0.25
        sizes = [write(file, content(rng, format), packed) for file in files]
        settings: dict[str, Any] = {"task": task, "cache_dir": str(self.work / "cache"), "max_length": 64, "stride": 8}
        settings["train"] = {"format": format, "files": [str(file) for file in files]}
        if task in ("classification", "tagging") and rng.random() < 0.7:
            settings["labels"] = ["a", "b", "B-ORG", "x:y", "x"]
        if task == "answering":
            settings |= {"max_length": 384, "stride": 128}
        if task not in ("tagging", "answering"):
            settings |= {"normalize": rng.choice(["none", "nfc", "nfkc"]), "lowercase": rng.random() < 0.3}
        if task in ("language-model", "masked-language-model"):
            settings["documents"] = rng.choice(["line", "paragraph", "heading", "file"])
        tokenizer = self.tokenizers[rng.choice(sorted(self.tokenizers))]
        name = f"{task} {format}{' gz' if packed else ''}"
        return Case(name, files, lambda: prepare(DataConfig.build(settings), [tokenizer]), sum(sizes) if packed else 0)

    def words(self, rng: random.Random) -> Case:
        file = self.work / "text"
        packed = rng.random() < 0.3
        distinct = (
            "".join(f"{rng.randrange(1 << 60):x} " for _ in range(size_of(rng) // 16)) if rng.random() < 0.5 else ""
        )
        size = write(file, distinct + repeated(rng), packed)
        known = WordVectors(["a", "b"], torch.eye(2))
        scores = [lambda: score_pairs(known, file), lambda: score_analogies(known, file)]
        read: Callable[[], object] = rng.choice([lambda: read_corpus([file], 1), *scores])
        return Case("words" + " gz" * packed, [file], read, size if packed else 0)

    def vectors(self, rng: random.Random) -> Case:
        file, dim = self.work / "vectors", rng.choice([1, 1, 2, 50])
        count = size_of(rng) // (7 + 2 * dim)
        lines = "".join(f"{n:x}{' 1' * dim}\n" for n in range(count))
        claim = rng.choice([(count, dim), (999999999, 999999999), (1, 999999999), (999999999, 1), (1, dim)])
        packed = rng.random() < 0.3
        size = write(file, f"{claim[0]} {claim[1]}\n{lines}" + repeated(rng) * (rng.random() < 0.5), packed)
        return Case("vectors" + " gz" * packed, [file], lambda: WordVectors.load(file), size if packed else 0)

    def vocabulary(self, rng: random.Random) -> Case:
        if rng.random() < 0.5:
            lines = "".join(f"{n:x}\n" for n in range(size_of(rng) // 6))
            (self.work / "vocab.txt").write_text("[UNK]\n" + lines + repeated(rng) * (rng.random() < 0.5))
            return Case("vocab.txt", [self.work / "vocab.txt"], lambda: load_folder(self.work))
        (self.work / "encoder.json").write_text(hostile_json(rng, {f"{n:x}": n for n in range(size_of(rng) // 12)}))
        (self.work / "vocab.bpe").write_text(repeated(rng))
        return Case(
            "encoder.json", [self.work / "encoder.json", self.work / "vocab.bpe"], lambda: load_folder(self.work)
        )

    def settings(self, rng: random.Random) -> Case:
        file = self.work / "recipe.yaml"
        text = recipe_text("mini-en-de")
        cut = rng.randrange(len(text))
        file.write_text(
            rng.choice([text[:cut] + repeated(rng) + text[cut:], repeated(rng), hostile_json(rng, {"a": 1})])
        )
        return Case("yaml", [file], rng.choice([lambda: load_recipe(str(file)), lambda: preset(str(file))]))

    def card(self, rng: random.Random) -> Case:
        file = self.work / "README.md"
        heads = ["## Recipe\n", "## Scores\n", "## Data\n", "", "# "]
        file.write_text("".join(rng.choice(heads) + repeated(rng) for _ in range(rng.randint(1, 3))))
        shutil.copytree(self.folder / "model-fp32", self.work / "model")
        shutil.move(file, self.work / "model" / "README.md")
        file = self.work / "model" / "README.md"
        return Case("card", [file], lambda: (read_card(file.read_text()), model_folder_info(file.parent)))

    def model(self, rng: random.Random) -> Case:
        """A folder of our own, its manifest not checked: config, weights, header or index changed."""
        folder = self.work / "model"
        shutil.copytree(self.folder / rng.choice(["model-fp32", "model-int8"]), folder)
        config, weights = folder / "config.json", folder / "model.safetensors"
        settings = json.loads(config.read_text())
        match rng.randrange(6):
            case 0:
                for _ in range(rng.randint(1, 4)):
                    settings["model"][rng.choice(sorted(settings["model"]))] = rng.choice(HUGE)
                config.write_text(json.dumps(settings))
            case 1:
                config.write_text(hostile_json(rng, settings))
            case 2:
                weights.write_bytes(mutate.change_header(weights.read_bytes(), rng))
            case 3:  # vectors, empty and eight-bit tensors under the names of the model
                header = [*settings["model"], "decoder.norm.weight", "decoder.norm.weight.scale"]
                size = size_of(rng)
                tensors = {rng.choice(header): hostile_tensor(rng, size) for _ in range(3)}
                save_file(tensors | {"decoder.norm.weight": torch.zeros(size, dtype=torch.int8)}, weights)
            case 4:  # many tensors
                count = size_of(rng) // 60
                header = {f"t{n:x}": {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]} for n in range(count)}
                text = json.dumps(header).encode()
                weights.write_bytes(struct.pack("<Q", len(text)) + text)
            case 5:  # many shards
                weights.rename(folder / "shard.safetensors")
                names = {
                    f"t{n:x}": rng.choice(["shard.safetensors", f"{n:x}", "../x"]) for n in range(size_of(rng) // 40)
                }
                index = {"weight_map": rng.choice([names, dict.fromkeys(names, "shard.safetensors")])}
                (folder / "model.safetensors.index.json").write_text(hostile_json(rng, index))

        def read() -> None:
            model_folder_info(folder)
            load_model(folder, verify=False)

        return Case("model", sorted(folder.iterdir()), read)

    def foreign(self, rng: random.Random) -> Case:
        """A model of another library with one file damaged, or a JSON or text file replaced."""
        sources = [path for path in self.sources if not path.name.startswith("model-")]
        source = rng.choice(sources)
        file = next(iter([*source.glob("*.gguf"), *source.glob("llama2c.bin")]), source)
        path = mutate.damaged_copy(file, self.work / "damaged", rng)
        texts = sorted(each for each in (self.work / "damaged").rglob("*") if each.suffix in (".json", ".txt"))
        texts = [each for each in texts if not each.name.startswith("tokenizer")]
        if texts and rng.random() < 0.5:
            target = rng.choice(texts)
            target.write_text(repeated(rng) if target.suffix == ".txt" else hostile_json(rng, {"model_type": "llama"}))
        files = sorted(each for each in (self.work / "damaged").rglob("*") if each.is_file())
        return Case(f"foreign {source.name.split('-')[0]}", files, lambda: read_foreign(path))

    def gguf(self, rng: random.Random) -> Case:
        """A GGUF header with large arrays, many settings, or many tensors."""
        path, size = self.work / "model.gguf", size_of(rng)
        settings: list[tuple[str, bytes]] = [("general.architecture", gguf_text("llama"))]
        tensors: list[bytes] = []
        match rng.randrange(4):
            case 0:
                kind, width = rng.choice([(0, 1), (1, 1), (3, 2), (5, 4), (6, 4), (7, 1), (10, 8), (12, 8)])
                for n in range(rng.randint(1, 8)):
                    count = min(1 << 20, size // width)
                    settings.append((f"k{n}", struct.pack("<IIQ", 9, kind, count) + b"\x80" * (count * width)))
            case 1:
                texts = [rng.choice(["", "a", "ab", "猫"]) for _ in range(min(1 << 20, size // 10))]
                settings.append(("tokenizer.ggml.tokens", gguf_texts(texts)))
            case 2:
                settings += [(f"{n:x}", struct.pack("<IB", 0, 1)) for n in range(min(1 << 20, size // 16))]
            case 3:
                for n in range(min(1 << 20, size // 40)):
                    name = f"{n:x}".encode()
                    tensors.append(struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 8, 0, 32 * n))
        if rng.random() < 0.3:  # a Llama of which every token has every split
            tokens = ["a" * (n % 512 + 1) + "b" * (n // 512) for n in range(min(2000, size // 300))]
            settings += llama_settings(tokens)
        data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings))
        for key, value in settings:
            data += struct.pack("<Q", len(key)) + key.encode() + value
        path.write_bytes(b"".join([data, *tensors, bytes(64), bytes(32 * len(tensors))]))
        return Case("gguf header", [path], lambda: read_foreign(path))


def size_of(rng: random.Random) -> int:
    """A size in bytes: mostly up to 300 kB, rarely 20 MB."""
    return int(10 ** rng.uniform(2, 7.3 if rng.random() < 0.03 else 5.5))


def repeated(rng: random.Random) -> str:
    """One or two units, repeated."""
    unit = "".join(rng.choice(UNITS) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    return unit * (size_of(rng) // len(unit.encode()) + 1)


def hostile_json(rng: random.Random, valid: dict[str, Any]) -> str:
    """A JSON text: a valid object with one value replaced by many, deep or long ones."""
    unit = rng.choice(
        ["[],", "{},", '{"":0},', "[[]],", "0,", "-9,", "1e9,", '"ab",', '"\u0100",', "null,", '"\\ud800",']
    )
    count = size_of(rng)
    values = [
        f"[{unit * (count // len(unit.encode()))}0]",
        json.dumps("x" * count),
        json.dumps(repeated(rng), ensure_ascii=rng.random() < 0.5),
        "[" * (depth := rng.choice((50, 99, 101, 400, 900, 5000))) + "]" * depth,
        '{"a":' * depth + "0" + "}" * depth,
        json.dumps({f"{n:x}": n for n in range(count // 12)}),
        "1" * rng.choice((10, 4000, 5000, 100_000)),
        f"[{','.join(['[' * 80 + ']' * 80] * (count // 160))}]",
    ]
    text = json.dumps(valid)
    key = rng.choice([*KEYS, *sorted(valid), "model", "labels", "vocab_size", "architectures", "weight_map"])
    return text[:-1] + (", " if valid else "") + json.dumps(key) + ": " + rng.choice(values) + "}"


def content(rng: random.Random, format: str) -> str:
    """A text of a data format: hostile fields in valid records, or repeated units."""
    if rng.random() < 0.5:
        return repeated(rng)
    field = repeated(rng)
    if rng.random() < 0.7 and format != "squad":  # one field, not several
        field = (
            field.translate(dict.fromkeys(map(ord, '\n\r\t",' if format in ("tsv", "csv", "trec") else "\n\r\t ")))
            or "x"
        )
    row = {"tsv": "a\t{}\n", "csv": 'a,"{}"\n', "trec": "x:y {}\n", "conll": "{} B-ORG\n"}.get(format, "{}\n")
    if format == "squad":
        questions = [{"question": "w?", "answers": []} for _ in range(int(10 ** rng.uniform(0, 3.5)))]
        return json.dumps({"data": [{"paragraphs": [{"context": field, "qas": questions}]}]}, ensure_ascii=False)
    if format == "jsonl":
        record: dict[str, Any] = dict.fromkeys(KEYS, "a") | {"tokens": ["a"], "tags": ["a"], "start": 0}
        if rng.random() < 0.5:
            return hostile_json(rng, record) + "\n"
        record[rng.choice(KEYS)] = rng.choice([field, list(field[:100_000]), field.split(" ")])
        return json.dumps(record, ensure_ascii=rng.random() < 0.5) + "\n"
    return "a\tb\n" + row.format(field) * rng.choice((1, 1, 3))


def write(path: Path, text: str, packed: bool) -> int:
    """Write a text, gzipped or not; return its size."""
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    return len(data)


def hostile_tensor(rng: random.Random, size: int) -> torch.Tensor:
    """A tensor of an unusual dtype or shape."""
    dtype = rng.choice([torch.int8, torch.float8_e4m3fn, torch.bool, torch.float16, torch.float32, torch.int64])
    shape = rng.choice([(size,), (size, 1), (1, size), (0, size), (size, 0), (1 << 40, 0), (size, 1, 1), ()])
    return torch.zeros(shape, dtype=dtype)


def gguf_text(value: str) -> bytes:
    return struct.pack("<IQ", 8, len(value.encode())) + value.encode()


def gguf_texts(values: list[str]) -> bytes:
    encoded = [value.encode() for value in values]
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(struct.pack("<Q", len(each)) + each for each in encoded)


def llama_settings(tokens: list[str]) -> list[tuple[str, bytes]]:
    """The settings of a Llama with a SentencePiece vocabulary."""
    sizes = {"embedding_length": 8, "block_count": 1, "feed_forward_length": 8, "context_length": 8}
    return [
        *((f"llama.{key}", struct.pack("<II", 4, value)) for key, value in sizes.items()),
        ("llama.attention.head_count", struct.pack("<II", 4, 1)),
        ("llama.attention.layer_norm_rms_epsilon", struct.pack("<If", 6, 1e-5)),
        ("tokenizer.ggml.model", gguf_text("llama")),
        ("tokenizer.ggml.tokens", gguf_texts(tokens)),
        ("tokenizer.ggml.scores", struct.pack("<IIQ", 9, 6, len(tokens)) + bytes(4 * len(tokens))),
    ]


def measure(case: Case, memory: int) -> Result:
    """Read in a forked process that may take `memory` bytes."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        before = peak_memory()
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2 * memory + (1 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
        start, outcome, detail = time.process_time(), "loaded", ""
        try:
            case.read()
        except UserError as error:
            outcome, detail = "refused", str(error)[:300]
        except BaseException as error:
            outcome, detail = "failed", "".join(traceback.format_exception(error))[-1500:]
        result = [outcome, peak_memory() - before, time.process_time() - start, detail]
        os.write(sender, json.dumps(result).encode())
        os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    return (
        Result(*json.loads(data)) if data else Result("killed", 0, 0.0, f"status {os.waitstatus_to_exitcode(status)}")
    )


def peak_memory() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def campaign(meter: Meter, count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Measure `count` inputs; return the counts by kind and outcome, and a line for each that breaks a limit."""
    counts: Counter[str] = Counter()
    worst: dict[str, tuple[float, float]] = {}
    problems = []
    for number in range(seed, seed + count):
        case = meter.case(number)
        size = sum(file.stat().st_size for file in case.files)
        memory = MEMORY_FACTOR * size + MEMORY
        seconds = SECONDS_PER_MB * max(size, case.unpacked) / 1e6 + SECONDS
        result = measure(case, memory)
        counts[f"{case.name}: {result.outcome}"] += 1
        shares = result.memory / memory, result.seconds / seconds
        worst[case.name] = tuple(map(max, zip(shares, worst.get(case.name, (0, 0)), strict=True)))  # type: ignore[assignment]
        if result.outcome in ("failed", "killed") or max(shares) > 1:
            line = f"number {number}, {case.name}, {size:,} bytes ({case.unpacked:,} unpacked), {result.outcome}: "
            line += f"{result.memory / 1e6:.0f} MB of {memory / 1e6:.0f}, {result.seconds:.1f} s of {seconds:.1f}"
            problems.append(f"{line}\n{result.detail}")
            print(problems[-1], flush=True)
        if number % 500 == 499:
            print(f"{number + 1 - seed:,} inputs, {len(problems)} problems", flush=True)
    for name, (memory_share, time_share) in sorted(worst.items()):
        print(f"{name}: at most {memory_share:.0%} of the memory, {time_share:.0%} of the time")
    return counts, problems


def main(count: int, seed: int) -> int:
    """Run a campaign over models of every format."""
    from tests.checkpoint.formats.test_damaged_files import write_models

    with TemporaryDirectory() as folder:
        write_models(Path(folder))
        counts, problems = campaign(Meter(Path(folder)), count, seed)
    outcomes = Counter[str]()
    for name, number in sorted(counts.items()):
        outcomes[name.rpartition(" ")[2]] += number
    print(json.dumps(dict(sorted(counts.items())), indent=1))
    print(f"{count:,} inputs: {dict(outcomes)}; {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*map(int, [*sys.argv[1:], *("5000", "0")[len(sys.argv) - 1 :]])))
