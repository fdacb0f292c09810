"""`clearhead fill`, `classify`, `tag` and `answer`: the tasks of encoders."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.batch import Batch, Column, File, Format, OnError, Out, Output, Texts
from clearhead.cli.options import Device, Dtype, Force, JsonLines, ModelName
from clearhead.cli.output import is_terminal
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.predict import Answer, Classification, MaskFill, Model, Span, TaggedWord, Tagging

Truncate = Annotated[bool, typer.Option("--truncate", help="Truncate texts that are too long.")]
COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")
NO_ANSWER = "(no answer)"


def fill(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    format: Format = None,
    column: Column = None,
    out: Out = None,
    on_error: OnError = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Candidates per mask.")] = 5,
    force: Force = False,
    as_json: JsonLines = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Predict the token at each [MASK]: one line per mask, most likely tokens first.

    Example: clearhead fill runs/mini-bert "Anna [MASK] the letter yesterday."
    """
    batch = Batch(texts, file, format, column, out, on_error, as_json, force)
    loaded = _load(model, device, dtype)

    def line(filled: "MaskFill") -> str:
        rows = (
            "\t".join(f"{_printable(token.text)} {token.score:.3f}" for token in mask.tokens) for mask in filled.masks
        )
        return "".join(f"{row}\n" for row in rows)

    output = Output(
        keys=("text",),
        columns=("filled", "masks"),
        line=line,
        to_json=lambda filled: {"masks": [mask.to_dict() for mask in filled.masks]},
        rows=lambda filled: [(filled.text, [mask.to_dict() for mask in filled.masks])],
        null=("masks",),
    )

    def predict(chunk: list[str]) -> list["MaskFill"]:
        return loaded.fill(chunk, top)

    batch.run(loaded, predict, output)


