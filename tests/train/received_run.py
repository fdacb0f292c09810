"""Fuzzing of received run folders: resume and load thousands of hostile ones (`make torture`).

    python -m tests.train.received_run [COUNT] [FIRST]

Each is a copy of a real run with one thing changed: a value in state.json, recipe.yaml, log.jsonl or config.json, a
tensor's name, shape, dtype or data, an entry of a manifest, a link or special file in a file's place. Manifests are
resealed, so that checksums fit. Only UserErrors are allowed, no file operation outside the run folder, and no change in
a folder beside it that the hostile values name. Prints counts; a failure names its number, which repeats it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import clearhead
from clearhead.checkpoint import disk
from clearhead.config.recipe import Recipe, load_recipe
from clearhead.errors import UserError
from clearhead.train import state
from tests.checkpoint.formats.mutate import DAMAGES, change_header
from tests.train.tiny import recipe, run

SETTINGS: dict[str, Any] = {"save_every": 2, "validate_every": 2, "eval_samples": 1, "log_every": 2}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OPERATIONS = {  # audit event → indices of the paths that it changes
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.link": (0, 1),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.utime": (0,),
    "os.setxattr": (0,),
}
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "C64", "U16", "X")


class Outside(Exception):
    """A file operation outside of the allowed folders."""


class Watch:
    """Records every operation that changes files outside the allowed folders, from an audit hook."""

    def __init__(self, *allowed: Path):
        self.allowed = [os.path.realpath(path) for path in allowed] + ["/dev"]
        self.active = False
        self.found: list[str] = []
        sys.addaudithook(self._hook)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.found, self.active = [], True
        try:
            yield
        finally:
            self.active = False
        if self.found:
            raise Outside("; ".join(self.found))

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        paths: list[str] = []
        if event == "open" and isinstance(arguments[0], str | bytes) and (arguments[2] or 0) & WRITES:
            follows = not arguments[2] & os.O_NOFOLLOW
            paths = [os.path.realpath(os.fsdecode(arguments[0])) if follows else _parent_resolved(arguments[0])]
        elif event in OPERATIONS:
            folders = [value for value in arguments if isinstance(value, int) and value >= 0]
            paths = [_parent_resolved(arguments[index], *folders[:1]) for index in OPERATIONS[event]]
        for path in paths:
            if not any(path == each or path.startswith(each + os.sep) for each in self.allowed):
                self.found.append(f"{event} {path}")


def _parent_resolved(path: Any, folder: int | None = None) -> str:
    """The real path of what an operation changes that does not follow a link; `folder` is a dir_fd."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    text = os.fsdecode(path)
    if folder is not None and not os.path.isabs(text):
        text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    return os.path.join(os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text))


class Campaign:
    """A real run, and hostile copies of it."""

    def __init__(self, folder: Path):
        self.folder, self.counts = folder, Counter[str]()
        self.real, self.copy, self.victim = folder / "real", folder / "copy", folder / "victim"
        self.recipe = recipe("gpt", steps=5, **SETTINGS)
        run(self.real, recipe("gpt", steps=4, **SETTINGS))
        (self.victim / "step-00000002").mkdir(parents=True)
        shutil.copytree(self.real / "best", self.victim / "best")
        (self.victim / "notes.txt").write_text("mine")
        (self.victim / "step-00000002" / "notes.txt").write_text("mine")
        self.before = _contents(self.victim)
        self.watch = Watch(self.copy, Path(os.environ["CLEARHEAD_CACHE"]))
        # The same data for every attempt, and no waiting for the disk.
        prepared = state.prepare(self.recipe.data, self.recipe.tokenizer)
        state.prepare = lambda *_, **__: prepared
        disk._sync = lambda path: None

    def attempt(self, number: int) -> None:
        """Make the hostile copy of a number; resume it and load its model."""
        rng = random.Random(number)
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.real, self.copy)
        kind = rng.choices([name for name, _, _ in KINDS], [weight for _, weight, _ in KINDS])[0]
        change = next(function for name, _, function in KINDS if name == kind)
        change(self, rng)
        made = self.recipe
        with self.watch():
            self._try(f"{kind}, load", lambda: clearhead.load(self.copy, "cpu"))
            if kind == "recipe":
                made = self._try(kind, lambda: _same_data(load_recipe(str(self.copy / "recipe.yaml")), made)) or made
            self._try(f"{kind}, resume", lambda: run(self.copy, made, resume=True))
        if _contents(self.victim) != self.before:
            raise Outside("the folder beside the run has changed")

    def _try(self, name: str, function: Callable[[], Any]) -> Any:
        try:
            result = function()
        except UserError as error:
            text = str(error)
            assert text, "an error without a message"
            assert len(text) < 20_000, "an endless message"
            self.counts[f"{name}: refused"] += 1
            return None
        self.counts[f"{name}: done"] += 1
        return result

    def hostile(self, rng: random.Random) -> Any:
        """A value that training never wrote."""
        paths = [f"{self.victim}", "../victim", "../../victim", "../../victim/step-00000002", "..", ".", "", "/"]
        texts = ["step-00000002", "step-00000002\n", "step-²", "\0", "\x1b[2J", "x" * 100_000, "\udc80", "NaN"]
        numbers = [-1, 0, 1, 2, 4, 1 << 31, 1 << 40, 1 << 63, 1 << 64, 1 << 80, 10**400, 0.5, -0.0, 1e308, 5e-324]
        numbers += [float("nan"), float("inf")]
        others = [None, True, False, [], {}, [[]], {"a": {"b": 1}}, [1, 2, 3], [0, 0], _nested(500), ["a"] * 1000]
        return rng.choice(rng.choice([paths, texts, numbers, others]))

    def change_json(self, path: Path, rng: random.Random) -> None:
        """Change, remove or add a value at any depth."""
        content = json.loads(path.read_text())
        inner, key = content, rng.choice(sorted(content))
        while isinstance(inner[key], dict | list) and inner[key] and rng.random() < 0.8:
            inner = inner[key]
            key = rng.choice(sorted(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
        match rng.randrange(6):
            case 0:
                del inner[key]
            case 1 if isinstance(inner, dict):
                inner[str(self.hostile(rng))[:1000]] = inner.pop(key)
            case 2 if isinstance(inner, dict):
                inner[str(self.hostile(rng))[:1000]] = self.hostile(rng)
            case 3 if isinstance(inner[key], int | float):
                inner[key] = rng.choice(
                    [
                        -inner[key],
                        inner[key] + 1,
                        inner[key] * 2,
                        inner[key] << 40 if isinstance(inner[key], int) else 1e300,
                    ]
                )
            case _:
                inner[key] = self.hostile(rng)
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))

    def checkpoints(self, rng: random.Random) -> list[Path]:
        """The newest checkpoint, or both."""
        folders = sorted((self.copy / "checkpoints").iterdir())
        return folders if rng.random() < 0.3 else folders[-1:]


