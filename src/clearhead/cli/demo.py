"""`clearhead demo`: a translator learns while you watch; the models that come along translate and write."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.predict import Model

SHADES, PLAIN_SHADES = " ░▒▓█", " .:*#"
LEVEL = ("data.train.level=1", "data.valid.level=1", "tokenizer.vocab_size=1000")
REAL = {
    "en-de": ("Two dogs are playing in the snow.", "Where is the nearest station?", "She has lived here for years."),
    "zh-en": ("火车站在哪里？", "他昨天买了一本新书。"),
}
NEXT = {
    "clearhead train mini-en-zh": "another language",
    "clearhead recipes": "what else can be trained",
    "clearhead models": "which models there are",
    "clearhead translate runs/mini-en-zh": "any text, from a pipe or a file",
}
STORY, OPENING = "novels-gpt", "It was a dark evening in October when"


def demo(
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Training steps of the little translator.")] = 400,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Where randomness begins.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Keep the translator in this run folder.")] = None,
) -> None:
    """Train a translator from nothing in about 100 seconds, then translate and write with the models that come along.

    Example: clearhead demo --out runs/first
    """
    from rich.console import Console

    console = Console(highlight=False)
    console.print("[bold]1 · A translator from nothing[/bold], English to German, in about 100 seconds\n")
    if out is not None:
        _learn(console, steps, seed, out)
    else:
        with tempfile.TemporaryDirectory(prefix="clearhead-demo-") as folder:
            _learn(console, steps, seed, Path(folder) / "run")
    _real(console)
    _story(console, seed)
    console.print("\n[bold]Next[/bold] (source .venv/bin/activate first)")
    for command, about in NEXT.items():
        console.print(f"  {command:42} {about}", markup=False)


def _learn(console: "Console", steps: int, seed: int, out: Path) -> None:
    """Train, then translate sentences whose combinations of words were held out, and draw one alignment."""
    from clearhead.cli.train import Display
    from clearhead.config.data import Corpus
    from clearhead.config.recipe import load_recipe
    from clearhead.data.build_datasets import raw_records
    from clearhead.data.formats import TRANSLATION
    from clearhead.predict import load
    from clearhead.train.loop import train

    every = max(1, steps // 4)
    changes = (f"train.steps={steps}", f"train.seed={seed}", f"train.validate_every={every}", "train.log_every=10")
    recipe = load_recipe("mini-en-de", (*LEVEL, *changes))
    with Display(steps) as display:
        summary = train(recipe, out, say=display.say, watch=display.watch)
    if summary.stopped:
        raise KeyboardInterrupt
    model = load(out)
    corpus = Corpus(format="embedded", languages=("en", "de"), level=1, split="test", count=4, seed=seed)
    pairs = [record.values for record in raw_records(corpus, TRANSLATION)]
    console.print("\nSentences it has never seen, nor these combinations of words:\n")
    outputs = model.translate([source for source, _ in pairs], beam=1)
    for (source, reference), output in zip(pairs, outputs, strict=True):
        other = "" if output == reference else f"   (or: {reference})"
        console.print(f"  {source}\n  → [bold]{output}[/bold]{other}")
    show_alignment(console, model, max((source for source, _ in pairs), key=len))


def show_alignment(console: "Console", model: "Model", text: str) -> None:
    """Where the decoder looks in the source while each word is written, as shades."""
    from clearhead.inference import alignment_weights

    source, target = model.tokenizers[0], model.tokenizers[-1]
    read = [*source.encode(text), source.id("end")]
    written = [*target.encode(model.translate(text, beam=1)[0]), target.id("end")]
    weights = alignment_weights(model.network, read, [target.id("begin")], written)  # type: ignore[arg-type]
    shades = SHADES if encodable(SHADES, console.encoding) else PLAIN_SHADES
    columns = [*(source.decode([token]) for token in read[:-1]), "end"]
    rows = [*(target.decode([token]) for token in written[:-1]), "end"]
    margin = max(map(len, rows))
    console.print("\nWhere it looked: each row a word written, each column a word read\n")
    console.print("  " + " " * margin + "  " + " ".join(columns))
    for name, row in zip(rows, weights.tolist(), strict=True):
        cells = (shades[min(4, int(5 * weight))] * len(column) for weight, column in zip(row, columns, strict=True))
        console.print(f"  {name:>{margin}}  {' '.join(cells)}")


def _real(console: "Console") -> None:
    from clearhead.predict import load
    from clearhead.predict.find import packaged_models

    names = [name for name in REAL if name in packaged_models()]
    if names:
        console.print("\n[bold]2 · Real sentences[/bold], by translators that come with the package\n")
    for name in names:
        for text, found in zip(REAL[name], load(name).translate(REAL[name]), strict=True):
            if encodable(text + found, console.encoding):
                console.print(f"  {name}   {text}  →  [bold]{found}[/bold]")


def _story(console: "Console", seed: int) -> None:
    from clearhead.predict import load
    from clearhead.predict.find import packaged_models

    if STORY not in packaged_models():
        return
    console.print(f"\n[bold]3 · A story[/bold], by {STORY}, the block of 2024, on English novels\n")
    console.print(f"  [bold]{OPENING}[/bold]", end="", soft_wrap=True)
    for piece in load(STORY).stream(OPENING, seed=seed, max_new_tokens=120, temperature=0.8, top_p=0.9):
        console.print(piece, end="", markup=False, soft_wrap=True)
    console.print()


def encodable(text: str, encoding: str) -> bool:
    """Whether a terminal of this encoding can show the text."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
