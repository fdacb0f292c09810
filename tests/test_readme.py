"""Every `clearhead` line of the README runs, in the order of the page, in one new folder.

Training is cut to a few steps. Instead of a network there are files: small ones in place of the public datasets, and
small random models in the cache in place of those that `clearhead pull` downloads.
"""

import gzip
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.checkpoint import save_model
from clearhead.config import preset
from clearhead.config.recipe import load_recipe, recipe_names
from clearhead.data.grammar import Grammar
from clearhead.data.public_datasets import public_datasets
from clearhead.model import build
from clearhead.text import ROLES, train
from tests.cli.forked import calls

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SENTENCES = [Grammar(level=2).example("train", n).text("en") for n in range(400)]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>model\n"
FEW = "train.steps=2 train.warmup=1 train.validate_every=2 train.save_every=2 train.eval_samples=4"
FEW_RECORDS = ("data.train.count=300", "data.valid.count=40")
SHRUNK = {"--vocab-size": "500"}


def lines() -> list[str]:
    """The commands of the page: lines of code blocks that run `clearhead`."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.M | re.S)
    every = [line for kind, block in blocks if kind in ("", "console") for line in block.splitlines()]
    return [line for line in (each.removeprefix("$ ") for each in every) if re.match(r"(echo .* \| )?clearhead ", line)]


def parse(line: str) -> tuple[list[str], bytes]:
    """Arguments and standard input of a command, cut to seconds."""
    words = shlex.split(line, comments=True)
    stdin = b""
    if words[0] == "echo":
        stdin, words = f"{words[1]}\n".encode(), words[3:]
    arguments = words[1:]
    if arguments[0] == "train":
        name = arguments[1]
        synthetic = name in recipe_names() and load_recipe(name).data.train[0].format == "embedded"
        arguments += [*FEW.split(), "data.batch_tokens=512", *(FEW_RECORDS if synthetic else ())]
    elif arguments[:2] == ["word2vec", "train"]:
        arguments += ["--epochs", "1", "--dim", "8"]
    elif arguments[0] == "chat":
        stdin = b"Hello!\n"
    return [SHRUNK.get(before, word) for before, word in zip(["", *arguments], arguments, strict=False)], stdin


def fake_downloads(folder: Path) -> None:
    """Put small files where `clearhead data` and `clearhead pull` put what they download."""
    text = {"sst2": "sentence\tlabel\n" + "".join(f"{s}\t{n % 2}\n" for n, s in enumerate(SENTENCES))}
    text["tinyshakespeare"] = "\n".join(f"The king and the queen. {s}" for s in SENTENCES)
    for name, content in text.items():
        for file in public_datasets()[name].files:
            path = folder / "data" / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    tokenizer = train(SENTENCES, "byte-bpe", 400, roles=ROLES)
    sizes = ("dim=16", "heads=2", "ff_dim=32", "max_positions=256", f"vocab_size={len(tokenizer)}")
    models: dict[str, tuple[str, dict[str, Any]]] = {
        "minilm": ("tiny-encoder", {}),
        "smollm2": ("tiny-llama", {"chat_template": CHATML, "eos_ids": [tokenizer.roles["end"]]}),
    }
    for name, (base, extra) in models.items():
        torch.manual_seed(0)
        save_model(folder / "cache" / "models" / name, build(preset(base, sizes)), tokenizer, extra)


def test_every_command_runs_in_the_order_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_downloads(tmp_path)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CLEARHEAD_DATA", raising=False)
    page = lines()
    assert len(page) > 30
    commands = [parse(line) for line in page]
    results = [each for start in range(0, len(page), 8) for each in calls(commands[start : start + 8], tmp_path)]
    failed = [
        (line, code, errors)
        for line, (code, _, errors) in zip(page, results, strict=True)
        if code != (2 if "haeds" in line else 0) or "Traceback" in errors
    ]
    assert failed == []
    said = {line: output for line, (_, output, _) in zip(page, results, strict=True)}
    (filled,) = (output for line, output in said.items() if line.startswith("clearhead fill"))
    assert filled.startswith("door "), "the example is one where the right word comes first"
    assert (tmp_path / "compared.svg").is_file()
    assert (tmp_path / "my-model" / "config.json").is_file()


def test_without_a_network_the_downloads_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CLEARHEAD_DATA", raising=False)
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    downloads = [line for line in lines() if re.match(r"clearhead data \w", line)]
    later = ["clearhead train sst2", "clearhead chat smollm2"]
    results = calls([parse(line) for line in [*downloads, *later]], tmp_path)
    assert [code for code, _, _ in results] == [2] * len(results)
    for line, (_, _, errors) in zip(downloads, results, strict=False):
        assert "cannot be reached" in errors
        assert f"clearhead:   data/{line.split()[2]}/" in errors
    assert results[-2][2] == "clearhead: minilm is not downloaded yet; run: clearhead pull minilm\n"
    assert results[-1][2] == "clearhead: smollm2 is not downloaded yet; run: clearhead pull smollm2\n"
