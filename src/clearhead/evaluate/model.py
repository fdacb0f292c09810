"""Evaluate a model on a test set: BLEU and chrF of translations, perplexity, metrics of labeled tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn import functional as F

from clearhead.config.data import Corpus, DataConfig
from clearhead.data import IGNORED, Loader, open_dataset, prepare
from clearhead.data.build_datasets import raw_records
from clearhead.data.formats import TEXT, TRANSLATION, Record
from clearhead.data.held_out import held_out_pairs
from clearhead.errors import UserError
from clearhead.evaluate.bleu import bleu, chrf
from clearhead.evaluate.bleu import tokenized_bleu as bleu_of_tokens
from clearhead.evaluate.data_files import check_files
from clearhead.evaluate.labeled import eval_records, records, score_labeled
from clearhead.model import Decoder, Encoder
from clearhead.predict import Model
from clearhead.predict.encode_batch import max_length

Log = Callable[[str], None]
MAX_EXPONENT = 700  # exp() of more overflows a float


def evaluate(
    model: Model,
    corpora: Sequence[Corpus] = (),
    *,
    beam: int = 4,
    lowercase: bool = False,
    tokenized_bleu: str = "",
    unseen: bool = False,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Return the metrics of a model on corpora, by default on the test (else validation, else held-out) set.

    `lowercase` and `tokenized_bleu` (the language of Moses tokenization) are for comparison with published scores;
    `unseen` adds the metrics of texts that do not occur in the training data. Files that only the model's config.json
    names are not read, see `data_files`.
    """
    data = model.data or _guess_task(model)
    data = data.model_copy(update={"cache_dir": "", "max_length": max_length(model)})
    recipe_data, has_corpora = data, bool(corpora)
    own = () if corpora else data.test or data.valid or data.train
    check_files(model, [*own, *(data.train if unseen else ())], log)
    if corpora:  # the URL of the recipe's own data does not apply to them
        data = data.model_copy(update={"source_url": ""})
    corpora = corpora or data.test or data.valid
    if not corpora and not (data.held_out and data.train):
        raise UserError("data: this model's recipe names no test or validation set; name one with --data")
    if not corpora:
        log(f"no test set; using the held-out {data.held_out:.1%} of the training data")
    if data.task == "translation":
        return _evaluate_translation(model, data, corpora, beam, lowercase, tokenized_bleu, log)
    if data.task == "language-model":
        return _evaluate_language_model(model, data, corpora)
    if data.task == "masked-language-model":
        return _evaluate_masked_language_model(model, data, corpora)
    examples = list(records(data, corpora)) if has_corpora else eval_records(model, data, corpora)
    scores = score_labeled(model, data, examples)
    result = {"texts": len(examples)} | scores.metrics
    if scores.confusion is not None:
        result["confusion"] = scores.confusion
    return result | (_score_unseen(model, recipe_data, corpora, examples) if unseen else {})


def _guess_task(model: Model) -> DataConfig:
    """Return a data config for an imported model, from its head or its pooling."""
    task = model.extra.get("task") or ("similarity" if "pooling" in model.extra else None)
    if task is None:
        name = model.name or "this model"
        raise UserError(f"{name}: no task in config.json; fine-tune it with a recipe")
    settings = {"task": task, "max_length": max_length(model), "pooling": model.extra.get("pooling", "mean")}
    return DataConfig.build(settings, where="config.json")


def _score_unseen(
    model: Model, data: DataConfig, corpora: Sequence[Corpus], examples: Sequence[Record]
) -> dict[str, Any]:
    """Return the metrics of records whose first text is contained in no training text.

    For other files, held-out texts count as seen, since they decided which checkpoint is best.
    """
    seen = records(data, data.train) if corpora else records(data, (), "kept")
    seen_text = "\n".join(_first_text(record) for record in seen)
    unseen = [record for record in examples if _first_text(record).strip() not in seen_text]
    metrics = score_labeled(model, data, unseen).metrics if unseen else {}
    return {"unseen_texts": len(unseen)} | {f"unseen_{name}": value for name, value in metrics.items()}


def _first_text(record: Record) -> str:
    text = record.values[0]
    return " ".join(text) if isinstance(text, list) else str(text)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, MAX_EXPONENT))


