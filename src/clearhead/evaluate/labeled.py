"""Score models of labeled tasks: classification, regression, similarity, tagging and question answering."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from clearhead.config.data import Corpus, DataConfig
from clearhead.data.build_datasets import TASKS, raw_records
from clearhead.data.cleaning import Cleaner, Split, check_text, chunks
from clearhead.data.formats import ANSWERS, ANSWERS_WITH_REFERENCES, Record
from clearhead.data.labeled_tasks import check_answer, check_tags, is_empty, label_id, score_value
from clearhead.errors import UserError
from clearhead.evaluate.classification_metrics import (
    accuracy,
    binary_f1,
    confusion_matrix,
    entity_f1,
    macro_f1,
    matthews_corrcoef,
    squad_scores,
)
from clearhead.predict import Model
from clearhead.predict.encode_batch import InvalidText, label_names, normalize_texts
from clearhead.text.correlation import pearson, spearman
from clearhead.text.entities import is_bio_scheme

MAX_SAMPLES = 5


class LabeledScores(NamedTuple):
    """Metrics by name, the confusion matrix of labels, a few samples, and the worst mistakes."""

    metrics: dict[str, Any]
    confusion: dict[str, Any] | None = None
    samples: list[dict[str, str]] = []  # noqa: RUF012  never changed
    mistakes: list[dict[str, str]] = []  # noqa: RUF012  worst first, each with the `mistake` in words


def records(data: DataConfig, corpora: Sequence[Corpus], part: Split = "held out") -> Iterator[Record]:
    """Yield the records of corpora; without corpora, those of one part of the recipe's training data."""
    columns = TASKS[data.task].record_columns(data)
    columns = ANSWERS_WITH_REFERENCES if columns == ANSWERS else columns
    for corpus in corpora:
        yield from raw_records(corpus, columns, data.source_url)
    if not corpora:
        cleaner = Cleaner(data, columns, part)
        for corpus in data.train:
            for chunk in chunks(raw_records(corpus, columns, data.source_url)):
                yield from cleaner.clean_chunk(chunk)


def eval_records(model: Model, data: DataConfig, corpora: Sequence[Corpus]) -> list[Record]:
    """Return the records of a recipe's own evaluation sets, without empty texts, which data preparation drops too."""
    kept = list(records(data, corpora))
    if data.task == "tagging":
        return [record for record in kept if record.values[0]]
    for side in range(2 if data.text_pairs or data.task in ("similarity", "answering") else 1):
        for record in kept:
            check_text(record, record.values[side])
        texts = normalize_texts(model, [record.values[side] for record in kept])
        encoded = zip(texts, model.tokenizer.encode_batch(texts), strict=True)
        kept = [record for record, (text, ids) in zip(kept, encoded, strict=True) if not is_empty(text, ids)]
    return kept


def score_labeled(model: Model, data: DataConfig, examples: Sequence[Record]) -> LabeledScores:
    """Score the model's predictions for the records of a labeled task."""
    if not examples:
        raise UserError("data: there are no texts to score; name a file with --data")
    try:
        return LABELED_TASKS[data.task](model, data, examples)
    except InvalidText as error:
        raise UserError(f"{examples[error.number].location}: {error.problem}") from None


def _texts(data: DataConfig, examples: Sequence[Record]) -> tuple[list[str], list[str] | None]:
    """Return the texts of the records, and the second texts of text pairs."""
    for record in examples:
        for text in record.values[: 2 if data.text_pairs else 1]:
            check_text(record, text)
    return [r.values[0] for r in examples], [r.values[1] for r in examples] if data.text_pairs else None


def _join_pairs(firsts: Sequence[str], seconds: Sequence[str] | None) -> Sequence[str]:
    """Return texts as shown in samples, a pair on two lines."""
    return [f"{first}\n{second}" for first, second in zip(firsts, seconds, strict=True)] if seconds else firsts