def classify(
    model: ModelName,
    texts: Texts = None,
    text_pair: Annotated[
        str | None, typer.Option(help="Second text of each pair. Default: the text after a tab.")
    ] = None,
    file: File = None,
    format: Format = None,
    column: Column = None,
    out: Out = None,
    on_error: OnError = None,
    all_labels: Annotated[bool, typer.Option("--all", help="Print all labels, not only the best one.")] = False,
    truncate: Truncate = False,
    force: Force = False,
    as_json: JsonLines = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Print the label of each text or text pair with its probability, or the value a regression model predicts.

    Example: clearhead classify runs/sst2 "A quiet, moving film."
    Example: clearhead classify runs/sst2 --file reviews.csv --column text --out labeled.csv
    """
    batch = Batch(texts, file, format, column, out, on_error, as_json, force, roles=())
    loaded = _load(model, device, dtype)
    pairs = text_pair is not None or (loaded.data is not None and loaded.data.text_pairs)
    regression = loaded.extra.get("task") == "regression"
    batch.reader.set_roles("text", *["second"] * (pairs and text_pair is None))

    def predict(firsts: list[str], seconds: list[str] | None = None) -> "Sequence[float | Classification]":
        if text_pair is not None:
            seconds = [text_pair] * len(firsts)
        if regression:
            return loaded.regress(firsts, seconds, truncate=truncate)
        return loaded.classify(firsts, seconds, truncate=truncate)

    batch.run(loaded, predict, _value_output() if regression else _label_output(all_labels))


def _value_output() -> Output:
    return Output(
        keys=("text", "second"),
        columns=("value",),
        line=lambda value: f"{value:.4f}\n",
        to_json=lambda value: {"value": value},
        rows=lambda value: [(value,)],
    )


def _label_output(all_labels: bool) -> Output:
    def line(result: "Classification") -> str:
        labels = result.labels if all_labels else result.labels[:1]
        return "\t".join(f"{label.name}\t{label.score:.4f}" for label in labels) + "\n"

    return Output(
        keys=("text", "second"),
        columns=("label", "score", *["scores"] * all_labels),
        line=line,
        to_json=lambda result: {"label": result.label, "scores": result.scores},
        rows=lambda result: [(result.label, result.score, *[result.scores] * all_labels)],
        null=("label", "scores"),
    )


def tag(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    format: Format = None,
    column: Column = None,
    out: Out = None,
    on_error: OnError = None,
    pretokenized: Annotated[bool, typer.Option("--pretokenized", help="Split words at spaces only.")] = False,
    truncate: Truncate = False,
    force: Force = False,
    as_json: JsonLines = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Tag the words of each text: colored spans on a terminal, `word TAB tag` lines in a pipe.

    Example: clearhead tag runs/conll2003 "Anna flew from Berlin to New York."
    """
    batch = Batch(texts, file, format, column, out, on_error, as_json, force)
    loaded = _load(model, device, dtype)

    def predict(chunk: list[str]) -> list["Tagging"]:
        return loaded.tag(chunk, pretokenized=pretokenized, truncate=truncate)

    def spans(tagged: "Tagging") -> list[dict[str, Any]]:
        return [_span_dict(span) | {"label": span.label} for span in tagged.spans]

    def words(tagged: "Tagging") -> list[dict[str, Any]]:
        return [_span_dict(word) | {"tag": word.tag} for word in tagged.words]

    output = Output(
        keys=("text",),
        columns=("spans", "words"),
        line=lambda tagged: "".join(f"{word.text}\t{word.tag}\n" for word in tagged.words) + "\n",
        to_json=lambda tagged: {"spans": spans(tagged), "words": words(tagged)},
        rows=lambda tagged: [(spans(tagged), words(tagged))],
        show=(lambda tagged: _print_colored(tagged, loaded.extra.get("labels", []))) if is_terminal() else None,
    )
    batch.run(loaded, predict, output)


def _span_dict(span: "Answer | Span | TaggedWord") -> dict[str, Any]:
    return {"text": span.text, "start": span.start, "end": span.end, "score": span.score}


def _print_colored(tagged: "Tagging", labels: Sequence[str]) -> None:
    """Print the text with its spans in one color per entity type, each followed by its label."""
    from rich.text import Text

    from clearhead.cli.console import Console

    types = list(dict.fromkeys(label.split("-", 1)[-1] for label in labels if label != "O"))
    output, end = Text(), 0
    for span in tagged.spans:
        color = COLORS[types.index(span.label) % len(COLORS) if span.label in types else -1]
        output.append(tagged.text[end : span.start])
        output.append(span.text, style=f"bold {color}").append(f" {span.label}", style=f"dim {color}")
        end = span.end
    Console().print(output.append(tagged.text[end:]), soft_wrap=True)


def answer(
    model: ModelName,
    questions: Annotated[
        list[str] | None, typer.Argument(metavar="QUESTION", help="Default: lines of --file or standard input.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context that contains the answers.")] = None,
    context_file: Annotated[Path | None, typer.Option(help="File with the context, or - for standard input.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="One question per line or, without a context, question TAB context; or a table."),
    ] = None,
    format: Format = None,
    column: Column = None,
    out: Out = None,
    on_error: OnError = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Answers per question.")] = 1,
    require_answer: Annotated[
        bool, typer.Option("--require-answer", help="Always return an answer, even if (no answer) scores higher.")
    ] = False,
    truncate: Truncate = False,
    force: Force = False,
    as_json: JsonLines = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Answer questions from a context: print `answer TAB score TAB start-end` (character offsets).

    Example: clearhead answer runs/squad "Who wrote it?" --context-file article.txt
    """
    from clearhead.files import read_document

    if context is not None and context_file is not None:
        raise UserError("--context: given together with --context-file; remove one of them")
    has_context = context is not None or context_file is not None
    if questions and not has_context:
        raise UserError("--context: missing; give the context of the questions, or --context-file")
    roles = ("question",) if has_context else ("question", "context")
    batch = Batch(questions, file, format, column, out, on_error, as_json, force, roles)
    shared = read_document(context_file) if context_file is not None else context
    loaded = _load(model, device, dtype)

    def predict(batch: list[str], contexts: list[str] | None = None) -> list["Answer"]:
        given = contexts if shared is None else shared
        assert given is not None
        return loaded.answer(batch, given, top=top, require_answer=require_answer, truncate=truncate)

    def line(best: "Answer") -> str:
        rows = (
            f"{' '.join(each.text.split()) or NO_ANSWER}\t{each.score:.4f}\t{each.start}-{each.end}\n"
            for each in best.candidates
        )
        return "".join(rows)

    output = Output(
        keys=("question",),
        columns=("answer", "score", "start", "end"),
        line=line,
        to_json=lambda best: {"answers": [_span_dict(each) for each in best.candidates]},
        rows=lambda best: [(each.text, each.score, each.start, each.end) for each in best.candidates],
        null=("answers",),
    )
    batch.run(loaded, predict, output)


def _load(model: str, device: str, dtype: str | None) -> "Model":
    from clearhead.predict import load

    return load(model, device, dtype)


def _printable(text: str) -> str:
    """Replace bytes and control characters by �."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
