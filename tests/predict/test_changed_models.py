"""Changed config.json files, resealed in the manifest: a clear error or a working model, and no other file is touched.

CLEARHEAD_MUTATIONS=10000 sets the number of changed folders instead of 150.
"""

import hashlib
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clearhead.checkpoint import disk, model_folder_info, save_model
from clearhead.config import preset
from clearhead.config.data import Corpus
from clearhead.errors import UserError
from clearhead.evaluate.model import evaluate
from clearhead.model import build
from clearhead.predict import Model, load
from tests.data.helpers import tokenizer
from tests.file_operations import operations_outside
from tests.predict.task_models import LABELS, SMALL, task_model

COUNT = int(os.environ.get("CLEARHEAD_MUTATIONS", "150"))
MAX_SECONDS = 20.0
TEXT = "the cat sat on the mat"


def reseal(folder: Path, name: str = "config.json") -> None:
    """Give the manifest the size and digest that a file has now, as an attacker would."""
    entries = json.loads((folder / "manifest.json").read_text())
    data = (folder / name).read_bytes()
    entries[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(disk._to_json(entries))


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    reseal(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of every family, with all keys that config.json may have."""
    root, tokens = tmp_path_factory.mktemp("models"), tokenizer()
    models = {"classes": task_model("classes"), "tags": task_model("tags"), "span": task_model("span")}
    models |= {"lm": task_model("lm"), "vectors": task_model("")}
    generation = {"begin": [1], "eos_ids": [2], "banned_ids": [[3]], "chat_template": "{{ messages[0].content }}"}
    for name, family in (("decoder", "tiny-gpt"), ("translator", "tiny-translator")):
        task = "language-model" if name == "decoder" else "translation"
        data = {"task": task, "test": {"format": "embedded", "count": 3, "languages": ["en", "de"]}, "max_length": 40}
        extra = {"task": task, "data": data, "step": 3, "source_end": True, "pad": 0, **generation}
        network = build(preset(family, [*SMALL, f"vocab_size={len(tokens)}"])).eval()
        models[name] = Model(network, (tokens,), extra)
    for name, model in models.items():
        extra = {"imported": "GGUF", "max_length": 40, "pooling": "mean", "normalized": True, **model.extra}
        save_model(root / name, model.network, model.own_tokenizers, extra, card="# A model\n\nsmall\n")
    return {name: root / name for name in models}


USES: dict[str, Callable[[Model], object]] = {
    "classes": lambda model: model.classify([TEXT, TEXT]),
    "tags": lambda model: model.tag([TEXT.split()]),
    "span": lambda model: model.answer("who sat?", TEXT),
    "lm": lambda model: model.fill("the [MASK] sat"),
    "vectors": lambda model: model.embed([TEXT]),
    "decoder": lambda model: (model.generate(TEXT, max_new_tokens=2), evaluate(model, [embedded("en")])),
    "translator": lambda model: (model.translate(TEXT, max_new_tokens=2), evaluate(model, beam=1)),
}


def embedded(*languages: str) -> Corpus:
    return Corpus.build({"format": "embedded", "count": 2, "languages": list(languages)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("labels", 7), ("labels", [1, 2]), ("labels", {"0": "a"}), ("labels", ["x" * 300_000] * 4), ("begin", "1")),
        *(("begin", [-1]), ("eos_ids", [True]), ("banned_ids", [3]), ("source_end", "no"), ("pooling", "max")),
        *(("max_length", "12"), ("max_length", 0), ("data", []), ("task", ["classification"]), ("chat_template", 3)),
        *(("data", {"task": "language-model", "cache_dir": 3}), ("normalized", 1), ("step", -1), ("imported", [])),
    ],
)  # fmt: skip
def test_keys_of_wrong_types_are_named(folders: dict[str, Path], key: str, value: Any) -> None:
    original = (folders["decoder"] / "config.json").read_text()
    change_config(folders["decoder"], **{key: value})
    try:
        with pytest.raises(UserError, match=rf"config\.json: {key}[:.]"):
            _ = load(folders["decoder"], "cpu").data
    finally:
        (folders["decoder"] / "config.json").write_text(original)
        reseal(folders["decoder"])


def test_null_is_as_if_the_key_were_not_there(folders: dict[str, Path]) -> None:
    original = (folders["vectors"] / "config.json").read_text()
    change_config(folders["vectors"], pooling=None, labels=None, data=None, max_length=None, own=None)
    try:
        model = load(folders["vectors"], "cpu")
        assert model.embed([TEXT]).shape == (1, 16)
        assert model.extra == {"imported": "GGUF", "normalized": True, "task": "similarity", "own": None}
    finally:
        (folders["vectors"] / "config.json").write_text(original)
        reseal(folders["vectors"])


VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 48, 1 << 20, 1 << 40, 1 << 70, -0.5, 0.5, 1e300, "", "O", "../../x"),
    *("/etc/passwd", "a\0b", "\ud800", "x" * 3000, "\x1b[31m", [], {}, [1], ["a"], [[1]], [None], {"a": 1}, [1 << 30]),
    *(list(LABELS), ["O"] * 5, {"files": ["/etc/passwd"], "format": "text"}, "text", "mean", "cls", "nan", [[]] * 60),
]


def change_randomly(config: dict[str, Any], rng: random.Random) -> str:
    """Change one to three values at any depth; return what was done."""
    done = []
    for _ in range(rng.randrange(1, 4)):
        place: Any = config
        while True:
            inner = [key for key in place if isinstance(place[key], dict)]
            if not inner or rng.random() < 0.4:
                break
            place = place[rng.choice(inner)]
        key = rng.choice([*place, "files", "cache_dir", "eos_ids", "labels"])
        if rng.random() < 0.1:
            place.pop(key, None)
            done.append(f"no {key}")
        else:
            place[key] = rng.choice(VALUES)
            done.append(f"{key} = {place[key]!r:.60}")
    return "; ".join(done)


def test_changed_configs_never_give_a_traceback_or_touch_other_files(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    for name, use in USES.items():  # whatever is imported on first use is no file operation of a model
        use(load(folders[name], "cpu"))
    originals = {name: (folder / "config.json").read_text() for name, folder in folders.items()}
    rng, refused, slowest = random.Random(0), 0, 0.0
    for number in range(COUNT):
        name = sorted(folders)[number % len(folders)]
        folder = folders[name]
        config = json.loads(originals[name])
        done = f"{name}: {change_randomly(config, rng)}"
        (folder / "config.json").write_text(json.dumps(config))
        reseal(folder)
        start = time.perf_counter()
        with operations_outside(folder) as outside:
            for read in (model_folder_info, lambda folder: USES[name](load(folder, "cpu"))):  # noqa: B023
                try:
                    read(folder)
                except UserError:
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"{number}: {done}") from error
        slowest = max(slowest, time.perf_counter() - start)
        assert slowest < MAX_SECONDS, done
        assert not [each for each in outside if str(tmp_path / "cache") not in each], done  # the user's own cache
        (folder / "config.json").write_text(originals[name])
        reseal(folder)
    assert COUNT / 4 < refused < 2 * COUNT
    print(f"{COUNT} changed configs, {refused} of {2 * COUNT} reads refused, slowest {slowest:.1f} s, 0 tracebacks")