def _score_classification(model: Model, data: DataConfig, examples: Sequence[Record]) -> LabeledScores:
    names = label_names(model, model.config.labels)
    ids = {name: number for number, name in enumerate(names)}
    references = [names[label_id(record, record.values[-1], ids)] for record in examples]
    texts, seconds = _texts(data, examples)
    results = model.classify(texts, seconds, truncate=True)
    predictions = [result.label for result in results]
    binary = len(names) == 2
    f1 = binary_f1(predictions, references, names[1]) if binary else macro_f1(predictions, references)
    metrics = {
        "accuracy": accuracy(predictions, references),
        "f1": f1.f1,
        "f1_of": f"the label {names[1]}" if binary else "macro average of all labels",
        "matthews": matthews_corrcoef(predictions, references),
    }
    table = {"labels": names, "counts": confusion_matrix(predictions, references, names)}
    sizes = [result.score if result.label != label else 0.0 for result, label in zip(results, references, strict=True)]
    rows = _rows(_join_pairs(texts, seconds), references, predictions)
    return LabeledScores(metrics, table, _samples(rows), _worst(rows, sizes, lambda p: f"predicted with {p:.1%}"))


def _score_regression(model: Model, data: DataConfig, examples: Sequence[Record]) -> LabeledScores:
    references = [score_value(record) for record in examples]
    texts, seconds = _texts(data, examples)
    predictions = model.regress(texts, seconds, truncate=True)
    shown = ([f"{value:.3g}" for value in values] for values in (references, predictions))
    rows, sizes = _rows(_join_pairs(texts, seconds), *shown), _differences(predictions, references)
    scores = _correlations(predictions, references)
    return LabeledScores(scores, None, _samples(rows), _worst(rows, sizes, lambda size: f"off by {size:.3g}"))


def _score_similarity(model: Model, data: DataConfig, examples: Sequence[Record]) -> LabeledScores:
    """Correlate cosines with scores or, for contrastive data, measure how often a text's pair is the nearest text."""
    for record in examples:
        for text in record.values[:2]:
            check_text(record, text)
    firsts, seconds = ([record.values[side] for record in examples] for side in (0, 1))
    first_vectors, second_vectors = model.embed(firsts, truncate=True), model.embed(seconds, truncate=True)
    if data.contrastive:
        nearest = (first_vectors @ second_vectors.T).argmax(1).tolist()
        return LabeledScores({"accuracy": accuracy([seconds[n] for n in nearest], seconds)})
    references = [score_value(record) for record in examples]
    cosines = (first_vectors * second_vectors).sum(1).tolist()
    expected, predicted = [f"{x / data.max_score:.3g}" for x in references], [f"{x:.3g}" for x in cosines]
    rows = _rows(_join_pairs(firsts, seconds), expected, predicted)
    sizes = _differences(cosines, [score / data.max_score for score in references])
    mistakes = _worst(rows, sizes, lambda size: f"off by {size:.3g}")
    return LabeledScores(_correlations(cosines, references), None, _samples(rows), mistakes)


def _differences(predictions: Sequence[float], references: Sequence[float]) -> list[float]:
    return [abs(prediction - reference) for prediction, reference in zip(predictions, references, strict=True)]


