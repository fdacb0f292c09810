"""`clearhead tokenizer`: train, encode, decode and compare tokenizers."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.language import localized
from clearhead.cli.options import Force, check_new, utf8_path
from clearhead.cli.output import echo, echo_json, is_terminal
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.text import Tokenizer
    from clearhead.text.tokenizer_stats import TokenizerStats

app = typer.Typer(help="Train a tokenizer, encode and decode text, and compare tokenizers.", no_args_is_help=True)
Folder = Annotated[
    Path, typer.Argument(metavar="TOKENIZER", help="Folder with tokenizer.json, the file itself, or a model's name.")
]
MAX_VOCAB_SIZE = 1 << 24


@app.command()
def train(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="UTF-8 text files, plain or gzip; - is stdin.")],
    out: Annotated[Path, typer.Option(callback=utf8_path, help="Folder to write tokenizer.json to.")],
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_VOCAB_SIZE, help="Vocabulary size. Default: 8000, or less if the text is small."),
    ] = None,
    kind: Annotated[str, typer.Option(help="byte-bpe, bpe, wordpiece, unigram, word or char.")] = "byte-bpe",
    roles: Annotated[
        str,
        typer.Option(
            help="Roles of the special tokens: pad, begin, end, unknown, mask, class, separator, system, user or "
            "assistant, separated by commas."
        ),
    ] = "pad,begin,end,unknown",
    lowercase: Annotated[bool, typer.Option(help="Lowercase the text first.")] = False,
    force: Force = False,
) -> None:
    """Train a tokenizer on text files.

    Example: clearhead tokenizer train novel.txt.gz --out my-tokenizer --kind byte-bpe --vocab-size 8000
    """
    from clearhead.config.data import DEFAULT_VOCAB_SIZE
    from clearhead.config.settings import nearest
    from clearhead.text import KINDS, ROLES, train_files

    if kind not in KINDS:
        raise UserError(f"--kind: {kind!r} is not allowed{nearest(kind, list(KINDS))}")
    role_names = [role.strip() for role in roles.split(",") if role.strip()]
    for role in role_names:
        if role not in ROLES:
            raise UserError(f"--roles: {role!r} is not allowed{nearest(role, list(ROLES))}")
    check_new(out / "tokenizer.json", force)
    tokenizer = train_files(
        files,
        kind,
        vocab_size or DEFAULT_VOCAB_SIZE,
        roles=role_names,
        lowercase=lowercase,
        progress=is_terminal(err=True),
        exact=vocab_size is not None,
    )
    tokenizer.save(out)
    echo(f"{len(tokenizer):,} tokens in {out / 'tokenizer.json'}", err=True)


@app.command()
def encode(
    folder: Folder,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Encode special tokens in the text as such, not as plain text.")
    ] = False,
    pieces: Annotated[bool, typer.Option("--pieces", help="Print the tokens as text, with ▁ for a space.")] = False,
) -> None:
    """Encode lines of standard input as ids, or as pieces of text, separated by spaces.

    Example: echo "hello world" | clearhead tokenizer encode my-tokenizer
    Example: echo "hello world" | clearhead tokenizer encode novels-gpt --pieces
    """
    from clearhead.files import read_lines

    tokenizer = _load(folder)
    for line in read_lines(Path("-")):
        ids = tokenizer.encode(line, special_tokens)
        echo(" ".join([_piece(tokenizer, token) for token in ids] if pieces else map(str, ids)))


def _piece(tokenizer: "Tokenizer", token: int) -> str:
    """A token as text; part of a character and special tokens as the vocabulary writes them."""
    text = tokenizer.decode([token])
    written = tokenizer.id_to_token(token)
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return written
    space = "▁" if written[0] in "Ġ▁" and not text.startswith(" ") else ""  # decode drops the first one
    return space + text.replace(" ", "▁")


@app.command()
def decode(
    folder: Folder,
    special_tokens: Annotated[bool, typer.Option("--special-tokens", help="Keep special tokens in the text.")] = False,
) -> None:
    """Decode lines of ids from standard input.

    Example: echo "15496 995" | clearhead tokenizer decode gpt2
    """
    from clearhead.files import read_lines

    tokenizer = _load(folder)
    for number, line in enumerate(read_lines(Path("-")), start=1):
        try:
            ids = [int(part) for part in line.split()]
        except ValueError:
            raise UserError(
                f"standard input, line {number}: expected ids; write whole numbers separated by spaces"
            ) from None
        try:
            echo(tokenizer.decode(ids, special_tokens))
        except UserError as error:
            raise UserError(f"standard input, line {number}: {error}") from None


@app.command()
def stats(
    folders: Annotated[list[Path], typer.Argument(metavar="TOKENIZER", help="Tokenizers, or models, to compare.")],
    file: Annotated[list[Path], typer.Option(help="Text to encode; repeatable.")],
    plot: Annotated[Path | None, typer.Option(help="Plot the comparison to this SVG file.")] = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Compare tokenizers on the same text: tokens per word, bytes per token, unknown rate, vocabulary usage.

    Example: clearhead tokenizer stats bpe-4k bpe-16k --file novel.txt.gz --plot compared.svg
    """
    from clearhead.files import read_lines, write_text
    from clearhead.text.tokenizer_plot import plot_stats
    from clearhead.text.tokenizer_stats import compute_stats

    if plot is not None and plot.suffix != ".svg":
        raise UserError(f"--plot: {plot} is not an SVG file; name it {plot.with_suffix('.svg')}")
    if plot is not None:
        check_new(plot, force, "--plot")

    results = {}
    for folder in folders:
        results[str(folder)] = compute_stats(_load(folder), (line for path in file for line in read_lines(path)))
    if plot is not None:
        write_text(plot, plot_stats(results))
    if as_json:
        rows = [{"name": name} | dataclasses.asdict(stats) for name, stats in results.items()]
        echo_json(rows, indent=2)
    else:
        _print_stats(results)


