"""`clearhead word2vec`: train, query, evaluate and export word vectors."""

import dataclasses
import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.options import Force, check_new, utf8_path
from clearhead.cli.output import echo, echo_json, is_terminal, say
from clearhead.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clearhead.text.word2vec import Training
    from clearhead.text.word_vectors import WordVectors

app = typer.Typer(help="Train, query, evaluate and export word vectors.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder with vectors, or a file in the text format.")]
TopK = Annotated[int, typer.Option(min=1, max=1000, help="Number of results.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def train(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="UTF-8 text files, plain or gzip; - is stdin.")],
    out: Annotated[Path, typer.Option(callback=utf8_path, help="Folder to write the vectors to.")],
    dim: Annotated[int, typer.Option(help="Vector dimension.")] = 100,
    window: Annotated[int, typer.Option(help="Maximum context words on each side.")] = 5,
    negatives: Annotated[int, typer.Option(help="Negative samples per pair.")] = 5,
    epochs: Annotated[int, typer.Option(help="Passes over the text.")] = 5,
    cbow: Annotated[bool, typer.Option("--cbow", help="Train CBOW instead of skip-gram.")] = False,
    min_count: Annotated[int, typer.Option(min=1, max=10**9, help="Drop words that occur less often.")] = 5,
    sample: Annotated[float, typer.Option(help="Subsampling threshold for frequent words.")] = 1e-3,
    lr: Annotated[float | None, typer.Option(help="Initial learning rate. Default: 0.035, or 0.15 for CBOW.")] = None,
    workers: Annotated[int | None, typer.Option(help="Threads; 1 is reproducible. Default: all cores.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train word vectors on text files. Text is lowercased; sentences end at . ! ?

    Example: clearhead word2vec train novels/*.txt.gz --out vectors --dim 100 --epochs 3
    """
    import torch

    from clearhead.text.corpus import read_corpus
    from clearhead.text.word2vec import Training, Word2VecSettings
    from clearhead.text.word_vectors import FILE

    check_new(out / FILE, force)

    if device != "cpu" and not (device.partition(":")[0] == "cuda" and torch.cuda.is_available()):
        raise UserError(f"--device: {device!r} is not available; use cpu" + (" or cuda" * torch.cuda.is_available()))
    if workers is None:
        workers = torch.get_num_threads() if device == "cpu" else 1
    values: dict[str, Any] = {"dim": dim, "window": window, "negatives": negatives, "epochs": epochs, "cbow": cbow}
    values |= {"sample": sample, "workers": workers, "seed": seed}
    if lr is not None:
        values["lr"] = lr
    settings = Word2VecSettings.build(values, "word2vec")
    with _output_folder(out):
        corpus = read_corpus(files, min_count)
        echo(f"{corpus.total_words:,} words, vocabulary {len(corpus.vocab):,} (count >= {min_count})", err=True)
        training, start = Training(corpus, settings, device), time.perf_counter()
        for _ in _with_progress(training, corpus.total_words * epochs):
            pass
        speed = corpus.total_words * epochs / (time.perf_counter() - start)
        training.vectors().save(out)
    if as_json:
        result = {"folder": str(out), "vocab_size": len(corpus.vocab), "words": corpus.total_words}
        echo_json(result | {"words_per_second": round(speed)} | settings.model_dump())
    else:
        echo(f"{len(corpus.vocab):,} vectors in {out}, {speed:,.0f} words/s", err=True)


@app.command("neighbours")
@app.command("neighbors", hidden=True)
def neighbors(
    folder: Folder,
    words: Annotated[list[str], typer.Argument(metavar="WORD", help="Query words.")],
    top_k: TopK = 10,
    as_json: Json = False,
) -> None:
    """Print the nearest words by cosine similarity.

    Example: clearhead word2vec neighbours vectors horse london --top-k 5
    """
    vectors = _load(folder)
    results = {word: vectors.neighbors(word, top_k) for word in words}
    if as_json:
        rows = {word: [{"word": near, "cosine": cosine} for near, cosine in pairs] for word, pairs in results.items()}
        echo_json(rows)
        return
    for word, pairs in results.items():
        if len(words) > 1:
            echo(f"{word}:")
        for near, cosine in pairs:
            echo(f"{cosine:6.3f}  {near}")


@app.command()
def analogy(
    folder: Folder,
    first: Annotated[str, typer.Argument(metavar="A")],
    second: Annotated[str, typer.Argument(metavar="B")],
    third: Annotated[str, typer.Argument(metavar="C")],
    top_k: TopK = 5,
    as_json: Json = False,
) -> None:
    """Solve the analogy: A is to B as C is to …

    Example: clearhead word2vec analogy vectors man woman king
    """
    rows = _load(folder).analogy(first, second, third, top_k)
    if as_json:
        echo_json([{"word": word, "cosine": cosine} for word, cosine in rows])
        return
    for word, cosine in rows:
        echo(f"{cosine:6.3f}  {word}")


@app.command("evaluate")
def evaluate(
    folder: Folder,
    pairs: Annotated[list[Path], typer.Option(help="Word pairs with human scores (WordSim, SimLex).")] = [],  # noqa: B006
    analogies: Annotated[list[Path], typer.Option(help="Analogies in sections (Google).")] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Evaluate word vectors: Spearman correlation on word pairs, accuracy on analogies.

    Example: clearhead word2vec evaluate vectors --pairs wordsim353.tsv --analogies questions-words.txt
    """
    from clearhead.text.word_similarity import AnalogyScore, score_analogies, score_pairs

    if not pairs and not analogies:
        raise UserError("--pairs, --analogies: missing; give at least one file")
    vectors = _load(folder)
    pair_scores = [score_pairs(vectors, path) for path in pairs]
    sections = {str(path): score_analogies(vectors, path) for path in analogies}
    for scores in sections.values():
        correct, total, unknown = (sum(getattr(s, name) for s in scores) for name in ("correct", "total", "unknown"))
        scores.append(AnalogyScore("all", correct, total, unknown))
    if as_json:
        data: dict[str, Any] = {"pairs": [dataclasses.asdict(score) for score in pair_scores]}
        data["analogies"] = [
            {"file": name} | dataclasses.asdict(score) | {"accuracy": score.accuracy}
            for name, scores in sections.items()
            for score in scores
        ]
        echo_json(data)
        return
    for pair_score in pair_scores:
        say(
            f"{pair_score.name}: Spearman {pair_score.spearman:.3f} on {pair_score.pairs} pairs "
            f"({pair_score.unknown} with unknown words)"
        )
    for name, scores in sections.items():
        echo(f"{name}:")
        for score in scores:
            say(f"  {score.accuracy:6.1%} of {score.total:>6,} ({score.unknown:,} with unknown words)  {score.name}")


@app.command()
def export(
    folder: Folder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Text file to write.")],
    force: Force = False,
) -> None:
    """Write the vectors in the word2vec text format: `words dim`, then one word with its values per line.

    Example: clearhead word2vec export vectors vectors.txt
    """
    check_new(file, force, "FILE")
    vectors = _load(folder)
    vectors.save_text(file)
    echo(f"{len(vectors):,} vectors in {file}", err=True)


def _load(folder: Path) -> "WordVectors":
    from clearhead.text.word_vectors import WordVectors

    return WordVectors.load(folder)


@contextmanager
def _output_folder(folder: Path) -> "Iterator[None]":
    """Create a writable folder, and remove it again if the work fails."""
    try:
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot write {folder} ({error.strerror}); choose another folder") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--out: no permission to write {folder}; change its permissions or choose another folder")
    try:
        yield
    except BaseException:
        for path in created:
            with suppress(OSError):  # it may not be empty
                path.rmdir()
        raise


def _with_progress(training: "Training", words: int) -> "Iterator[float]":
    """Train with a progress bar on a terminal, else a line per 10%: fraction done, words/s, time left."""
    if is_terminal(err=True):
        yield from _with_bar(training, words)
        return
    start, reported = time.perf_counter(), 0
    for done in training:
        yield done
        if int(10 * done) > reported:
            reported, elapsed = int(10 * done), time.perf_counter() - start
            left = elapsed / done - elapsed
            echo(f"{done:4.0%}  {words * done / elapsed:,.0f} words/s  {left:.0f} s left", err=True)


def _with_bar(training: "Training", words: int) -> "Iterator[float]":
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from clearhead.cli.console import Console

    columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(err=True)) as progress:
        task, start = progress.add_task("", total=1.0, speed=""), time.perf_counter()
        for done in training:
            yield done
            speed = words * done / (time.perf_counter() - start)
            progress.update(task, completed=done, speed=f"{speed:,.0f} words/s")
