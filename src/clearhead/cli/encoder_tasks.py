"""`clearhead fill`, `classify`, `tag`, `answer`, `embed` and `similar`: the tasks of encoders."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.options import Device, Dtype, JsonLines, ModelName
from clearhead.cli.output import echo, echo_json, is_terminal
from clearhead.cli.text_input import map_texts
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.predict import Answer, Classification, Match, Model, Span, TaggedWord, Tagging

Texts = Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Default: lines of --file or standard input.")]
File = Annotated[Path | None, typer.Option(help="File with one text per line, plain or gzip.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Truncate texts that are too long.")]
COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")
NO_ANSWER = "(no answer)"


def fill(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Candidates per mask.")] = 5,
    as_json: JsonLines = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Predict the token at each [MASK]: one line per mask, most likely tokens first.

    Example: clearhead fill runs/mini-bert "Anna [MASK] the letter yesterday."
    """
    loaded = _load(model, device, dtype)
    for text, filled in map_texts(texts, file, lambda chunk: loaded.fill(chunk, top)):
        if as_json:
            echo_json({"text": text, "masks": [mask.to_dict() for mask in filled.masks]})
            continue
        for mask in filled.masks:
            echo("\t".join(f"{_printable(token.text)} {token.score:.3f}" for token in mask.tokens))


def classify(
    model: ModelName,
    texts: Texts = None,
    text_pair: Annotated[
        str | None, typer.Option(help="Second text of each pair. Default: the text after a tab.")
    ] = None,
    file: File = None,
    all_labels: Annotated[bool, typer.Option("--all", help="Print all labels, not only the best one.")] = False,
    truncate: Truncate = False,
    as_json: JsonLines = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Print the label of each text or text pair with its probability, or the value a regression model predicts.

    Example: clearhead classify runs/sst2 "A quiet, moving film."
    """
    loaded = _load(model, device, dtype)
    pairs = text_pair is not None or (loaded.data is not None and loaded.data.text_pairs)
    regression = loaded.extra.get("task") == "regression"

    def predict(chunk: list[str]) -> "Sequence[float | Classification]":
        firsts, seconds = chunk, None
        if pairs:
            firsts, seconds = _split_columns(chunk, text_pair, "the two texts", "--text-pair")
        if regression:
            return loaded.regress(firsts, seconds, truncate=truncate)
        return loaded.classify(firsts, seconds, truncate=truncate)

    for text, result in map_texts(texts, file, predict):
        if isinstance(result, float):
            echo_json({"text": text, "value": result}) if as_json else echo(f"{result:.4f}")
        elif as_json:
            echo_json({"text": text, "label": result.label, "scores": result.scores})
        else:
            labels = result.labels if all_labels else result.labels[:1]
            echo("\t".join(f"{label.name}\t{label.score:.4f}" for label in labels))


def tag(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    pretokenized: Annotated[bool, typer.Option("--pretokenized", help="Split words at spaces only.")] = False,
    truncate: Truncate = False,
    as_json: JsonLines = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Tag the words of each text: colored spans on a terminal, `word TAB tag` lines in a pipe.

    Example: clearhead tag runs/conll2003 "Anna flew from Berlin to New York."
    """
    loaded = _load(model, device, dtype)

    def predict(chunk: list[str]) -> list["Tagging"]:
        return loaded.tag(chunk, pretokenized=pretokenized, truncate=truncate)

    for _, tagged in map_texts(texts, file, predict):
        if as_json:
            spans = [_span_dict(span) | {"label": span.label} for span in tagged.spans]
            words = [_span_dict(word) | {"tag": word.tag} for word in tagged.words]
            echo_json({"text": tagged.text, "spans": spans, "words": words})
        elif is_terminal():
            _print_colored(tagged, loaded.extra.get("labels", []))
        else:
            echo("".join(f"{word.text}\t{word.tag}\n" for word in tagged.words))


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
        Path | None, typer.Option(help="File with one question per line or, without a context, question TAB context.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Answers per question.")] = 1,
    require_answer: Annotated[
        bool, typer.Option("--require-answer", help="Always return an answer, even if (no answer) scores higher.")
    ] = False,
    truncate: Truncate = False,
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
    shared = read_document(context_file) if context_file is not None else context
    if questions and shared is None:
        raise UserError("--context: missing; give the context of the questions, or --context-file")
    loaded = _load(model, device, dtype)

    def predict(chunk: list[str]) -> list[tuple[str, "Answer"]]:
        batch, contexts = _split_columns(chunk, shared, "question and context", "--context")
        answers = loaded.answer(batch, contexts, top=top, require_answer=require_answer, truncate=truncate)
        return list(zip(batch, answers, strict=True))

    for _, (question, best) in map_texts(questions, file, predict):
        if as_json:
            echo_json({"question": question, "answers": [_span_dict(each) for each in best.candidates]})
            continue
        for each in best.candidates:
            echo(f"{' '.join(each.text.split()) or NO_ANSWER}\t{each.score:.4f}\t{each.start}-{each.end}")