def _load(folder: Path) -> "Tokenizer":
    from clearhead.text import load_folder

    if not folder.is_file() and not any(folder.glob("tokenizer*.json")):
        from clearhead.predict.find import find_model

        folder = find_model(folder)
    tokenizers = load_folder(folder)
    if len(tokenizers) > 1:
        raise UserError(
            f"{folder}: has two tokenizers; name {folder / 'tokenizer.source.json'} or tokenizer.target.json"
        )
    return tokenizers[0]


def _print_stats(results: "dict[str, TokenizerStats]") -> None:
    from rich.table import Table

    from clearhead.cli.console import Console

    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for title in ("vocabulary", "used", "tokens", "per word", "bytes/token", "unknown", "round trip"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, stats in results.items():
        table.add_row(
            name,
            f"{stats.vocab_size:,}",
            f"{stats.vocab_usage:.0%}",
            f"{stats.tokens:,}",
            f"{stats.tokens_per_word:.2f}",
            f"{stats.bytes_per_token:.2f}",
            f"{stats.unknown_rate:.2%}",
            f"{stats.round_trip_rate:.1%}",
        )
    console.print(table)
    max_length = min(16, max(length for stats in results.values() for length in stats.token_lengths))
    for name, stats in results.items():
        console.print(localized(f"\n{name}: token lengths in characters"), soft_wrap=True)
        counts = [0] * (max_length + 1)
        for length, count in stats.token_lengths.items():
            counts[min(length, max_length)] += count
        peak = max(stats.token_lengths.values())
        for length, count in enumerate(counts[1:], start=1):
            bar = "█" * round(40 * count / peak) or ("▏" if count else "")
            console.print(f"{length:>4}{'+' if length == max_length else ' '} {bar} {count / stats.tokens:.1%}")