def _correlations(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    return {"pearson": pearson(predictions, references), "spearman": spearman(predictions, references)}


def _score_tagging(model: Model, data: DataConfig, examples: Sequence[Record]) -> LabeledScores:
    """Entity F1 as in seqeval, or macro F1 if the tags are not B-/I-/O; tags after a truncation are O."""
    names = label_names(model, model.config.labels)
    ids = {name: number for number, name in enumerate(names)}
    references = []
    for record in examples:
        check_tags(record)
        tags = enumerate(record.values[1])
        references.append(
            [names[label_id(record._replace(location=record.location.for_item(n)), tag, ids)] for n, tag in tags]
        )
    tagged = model.tag([record.values[0] for record in examples], truncate=True)
    predictions = [[word.tag for word in text.words] for text in tagged]
    flat_predictions, flat_references = ([tag for tags in side for tag in tags] for side in (predictions, references))
    metrics: dict[str, Any] = {"accuracy": accuracy(flat_predictions, flat_references)}
    if is_bio_scheme(names):
        scores = entity_f1(predictions, references)
        metrics |= {"f1": scores.all.f1, "precision": scores.all.precision, "recall": scores.all.recall}
        metrics |= {f"f1_{kind}": score.f1 for kind, score in scores.types.items()}
    else:
        metrics["f1"] = macro_f1(flat_predictions, flat_references).f1
    table = {"labels": list(names), "counts": confusion_matrix(flat_predictions, flat_references, names)}
    texts = [" ".join(record.values[0]) for record in examples]
    expected, predicted = (
        [_mark_tags(record.values[0], tags) for record, tags in zip(examples, side, strict=True)]
        for side in (references, predictions)
    )
    pairs = zip(predictions, references, strict=True)
    sizes = [sum(tag != other for tag, other in zip(*pair, strict=True)) for pair in pairs]
    rows = _rows(texts, expected, predicted)
    return LabeledScores(metrics, table, _samples(rows), _worst(rows, sizes, lambda count: f"{count:,} wrong tags"))


def _mark_tags(words: Sequence[str], tags: Sequence[str]) -> str:
    return " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))


def _score_answering(model: Model, data: DataConfig, examples: Sequence[Record]) -> LabeledScores:
    """Exact match and F1 of SQuAD over all questions, and over those with and without an answer."""
    for record in examples:
        for text in (*record.values[:2], *record.values[4]):
            check_text(record, text)
        check_answer(record._replace(values=record.values[:4]))
    contexts, questions = ([record.values[side] for record in examples] for side in (0, 1))
    references = [record.values[4] if record.values[2] else [] for record in examples]
    predictions = [answer.text for answer in model.answer(questions, contexts, truncate=True)]
    metrics: dict[str, Any] = squad_scores(predictions, references)._asdict()
    for name, answerable in (("answerable", True), ("unanswerable", False)):
        part = [(p, r) for p, r in zip(predictions, references, strict=True) if bool(r) == answerable]
        if part and len(part) < len(predictions):
            scores = squad_scores([prediction for prediction, _ in part], [answers for _, answers in part])
            metrics |= {f"{name}_exact": scores.exact, f"{name}_f1": scores.f1}
    expected = [answers[0] if answers else "" for answers in references]
    rows = _rows(_join_pairs(questions, contexts), expected, predictions)
    f1 = [squad_scores([prediction], [answers]).f1 for prediction, answers in zip(predictions, references, strict=True)]
    mistakes = _worst(rows, [1 - value for value in f1], lambda size: f"F1 {1 - size:.0%}")
    return LabeledScores(metrics, None, _samples(rows), mistakes)


def _rows(texts: Sequence[str], references: Sequence[str], predictions: Sequence[str]) -> list[dict[str, str]]:
    rows = zip(texts, references, predictions, strict=True)
    return [{"source": text, "reference": reference, "output": prediction} for text, reference, prediction in rows]


def _samples(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return up to MAX_SAMPLES rows at even intervals."""
    return list(rows[:: max(1, len(rows) // MAX_SAMPLES)][:MAX_SAMPLES])


def _worst(
    rows: Sequence[dict[str, str]], sizes: Sequence[float], describe: Callable[[Any], str]
) -> list[dict[str, str]]:
    """Return up to MAX_SAMPLES rows with the largest mistakes, each described; a size of 0 is no mistake."""
    order = sorted(range(len(rows)), key=lambda index: -sizes[index])[:MAX_SAMPLES]
    return [{**rows[index], "mistake": describe(sizes[index])} for index in order if sizes[index] > 0]


LABELED_TASKS: dict[str, Callable[[Model, DataConfig, Sequence[Record]], LabeledScores]] = {
    "classification": _score_classification,
    "regression": _score_regression,
    "similarity": _score_similarity,
    "tagging": _score_tagging,
    "answering": _score_answering,
}