def _evaluate_masked_language_model(model: Model, data: DataConfig, corpora: Sequence[Corpus]) -> dict[str, Any]:
    """Return perplexity and accuracy of masked tokens (masks of seed 0), and next-sentence accuracy."""
    assert isinstance(model.network, Encoder)
    dataset = open_dataset(data, corpora, model.tokenizers) if corpora else prepare(data, model.tokenizers).valid
    assert dataset is not None  # `evaluate` has checked that there is held-out data
    heads, total_loss, tokens, correct, pairs, correct_pairs = model.network.heads, 0.0, 0, 0, 0, 0
    with torch.inference_mode():
        for step in Loader(dataset, batch_tokens=data.batch_tokens, shuffle=False, workers=1):
            for cpu_batch in step.batches:
                batch = cpu_batch.to(model.device)
                lengths, documents = batch.get("ids_lengths"), batch.documents.get("ids")
                segments = batch["segments"] if model.config.segments > 1 else None
                hidden = model.network.encode(batch["ids"], lengths, documents=documents, segments=segments)
                masked = batch["labels"] != IGNORED
                logits, labels = model.network.logits(hidden[masked]).float(), batch["labels"][masked]
                total_loss += float(F.cross_entropy(logits, labels, reduction="sum"))
                tokens, correct = tokens + len(labels), correct + int((logits.argmax(-1) == labels).sum())
                if heads.next_sentence is not None:
                    follows = heads.next_sentence(heads.pool(hidden, lengths, documents)).argmax(-1)
                    pairs += len(follows)
                    correct_pairs += int((follows == batch["next_sentence"]).sum())
    loss = total_loss / max(1, tokens)
    result = {"tokens": tokens, "loss": loss, "perplexity": _perplexity(loss), "accuracy": correct / max(1, tokens)}
    return result | ({"next_sentence_accuracy": correct_pairs / pairs} if pairs else {})


def _evaluate_translation(
    model: Model, data: DataConfig, corpora: Sequence[Corpus], beam: int, lowercase: bool, language: str, log: Log
) -> dict[str, Any]:
    tokenize = _moses_tokenizer(language) if language else None
    sources, references = pairs(data, corpora, log)
    log(f"translating {len(sources):,} texts with beam {beam} …")
    outputs = [output.text for output in model.translate(sources, beam=beam)]
    scores = [
        bleu(outputs, references, lowercase, data.target_language),
        chrf(outputs, references, lowercase=lowercase),
    ]
    result: dict[str, Any] = {"texts": len(sources), "beam": beam}
    if tokenize is not None:
        output_tokens, reference_tokens = ([tokenize(text) for text in texts] for texts in (outputs, references))
        score = bleu_of_tokens(output_tokens, reference_tokens, lowercase=lowercase)
        result |= {"tokenized_bleu": score.value, "tokenized_signature": score.signature}
    for score in scores:
        result |= {score.name.lower(): score.value, f"{score.name.lower()}_signature": score.signature}
    compared = ((a.lower(), b.lower()) if lowercase else (a, b) for a, b in zip(outputs, references, strict=True))
    result["exact"] = sum(a == b for a, b in compared) / len(outputs)
    return result


def pairs(
    data: DataConfig, corpora: Sequence[Corpus] = (), log: Log = lambda line: None
) -> tuple[list[str], list[str]]:
    """Return sources and references of corpora, by default of the pairs held out from training."""
    read = partial(raw_records, columns=TRANSLATION, source_url=data.source_url)
    records = map(read, corpora) if corpora else held_out_pairs(data, read, log)
    values = [record.values for record in chain.from_iterable(records)]
    if not values:
        raise UserError("data: there are no texts to score; name a file with --data")
    return [source for source, _ in values], [reference for _, reference in values]


def _moses_tokenizer(language: str) -> Callable[[str], list[str]]:
    try:
        from sacremoses import MosesTokenizer  # type: ignore[import-not-found]
    except ImportError:
        raise UserError("--tokenized-bleu: needs sacremoses; pip install 'clearhead[evaluation]'") from None
    tokenizer = MosesTokenizer(lang=language)
    return lambda text: list(tokenizer.tokenize(text, escape=False))


def _evaluate_language_model(model: Model, data: DataConfig, corpora: Sequence[Corpus]) -> dict[str, Any]:
    """Return the perplexity of tokens and, for text files, of words separated by spaces; windows are independent."""
    network = model.inference_network
    assert isinstance(network, Decoder)
    dataset = open_dataset(data, corpora, model.tokenizers) if corpora else prepare(data, model.tokenizers).valid
    assert dataset is not None  # `evaluate` has checked that there is held-out data
    total_loss, tokens = 0.0, 0
    with torch.inference_mode():
        for step in Loader(dataset, batch_tokens=data.batch_tokens, shuffle=False, workers=1):
            for cpu_batch in step.batches:
                batch = cpu_batch.to(model.device)
                logits = network(batch["ids"], documents=batch.documents.get("ids"))
                labels = batch["labels"].flatten()
                logits = logits.flatten(0, 1).float()
                total_loss += float(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
                tokens += int((labels != IGNORED).sum())
    loss = total_loss / max(1, tokens)
    result: dict[str, Any] = {"tokens": tokens, "loss": loss, "perplexity": _perplexity(loss)}
    words = sum(
        len(record.values[0].split())
        for corpus in corpora
        if corpus.format == "text"
        for record in raw_records(corpus, TEXT, data.source_url)
    )
    if words:
        result["word_perplexity"] = _perplexity(total_loss / words)
    return result