def change_state(campaign: Campaign, rng: random.Random) -> None:
    for folder in campaign.checkpoints(rng):
        campaign.change_json(folder / "state.json", rng)
        reseal(folder)


def change_config(campaign: Campaign, rng: random.Random) -> None:
    folder = campaign.copy / rng.choice(["best", "last"])
    campaign.change_json(folder / "config.json", rng)
    reseal(folder)


def change_manifest(campaign: Campaign, rng: random.Random) -> None:
    """A manifest that is consistent in form: other names, sizes, digests; most have what its format asks for."""
    folder = rng.choice([*campaign.checkpoints(rng), campaign.copy / "best", campaign.copy / "last"])
    path = folder / "manifest.json"
    entries = json.loads(path.read_text())
    name = rng.choice(sorted(entries))
    match rng.randrange(5):
        case 0:
            entries[str(campaign.hostile(rng))[:300]] = entries.pop(name)
        case 1:
            entries[rng.choice(["notes", "..", ".", "\0", "a" * 300, "../../victim/notes.txt"])] = entries[name]
        case 2:
            entries[name][rng.choice(["size", "sha256"])] = campaign.hostile(rng)
        case 3:
            del entries[name]
        case 4:
            entries = campaign.hostile(rng)
    path.write_bytes((json.dumps(entries, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "surrogatepass"))


def change_tensors(campaign: Campaign, rng: random.Random) -> None:
    """Another name, shape or dtype with the right number of bytes, other values, or a damaged header."""
    folders = [*campaign.checkpoints(rng)] * 3 + [campaign.copy / "best", campaign.copy / "last"]
    path = rng.choice(sorted(rng.choice(folders).glob("*.safetensors")))
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    names = sorted(name for name in header if name != "__metadata__")
    for name in rng.sample(names, min(len(names), rng.choice([1, 1, 1, 3, 1000]))):
        entry = header[name]
        count = entry["data_offsets"][1] - entry["data_offsets"][0]
        match rng.randrange(5):
            case 0:
                other = rng.choice([rng.choice(names), "exp_avg/", "/", "", f"exp_inf/{name}", name.upper()])
                header[other] = header.pop(name)
            case 1:
                dtype = rng.choice(DTYPES)
                width = 8 if dtype in ("F64", "I64", "C64") else 4 if dtype in ("F32", "I32") else 2
                width = 1 if dtype in ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2") else width
                entry["dtype"], entry["shape"] = dtype, rng.choice([entry["shape"], [count // width]])
            case 2:
                entry["shape"] = rng.choice(
                    [[], [count // 4], [1, count // 4], entry["shape"][::-1], [*entry["shape"], 1]]
                )
            case 3:
                begin = entry["data_offsets"][0]
                value = rng.choice([float("nan"), float("inf"), -1.0, 1e38, 1e-45])
                body[begin : begin + count] = (struct.pack("<f", value) * (count // 4 + 1))[:count]
            case 4:
                changed = rng.choice([change_header, change_header, *DAMAGES])(data, rng)
                path.write_bytes(changed)
                reseal(path.parent)
                return
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    reseal(path.parent)


def change_log(campaign: Campaign, rng: random.Random) -> None:
    path = campaign.copy / "log.jsonl"
    lines = path.read_text().splitlines()
    if rng.random() < 0.2:
        path.write_bytes(rng.choice(DAMAGES)(path.read_bytes(), rng))
        return
    for _ in range(rng.choice([1, 1, 5])):
        index, line = rng.randrange(len(lines)), campaign.folder / "line.json"
        if rng.random() < 0.2:
            lines.insert(
                index, rng.choice(["{", "[]", '{"kind": "end"}', '{"kind": "step", "step": 1e400}', '"', "\0"])
            )
            continue
        if not lines[index].startswith('{"'):
            continue
        line.write_text(lines[index])
        campaign.change_json(line, rng)
        text = line.read_bytes().decode("utf-8", "replace")
        lines[index] = " ".join(text.splitlines())
    path.write_text("\n".join(lines) + "\n")


def change_recipe(campaign: Campaign, rng: random.Random) -> None:
    path = campaign.copy / "recipe.yaml"
    lines = path.read_text().splitlines()
    index = rng.randrange(len(lines))
    key, _, _ = lines[index].partition(":")
    value = campaign.hostile(rng)
    try:
        text = value if isinstance(value, str) and rng.random() < 0.5 else json.dumps(value)
    except ValueError:
        text = "?"
    lines[index] = rng.choice(
        [f"{key}: {text}", f"{key}: *a", f"{key}: !!python/object/apply:os.system [id]", text, f"? {text}"]
    )
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))


def change_tree(campaign: Campaign, rng: random.Random) -> None:
    """A link, a FIFO or a folder in the place of a file or folder, or beside it."""
    copy, victim = campaign.copy, campaign.victim
    names = [str(path.relative_to(copy)) for path in copy.rglob("*") if "tokenizer" not in path.name]
    names += [".lock", "events", ".best.old", ".last.old", ".recipe.yaml.1.tmp", f".report.html.{os.getpid()}.tmp"]
    names += ["checkpoints/.step-00000002.old", "checkpoints/step-00000001", "checkpoints/step-00000003"]
    names += ["checkpoints/.step-00000009.tmp-1", f"checkpoints/.step-00000005.tmp-{os.getpid()}", ".best.tmp-1"]
    names += ["checkpoints/step-00000005", "nonfinite-step-5-rank-0.safetensors", f".best.tmp-{os.getpid()}"]
    path = copy / rng.choice(sorted(set(names)))
    kind = rng.choice(["link", "link", "link", "fifo", "folder"])
    if kind == "fifo" and path.parent.name in ("best", "last"):
        kind = "link"  # model folders: tests of load
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    targets = [victim, victim / "best", victim / "notes.txt", victim / "none", victim / "step-00000002"]
    relative = [Path(os.path.relpath(target, path.parent)) for target in targets]
    match kind:
        case "link":
            path.symlink_to(rng.choice([*targets, *relative, Path("/dev/zero"), Path(path.name)]))
        case "fifo":
            os.mkfifo(path)
        case "folder":
            (path / "inner").mkdir(parents=True)


KINDS: list[tuple[str, int, Callable[[Campaign, random.Random], None]]] = [
    ("state", 8, change_state),
    ("tensors", 4, change_tensors),
    ("tree", 3, change_tree),
    ("log", 3, change_log),
    ("manifest", 2, change_manifest),
    ("recipe", 2, change_recipe),
    ("config", 2, change_config),
]


def reseal(folder: Path) -> None:
    """Write a manifest that fits what is in a folder."""
    entries = {}
    for path in sorted(folder.iterdir()):
        if path.name not in disk.NOT_IN_MANIFEST:
            data = path.read_bytes()
            entries[path.name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(entries, ensure_ascii=False, indent=2) + "\n")


def _same_data(changed: Recipe, made: Recipe) -> Recipe | None:
    """The changed recipe for one more step of the run, unless it asks for other data or models."""
    same = changed.data == made.data and changed.model == made.model and changed.tokenizer == made.tokenizer
    train = changed.train.model_copy(update={"steps": 5, "device": "cpu"})
    return changed.model_copy(update={"train": train}) if same else None


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def main(count: int = 10_000, first: int = 0) -> None:
    """Try `count` hostile runs and print what became of them."""
    sys.dont_write_bytecode = True
    logging.disable()
    with TemporaryDirectory() as folder:
        os.environ["CLEARHEAD_CACHE"] = f"{folder}/cache"
        campaign, failures, start = Campaign(Path(folder)), 0, time.perf_counter()
        for number in range(first, first + count):
            begin = time.process_time()
            try:
                campaign.attempt(number)
            except Exception:
                failures += 1
                print(f"number {number}:\n{traceback.format_exc()}", flush=True)
            if (seconds := time.process_time() - begin) > 5:
                print(f"number {number}: {seconds:.1f} s", flush=True)
        for name, times in sorted(campaign.counts.items()):
            print(f"{times:6}  {name}")
        print(f"{count:,} hostile runs, {failures} failures; {time.perf_counter() - start:.0f} s")
        assert not failures


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
