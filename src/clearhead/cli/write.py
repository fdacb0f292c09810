"""`clearhead translate` and `clearhead generate`: text to text, from the command line, a pipe or a file."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.errors import UserError

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a run folder, or a name.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or int8.")]
Json = Annotated[bool, typer.Option("--json", help="For programs: an object a line.")]
CHUNK = 512  # lines that are sorted and translated together


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
    for chunk in _chunks(texts):
        prefixes = None if prefix is None else [prefix] * len(chunk)
        found = loaded.translations(
            chunk,
            prefixes,
            beam=beam,
            n_best=n_best,
            length_penalty=length_penalty,
            align=align,
            scores=scores,
            workers=workers,
        )
        for source, answers in zip(chunk, found, strict=True):
            if as_json:
                rows = [{"text": a.text, "score": a.score, "alignment": a.alignment} for a in answers]
                typer.echo(json.dumps({"source": source, "translations": rows}, ensure_ascii=False))
                continue
            for answer in answers:
                typer.echo("\t".join(_columns(answer, scores, align)))
        sys.stdout.flush()


def _columns(answer: Any, scores: bool, align: bool) -> list[str]:
    """A line's text, with its score and alignment where they are asked for."""
    from clearhead.decode import moses

    found = [answer.text.replace("\n", " ")]
    if scores:
        found.append("" if answer.score is None else f"{answer.score:.4f}")
    if align:
        found.append(moses(answer.alignment or []))
    return found


def _chunks(texts: list[str] | None) -> Iterator[list[str]]:
    """What to work on together: all that was given, or lines of standard input, one at a time from a terminal."""
    from clearhead.files import read_lines

    if texts:
        yield texts
        return
    most = 1 if sys.stdin.isatty() else CHUNK
    lines = read_lines(Path("-"))
    while chunk := list(islice(lines, most)):
        yield chunk


def generate(
    model: ModelName,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the text begins with.")],
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, max=1 << 24, help="Only the best so many words; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Only the best words with this share.")] = 0.95,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="Only words with this share of the best one's.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(min=0.01, max=100, help="Above 1 avoids what was said.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens at the most.")] = 200,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Texts to write.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends it; may be given several times.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same text.")] = 0,
    stream: Annotated[bool, typer.Option(help="Show the text as it is written.")] = False,
    as_json: Json = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Go on from a prompt.

    Example: clearhead generate novels-gpt "It was a Sunday evening in October" --seed 3
    """
    from clearhead.predict import load

    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    if temperature:
        options |= {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    options["repetition_penalty"] = repetition_penalty
    if stream and (samples > 1 or as_json):
        raise UserError("--stream: one text is shown as it is written; leave out --samples and --json")
    if samples > 1:
        options["samples"] = samples
    loaded = load(model, device, dtype)
    if stream:
        typer.echo(prompt, nl=False)
        for piece in loaded.stream(prompt, seed=seed, stop=stop or (), **options):
            typer.echo(piece, nl=False)
            sys.stdout.flush()
        typer.echo()
        return
    for number, text in enumerate(loaded.generate(prompt, seed=seed, stop=stop or (), **options)[0]):
        if as_json:
            typer.echo(json.dumps({"prompt": prompt, "text": text.text, "finished": text.finished}, ensure_ascii=False))
        else:
            typer.echo((f"--- {number + 1}\n" if samples > 1 else "") + prompt + text.text)


def models(as_json: Annotated[bool, typer.Option("--json", help="For programs: a list of objects.")] = False) -> None:
    """List the models that come with the package.

    Example: clearhead models
    """
    from clearhead.predict.find import embedded_models

    found = embedded_models()
    if as_json:
        typer.echo(json.dumps([{"name": name, "folder": str(path)} for name, path in found.items()], indent=2))
        return
    if not found:
        typer.echo("none yet; train one with `clearhead train mini-en-de`, then `clearhead translate runs/mini-en-de`")
    for name, path in found.items():
        lines = [line for line in (path / "README.md").read_text(encoding="utf-8").splitlines() if line.strip()]
        typer.echo(f"{name:12} {lines[1] if len(lines) > 1 else ''}")
