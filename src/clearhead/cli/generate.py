"""`clearhead generate`: continue prompts."""

import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.batch import Batch, Column, Failed, File, Format, OnError, Out, Output
from clearhead.cli.options import Device, Dtype, Force, JsonLines, ModelName
from clearhead.cli.output import echo, echo_json
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.cli.records import Record
    from clearhead.predict import GenerationResult, Model

DEFAULT_TEMPERATURE, DEFAULT_TOP_P = 0.8, 0.95  # when sampling


def generate(
    model: ModelName,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue. Default: lines of --file or stdin.")
    ] = None,
    file: File = None,
    format: Format = None,
    column: Column = None,
    out: Out = None,
    on_error: OnError = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="0 is greedy. Default: 0, or 0.8 with another sampling option."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, max=1 << 24, help="Sample from the k most likely tokens; 0 is off.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            max=1,
            help="Sample from the smallest set of tokens whose cumulative probability reaches p. "
            "Default: 0.95 when sampling.",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Drop tokens below this fraction of the highest probability."),
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(min=0.01, max=100, help="Repetition penalty; 1 is off.")] = 1.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 20, help="Maximum tokens to generate. Default: 256, or what the context has left."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Samples per prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this string; repeatable.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Speculative decoding with this model, or prompt-lookup; same text, fewer steps."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed; the same seed gives the same text.")] = None,
    stream: Annotated[bool, typer.Option(help="Print text as it is generated.")] = False,
    force: Force = False,
    as_json: JsonLines = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Continue a prompt, or each line of a file, table or standard input (batched; output in input order).

    Example: clearhead generate novels-gpt "It was a Sunday evening in October" --seed 3
    Example: clearhead generate novels-gpt --json < prompts.txt > texts.jsonl
    Example: clearhead generate novels-gpt --file prompts.csv --column opening --out stories.csv
    """
    from clearhead.predict import load

    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    if temperature is None:
        sampled = samples > 1 or any(value is not None for value in (seed, *filters.values()))
        temperature = DEFAULT_TEMPERATURE if sampled else 0.0
    options: dict[str, Any] = {"temperature": temperature, "seed": seed or 0}
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens
    if temperature:
        options |= {"top_p": DEFAULT_TOP_P, "samples": samples}
        options |= {name: value for name, value in filters.items() if value is not None}
    elif samples > 1:
        raise UserError(f"--samples: {samples} identical greedy samples; set a --temperature above 0")
    options |= {"repetition_penalty": repetition_penalty, "stop": stop or ()}
    if stream and (samples > 1 or as_json or prompt is None):
        raise UserError("--stream: needs a PROMPT and a single text; remove --samples and --json")
    if prompt is None and file is None and sys.stdin is not None and sys.stdin.isatty():
        raise UserError("PROMPT: missing; give a prompt, or pipe lines into standard input")
    if stop and not all(stop):
        raise UserError("--stop: empty string; remove it")
    given = {"--format": format, "--column": column, "--out": out, "--on-error": on_error, "--file": file}
    for option, value in given.items():
        if prompt is not None and value is not None:
            raise UserError(f"{option}: given together with a PROMPT; put the prompts into a file or a pipe")
    batch = Batch(None, file, format, column, out, on_error, as_json, force, ("prompt",)) if prompt is None else None
    loaded = load(model, device, dtype)
    if draft is not None and prompt is None:
        raise UserError("--draft: needs a PROMPT; remove it for lines of standard input")
    options |= {"draft": draft} if draft is not None else {}
    if batch is not None:
        _generate_batch(loaded, batch, options)
        return
    assert prompt is not None
    if stream:
        pieces = loaded.stream(prompt, **options)
        echo(prompt, end="")
        for piece in pieces:
            echo(piece, end="")
        echo()
    else:
        for number, result in enumerate(loaded.generate(prompt, **options).candidates, start=1):
            if as_json:
                _echo_result(prompt, result)
            else:
                echo((f"--- {number}\n" if samples > 1 else "") + prompt + result.text)


def _generate_batch(model: "Model", batch: Batch, options: dict[str, Any]) -> None:
    """Continue each record; in plain text a line break becomes a space."""
    from clearhead.predict import generate_batch_texts

    output = Output(
        keys=("prompt",),
        columns=("generated", "finished"),
        line=lambda pair: " ".join((pair[0] + pair[1].text).splitlines()) + "\n",
        to_json=lambda pair: {"text": pair[1].text, "finished": pair[1].finished},
        rows=lambda pair: [(pair[1].text, pair[1].finished)],
        null=("text", "finished"),
    )
    waiting = deque["Record"]()  # in the order of the input; of good ones, the results come in this order too

    with batch.writer(model, output) as write:

        def write_failed() -> None:
            while waiting and waiting[0].problem:
                record = waiting.popleft()
                write(record, Failed(record.problem))

        def prompts() -> Iterator[str | None]:
            for record in batch.poll():
                if record is None:
                    write_failed()
                    yield None
                    continue
                waiting.append(record)
                if not record.problem:
                    yield record.texts[0]
                elif batch.on_error == "stop":
                    raise batch.error(record.number, record.problem)

        def on_error(error: UserError) -> None:
            problem = getattr(error, "problem", str(error)).removeprefix("prompt: ")
            if batch.on_error == "stop":
                raise batch.error(waiting[-1].number, problem)
            waiting[-1] = waiting[-1]._replace(problem=problem)

        samples = options.get("samples", 1)
        results = generate_batch_texts(model, prompts(), on_error=on_error, **options)
        for count, (prompt, result) in enumerate(results, start=1):
            write_failed()
            write(waiting[0], (prompt, result))
            if count % samples == 0:
                waiting.popleft()
        write_failed()


def _echo_result(prompt: str, result: "GenerationResult") -> None:
    echo_json({"prompt": prompt, "text": result.text, "finished": result.finished})
