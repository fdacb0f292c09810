"""`clearhead demo`: train a small translator, then translate and generate with the packaged models."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.options import utf8_path

if TYPE_CHECKING:
    from clearhead.cli.console import Console
    from clearhead.predict import Model

SHADES, ASCII_SHADES = " ░▒▓█", " .:*#"
OVERRIDES = ("data.train.level=1", "data.valid.level=1", "tokenizer.vocab_size=1000")
SENTENCES = {
    "en-de": ("Two dogs are playing in the snow.", "Where is the nearest station?", "She has lived here for years."),
    "zh-en": ("火车站在哪里？", "他昨天买了一本新书。"),
}
NEXT_COMMANDS = {
    "clearhead train mini-en-zh": "train another language pair",
    "clearhead recipes": "list everything you can train",
    "clearhead models": "list the available models",
    "clearhead translate runs/mini-en-zh": "translate text, files and pipes",
}
STORY_MODEL, STORY_PROMPT = "novels-gpt", "It was a dark evening in October when"


def demo(
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Training steps.")] = 400,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Random seed.")] = 0,
    out: Annotated[
        Path | None, typer.Option(callback=utf8_path, help="Keep the trained model in this run folder.")
    ] = None,
) -> None:
    """Train a translator from scratch in about 100 seconds, then translate and generate with the packaged models.

    Example: clearhead demo --out runs/first
    """
    from clearhead.cli.console import Console

    console = Console()
    console.print("[bold]1 · A translator from scratch[/bold], English to German, in about 100 seconds\n", markup=True)
    if out is not None:
        _train(console, steps, seed, out)
    else:
        with tempfile.TemporaryDirectory(prefix="clearhead-demo-") as folder:
            _train(console, steps, seed, Path(folder) / "run")
    _translate(console)
    _generate(console, seed)
    console.print("\n[bold]Next[/bold] (source .venv/bin/activate first)", markup=True)
    for command, description in NEXT_COMMANDS.items():
        console.print(f"  {command:42} {description}")


def _train(console: "Console", steps: int, seed: int, out: Path) -> None:
    """Train, translate held-out sentences, and draw one attention map."""
    from rich.text import Text

    from clearhead.cli.display import Display
    from clearhead.config.data import Corpus
    from clearhead.config.recipe import load_recipe
    from clearhead.data.build_datasets import raw_records
    from clearhead.data.formats import TRANSLATION
    from clearhead.predict import load
    from clearhead.train.loop import train

    every = max(1, steps // 4)
    changes = (f"train.steps={steps}", f"train.seed={seed}", f"train.validate_every={every}", "train.log_every=10")
    recipe = load_recipe("mini-en-de", (*OVERRIDES, *changes))
    with Display(steps) as display:
        summary = train(recipe, out, log=display.log, on_event=display.on_event)
    if summary.stopped:
        raise KeyboardInterrupt
    model = load(out)
    corpus = Corpus(format="embedded", languages=("en", "de"), level=1, split="test", count=4, seed=seed)
    pairs = [record.values for record in raw_records(corpus, TRANSLATION)]
    console.print("\nHeld-out sentences, whose word combinations are not in the training data:\n")
    outputs = [output.text for output in model.translate([source for source, _ in pairs], beam=1)]
    for (source, reference), output in zip(pairs, outputs, strict=True):
        difference = "" if output == reference else f"   (reference: {reference})"
        console.print(Text.assemble(f"  {source}\n  → ", (output, "bold"), difference))
    show_alignment(console, model, max((source for source, _ in pairs), key=len))


def show_alignment(console: "Console", model: "Model", text: str) -> None:
    """Draw the cross-attention weights of each target token over the source tokens as shades."""
    from clearhead.inference import alignment_weights

    source, target = model.tokenizers[0], model.tokenizers[-1]
    source_ids = [*source.encode(text), source.id("end")]
    target_ids = [*target.encode(model.translate(text, beam=1).text), target.id("end")]
    weights = alignment_weights(model.network, source_ids, [target.id("begin")], target_ids)  # type: ignore[arg-type]
    shades = SHADES if encodable(SHADES, console.encoding) else ASCII_SHADES
    columns = [*(source.decode([token]) for token in source_ids[:-1]), "end"]
    rows = [*(target.decode([token]) for token in target_ids[:-1]), "end"]
    margin = max(map(len, rows))
    console.print("\nCross-attention: one row per target token, one column per source token\n")
    console.print("  " + " " * margin + "  " + " ".join(columns))
    for name, row in zip(rows, weights.tolist(), strict=True):
        cells = (shades[min(4, int(5 * weight))] * len(column) for weight, column in zip(row, columns, strict=True))
        console.print(f"  {name:>{margin}}  {' '.join(cells)}")


def _translate(console: "Console") -> None:
    """Translate example sentences with the packaged translators."""
    from rich.text import Text

    from clearhead.predict import load
    from clearhead.predict.find import packaged_models

    names = [name for name in SENTENCES if name in packaged_models()]
    if names:
        console.print("\n[bold]2 · Real sentences[/bold], translated by the packaged models\n", markup=True)
    for name in names:
        for text, result in zip(SENTENCES[name], load(name).translate(SENTENCES[name]), strict=True):
            if encodable(text + result.text, console.encoding):
                console.print(Text.assemble(f"  {name}   {text}  →  ", (result.text, "bold")))


def _generate(console: "Console", seed: int) -> None:
    """Stream a story from the packaged language model."""
    from clearhead.predict import load
    from clearhead.predict.find import packaged_models

    if STORY_MODEL not in packaged_models():
        return
    heading = f"\n[bold]3 · A story[/bold] by {STORY_MODEL}, a Llama-style decoder trained on English novels\n"
    console.print(heading, markup=True)
    console.print(f"  {STORY_PROMPT}", style="bold", end="", soft_wrap=True)
    for piece in load(STORY_MODEL).stream(STORY_PROMPT, seed=seed, max_new_tokens=120, temperature=0.8, top_p=0.9):
        console.print(piece, end="", soft_wrap=True)
    console.print()


def encodable(text: str, encoding: str) -> bool:
    """Whether a terminal with this encoding can show the text."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
