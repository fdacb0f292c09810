"""`clearhead fill`, `classify`, `tag`, `answer`, `embed`, `similar`: what a model that reads says about texts."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.generate import Device, Dtype, Json, ModelName
from clearhead.cli.text_input import each_text
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.predict.tag import Tagged

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Without any, lines of a file or stdin.")]
File = Annotated[Path | None, typer.Option(help="A text a line, plain or gzip.")]
Cut = Annotated[bool, typer.Option("--cut", help="Of a text that is too long, read the beginning.")]
Top = Annotated[int, typer.Option(min=1, max=10_000, help="Answers at the most.")]
COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")
NONE = "(no answer)"


def fill(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    top: Top = 5,
    as_json: Json = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Words that fit where a text says [MASK]: a line for each mask, the best word first.

    Example: clearhead fill runs/mini-bert "Anna [MASK] the letter yesterday."
    """
    loaded = _load(model, device, dtype)
    for text, gaps in each_text(texts, file, lambda chunk: loaded.fill(chunk, top)):
        if as_json:
            masks = [
                {"start": gap.first, "end": gap.behind, "words": [word._asdict() for word in gap.words]} for gap in gaps
            ]
            _show({"text": text, "masks": masks})
            continue
        for gap in gaps:
            typer.echo("\t".join(f"{_printed(word.text)} {word.score:.3f}" for word in gap.words))


