"""`clearhead translate` and `clearhead generate`: text to text, from the command line, a pipe or a file."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.cli.text_input import each_text, waiting
from clearhead.errors import UserError

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a run folder, or a name.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16, int8 or int4.")]
Json = Annotated[bool, typer.Option("--json", help="For programs: an object a line.")]


def translate(
    model: ModelName,
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Without any, lines of stdin.")] = None,
    beam: Annotated[int, typer.Option(min=1, max=64, help="Beams; 1 is greedy.")] = 4,
    n_best: Annotated[int, typer.Option(min=1, max=64, help="Translations of each text.")] = 1,
    length_penalty: Annotated[float, typer.Option(min=-10, max=10, help="Above 0 prefers longer ones.")] = 1.0,
    align: Annotated[bool, typer.Option(help="Show which token comes from which, as i-j.")] = False,
    prefix: Annotated[str | None, typer.Option(help="How every translation begins.")] = None,
    scores: Annotated[bool, typer.Option(help="Show log-probabilities.")] = False,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="Batches at a time. 0: two on a CPU.")] = 0,
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
    from clearhead.inference import format_alignment

    found = [" ".join(answer.text.splitlines())]
    if scores:
        found.append("" if answer.score is None else f"{answer.score:.4f}")
    if align:
        found.append(format_alignment(answer.alignment or []))
    return found


def at_terminal() -> bool:
    """Whether a person types the input; there may be none at all."""
    return sys.stdin is not None and sys.stdin.isatty()


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
    from clearhead.predict import generate_batch_texts

    line = 0

    def prompts() -> Iterator[str | None]:
        nonlocal line
        for prompt in waiting(Path("-")):
            line += prompt is not None
            yield prompt

    try:
        for prompt, text in generate_batch_texts(model, prompts(), **options):
            typer.echo(_generated(prompt, text) if as_json else " ".join((prompt + text.text).splitlines()))
            sys.stdout.flush()
    except UserError as error:
        where = f"standard input, line {line}: " if str(error).startswith("prompt") else ""
        raise UserError(f"{where}{error}") from None


def _generated(prompt: str, text: Any) -> str:
    return json.dumps({"prompt": prompt, "text": text.text, "finished": text.finished}, ensure_ascii=False)
