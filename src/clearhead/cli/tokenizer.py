"""`clearhead tokenizer`: train one, turn lines into ids and back, compare several on the same text."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.text import Tokenizer
    from clearhead.text.stats import Stats

app = typer.Typer(help="Train a tokenizer, encode, decode, compare.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder with tokenizer.json, or the file.")]
LARGEST = 1 << 24


@app.command()
def train(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Text, plain or gzip, UTF-8; - is stdin.")],
    out: Annotated[Path, typer.Option(help="Folder to write tokenizer.json into.")],
    size: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Tokens; without it, 8000 or what the text supports.")
    ] = None,
    kind: Annotated[str, typer.Option(help="byte-bpe, bpe, wordpiece, unigram, word or char.")] = "byte-bpe",
    roles: Annotated[str, typer.Option(help="Special tokens, by role.")] = "pad,begin,end,unknown",
    lowercase: Annotated[bool, typer.Option(help="Make every letter small first.")] = False,
) -> None:
    """Learn a tokenizer from text files.

    Example: clearhead tokenizer train novel.txt.gz --out my-tokenizer --kind byte-bpe --size 8000
    """
    from clearhead.config.settings import nearest
    from clearhead.text import KINDS, ROLES, train_files

    if kind not in KINDS:
        raise UserError(f"--kind: {kind!r} is not allowed{nearest(kind, list(KINDS))}")
    wanted = [role.strip() for role in roles.split(",") if role.strip()]
    for role in wanted:
        if role not in ROLES:
            raise UserError(f"--roles: {role!r} is not allowed{nearest(role, list(ROLES))}")
    if (out / "tokenizer.json").exists():
        raise UserError(f"--out: {out / 'tokenizer.json'} exists already; choose another folder")
    tokenizer = train_files(
        files,
        kind,
        size or 8000,
        roles=wanted,
        lowercase=lowercase,
        progress=sys.stderr.isatty(),
        exact=size is not None,
    )
    tokenizer.save(out)
    typer.echo(f"{len(tokenizer):,} tokens in {out / 'tokenizer.json'}", err=True)


@app.command()
def encode(
    folder: Folder,
    specials: Annotated[bool, typer.Option(help="Special tokens written in the text count as such.")] = False,
) -> None:
    """Lines of text on standard input to ids, separated by spaces.

    Example: echo "hello world" | clearhead tokenizer encode my-tokenizer
    """
    from clearhead.files import read_lines

    tokenizer = _load(folder)
    for line in read_lines(Path("-")):
        print(*tokenizer.encode(line, specials))


@app.command()
def decode(
    folder: Folder,
    specials: Annotated[bool, typer.Option(help="Show special tokens instead of leaving them out.")] = False,
) -> None:
    """Lines of ids on standard input, separated by spaces, to text.

    Example: echo "15496 995" | clearhead tokenizer decode gpt2
    """
    from clearhead.files import read_lines

    tokenizer = _load(folder)
    for number, line in enumerate(read_lines(Path("-")), start=1):
        try:
            ids = [int(word) for word in line.split()]
        except ValueError:
            raise UserError(f"standard input, line {number}: expected ids, whole numbers with spaces between") from None
        try:
            print(tokenizer.decode(ids, specials))
        except UserError as error:
            raise UserError(f"standard input, line {number}: {error}") from None


@app.command()
def stats(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Tokenizers to compare.")],
    file: Annotated[list[Path], typer.Option(help="Text to measure on; may be given several times.")],
    picture: Annotated[Path | None, typer.Option(help="Draw the comparison into this SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: a list of objects.")] = False,
) -> None:
    """Compare tokenizers on the same text: tokens per word, bytes per token, unknown rate, vocabulary use.

    Example: clearhead tokenizer stats bpe-4k bpe-16k --file novel.txt.gz --picture compared.svg
    """
    from clearhead.files import read_lines, write_text
    from clearhead.text.picture import draw
    from clearhead.text.stats import measure

    if picture is not None and picture.suffix != ".svg":
        raise UserError(f"--picture: {picture} is drawn as SVG; name it {picture.with_suffix('.svg')}")

    found = {}
    for folder in folders:
        found[str(folder)] = measure(_load(folder), (line for one in file for line in read_lines(one)))
    if picture is not None:
        write_text(picture, draw(found))
    if as_json:
        typer.echo(json.dumps([{"name": name} | dataclasses.asdict(each) for name, each in found.items()], indent=2))
    else:
        _show(found)


def _load(folder: Path) -> "Tokenizer":
    from clearhead.text import load_folder

    found = load_folder(folder)
    if len(found) > 1:
        raise UserError(f"{folder} has two; name {folder / 'tokenizer.source.json'} or tokenizer.target.json")
    return found[0]


def _show(found: "dict[str, Stats]") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for title in ("vocabulary", "used", "tokens", "per word", "bytes/token", "unknown", "come back"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, each in found.items():
        table.add_row(
            name,
            f"{each.vocabulary:,}",
            f"{each.vocabulary_used:.0%}",
            f"{each.tokens:,}",
            f"{each.tokens_per_word:.2f}",
            f"{each.bytes_per_token:.2f}",
            f"{each.unknown_rate:.2%}",
            f"{each.round_trip:.1%}",
        )
    console.print(table)
    longest = min(16, max(length for each in found.values() for length in each.lengths))
    for name, each in found.items():
        console.print(f"\n{name}: tokens by their number of characters", soft_wrap=True)
        most = max(each.lengths.values())
        for length in range(1, longest + 1):
            times = sum(n for size, n in each.lengths.items() if size == length or (length == longest < size))
            bar = "█" * round(40 * times / most) or ("▏" if times else "")
            console.print(f"{length:>4}{'+' if length == longest else ' '} {bar} {times / each.tokens:.1%}")
