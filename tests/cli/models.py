"""Tiny model folders of each family, and the command line in a subprocess."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint import Score, model_card, save_model
from clearhead.config import preset
from clearhead.model import build
from clearhead.text import ROLES, train

TEXT = "a man sees the dog, and the dog sees a café. You: Model: hello there, how are you?"
TASKS = {"tiny-translator": "translation", "tiny-gpt": "language-model", "tiny-encoder": "masked-language-model"}


def make(folder: Path, name: str, *, scores: bool = False, tokenizers: bool = True, fill: float | None = None) -> Path:
    """Save a random model of a few thousand parameters; `fill` overwrites one weight."""
    torch.manual_seed(1)
    tokenizer = train([TEXT] * 9, "char" if name == "tiny-gpt" else "word", 64, roles=ROLES)
    sizes = ("dim=16", "heads=2", "ff_dim=32", "max_positions=128", f"vocab_size={len(tokenizer)}")
    network = build(preset(name, sizes))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if fill is not None:
            parameter.view(-1)[0] = fill
    card = None
    if scores:
        results = [Score("BLEU", 31.4, "a test set", "nrefs:1|case:mixed")]
        card = model_card("tiny", "Translates little.", ["Own words"], "train:\n  steps: 7", results, "Apache-2.0")
    save_model(folder, network, tokenizer if tokenizers else (), {"data": {"task": TASKS[name]}}, card)
    return folder


def start(*arguments: object, module: str = "clearhead", **options: Any) -> "subprocess.Popen[bytes]":
    """Start a subprocess with pipes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", module, *map(str, arguments)], env=environment, **pipes)


def clearhead(*arguments: object, stdin: bytes | str = b"", **options: Any) -> tuple[int, str, str]:
    """Run a command; return exit code, stdout and stderr."""
    child = start(*arguments, **options)
    output, errors = child.communicate(stdin.encode() if isinstance(stdin, str) else stdin, timeout=60)
    return child.returncode, output.decode(), errors.decode()
