"""How good a model is on a test set: BLEU and chrF of translations, perplexity, the scores of labeled tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from clearhead.config.data import Corpus, DataConfig
from clearhead.data import IGNORED, Loader, open_set, prepare
from clearhead.data.build_datasets import raw_records
from clearhead.data.cleaning import cleaned, share
from clearhead.data.formats import TEXT, TRANSLATION, Record
from clearhead.errors import UserError
from clearhead.evaluate.bleu import bleu, chrf, tokenized_bleu
from clearhead.evaluate.labeled import own_records, records, score_labeled
from clearhead.model import Decoder, Encoder
from clearhead.predict import Model
from clearhead.predict.encode_batch import limit

Say = Callable[[str], None]


def evaluate(
    model: Model,
    corpora: Sequence[Corpus] = (),
    *,
    beam: int = 4,
    lowercase: bool = False,
    moses: str = "",
    unseen: bool = False,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Scores of a model on corpora, or on the test (else validation, else held-out) set of its recipe.

    `lowercase` and `moses` (a language, for tokens as sacremoses makes them) are for published figures that were
    computed so; `unseen` adds the scores of the texts that are no part of any training text.
    """
    data = model.data or _guessed(model)
    known, given = data, bool(corpora)
    if corpora:  # where the recipe's own data are published is no matter of theirs
        data = data.model_copy(update={"published": ""})
    corpora = corpora or data.test or data.valid
    if not corpora and not (data.held_out and data.train):
        raise UserError("data: this model's recipe names no test or validation set; name one with --data")
    if not corpora:
        say(f"there is no test set: {data.held_out:.3%} of the training data, which were held out, take its place")
    if data.task == "translation":
        return _translation(model, data, corpora, beam, lowercase, moses, say)
    if data.task == "language-model":
        return _language_model(model, data, corpora)
    if data.task == "masked-language-model":
        return _masked(model, data, corpora)
    found = list(records(data, corpora)) if given else own_records(model, data, corpora)
    scores = score_labeled(model, data, found)
    result = {"texts": len(found)} | scores.numbers
    if scores.confusion is not None:
        result["confusion"] = scores.confusion
    return result | (_unseen(model, known, corpora, found) if unseen else {})


def _guessed(model: Model) -> DataConfig:
    """What a model from elsewhere can be scored on: the task of its head, or how alike its vectors are."""
    task = model.extra.get("task") or ("similarity" if "pooling" in model.extra else None)
    if task is None:
        name = model.name or "this model"
        raise UserError(f"{name} does not say what it was trained for; fine-tune it with a recipe")
    settings = {"task": task, "max_length": limit(model), "pooling": model.extra.get("pooling", "mean")}
    return DataConfig.build(settings, where="config.json")


def _unseen(model: Model, data: DataConfig, corpora: Sequence[Corpus], found: Sequence[Record]) -> dict[str, Any]:
    """Scores of those records whose first text is contained in no text that was learned from.

    Other files may share texts with what was held out, which had a say in which step was best: it counts as seen there.
    """
    learned = records(data, data.train) if corpora else records(data, (), "kept")
    read = "\n".join(_said(record) for record in learned)
    kept = [record for record in found if _said(record).strip() not in read]
    numbers = score_labeled(model, data, kept).numbers if kept else {}
    return {"unseen_texts": len(kept)} | {f"unseen_{name}": value for name, value in numbers.items()}


def _said(record: Record) -> str:
    text = record.values[0]
    return " ".join(text) if isinstance(text, list) else str(text)


def _masked(model: Model, data: DataConfig, corpora: Sequence[Corpus]) -> dict[str, Any]:
    """Perplexity and accuracy of masked words, masks drawn with seed 0; how often the next sentence was known."""
    assert isinstance(model.network, Encoder)
    dataset = open_set(data, corpora, model.tokenizers) if corpora else prepare(data, model.tokenizers).valid
    assert dataset is not None  # `evaluate` has seen that something is held out
    heads, total, words, right, rows, known = model.network.heads, 0.0, 0, 0, 0, 0
    with torch.inference_mode():
        for step in Loader(dataset, tokens=data.batch_tokens, shuffle=False, workers=1):
            for batch in step.batches:
                there = batch.to(model.device)
                lengths, documents = there.get("ids_lengths"), there.documents.get("ids")
                segments = there["segments"] if model.config.segments else None
                hidden = model.network.encode(there["ids"], lengths, documents=documents, segments=segments)
                asked = there["labels"] != IGNORED
                scores, labels = model.network.logits(hidden[asked]).float(), there["labels"][asked]
                total += float(F.cross_entropy(scores, labels, reduction="sum"))
                words, right = words + len(labels), right + int((scores.argmax(-1) == labels).sum())
                if heads.next_sentence is not None:
                    follows = heads.next_sentence(heads.pool(hidden, lengths, documents)).argmax(-1)
                    rows, known = rows + len(follows), known + int((follows == there["next_sentence"]).sum())
    loss = total / max(1, words)
    found = {"words": words, "loss": loss, "perplexity": math.exp(min(loss, 700)), "accuracy": right / max(1, words)}
    return found | ({"next_sentence_accuracy": known / rows} if rows else {})


