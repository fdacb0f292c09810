"""How good a model of a labeled task is: what it says about the texts of records, beside what they expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from clearhead.config.data import Corpus, DataConfig
from clearhead.data.build_datasets import TASKS, raw_records
from clearhead.data.cleaning import Cleaner, Part, check_text, chunks
from clearhead.data.formats import ALL_ANSWERS, ANSWERS, Record
from clearhead.data.labeled_tasks import check_answer, check_tags, is_empty, label_number, number
from clearhead.errors import UserError
from clearhead.evaluate.classification_metrics import (
    accuracy,
    answers,
    binary_f1,
    confusion,
    entity_f1,
    macro_f1,
    matthews,
)
from clearhead.predict import Model
from clearhead.predict.encode_batch import InvalidText, clean, label_names
from clearhead.text.correlation import pearson, spearman
from clearhead.text.entities import is_entity_scheme

SHOWN = 5  # samples to read


class Scores(NamedTuple):
    """Numbers by name, how often each label was called each, and a few texts with what was said of them."""

    numbers: dict[str, Any]
    confusion: dict[str, Any] | None = None
    samples: list[dict[str, str]] = []  # noqa: RUF012  nobody adds to it


def records(data: DataConfig, corpora: Sequence[Corpus], part: Part = "held out") -> Iterator[Record]:
    """The records of corpora as they stand; of none, those that the recipe held out of its training data, or kept."""
    columns = TASKS[data.task].reads(data)
    wanted = ALL_ANSWERS if columns == ANSWERS else columns
    for corpus in corpora:
        yield from raw_records(corpus, wanted, data.source_url)
    if not corpora:
        cleaner = Cleaner(data, wanted, part)
        for corpus in data.train:
            for chunk in chunks(raw_records(corpus, wanted, data.source_url)):
                yield from cleaner.chunk(chunk)


def own_records(model: Model, data: DataConfig, corpora: Sequence[Corpus]) -> list[Record]:
    """The records of a recipe's own sets but those without words, which were left out when the sets were prepared."""
    found = list(records(data, corpora))
    if data.task == "tagging":
        return [record for record in found if record.values[0]]
    for side in range(2 if data.text_pairs or data.task in ("similarity", "answering") else 1):
        for record in found:
            check_text(record, record.values[side])
        texts = clean(model, [record.values[side] for record in found])
        pairs = zip(texts, model.tokenizer.encode_batch(texts), strict=True)
        found = [record for record, pair in zip(found, pairs, strict=True) if not is_empty(*pair)]
    return found


def score_labeled(model: Model, data: DataConfig, found: Sequence[Record]) -> Scores:
    """What the model says about every record, measured."""
    if not found:
        raise UserError("data: there are no texts to score on; name some with --data")
    try:
        return LABELED[data.task](model, data, found)
    except InvalidText as error:
        raise UserError(f"{found[error.number].place}: {error.problem}") from None


def _texts(data: DataConfig, found: Sequence[Record]) -> tuple[list[str], list[str] | None]:
    for record in found:
        for text in record.values[: 2 if data.text_pairs else 1]:
            check_text(record, text)
    return [r.values[0] for r in found], [r.values[1] for r in found] if data.text_pairs else None


def _classes(model: Model, data: DataConfig, found: Sequence[Record]) -> Scores:
    names = label_names(model, model.config.labels)
    true = [names[label_number(record, record.values[-1], tuple(names))] for record in found]
    texts, seconds = _texts(data, found)
    said = [labels[0].name for labels in model.classify(texts, seconds, truncate=True)]
    two = len(names) == 2
    numbers = {
        "accuracy": accuracy(said, true),
        "f1": binary_f1(said, true, names[1]).f1 if two else macro_f1(said, true).f1,
        "f1_of": f"the label {names[1]}" if two else "all labels, each weighing the same",
        "matthews": matthews(said, true),
    }
    shown = [f"{text}\n{second}" for text, second in zip(texts, seconds, strict=True)] if seconds else texts
    table = {"labels": names, "counts": confusion(said, true, names)}
    return Scores(numbers, table, _samples(shown, true, said))


def _values(model: Model, data: DataConfig, found: Sequence[Record]) -> Scores:
    true = [number(record) for record in found]
    texts, seconds = _texts(data, found)
    said = model.regress(texts, seconds, truncate=True)
    shown = [f"{text}\n{second}" for text, second in zip(texts, seconds, strict=True)] if seconds else texts
    samples = _samples(shown, [f"{value:.3g}" for value in true], [f"{value:.3g}" for value in said])
    return Scores({"pearson": pearson(said, true), "spearman": spearman(said, true)}, None, samples)


