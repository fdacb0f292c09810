"""Fuzzing of the importers: `python -m tests.checkpoint.formats.mutate FOLDER N` reads N damaged copies of models.

Prints one line of JSON: counts of refused and loaded models, the slowest, the memory. Any exception other than
UserError ends the process.
"""

import json
import logging
import random
import resource
import shutil
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from clearhead.checkpoint.formats import read_foreign
from clearhead.checkpoint.model_folder import build_with_weights
from clearhead.errors import UserError


def truncate(data: bytes, rng: random.Random) -> bytes:
    """An interrupted download."""
    return data[: rng.randrange(len(data))]


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    """Flip a few bits, mostly near the beginning, where the lengths are."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = len(data) if rng.random() < 0.4 else min(len(data), 2000)
        changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def insert_huge_number(data: bytes, rng: random.Random) -> bytes:
    """Write a length or count larger than any file."""
    size = rng.choice((2, 4, 8))
    end = min(len(data) - size, rng.choice((64, 400, 4000, 10**9)))
    position = rng.randrange(max(1, end)) // rng.choice((1, 4)) * rng.choice((1, 4))
    position = min(position, len(data) - size)
    value = rng.choice((b"\xff" * size, b"\xff" * (size - 1) + b"\x7f", b"\0" * (size - 1) + b"\x10"))
    return data[:position] + value + data[position + size :]


def zero_tail(data: bytes, rng: random.Random) -> bytes:
    """What a power failure leaves."""
    position = rng.randrange(len(data))
    return data[:position] + bytes(len(data) - position)


def repeat(data: bytes, rng: random.Random) -> bytes:
    """Repeat a part."""
    position = rng.randrange(len(data))
    return data[:position] + data[max(0, position - rng.randint(1, 64)) :]


def change_header(data: bytes, rng: random.Random) -> bytes:
    """Change offset, shape or dtype of a tensor in a safetensors header."""
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    match rng.randrange(4):
        case 0:
            entry["data_offsets"] = [0, rng.choice((4, 1 << 40, -4))]
        case 1:
            entry["shape"] = [rng.choice((1 << 40, 0, 3)), *entry["shape"][1:]]
        case 2:
            entry["dtype"] = rng.choice(("I8", "F16", "F64", "F8_E4M3", "BOOL", "X"))
        case 3:
            other = header[rng.choice([name for name in header if name != "__metadata__"])]
            entry["data_offsets"] = other["data_offsets"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def change_json(data: bytes, rng: random.Random) -> bytes:
    """Change the type of a JSON value at any depth, or nest many brackets."""
    try:
        content = json.loads(data)
    except ValueError:
        return flip_bits(data, rng)
    if not isinstance(content, dict):
        return flip_bits(data, rng)
    if rng.random() < 0.2:
        return f'{{"{rng.choice(sorted(content))}": {"[" * rng.choice((500, 100_000))}'.encode()
    inner, key = content, rng.choice(sorted(content))
    while isinstance(inner[key], dict | list) and inner[key] and rng.random() < 0.8:
        inner = inner[key]
        key = rng.choice(sorted(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
    inner[key] = rng.choice([None, True, -1, 0, 1 << 31, 1 << 80, 1e308, "x" * 100, [], {}, [[]], {"a": {"b": 1}}])
    return json.dumps(content).encode()


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [
    truncate,
    flip_bits,
    flip_bits,
    insert_huge_number,
    insert_huge_number,
    zero_tail,
    repeat,
]


def damaged_copy(source: Path, copy: Path, rng: random.Random) -> Path:
    """Copy a model with one damaged file; return the path to read."""
    shutil.rmtree(copy, ignore_errors=True)
    if source.is_dir():
        shutil.copytree(source, copy)
        target = rng.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
        source_copy = copy
    else:  # a file, with its tokenizer in the same folder
        shutil.copytree(source.parent, copy)
        target = rng.choice(sorted(copy.iterdir()))
        source_copy = copy / source.name
    damages = (
        DAMAGES
        + [change_header] * 4 * (target.suffix == ".safetensors")
        + [change_json] * 9 * (target.suffix == ".json")
    )
    data = target.read_bytes()
    target.write_bytes(rng.choice(damages)(data, rng) if len(data) > 16 else b"")
    return source_copy


def main(folder: Path, count: int) -> None:
    """Read `count` damaged models, every format in turn."""
    sources = sorted(folder.glob("*/*.gguf")) + sorted(folder.glob("*/llama2c.bin")) + sorted(folder.glob("hf-*"))
    sources += sorted(folder.glob("ct2-*"))
    logging.disable()
    tally: Counter[str] = Counter()
    slowest, before = 0.0, peak_memory()
    for number in range(count):
        source = sources[number % len(sources)]
        path = damaged_copy(source, folder / "damaged", random.Random(number))
        format_name = source.parent.name if source.is_file() else source.name
        start = time.process_time()  # CPU time, so that other processes do not count
        try:
            model = read_foreign(path)
            build_with_weights(model.config, model.weights)
        except UserError as error:
            tally[f"{format_name} refused" if str(error) else f"{format_name} refused without a message"] += 1
        except BaseException:
            print(f"{format_name}, number {number}", file=sys.stderr)
            raise
        else:
            tally[f"{format_name} loaded"] += 1
        seconds = time.process_time() - start
        if seconds > slowest:
            slowest = seconds
            print(f"{format_name}, number {number}: {seconds:.2f} s", file=sys.stderr)
    memory = peak_memory() - before
    print(json.dumps({"tally": tally, "slowest": slowest, "memory": memory}))


def peak_memory() -> int:
    """Return the peak memory of this process in bytes; rusage would include that of its parent."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
