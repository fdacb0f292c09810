"""Models with control sequences in every field, the commands that show them, and a terminal that records the bytes.

`python -m tests.cli.hostile FOLDER COUNT SEED` runs COUNT cases (0: all) and prints them as JSON: terminal type,
arguments, exit code and output.
"""

import json
import os
import random
import select
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTROL = "\x1b]0;T\x07\x1b]8;;http:e\x1b\\L\x1b]8;;\x1b\\\x1b[5;7mB\x1b[2J\r\x08\x7f\x9b31m\x85\u202eR\u2066[red]m"
HOSTILE = CONTROL + "\udcff"  # in file names and arguments
TEXT = "a man sees the dog"
HEADS = {"fill": "lm", "classify": "classes", "tag": "tags", "answer": "span", "embed": ""}
TASKS = {
    "fill": "masked-language-model",
    "classify": "classification",
    "tag": "tagging",
    "answer": "answering",
    "embed": "similarity",
}
SECONDS = 30
Change = Callable[[dict[str, Any]], object]

CONFIG_FIELDS: dict[str, Change] = {
    "family": lambda config: config["model"].update(family=CONTROL),
    "setting": lambda config: config["model"].update({CONTROL: 1}),
    "value": lambda config: config["model"].update(dim=CONTROL),
    "attention": lambda config: config["model"].update(attention=[CONTROL]),
    "format": lambda config: config.update(format=CONTROL),
    "version": lambda config: config.update(version=CONTROL),
    "task": lambda config: config.update(task=CONTROL, data={"task": CONTROL}),
    "data": lambda config: config["data"].update({CONTROL: CONTROL}),
    "languages": lambda config: config["data"].update(languages=[CONTROL, CONTROL]),
    "source-url": lambda config: config["data"].update(source_url=CONTROL),
    "corpora": lambda config: config["data"].update(test=[{"format": "text", "files": [CONTROL]}]),
    "labels": lambda config: config.update(labels=[CONTROL, CONTROL]),
    "begin": lambda config: config.update(begin=CONTROL),
    "eos": lambda config: config.update(eos_ids=[CONTROL]),
    "template": lambda config: config.update(
        chat_template="{{ raise_exception(messages[0].content ~ '" + CONTROL + "') }}"
    ),
    "template-syntax": lambda config: config.update(chat_template="{% " + CONTROL + " %}"),
    "template-text": lambda config: config.update(chat_template=CONTROL + "{{ messages[-1].content }}"),
    "extra": lambda config: config.update({CONTROL: {CONTROL: CONTROL}}),
}
FILES = {
    "config-bytes": ("config.json", '{"' + CONTROL),
    "tokenizer-kind": ("tokenizer.json", json.dumps({"model": {"type": CONTROL}})),
    "tokenizer-bytes": ("tokenizer.json", CONTROL),
    "weights": ("model.safetensors", CONTROL),
    "manifest": ("manifest.json", json.dumps({"files": {CONTROL: {"size": 1, "sha256": CONTROL}}})),
}
PAIRS = {"format": "tsv", "files": ["pairs.tsv"], "columns": {"source": 1, "target": 2}}
RECIPE = {
    "model": {"preset": "tiny-translator", "dim": 16, "heads": 2, "ff_dim": 32},
    "tokenizer": {"kind": "char", "vocab_size": 99},
    "data": {"task": "translation", "train": PAIRS, "valid": PAIRS, "max_length": 120, "batch_tokens": 500},
    "train": {"steps": 2, "validate_every": 2, "eval_samples": 2, "device": "cpu"},
}


def save_hostile(folder: Path, name: str) -> Path:
    """Save a model whose tokens, labels and card hold control sequences."""
    import torch

    from clearhead.checkpoint import Score, model_card, save_model
    from clearhead.config import preset
    from clearhead.model import build
    from clearhead.text import ROLES, train

    torch.manual_seed(0)
    tokens = train([TEXT + CONTROL] * 9, "char", 99, roles=ROLES)
    head, encoder = HEADS.get(name, "lm"), name in HEADS
    labels = (
        [f"{kind}-{CONTROL}{number}" for number in range(2) for kind in "BI"] if head in ("classes", "tags") else []
    )
    base = "tiny-encoder" if encoder else {"gpt": "tiny-gpt", "tr": "tiny-translator"}[name]
    sizes = ["dim=16", "heads=2", "ff_dim=32", "max_positions=128", f"vocab_size={len(tokens)}"]
    if encoder:
        sizes += [f"outputs=[{head}]", f"labels={len(labels)}", "pooler=false"]
    network = build(preset(base, sizes)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter))
    task = TASKS.get(name, "translation" if name == "tr" else "language-model")
    score = Score(CONTROL, 1.0, CONTROL, CONTROL)
    card = model_card(CONTROL, CONTROL, [CONTROL], CONTROL, [score], CONTROL, CONTROL)
    save_model(
        folder, network, tokens, {"task": task, "labels": labels, "data": {"task": task, "max_length": 64}}, card
    )
    return folder