def _similar(model: Model, data: DataConfig, found: Sequence[Record]) -> Scores:
    """How the cosine goes with the score of a pair or, of a contrastive set, how many find their own among all."""
    for record in found:
        for text in record.values[:2]:
            check_text(record, text)
    firsts, seconds = ([record.values[side] for record in found] for side in (0, 1))
    ours, theirs = model.embed(firsts, truncate=True), model.embed(seconds, truncate=True)
    if data.contrastive:
        best = (ours @ theirs.T).argmax(1).tolist()
        return Scores({"accuracy": accuracy([seconds[n] for n in best], seconds)})
    true, said = [number(record) for record in found], (ours * theirs).sum(1).tolist()
    shown = [f"{first}\n{second}" for first, second in zip(firsts, seconds, strict=True)]
    samples = _samples(shown, [f"{value / data.max_score:.3g}" for value in true], [f"{value:.3g}" for value in said])
    return Scores({"pearson": pearson(said, true), "spearman": spearman(said, true)}, None, samples)


def _tags(model: Model, data: DataConfig, found: Sequence[Record]) -> Scores:
    """Entity F1 as seqeval counts it, or the mean over tags that are none of entities; tags behind a cut are O."""
    names = tuple(label_names(model, model.config.labels))
    true = []
    for record in found:
        check_tags(record)
        tags = enumerate(record.values[1])
        true.append([names[label_number(record._replace(place=record.place.at(n)), tag, names)] for n, tag in tags])
    said = [
        [word.tag for word in each.words] for each in model.tag([record.values[0] for record in found], truncate=True)
    ]
    ours, theirs = ([tag for tags in side for tag in tags] for side in (said, true))
    numbers: dict[str, Any] = {"accuracy": accuracy(ours, theirs)}
    if is_entity_scheme(names):
        scores = entity_f1(said, true)
        numbers |= {"f1": scores.all.f1, "precision": scores.all.precision, "recall": scores.all.recall}
        numbers |= {f"f1_{kind}": each.f1 for kind, each in scores.types.items()}
    else:
        numbers["f1"] = macro_f1(ours, theirs).f1
    table = {"labels": list(names), "counts": confusion(ours, theirs, names)}
    shown = [_marked(record.values[0], tags) for record, tags in zip(found, said, strict=True)]
    texts = [" ".join(record.values[0]) for record in found]
    return Scores(
        numbers, table, _samples(texts, [_marked(r.values[0], t) for r, t in zip(found, true, strict=True)], shown)
    )


def _marked(words: Sequence[str], tags: Sequence[str]) -> str:
    return " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))


def _answers(model: Model, data: DataConfig, found: Sequence[Record]) -> Scores:
    """SQuAD's exact match and F1, over all questions, over those with an answer and over those without."""
    for record in found:
        for text in (*record.values[:2], *record.values[4]):
            check_text(record, text)
        check_answer(record._replace(values=record.values[:4]))
    contexts, questions = ([record.values[side] for record in found] for side in (0, 1))
    references = [record.values[4] if record.values[2] else [] for record in found]
    said = [several[0].text for several in model.answer(questions, contexts, truncate=True)]
    numbers: dict[str, Any] = answers(said, references)._asdict()
    for name, wanted in (("answerable", True), ("unanswerable", False)):
        part = [(output, several) for output, several in zip(said, references, strict=True) if bool(several) == wanted]
        if part and len(part) < len(said):
            scores = answers([output for output, _ in part], [several for _, several in part])
            numbers |= {f"{name}_exact": scores.exact, f"{name}_f1": scores.f1}
    shown = [f"{question}\n{context}" for question, context in zip(questions, contexts, strict=True)]
    return Scores(numbers, None, _samples(shown, [each[0] if each else "" for each in references], said))


def _samples(texts: Sequence[str], true: Sequence[str], said: Sequence[str]) -> list[dict[str, str]]:
    """A few of all, evenly spread."""
    every = max(1, len(texts) // SHOWN)
    rows = list(zip(texts, true, said, strict=True))[::every][:SHOWN]
    return [{"source": text, "reference": reference, "output": output} for text, reference, output in rows]


LABELED: dict[str, Callable[[Model, DataConfig, Sequence[Record]], Scores]] = {
    "classification": _classes,
    "regression": _values,
    "similarity": _similar,
    "tagging": _tags,
    "answering": _answers,
}
