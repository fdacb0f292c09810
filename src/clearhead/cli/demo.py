"""`clearhead demo`: train a small translator, then translate and generate with the packaged models."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.language import localized
from clearhead.cli.options import utf8_path
from clearhead.ops.openmp import spin_briefly

if TYPE_CHECKING:
    from clearhead.cli.console import Console
    from clearhead.predict import Alignment, Model

SHADES, ASCII_SHADES = " ░▒▓█", " .:*#"
LINKED, UNLINKED = "bold green", "bright_black"  # the cell with the highest weight of a row, and all others
OVERRIDES = ("data.train.level=1", "data.valid.level=1", "tokenizer.vocab_size=1000", "train.eval_samples=100")
SHOWN_STEPS, SAMPLE = 4, 58  # validations, and characters of their sample
HELD_OUT, SHOWN = 40, 4  # sentences translated to find a clear alignment, and of those the first shown as text
SENTENCES = {
    "en-de": ("Two dogs are playing in the snow.", "Where is the nearest station?", "She has lived here for years."),
    "zh-en": ("火车站在哪里？", "他昨天买了一本新书。"),
}
STORY_MODEL, STORY_PROMPT = "novels-gpt", "It was a dark evening in October when"
STORY_SAMPLES = 16  # of which the most probable one is shown
STORY_OPTIONS: dict[str, Any] = {"max_new_tokens": 70, "temperature": 0.7, "top_p": 0.9, "no_repeat_ngram_size": 3}


def demo(
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Training steps.")] = 300,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Random seed.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=utf8_path, help="Run folder of the trained model. Default: runs/demo, or the next free name."
        ),
    ] = None,
) -> None:
    """Train a translator from scratch in about a minute, then translate and generate with the packaged models.

    Example: clearhead demo --out runs/first
    """
    spin_briefly()  # before torch is imported
    from clearhead.cli.console import Console

    console = Console()
    out = out or _free_folder(Path("runs/demo"))
    _heading(console, "1 · A translator from scratch", ", English to German, in about a minute")
    example = _train(console, steps, seed, out)
    _translate(console)
    _generate(console, seed)
    _heading(console, "Next", ": paste any of these")
    for command in next_commands(out, example):
        _print(console, ("  $ ", "bright_black"), (command, "cyan"))


def next_commands(out: Path, example: str) -> list[str]:
    """Commands to continue with; they work as pasted."""
    program = _program()
    return [
        f"{program} translate {shlex.quote(out.as_posix())} {shlex.quote(example)} --align",
        f"{program} fill novels-bert 'He opened the [MASK] and went into the room.'",
        f"{program} train mini-en-zh train.steps=800 --out {shlex.quote(_free_folder(Path('runs/en-zh')).as_posix())}",
    ]


def _program() -> str:
    """The command that started this program, as a shell finds it."""
    started, found = Path(sys.argv[0]), shutil.which("clearhead")
    if not started.name.startswith("clearhead"):
        return f"{shlex.quote(sys.executable)} -m clearhead"
    if found is not None and Path(found).resolve() == started.resolve():
        return "clearhead"
    relative = os.path.relpath(started)
    return shlex.quote(str(started) if relative.startswith("..") else relative)


def _free_folder(folder: Path) -> Path:
    """The folder, or with the first number that is free."""
    number = 1
    free = folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _print(console: "Console", *parts: str | tuple[str, str]) -> None:
    """Print a line of texts, or of texts with a style, as they are."""
    from rich.text import Text

    console.print(Text.assemble(*parts), soft_wrap=True)  # a command is pasted as one line


def _heading(console: "Console", title: str, rest: str) -> None:
    _print(console, "")
    _print(console, (localized(title), "bold cyan"), localized(rest))
    _print(console, "")


def _train(console: "Console", steps: int, seed: int, out: Path) -> str:
    """Train, translate held-out sentences, and draw one alignment; return its sentence."""
    from clearhead.cli.display import Display
    from clearhead.config.data import Corpus
    from clearhead.config.recipe import load_recipe
    from clearhead.data.build_datasets import raw_records
    from clearhead.data.formats import TRANSLATION
    from clearhead.predict import load
    from clearhead.train.loop import train

    class DemoDisplay(Display):
        """One line a validation."""

        def _validation(self, event: dict[str, Any]) -> None:
            if event["step"] == every:
                _print(console, " " * 39, (event["samples"][0]["source"], "italic"))
            scores = f"  step {event['step']:>4}   loss {event['loss']:5.2f}   BLEU {event.get('bleu', 0):4.1f}   "
            output = event["samples"][0]["output"]
            _print(
                console, localized(scores), (output if len(output) <= SAMPLE else output[: SAMPLE - 2] + " …", "green")
            )

    every = max(1, steps // SHOWN_STEPS)
    changes = (f"train.steps={steps}", f"train.seed={seed}", f"train.validate_every={every}", "train.log_every=10")
    recipe = load_recipe("mini-en-de", (*OVERRIDES, *changes))
    with DemoDisplay(steps) as display:
        summary = train(recipe, out, log=display.log, on_event=display.on_event)
    if summary.stopped:
        raise KeyboardInterrupt
    model = load(out)
    corpus = Corpus(format="embedded", languages=("en", "de"), level=1, split="test", count=HELD_OUT, seed=seed)
    pairs = [record.values for record in raw_records(corpus, TRANSLATION)]
    _print(console, localized("\n  Held-out sentences, whose word combinations are not in the training data:\n"))
    results = model.translate([source for source, _ in pairs], beam=1, align=True)
    for (source, reference), result in list(zip(pairs, results, strict=True))[:SHOWN]:
        right = result.text == reference
        difference = (localized(f"   (reference: {reference})"), "bright_black") if not right else ("", "")
        _print(console, f"  {source}  →  ", (result.text, "green" if right else "yellow"), difference)
    alignments = [result.alignment for result in results if result.alignment is not None]
    clearest = max(range(len(alignments)), key=lambda number: _clarity(alignments[number]))
    show_alignment(console, model, alignments[clearest])
    return str(pairs[clearest][0])


def _clarity(alignment: "Alignment") -> tuple[bool, float]:
    """Whether the word order changes, and the weight of the least certain link."""
    sources = [source for source, _ in alignment.links]
    return sources != sorted(sources), min((max(weights) for weights in alignment.weights), default=0.0)


def show_alignment(console: "Console", model: "Model", alignment: "Alignment") -> None:
    """Draw which source word each target word was translated from, as a matrix of attention weights."""
    from rich.cells import cell_len

    shades = SHADES if encodable(SHADES, console.encoding) else ASCII_SHADES
    rate = model.extra.get("alignment", {}).get("error_rate")
    measured = "" if rate is None else f"; alignment error rate on unseen sentences: {rate:.0%}"
    _print(console, localized(f"\n  The clearest of {HELD_OUT} alignments by cross-attention{measured}\n"))
    margin, linked = max(map(cell_len, alignment.target)), {target: source for source, target in alignment.links}
    _print(console, " " * (margin + 4), ("  ".join(alignment.source), "bold"))
    for j, (word, weights) in enumerate(zip(alignment.target, alignment.weights, strict=True)):
        cells = _row(alignment.source, weights, linked.get(j), shades)
        _print(console, "  " + " " * (margin - cell_len(word)), (word, "bold"), "  ", *cells)


def _row(words: Sequence[str], weights: Sequence[float], linked: int | None, shades: str) -> list[tuple[str, str]]:
    """The cells of one target word, each as wide as its source word."""
    from rich.cells import cell_len

    row = []
    for column, (word, weight) in enumerate(zip(words, weights, strict=True)):
        shade = shades[-1] if column == linked else shades[min(len(shades) - 2, int(len(shades) * weight))]
        row += [(shade * cell_len(word), LINKED if column == linked else UNLINKED), ("  ", "")]
    return row


def _translate(console: "Console") -> None:
    """Translate example sentences with the packaged translators."""

    from clearhead.predict import load
    from clearhead.predict.find import packaged_models

    names = [name for name in SENTENCES if name in packaged_models()]
    if names:
        _heading(console, "2 · Real sentences", ", translated by the packaged models")
    for name in names:
        for text, result in zip(SENTENCES[name], load(name).translate(SENTENCES[name]), strict=True):
            if encodable(text + result.text, console.encoding):
                _print(console, (f"  {name}  ", "bright_black"), f"{text}  →  ", (result.text, "green"))


def _generate(console: "Console", seed: int) -> None:
    """Continue a story with the packaged language model: the most probable of several samples."""
    from rich.padding import Padding
    from rich.text import Text

    from clearhead.predict import load
    from clearhead.predict.find import packaged_models

    if STORY_MODEL not in packaged_models():
        return
    how = f", the most probable of {STORY_SAMPLES} by {STORY_MODEL}, a Llama-style decoder trained on novels"
    _heading(console, "3 · A story", how)
    options = STORY_OPTIONS | {"samples": STORY_SAMPLES, "logprobs": True}
    story = load(STORY_MODEL).generate(STORY_PROMPT, seed=seed, **options)
    best = max(story.candidates, key=lambda sample: sample.score or 0.0)
    text = Text.assemble((STORY_PROMPT, "bold"), " ", (_whole_sentences(best.text), "green"))
    console.print(Padding(text, (0, 2)))


def _whole_sentences(text: str) -> str:
    """The text on one line, up to its last complete sentence."""
    text = " ".join(text.split())
    end = max(text.rfind(mark) for mark in (".", "?", "!", '."', '?"', '!"'))
    if text[end + 1 : end + 2] == '"':
        end += 1
    return text[: end + 1] if end > 0 else text


def encodable(text: str, encoding: str) -> bool:
    """Whether a terminal with this encoding can show the text."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