def _translation(
    model: Model, data: DataConfig, corpora: Sequence[Corpus], beam: int, lowercase: bool, moses: str, say: Say
) -> dict[str, Any]:
    tokens = _moses(moses) if moses else None
    sources, references = pairs(data, corpora)
    say(f"translating {len(sources):,} texts with beam {beam} …")
    outputs = model.translate(sources, beam=beam)
    corpora = corpora or data.train
    chinese = any(corpus.format == "embedded" and corpus.languages[-1] == "zh" for corpus in corpora)
    found = [
        bleu(outputs, references, lowercase=lowercase, tokenize="zh" if chinese else "13a"),
        chrf(outputs, references, lowercase=lowercase),
    ]
    result: dict[str, Any] = {"texts": len(sources), "beam": beam}
    if tokens is not None:
        ours, theirs = ([tokens(text) for text in texts] for texts in (outputs, references))
        score = tokenized_bleu(ours, theirs, lowercase=lowercase)
        result |= {"tokenized_bleu": score.value, "tokenized_signature": score.signature}
    for score in found:
        result |= {score.name.lower(): score.value, f"{score.name.lower()}_signature": score.signature}
    same = ((a.lower(), b.lower()) if lowercase else (a, b) for a, b in zip(outputs, references, strict=True))
    result["exact"] = sum(a == b for a, b in same) / len(outputs)
    return result


def pairs(data: DataConfig, corpora: Sequence[Corpus] = ()) -> tuple[list[str], list[str]]:
    """Sources and references of corpora; without any, those of the training data that were held out."""
    found = [
        record.values
        for corpus in corpora or data.train
        for record in raw_records(corpus, TRANSLATION, data.source_url)
        if corpora or share(cleaned(record.values[0], data)) < data.held_out
    ]
    if not found:
        raise UserError("data: there are no texts to score on; name some with --data")
    return [source for source, _ in found], [reference for _, reference in found]


def _moses(language: str) -> Callable[[str], list[str]]:
    try:
        from sacremoses import MosesTokenizer  # type: ignore[import-not-found]
    except ImportError:
        raise UserError("moses: the package sacremoses is not installed; pip install sacremoses") from None
    tokenizer = MosesTokenizer(lang=language)
    return lambda text: list(tokenizer.tokenize(text, escape=False))


def _language_model(model: Model, data: DataConfig, corpora: Sequence[Corpus]) -> dict[str, Any]:
    """Perplexity of a token, and of a word where words are what spaces part; every window sees only itself."""
    network = model.inference_network
    assert isinstance(network, Decoder)
    dataset = open_set(data, corpora, model.tokenizers) if corpora else prepare(data, model.tokenizers).valid
    assert dataset is not None  # `evaluate` has seen that something is held out
    total, count = 0.0, 0
    with torch.inference_mode():
        for step in Loader(dataset, tokens=data.batch_tokens, shuffle=False, workers=1):
            for batch in step.batches:
                there = batch.to(model.device)
                scores = network(there["ids"], documents=there.documents.get("ids"))
                labels = there["labels"].flatten()
                scores = scores.flatten(0, 1).float()
                total += float(F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum"))
                count += int((labels != IGNORED).sum())
    loss = total / max(1, count)
    found: dict[str, Any] = {"tokens": count, "loss": loss, "perplexity": math.exp(min(loss, 700))}
    words = sum(
        len(record.values[0].split())
        for corpus in corpora
        if corpus.format == "text"
        for record in raw_records(corpus, TEXT, data.source_url)
    )
    if words:
        found["word_perplexity"] = math.exp(min(total / words, 700))
    return found
