"""`clearhead.evaluate`: score a model on its test set or on files, from Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.config.data import FORMAT_OF_SUFFIX, Corpus, DataConfig, data_suffix
from clearhead.errors import UserError
from clearhead.evaluate.alignment import evaluate_alignment
from clearhead.evaluate.model import evaluate as score
from clearhead.predict import Model, load
from clearhead.predict.check_arguments import check_number, check_string

Data = str | Path | Corpus | Mapping[str, Any] | Sequence[str | Path]

EXAMPLES = {"columns": "{'text': 1, 'label': 2}", "labels": "{'1': 'World'}"}  # of arguments


@dataclass(frozen=True, repr=False)
class Evaluation(Mapping[str, Any]):
    """Metrics by name (`result["bleu"]`), in the order in which `clearhead evaluate` prints them."""

    metrics: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def __repr__(self) -> str:
        plain = {name: value for name, value in self.metrics.items() if not isinstance(value, Mapping)}
        shown = [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v!r:.60}" for k, v in plain.items()]
        return f"Evaluation({', '.join(shown)})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; NaN is None."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in self.metrics.items()}


def evaluate(
    model: Model | str | Path,
    data: Data | None = None,
    *,
    format: str = "",
    columns: Mapping[str, int | str] | None = None,
    labels: Mapping[str, str] | None = None,
    beam: int = 4,
    lowercase: bool = False,
    tokenized_bleu: str = "",
    unseen: bool = False,
    alignment: str = "",
    log: Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """Score a model (or its name) on the test set of its recipe, or on `data`: files, a Corpus or its settings.

    Files that only a model's config.json names are not read: give them as `data`, or evaluate the run folder, whose
    recipe.yaml names them, too.
    `format` (tsv, csv, conll, …), `columns` ({"text": 1, "label": 2}) and `labels` ({"1": "World"}) describe the files;
    by default they are as in the recipe. `tokenized_bleu` also computes BLEU after Moses tokenization for that
    language; `unseen` also scores only the texts that do not occur in the training data. `alignment` (like "en-de")
    scores only word alignments, on the embedded grammar.
    """
    check_number("beam", beam, 1)
    check_string("tokenized_bleu", tokenized_bleu)
    check_string("alignment", alignment)
    for name, names in (("columns", columns), ("labels", labels)):
        if names is not None and not isinstance(names, Mapping):
            raise UserError(f"{name}: {type(names).__name__} is not a dict; write it like {EXAMPLES[name]}")
    _check_data(data)
    loaded = model if isinstance(model, Model) else load(model)
    if alignment:
        if data is not None:
            raise UserError("alignment: is measured on the embedded grammar; leave data out")
        return Evaluation(evaluate_alignment(loaded, alignment))
    if data is None and (format or columns or labels):
        raise UserError("data: missing; format, columns and labels describe its files")
    corpora = [] if data is None else [corpus_of(loaded.data, data, format, columns, labels)]
    return Evaluation(
        score(loaded, corpora, beam=beam, lowercase=lowercase, tokenized_bleu=tokenized_bleu, unseen=unseen, log=log)
    )


def _check_data(data: Any) -> None:
    """Refuse what is neither files nor a corpus."""
    if data is None or isinstance(data, str | Path | Corpus | Mapping):
        return
    if not isinstance(data, Sequence) or not data or not all(isinstance(each, str | Path) for each in data):
        raise UserError(f"data: {data!r:.40} is neither a file nor a list of files; give a path, or several")


def corpus_of(
    known: DataConfig | None,
    data: Data,
    format: str = "",
    columns: Mapping[str, int | str] | None = None,
    labels: Mapping[str, str] | None = None,
    where: str = "data",
) -> Corpus:
    """The files as a corpus in the format of the recipe's data, unless overridden; two files are parallel."""
    if isinstance(data, Corpus):
        return data
    if isinstance(data, Mapping):
        return Corpus.build(data, where=where)
    files = [str(data)] if isinstance(data, str | Path) else [str(path) for path in data]
    like = next(iter((*known.test, *known.valid, *known.train)), None) if known is not None else None
    is_pair = len(files) == 2 and not any(data_suffix(name) in FORMAT_OF_SUFFIX for name in files)
    settings: dict[str, Any] = {"format": "parallel"} if is_pair else {}
    if like is not None and like.files and format in ("", like.format):
        settings = {"format": like.format, "columns": dict(like.columns), "header": like.header}
    settings |= {"format": format} if format else {}
    settings |= {"columns": dict(columns)} if columns else {}
    settings |= {"rename": dict(labels)} if labels else {}
    return Corpus.build(settings | {"files": files}, where=where)
