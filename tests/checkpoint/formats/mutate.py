"""Damages files of every format and reads them: `python -m tests.checkpoint.formats.mutate FOLDER N`.

Prints one line of JSON: how many were refused, how many loaded, the slowest, the memory. Anything that is neither a
refusal with a clear error nor a model of the declared shapes ends the process.
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

from clearhead.checkpoint.folder import with_weights
from clearhead.checkpoint.formats import read_foreign
from clearhead.errors import UserError


def cut(data: bytes, chance: random.Random) -> bytes:
    """A download that broke off."""
    return data[: chance.randrange(len(data))]


def flip(data: bytes, chance: random.Random) -> bytes:
    """A few bits, mostly near the beginning, where the lengths are."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        end = len(data) if chance.random() < 0.4 else min(len(data), 2000)
        changed[chance.randrange(end)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def huge(data: bytes, chance: random.Random) -> bytes:
    """A length or a count that no file can hold."""
    size = chance.choice((2, 4, 8))
    end = min(len(data) - size, chance.choice((64, 400, 4000, 10**9)))
    at = chance.randrange(max(1, end)) // chance.choice((1, 4)) * chance.choice((1, 4))
    at = min(at, len(data) - size)
    value = chance.choice((b"\xff" * size, b"\xff" * (size - 1) + b"\x7f", b"\0" * (size - 1) + b"\x10"))
    return data[:at] + value + data[at + size :]


def zeros(data: bytes, chance: random.Random) -> bytes:
    """What a power cut leaves."""
    at = chance.randrange(len(data))
    return data[:at] + bytes(len(data) - at)


def doubled(data: bytes, chance: random.Random) -> bytes:
    """A part that stands twice."""
    at = chance.randrange(len(data))
    return data[:at] + data[max(0, at - chance.randint(1, 64)) :]


def changed_header(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file whose own header claims another place, shape or kind for a tensor."""
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    entry = header[chance.choice([name for name in header if name != "__metadata__"])]
    match chance.randrange(4):
        case 0:
            entry["data_offsets"] = [0, chance.choice((4, 1 << 40, -4))]
        case 1:
            entry["shape"] = [chance.choice((1 << 40, 0, 3)), *entry["shape"][1:]]
        case 2:
            entry["dtype"] = chance.choice(("I8", "F16", "F64", "F8_E4M3", "BOOL", "X"))
        case 3:
            other = header[chance.choice([name for name in header if name != "__metadata__"])]
            entry["data_offsets"] = other["data_offsets"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def changed_json(data: bytes, chance: random.Random) -> bytes:
    """JSON with a value of another kind at any depth, a huge number, or a thousand brackets."""
    try:
        found = json.loads(data)
    except ValueError:
        return flip(data, chance)
    if not isinstance(found, dict):
        return flip(data, chance)
    if chance.random() < 0.2:
        return f'{{"{chance.choice(sorted(found))}": {"[" * chance.choice((500, 100_000))}'.encode()
    inner, key = found, chance.choice(sorted(found))
    while isinstance(inner[key], dict | list) and inner[key] and chance.random() < 0.8:
        inner = inner[key]
        key = chance.choice(sorted(inner)) if isinstance(inner, dict) else chance.randrange(len(inner))
    inner[key] = chance.choice([None, True, -1, 0, 1 << 31, 1 << 80, 1e308, "x" * 100, [], {}, [[]], {"a": {"b": 1}}])
    return json.dumps(found).encode()


WAYS: list[Callable[[bytes, random.Random], bytes]] = [cut, flip, flip, huge, huge, zeros, doubled]


def mutated(source: Path, place: Path, chance: random.Random) -> Path:
    """A copy of a model with one damaged file; returns what is to be read."""
    shutil.rmtree(place, ignore_errors=True)
    if source.is_dir():
        shutil.copytree(source, place)
        target = chance.choice(sorted(path for path in place.rglob("*") if path.is_file()))
        wanted = place
    else:  # a file, with its tokenizer beside it
        shutil.copytree(source.parent, place)
        target = chance.choice(sorted(place.iterdir()))
        wanted = place / source.name
    ways = (
        WAYS
        + [changed_header] * 4 * (target.suffix == ".safetensors")
        + [changed_json] * 9 * (target.suffix == ".json")
    )
    data = target.read_bytes()
    target.write_bytes(chance.choice(ways)(data, chance) if len(data) > 16 else b"")
    return wanted


def main(folder: Path, count: int) -> None:
    """Read so many damaged models, of every format in turn."""
    sources = sorted(folder.glob("*/*.gguf")) + sorted(folder.glob("*/llama2c.bin")) + sorted(folder.glob("hf-*"))
    sources += sorted(folder.glob("ct2-*"))
    logging.disable()
    tally: Counter[str] = Counter()
    slowest, before = 0.0, peak()
    for number in range(count):
        source = sources[number % len(sources)]
        path = mutated(source, folder / "damaged", random.Random(number))
        kind = source.parent.name if source.is_file() else source.name
        begun = time.process_time()  # by the clock, others on the machine would count
        try:
            found = read_foreign(path)
            with_weights(found.config, found.weights)
        except UserError as error:
            tally[f"{kind} refused" if str(error) else f"{kind} refused without a word"] += 1
        except BaseException:
            print(f"{kind}, number {number}", file=sys.stderr)
            raise
        else:
            tally[f"{kind} loaded"] += 1
        taken = time.process_time() - begun
        if taken > slowest:
            slowest = taken
            print(f"{kind}, number {number}: {taken:.2f} s", file=sys.stderr)
    memory = peak() - before
    print(json.dumps({"tally": tally, "slowest": slowest, "memory": memory}))


def peak() -> int:
    """The most memory that this process has had, in bytes; what rusage says begins with its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
