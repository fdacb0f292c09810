"""`clearhead translate` and `clearhead generate`: text to text, from the command line, a pipe or a file."""

import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from time import monotonic
from typing import Annotated, Any, TypeVar

import typer

from clearhead.errors import UserError

A = TypeVar("A")
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a run folder, or a name.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16, int8 or int4.")]
Json = Annotated[bool, typer.Option("--json", help="For programs: an object a line.")]
CHUNK = 512  # lines that are sorted by length and worked on together, at the most
GRACE = 0.01  # seconds that the first line of a chunk waits for others: one who writes without a pause fills it


def translate(
    model: ModelName,
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Without any, lines of stdin.")] = None,
    beam: Annotated[int, typer.Option(min=1, max=64, help="Beams; 1 is greedy.")] = 4,
    n_best: Annotated[int, typer.Option(min=1, max=64, help="Translations of each text.")] = 1,
    length_penalty: Annotated[float, typer.Option(min=-10, max=10, help="Above 0 prefers longer ones.")] = 1.0,
    align: Annotated[bool, typer.Option(help="Show which token comes from which, as i-j.")] = False,
    prefix: Annotated[str | None, typer.Option(help="How every translation begins.")] = None,
    scores: Annotated[bool, typer.Option(help="Show log-probabilities.")] = False,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Batches at a time, a thread each.")] = 1,
    as_json: Json = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Translate texts, or standard input line by line to standard output, in order.

    Example: echo "Two dogs are playing in the snow." | clearhead translate en-de
    """
    from clearhead.predict import load

    if n_best > beam:
        raise UserError(f"--n-best: {n_best} is more than --beam {beam}; raise the beam")
    loaded = load(model, device, dtype)
    options: dict[str, Any] = {"beam": beam, "n_best": n_best, "length_penalty": length_penalty}
    options |= {"align": align, "scores": scores, "workers": workers}

    def work(chunk: list[str]) -> list[Any]:
        return loaded.translations(chunk, None if prefix is None else [prefix] * len(chunk), **options)

    for source, answers in each_text(texts, None, work):
        if as_json:
            rows = [{"text": a.text, "score": _finite(a.score), "alignment": a.alignment} for a in answers]
            typer.echo(json.dumps({"source": source, "translations": rows}, ensure_ascii=False))
            continue
        for answer in answers:
            typer.echo("\t".join(_columns(answer, scores, align)))


def _finite(score: float | None) -> float | None:
    """A score as JSON has it: where nothing could be written it is -inf, which is no number there."""
    return None if score is None or not math.isfinite(score) else score


def _columns(answer: Any, scores: bool, align: bool) -> list[str]:
    """A line's text, with its score and alignment where they are asked for."""
    from clearhead.decode import moses

    found = [" ".join(answer.text.splitlines())]
    if scores:
        found.append("" if answer.score is None else f"{answer.score:.4f}")
    if align:
        found.append(moses(answer.alignment or []))
    return found


def at_terminal() -> bool:
    """Whether a person types the input; there may be none at all."""
    return sys.stdin is not None and sys.stdin.isatty()


def each_text(
    texts: list[str] | None, file: Path | None, work: Callable[[list[str]], Sequence[A]]
) -> Iterator[tuple[str, A]]:
    """Every text with what `work` found: those given, or lines of a file or of stdin; an error comes in its turn."""
    if texts and file is not None:
        raise UserError("--file: given together with texts; leave one of them out")
    where = "text " if texts else f"{'standard input' if file in (None, Path('-')) else file}, line "
    number = 0
    for chunk in [texts] if texts else chunks(file or Path("-")):
        found, problem = _until_wrong(chunk, work)
        yield from zip(chunk, found, strict=problem is None)
        sys.stdout.flush()
        number += len(found)
        if problem is not None:
            raise UserError(f"{where}{number + 1}: {problem}")


def _until_wrong(chunk: list[str], work: Callable[[list[str]], Sequence[A]]) -> tuple[Sequence[A], str | None]:
    """What `work` finds for the texts before the first wrong one, and what is wrong with that."""
    from clearhead.predict.reading import WrongText

    problem = None
    while chunk:
        try:
            return work(chunk), problem
        except WrongText as error:  # there may be another before it
            chunk = chunk[: error.number]
            problem = error.problem + (" with --cut" if error.problem.endswith("let it be cut") else "")
    return [], problem


def chunks(path: Path) -> Iterator[list[str]]:
    """Lines of a file, or of standard input for `-`: as many as are there, where it is a pipe; at least one."""
    queue, regular = _queue(path), _is_regular(path)
    found: str | Exception | None = ""
    while isinstance(found, str):
        chunk: list[str] = []
        found, latest = queue.get(), monotonic() + GRACE
        while isinstance(found, str):
            chunk.append(found)
            if len(chunk) == CHUNK:
                break
            try:
                found = queue.get(timeout=None if regular else max(0.0, latest - monotonic()))
            except Empty:
                break
        if chunk:
            yield chunk
    if found is not None:
        raise found


def _waiting(path: Path) -> Iterator[str | None]:
    """The same, line by line; None where the next one is not there yet."""
    queue, patience = _queue(path), None if _is_regular(path) else GRACE / 5
    while True:
        try:
            found = queue.get(timeout=patience)
        except Empty:
            yield None
            continue
        if not isinstance(found, str):
            break
        yield found
    if found is not None:
        raise found


def _queue(path: Path) -> "Queue[str | Exception | None]":
    queue: Queue[str | Exception | None] = Queue(CHUNK)
    Thread(target=_read, args=(path, queue, sys.stdin), daemon=True).start()
    return queue


def _read(path: Path, queue: "Queue[str | Exception | None]", stdin: object) -> None:
    """Lines as they come, then the error that ended them, or None; a full queue is waited for.

    `stdin` is only held: Python ends with an abort if it has to close a stream in which this thread still waits.
    """
    from clearhead.files import read_lines

    try:
        for line in read_lines(path):
            queue.put(line)
        queue.put(None)
    except Exception as error:
        queue.put(error)


def _is_regular(path: Path) -> bool:
    """Whether all lines are there already: then every chunk is full, and the same at every run."""
    try:
        return stat.S_ISREG(os.stat(0 if str(path) == "-" else path).st_mode)
    except OSError:  # whoever reads it says why
        return False


def generate(
    model: ModelName,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What the text begins with; without it, lines of stdin.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="0 is greedy, the default; with a seed, samples or a cut-off, 0.8."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, max=1 << 24, help="Only the best so many words; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(min=1e-6, max=1, help="Only the best words with this share.")] = None,
    min_p: Annotated[float | None, typer.Option(min=0, max=1, help="Only words with this share of the best.")] = None,
    repetition_penalty: Annotated[float, typer.Option(min=0.01, max=100, help="Above 1 avoids what was said.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens at the most.")] = 200,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Texts to write.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends it; may be given several times.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed writes the same text.")] = None,
    stream: Annotated[bool, typer.Option(help="Show the text as it is written.")] = False,
    as_json: Json = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Go on from a prompt, or from each line of standard input: a line each, in order, many at once.

    Example: clearhead generate novels-gpt "It was a Sunday evening in October" --seed 3
    Example: clearhead generate novels-gpt --json < prompts.txt > texts.jsonl
    """
    from clearhead.predict import load

    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    if temperature is None:
        drawn = samples > 1 or any(each is not None for each in (seed, *cuts.values()))
        temperature = 0.8 if drawn else 0.0
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed or 0}
    if temperature:
        options |= {"top_p": 0.95, "samples": samples} | {name: cut for name, cut in cuts.items() if cut is not None}
    elif samples > 1:
        raise UserError(f"--samples: {samples}, but without a temperature all are the same; set one")
    options |= {"repetition_penalty": repetition_penalty, "stop": stop or ()}
    if stream and (samples > 1 or as_json or prompt is None):
        raise UserError("--stream: one text is shown as it is written; give a PROMPT, leave out --samples and --json")
    if prompt is None and at_terminal():
        raise UserError("there is no prompt; give one, or send lines through a pipe")
    if stop and not all(stop):
        raise UserError("--stop: empty, which would end every text before it begins; leave it out")
    loaded = load(model, device, dtype)
    if stream and prompt is not None:
        pieces = loaded.stream(prompt, **options)
        typer.echo(prompt, nl=False)
        for piece in pieces:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
        typer.echo()
        return
    if prompt is None:
        _generate_lines(loaded, as_json, options)
        return
    for number, text in enumerate(loaded.generate(prompt, **options)[0]):
        if as_json:
            typer.echo(_generated(prompt, text))
        else:
            typer.echo((f"--- {number + 1}\n" if samples > 1 else "") + prompt + text.text)


def _generate_lines(model: Any, as_json: bool, options: dict[str, Any]) -> None:
    """A text for each line of standard input, on a line each; in plain text a line break becomes a space."""
    from clearhead.predict import generate_each

    line = 0

    def prompts() -> Iterator[str | None]:
        nonlocal line
        for prompt in _waiting(Path("-")):
            line += prompt is not None
            yield prompt

    try:
        for prompt, text in generate_each(model, prompts(), **options):
            typer.echo(_generated(prompt, text) if as_json else " ".join((prompt + text.text).splitlines()))
            sys.stdout.flush()
    except UserError as error:
        where = f"standard input, line {line}: " if str(error).startswith("prompt") else ""
        raise UserError(f"{where}{error}") from None


def _generated(prompt: str, text: Any) -> str:
    return json.dumps({"prompt": prompt, "text": text.text, "finished": text.finished}, ensure_ascii=False)
