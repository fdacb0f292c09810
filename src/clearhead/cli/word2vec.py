"""`clearhead word2vec`: learn word vectors from text, ask them for neighbors and analogies, score and export them."""

import dataclasses
import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clearhead.text.word2vec import Training

app = typer.Typer(help="Learn word vectors, find neighbors and analogies, score, export.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder with vectors, or a file in the text format.")]
Count = Annotated[int, typer.Option(min=1, max=1000, help="Answers for each.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command()
def train(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Text, plain or gzip, UTF-8; - is stdin.")],
    out: Annotated[Path, typer.Option(help="Folder to write the vectors into.")],
    dim: Annotated[int, typer.Option(help="Width of the vectors.")] = 100,
    window: Annotated[int, typer.Option(help="Words seen to each side, at the most.")] = 5,
    negatives: Annotated[int, typer.Option(help="Random words against each pair.")] = 5,
    epochs: Annotated[int, typer.Option(help="Times through the text.")] = 5,
    cbow: Annotated[bool, typer.Option("--cbow", help="Predict the word from its context instead.")] = False,
    min_count: Annotated[int, typer.Option(min=1, max=10**9, help="Leave out words that are rarer.")] = 5,
    sample: Annotated[float, typer.Option(help="Thin out words above this share of the text.")] = 1e-3,
    learning_rate: Annotated[
        float | None, typer.Option(help="At the start. [default: 0.035, with --cbow 0.15]")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Threads; 1 repeats exactly. [default: all cores]")] = None,
    seed: Annotated[int, typer.Option(help="Where randomness begins.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Learn word vectors from text files: sentences end at . ! ?, letters are made small.

    Example: clearhead word2vec train novels/*.txt.gz --out vectors --dim 100 --epochs 3
    """
    import torch

    from clearhead.text.corpus import read_corpus
    from clearhead.text.word2vec import Training, Word2VecSettings

    if device != "cpu" and not (device.partition(":")[0] == "cuda" and torch.cuda.is_available()):
        raise UserError(f"--device: {device!r} is not there; use cpu" + (" or cuda" * torch.cuda.is_available()))
    if workers is None:
        workers = torch.get_num_threads() if device == "cpu" else 1
    given: dict[str, Any] = {"dim": dim, "window": window, "negatives": negatives, "epochs": epochs, "cbow": cbow}
    given |= {"sample": sample, "workers": workers, "seed": seed}
    if learning_rate is not None:
        given["learning_rate"] = learning_rate
    settings = Word2VecSettings.build(given, "word2vec")
    with _made(out):
        corpus = read_corpus(files, min_count)
        typer.echo(f"{corpus.raw_words:,} words, {len(corpus.words):,} different ones of {min_count} or more", err=True)
        training, begun = Training(corpus, settings, device), time.perf_counter()
        for _ in _shown(training, corpus.raw_words * epochs):
            pass
        rate = corpus.raw_words * epochs / (time.perf_counter() - begun)
        training.vectors().save(out)
    if as_json:
        result = {"folder": str(out), "vocabulary": len(corpus.words), "words": corpus.raw_words}
        typer.echo(json.dumps(result | {"words_per_second": round(rate)} | settings.model_dump()))
    else:
        typer.echo(f"{len(corpus.words):,} vectors in {out}, {rate:,.0f} words a second", err=True)


@app.command()
def neighbors(
    folder: Folder,
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="Words to ask for.")],
    count: Count = 10,
    as_json: Json = False,
) -> None:
    """The words whose vectors point most nearly the same way, with the cosine.

    Example: clearhead word2vec neighbors vectors horse london --count 5
    """
    vectors = _load(folder)
    found = {word: vectors.neighbors(word, count) for word in words}
    if as_json:
        answers = {word: [{"word": near, "cosine": cosine} for near, cosine in rows] for word, rows in found.items()}
        typer.echo(json.dumps(answers, ensure_ascii=False))
        return
    for word, rows in found.items():
        if len(words) > 1:
            typer.echo(f"{word}:")
        for near, cosine in rows:
            typer.echo(f"{cosine:6.3f}  {near}")


@app.command()
def analogy(
    folder: Folder,
    first: Annotated[str, typer.Argument(metavar="A")],
    second: Annotated[str, typer.Argument(metavar="B")],
    third: Annotated[str, typer.Argument(metavar="C")],
    count: Count = 5,
    as_json: Json = False,
) -> None:
    """A is to B as C is to what?

    Example: clearhead word2vec analogy vectors man woman king
    """
    rows = _load(folder).analogy(first, second, third, count)
    if as_json:
        typer.echo(json.dumps([{"word": word, "cosine": cosine} for word, cosine in rows], ensure_ascii=False))
        return
    for word, cosine in rows:
        typer.echo(f"{cosine:6.3f}  {word}")


@app.command()
def score(
    folder: Folder,
    pairs: Annotated[list[Path], typer.Option(help="Pairs with human scores, as WordSim and SimLex.")] = [],  # noqa: B006
    analogies: Annotated[list[Path], typer.Option(help="Analogies in sections, as Google's.")] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Compare the vectors with what people say: Spearman's correlation on pairs, share of analogies solved.

    Example: clearhead word2vec score vectors --pairs wordsim353.tsv --analogies questions-words.txt
    """
    from clearhead.text.similarity import AnalogyScore, score_analogies, score_pairs

    if not pairs and not analogies:
        raise UserError("there is nothing to score with; give --pairs FILE or --analogies FILE")
    vectors = _load(folder)
    of_pairs = [score_pairs(vectors, path) for path in pairs]
    sections = {str(path): score_analogies(vectors, path) for path in analogies}
    for rows in sections.values():
        right, asked, unknown = (sum(getattr(row, name) for row in rows) for name in ("right", "asked", "unknown"))
        rows.append(AnalogyScore("all", right, asked, unknown))
    if as_json:
        data: dict[str, Any] = {"pairs": [dataclasses.asdict(each) for each in of_pairs]}
        data["analogies"] = [
            {"file": name} | dataclasses.asdict(row) | {"accuracy": row.accuracy}
            for name, rows in sections.items()
            for row in rows
        ]
        typer.echo(json.dumps(data))
        return
    for each in of_pairs:
        typer.echo(f"{each.name}: Spearman {each.spearman:.3f} on {each.pairs} pairs ({each.unknown} left out)")
    for name, rows in sections.items():
        typer.echo(f"{name}:")
        for row in rows:
            typer.echo(f"  {row.accuracy:6.1%} of {row.asked:>6,} ({row.unknown:,} left out)  {row.name}")


@app.command()
def export(folder: Folder, file: Annotated[Path, typer.Argument(metavar="FILE", help="Text file to write.")]) -> None:
    """Write the vectors in the text format that other tools read: `words width`, then a word and its numbers a line.

    Example: clearhead word2vec export vectors vectors.txt
    """
    vectors = _load(folder)
    vectors.save_text(file)
    typer.echo(f"{len(vectors):,} vectors in {file}", err=True)


def _load(folder: Path) -> Any:
    from clearhead.text.vectors import WordVectors

    return WordVectors.load(folder)


@contextmanager
def _made(folder: Path) -> "Iterator[None]":
    """A folder that can be written, made before the work and taken away again if the work fails."""
    try:
        new = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be written ({error.strerror}); name another folder") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--out: {folder} may not be written; check its permissions, or name another folder")
    try:
        yield
    except BaseException:
        for each in new:
            with suppress(OSError):  # somebody else may have put something into it
                each.rmdir()
        raise


def _shown(training: "Training", words: int) -> "Iterator[float]":
    """The training with a bar on a terminal and a line every tenth otherwise: done, words a second, time left."""
    if sys.stderr.isatty():
        yield from _bar(training, words)
        return
    begun, told = time.perf_counter(), 0
    for done in training:
        yield done
        if int(10 * done) > told:
            told, passed = int(10 * done), time.perf_counter() - begun
            left = passed / done - passed
            typer.echo(f"{done:4.0%}  {words * done / passed:,.0f} words a second  {left:.0f} s left", err=True)


def _bar(training: "Training", words: int) -> "Iterator[float]":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task, begun = progress.add_task("", total=1.0, rate=""), time.perf_counter()
        for done in training:
            yield done
            rate = words * done / (time.perf_counter() - begun)
            progress.update(task, completed=done, rate=f"{rate:,.0f} words a second")