def change(folder: Path, name: str) -> None:
    """Put control sequences into one field of a model folder, and make its manifest fit."""
    from clearhead.checkpoint import disk

    if name in CONFIG_FIELDS:
        config = json.loads((folder / "config.json").read_text())
        CONFIG_FIELDS[name](config)
        (folder / "config.json").write_text(json.dumps(config))
    else:
        file, text = FILES[name]
        (folder / file).write_text(text)
    if name != "manifest":
        (folder / disk.MANIFEST).unlink()
        disk._write_manifest(folder)


def prepare(folder: Path) -> list[str]:
    """Write models and files to a folder; return the names of the models."""
    models = [save_hostile(folder / name, name).name for name in ("gpt", "tr", *HEADS)]
    for name in (*CONFIG_FIELDS, *FILES):
        base = "classify" if name == "labels" else "tr" if name == "languages" else "gpt"
        change(save_hostile(folder / name, base), name)
        models.append(name)
    for name in (CONTROL, HOSTILE):
        save_hostile(folder / "renamed", "gpt").rename(folder / name)  # HOSTILE is not UTF-8, which save_model refuses
    save_hostile(folder / "runs" / CONTROL / "best", "tr")
    change(save_hostile(folder / "runs" / f"broken{CONTROL}" / "best", "gpt"), "family")
    (folder / "runs" / "two").mkdir()
    (folder / "lines").write_text(f"{TEXT}\n{CONTROL}\n{TEXT}\t{CONTROL}\n")
    (folder / f"lines{HOSTILE}").write_text(TEXT + "\n")
    (folder / "vectors").write_text(
        f"3 2\nking{CONTROL.replace(' ', '')} 1 0\nking 0 1\nqueen 1 1\n".replace("\x85", "")
    )
    (folder / "pairs").write_text(f"king\tqueen\t{CONTROL}\n")
    (folder / "recipe.yaml").write_text(json.dumps({"model": {"preset": CONTROL}, CONTROL: 1}))
    (folder / "preset.yaml").write_text(json.dumps({"family": "decoder", CONTROL: CONTROL}))
    (folder / "pairs.tsv").write_text(f"{TEXT} {CONTROL}\t{TEXT} {CONTROL}\n".replace("\x85", "") * 20)
    (folder / f"{CONTROL}.yaml").write_text(json.dumps(RECIPE))
    return [*models, CONTROL, HOSTILE, f"runs/{CONTROL}"]