def embed(
    model: ModelName,
    texts: Texts = None,
    file: File = None,
    out: Annotated[Path | None, typer.Option(help="NumPy file to write. Default: print JSON lines.")] = None,
    pooling: Annotated[str | None, typer.Option(help="mean or cls. Default: as in training.")] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to unit length.")] = True,
    truncate: Truncate = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines; the default without --out.")] = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Embed texts as JSON lines, or as a NumPy file of shape (texts, dim).

    Example: clearhead embed minilm --file sentences.txt --out vectors.npy
    """
    if out is not None and as_json:
        raise UserError("--json: given together with --out; remove one of them")
    loaded = _load(model, device, dtype)

    def predict(chunk: list[str]) -> list[Any]:
        return list(loaded.embed(chunk, pooling=pooling, normalize=normalize, truncate=truncate))

    if out is None:
        for text, vector in map_texts(texts, file, predict):
            echo_json({"text": text, "vector": [round(float(value), 7) for value in vector]})
        return
    import numpy as np

    vectors = [vector for _, vector in map_texts(texts, file, predict)]
    try:
        with out.open("wb") as target:
            np.save(target, np.stack(vectors) if vectors else np.zeros((0, loaded.config.dim), np.float32))
    except OSError as error:
        raise UserError(f"--out: cannot write {out} ({error.strerror}); choose another file") from None
    echo(f"{len(vectors):,} vectors of dim {loaded.config.dim} in {out}", err=True)


def similar(
    model: ModelName,
    corpus: Annotated[Path, typer.Argument(metavar="FILE", help="File with one text per line to search.")],
    queries: Annotated[
        list[str] | None, typer.Argument(metavar="QUERY", help="Default: lines of --file or standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="File with one query per line.")] = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Matches per query.")] = 5,
    truncate: Truncate = False,
    as_json: JsonLines = False,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Find the lines of FILE most similar to each query by exact cosine search: `score TAB line TAB text`.

    Example: clearhead similar minilm sentences.txt "A man plays the guitar."
    """
    from clearhead.predict.embed import nearest

    loaded = _load(model, device, dtype)
    texts, vectors = [], []
    for text, vector in map_texts(None, corpus, lambda chunk: list(loaded.embed(chunk, truncate=truncate))):
        texts.append(text)
        vectors.append(vector)
    if not texts:
        raise UserError(f"{corpus}: empty; give a file with one text per line")
    import numpy as np

    matrix = np.stack(vectors)

    def search(chunk: list[str]) -> list[list["Match"]]:
        return nearest(loaded.embed(chunk, truncate=truncate), matrix, texts, top)

    for query, matches in map_texts(queries, file, search):
        rows = [{"line": match.index + 1, "text": match.text, "score": match.score} for match in matches]
        if as_json:
            echo_json({"query": query, "matches": rows})
            continue
        for row in rows:
            echo(f"{row['score']:.4f}\t{row['line']}\t{row['text']}")


def _load(model: str, device: str, dtype: str | None) -> "Model":
    from clearhead.predict import load

    return load(model, device, dtype)


def _printable(text: str) -> str:
    """Replace bytes and control characters by �."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _split_columns(lines: list[str], shared: str | None, what: str, option: str) -> tuple[list[str], list[str]]:
    """Split lines at their tab into two columns; a shared second column replaces the tab."""
    from clearhead.predict.encode_batch import InvalidText

    if shared is not None:
        return lines, [shared] * len(lines)
    pairs = [line.split("\t") for line in lines]
    for number, pair in enumerate(pairs):
        if len(pair) != 2:
            raise InvalidText(number, f"{len(pair) - 1} tabs; separate {what} by one tab, or use {option}")
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