def classify(
    model: ModelName,
    texts: Texts = None,
    second: Annotated[str | None, typer.Option(help="The other text of a pair; in a file, behind a tab.")] = None,
    file: File = None,
    every: Annotated[bool, typer.Option("--all", help="Show every label, not the best alone.")] = False,
    cut: Cut = False,
    as_json: Json = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """The label of each text, or of each pair, with its probability; of a regression, its number.

    Example: clearhead classify runs/sst2 "A quiet, moving film."
    """
    loaded = _load(model, device, dtype)
    pairs = second is not None or (loaded.data is not None and loaded.data.second)
    ask: Callable[..., list[Any]] = loaded.values if loaded.extra.get("task") == "regression" else loaded.classify

    def work(chunk: list[str]) -> list[Any]:
        if not pairs:
            return ask(chunk, cut=cut)
        firsts, seconds = _columns(chunk, second, "the two texts", "--second")
        return ask(firsts, seconds, cut=cut)

    for text, found in each_text(texts, file, work):
        if isinstance(found, float):
            _show({"text": text, "value": found}) if as_json else typer.echo(f"{found:.4f}")
        elif as_json:
            _show({"text": text, "label": found[0].name, "scores": {label.name: label.score for label in found}})
        else:
            typer.echo("\t".join(f"{label.name}\t{label.score:.4f}" for label in (found if every else found[:1])))


def tag(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    words: Annotated[bool, typer.Option("--words", help="Spaces part the words already; keep them.")] = False,
    cut: Cut = False,
    as_json: Json = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Tags of words: colored spans on a terminal, `word TAB tag` lines in a pipe.

    Example: clearhead tag runs/conll2003 "Anna flew from Berlin to New York."
    """
    loaded = _load(model, device, dtype)

    for _, found in each_text(texts, file, lambda chunk: loaded.tag(chunk, spaced=words, cut=cut)):
        if as_json:
            spans = [_placed(span) | {"label": span.label} for span in found.spans]
            _show({"text": found.text, "spans": spans, "words": [_placed(w) | {"tag": w.tag} for w in found.words]})
        elif sys.stdout.isatty():
            _colored(found, loaded.extra.get("labels", []))
        else:
            typer.echo("".join(f"{word.text}\t{word.tag}\n" for word in found.words))


def _placed(found: Any) -> dict[str, Any]:
    return {"text": found.text, "start": found.first, "end": found.behind, "score": found.score}


def _colored(found: "Tagged", labels: Sequence[str]) -> None:
    """The text with its spans in colors, one for each kind, followed by its label."""
    from rich.console import Console
    from rich.text import Text

    kinds = list(dict.fromkeys(label.split("-", 1)[-1] for label in labels if label != "O"))
    shown, place = Text(), 0
    for span in found.spans:
        color = COLORS[kinds.index(span.label) % len(COLORS) if span.label in kinds else -1]
        shown.append(found.text[place : span.start])
        shown.append(span.text, style=f"bold {color}").append(f" {span.label}", style=f"dim {color}")
        place = span.end
    Console(highlight=False).print(shown.append(found.text[place:]), soft_wrap=True)


def answer(
    model: ModelName,
    questions: Annotated[list[str] | None, typer.Argument(metavar="[QUESTION]...", help="Without any, stdin.")] = None,
    context: Annotated[str | None, typer.Option(help="The text that holds the answers.")] = None,
    context_file: Annotated[Path | None, typer.Option(help="The same as a file of any length, or - for stdin.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A question a line or, without a context, question TAB text.")
    ] = None,
    top: Top = 1,
    must: Annotated[bool, typer.Option("--must", help="Never say that there is no answer.")] = False,
    cut: Cut = False,
    as_json: Json = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Answers to questions from a text: `answer TAB score TAB first-behind`, characters counted from 0.

    Example: clearhead answer runs/squad "Who wrote it?" --context-file article.txt
    """
    from clearhead.files import read_document

    if context is not None and context_file is not None:
        raise UserError("--context: given together with --context-file; leave one out")
    given = read_document(context_file) if context_file is not None else context
    if questions and given is None:
        raise UserError("--context: missing; give the text that holds the answers, or --context-file")
    loaded = _load(model, device, dtype)

    def work(chunk: list[str]) -> list[tuple[str, list[Any]]]:
        asked, contexts = _columns(chunk, given, "question and text", "--context")
        return list(zip(asked, loaded.answer(asked, contexts, top=top, must=must, cut=cut), strict=True))

    for _, (question, found) in each_text(questions, file, work):
        if as_json:
            _show({"question": question, "answers": [_placed(each) for each in found]})
            continue
        for each in found:
            typer.echo(f"{' '.join(each.text.split()) or NONE}\t{each.score:.4f}\t{each.first}-{each.behind}")


def embed(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    out: Annotated[Path | None, typer.Option(help="Write a NumPy file; without it, JSON lines.")] = None,
    pooling: Annotated[str | None, typer.Option(help="mean or class; without it, as the model was trained.")] = None,
    normalize: Annotated[bool, typer.Option(help="Vectors of length 1.")] = True,
    cut: Cut = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines, as without --out.")] = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """A vector for each text: JSON lines, or one NumPy file of shape (texts, width).

    Example: clearhead embed minilm --file sentences.txt --out vectors.npy
    """
    if out is not None and as_json:
        raise UserError("--json: vectors go to the file of --out; leave one of them out")
    loaded = _load(model, device, dtype)

    def work(chunk: list[str]) -> list[Any]:
        return list(loaded.embed(chunk, pooling=pooling, normalize=normalize, cut=cut))

    if out is None:
        for text, vector in each_text(texts, file, work):
            _show({"text": text, "vector": [round(float(value), 7) for value in vector]})
        return
    import numpy as np

    vectors = [vector for _, vector in each_text(texts, file, work)]
    try:
        with out.open("wb") as target:
            np.save(target, np.stack(vectors) if vectors else np.zeros((0, loaded.config.width), np.float32))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); choose another --out") from None
    typer.echo(f"{len(vectors):,} vectors of {loaded.config.width} in {out}", err=True)


def similar(
    model: ModelName,
    among: Annotated[Path, typer.Argument(metavar="FILE", help="The texts to search, one a line.")],
    queries: Annotated[list[str] | None, typer.Argument(metavar="[QUERY]...", help="Without any, stdin.")] = None,
    file: File = None,
    top: Top = 5,
    cut: Cut = False,
    as_json: Json = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """The texts of a file that are most like a query, by exact search: `score TAB line TAB text`.

    Example: clearhead similar minilm sentences.txt "A man plays the guitar."
    """
    from clearhead.predict.embed import nearest

    loaded = _load(model, device, dtype)
    texts, vectors = [], []
    for text, vector in each_text(None, among, lambda chunk: list(loaded.embed(chunk, cut=cut))):
        texts.append(text)
        vectors.append(vector)
    if not texts:
        raise UserError(f"{among} is empty; give a file with content")
    import numpy as np

    table = np.stack(vectors)
    for query, found in each_text(queries, file, lambda chunk: nearest(loaded.embed(chunk, cut=cut), table, top)):
        rows = [{"line": match.position + 1, "text": texts[match.position], "score": match.score} for match in found]
        if as_json:
            _show({"query": query, "matches": rows})
            continue
        for row in rows:
            typer.echo(f"{row['score']:.4f}\t{row['line']}\t{row['text']}")


def _load(model: str, device: str, dtype: str | None) -> Any:
    from clearhead.predict import load

    return load(model, device, dtype)


def _show(found: dict[str, Any]) -> None:
    typer.echo(json.dumps(found, ensure_ascii=False))


def _printed(text: str) -> str:
    """A word of any vocabulary as a terminal may show it: a byte or a control character is �."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _columns(lines: list[str], given: str | None, what: str, option: str) -> tuple[list[str], list[str]]:
    """The two sides of each line: the second is the same for all, or stands behind a tab."""
    from clearhead.predict.encode_batch import InvalidText

    if given is not None:
        return lines, [given] * len(lines)
    pairs = [line.split("\t") for line in lines]
    for number, pair in enumerate(pairs):
        if len(pair) != 2:
            raise InvalidText(number, f"{len(pair) - 1} tabs; write {what} with one tab between, or use {option}")
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