def cases(models: list[str]) -> list[tuple[list[str], bytes | None]]:
    """Every command for every model, and commands with hostile arguments; None as input is a terminal."""
    lines = f"{TEXT}\n{CONTROL}\n".encode()
    found: list[tuple[list[str], bytes | None]] = []
    for model in models:
        commands: list[tuple[list[str], bytes | None]] = [
            (["info", model], b""),
            (["info", model, "--json"], b""),
            (["translate", model, TEXT, CONTROL, "--n-best", "3", "--align", "--logprobs"], b""),
            (["translate", model, "--json"], lines),
            (["generate", model, CONTROL, "--max-new-tokens", "40"], b""),
            (["generate", model, "a", "--stream", "--max-new-tokens", "60", "--temperature", "2"], b""),
            (["generate", model, "a", "--samples", "2", "--json", "--max-new-tokens", "40"], b""),
            (["generate", model, "--max-new-tokens", "40"], lines),
            (["chat", model, "--max-new-tokens", "20"], None),
            (["fill", model, f"{TEXT} [MASK] <mask>"], b""),
            (["fill", model, "a<mask>", "--json"], b""),
            (["classify", model, TEXT, "--all"], b""),
            (["classify", model, CONTROL, "--json"], b""),
            (["tag", model, TEXT, CONTROL], b""),
            (["tag", model, TEXT, "--json"], b""),
            (["answer", model, "who?", "--context", f"{TEXT} {CONTROL}", "--top", "3", "--require-answer"], b""),
            (["embed", model, "--out", f"v{HOSTILE}"], lines),
            (["similar", model, "lines", TEXT], b""),
            (["evaluate", model, "--data", "lines"], b""),
            (["evaluate", model], b""),
            (["export", model, f"to{CONTROL}", "--to", "hf"], b""),
            (["import", model, f"from{CONTROL}"], b""),
            (["tokenizer", "encode", model], lines),
            (["tokenizer", "decode", model], b" ".join(b"%d" % number for number in range(40)) + b"\n9999\n"),
            (["tokenizer", "stats", model, "--file", "lines"], b""),
        ]
        found += commands
    for arguments in (
        [["models"], ["models", "--json"], [CONTROL], [f"--{CONTROL}"], ["generate", "gpt", f"--{CONTROL}"]]
        + [["generate", "gpt", "a", option, CONTROL] for option in ("--device", "--dtype", "--seed", "--draft")]
        + [["pull", name] for name in (CONTROL, HOSTILE, f"hf:{CONTROL}/x")]
        + [["presets", name] for name in (CONTROL, "preset.yaml", HOSTILE)]
        + [["presets", "tiny-gpt", f"{CONTROL}=1"], ["presets", "tiny-gpt", f"family={CONTROL}"]]
        + [["train", name, "--dry-run"] for name in (CONTROL, "recipe.yaml", HOSTILE)]
        + [["train", f"{CONTROL}.yaml", "--out", f"run{number}{CONTROL}"] for number in range(4)]
        + [["train", "mini-en-de", f"{CONTROL}=1"], ["train", "mini-en-de", f"data.task={CONTROL}"]]
        + [["word2vec", "neighbours", "vectors", word] for word in ("queen", CONTROL, HOSTILE)]
        + [["word2vec", "neighbours", "vectors", "queen", "king", "--json"], ["word2vec", "export", "vectors", HOSTILE]]
        + [["word2vec", "analogy", "vectors", "king", "queen", "king"], ["word2vec", "evaluate", "vectors"]]
        + [["word2vec", "evaluate", "vectors", option, "pairs"] for option in ("--pairs", "--analogies")]
        + [["word2vec", "train", "lines", "--out", f"w{CONTROL}", "--min-count", "1", "--workers", "1"]]
        + [["tokenizer", "train", f"lines{HOSTILE}", "--out", f"t{CONTROL}"]]
        + [["tokenizer", "train", "lines", "--out", "t", option, CONTROL] for option in ("--kind", "--roles")]
        + [["evaluate", "tr", "--data", HOSTILE, option, CONTROL] for option in ("--format", "--columns", "--labels")]
        + [["similar", "embed", HOSTILE, TEXT], ["export", "gpt", "x", "--to", CONTROL], ["tokenizer", CONTROL]]
    ):
        found.append((arguments, b""))
    return found


def record(arguments: list[str], stdin: bytes | None, terminal: str) -> tuple[int, bytes]:
    """Run a command in a forked process on a terminal; return its exit code and every byte it writes there."""
    import pty
    import termios

    from tests.cli.forked import run

    parent_end, child_end = pty.openpty()
    mode = termios.tcgetattr(child_end)
    mode[1] &= ~termios.OPOST  # a line break is \n
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(child_end, termios.TCSANOW, mode)
    with tempfile.TemporaryFile() as source:
        source.write(stdin or b"")
        source.seek(0)
        child = os.fork()
        if child == 0:
            os.environ["TERM"] = terminal
            os.setsid()
            for number in (0, 1, 2):
                os.dup2(child_end if number or stdin is None else source.fileno(), number)
            sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
            run(arguments)
    os.close(child_end)
    typed = ["hello", "/what", "/system x", "the dog", "/quit"]
    output, limit = b"", time.monotonic() + SECONDS
    while time.monotonic() < limit:
        try:
            if select.select([parent_end], [], [], 0.2)[0]:
                output += os.read(parent_end, 1 << 16)
            if stdin is None and typed and output.endswith(b"You: "):
                os.write(parent_end, typed.pop(0).encode() + b"\n")
                output += b"\n"
        except OSError:  # the child has ended
            break
    else:
        os.kill(child, 9)
    os.close(parent_end)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output


def main(folder: str, count: int, seed: int) -> None:
    """Run the cases in a folder."""
    import clearhead.cli.console
    import clearhead.predict  # noqa: F401 (imports torch once)

    os.chdir(folder)
    os.environ["CLEARHEAD_CACHE"] = str(Path(folder).resolve() / "cache")
    chosen = cases(prepare(Path()))
    if count:
        chosen = random.Random(seed).sample(chosen, count)
    results = []
    for number, (arguments, stdin) in enumerate(chosen):
        terminal = "xterm-256color" if number % 4 == 0 and stdin is not None else "dumb"
        code, output = record(arguments, stdin, terminal)
        results.append([terminal, arguments, code, output.decode(errors="surrogateescape")])
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
