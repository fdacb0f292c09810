"""Measure the word alignments of a translator, and choose the cross-attention heads that align best.

N sentences · L layers · H heads · T target words · S source words
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.config.data import DataConfig
from clearhead.data.build_datasets import raw_records
from clearhead.data.formats import TRANSLATION
from clearhead.data.grammar import LANGUAGES
from clearhead.errors import UserError
from clearhead.evaluate.word_links import LinkedPair, Span, estimate_links, grammar_pairs
from clearhead.inference import cross_attention_weights
from clearhead.model import EncoderDecoder
from clearhead.predict import Model
from clearhead.predict.align import Words, alignment_heads, source_words, target_words, word_weights
from clearhead.predict.requests import requests

Head = tuple[int, int]  # decoder layer and head
GRAMMAR, ESTIMATE = "exact links of the embedded grammar", "links estimated by IBM model 1"
NUM_SENTENCES = 100  # to choose heads with, and as many to measure them
NUM_ESTIMATED = 20_000  # training pairs of IBM model 1


class Score(NamedTuple):
    """Alignment error rate (Och and Ney 2003) of links that are all sure: 1 - F1; with its precision and recall."""

    error_rate: float
    precision: float
    recall: float


class AttentionSet(NamedTuple):
    """Cross-attention of reference translations, over words, with the true links."""

    weights: Tensor  # (L · H, N, T, S), -1 beyond the words of a sentence
    links: Tensor  # (N, T, S) booleans
    is_word: Tensor  # (N, T) booleans
    heads: int  # H

    def score(self, heads: Iterable[Head]) -> Score:
        """The score of links from each target word to the source word with the highest mean weight."""
        rows = [layer * self.heads + head for layer, head in heads]
        return self.score_weights(self.weights[rows].mean(0))

    def score_weights(self, weights: Tensor) -> Score:
        """The score of weights (N, T, S)."""
        found = self.links.gather(2, weights.argmax(-1, keepdim=True))[..., 0] & self.is_word
        hits, made, true = int(found.sum()), int(self.is_word.sum()), int(self.links.sum())
        return Score(1 - 2 * hits / max(1, made + true), hits / max(1, made), hits / max(1, true))


def collect_attention(model: Model, pairs: Sequence[LinkedPair]) -> AttentionSet:
    """Run the model over reference translations; pairs that it cannot read are left out."""
    network = model.inference_network_for(EncoderDecoder, "alignment")
    weights, links = [], []
    for pair in pairs:
        source = source_words(model, pair.source)
        try:
            [(prompt, ids, _)] = requests(model, [pair.source], {}, [pair.target])
        except UserError:  # too long
            continue
        target = target_words(model.tokenizers[-1], prompt[1:])
        if not ids or not source.spans or not target.spans:
            continue
        attention = word_weights(cross_attention_weights(network, ids, prompt), source, target)  # (L, H, T, S)
        weights.append(attention.flatten(0, 1))
        links.append(_links_of_words(pair, source, target))
    if not weights:
        raise UserError("alignment: the model can read none of the sentences; use other languages")
    columns, rows = (max(table.shape[axis] for table in links) for axis in (1, 0))

    def pad(table: Tensor, value: float) -> Tensor:
        return F.pad(table, (0, columns - table.shape[-1], 0, rows - table.shape[-2]), value=value)

    is_word = torch.stack([torch.arange(rows) < len(table) for table in links])
    stacked = torch.stack([pad(table, -1) for table in weights], dim=1)
    return AttentionSet(stacked, torch.stack([pad(table, False) for table in links]), is_word, model.config.heads)


def _links_of_words(pair: LinkedPair, source: Words, target: Words) -> Tensor:
    """The links of a pair between the words that a model sees: (T, S) booleans."""
    table = torch.zeros(len(target.spans), len(source.spans), dtype=torch.bool)
    for in_source, in_target in pair.links:
        for i in _overlapping(source.spans, in_source):
            for j in _overlapping(target.spans, in_target):
                table[j, i] = True
    return table


def _overlapping(spans: Sequence[Span], span: Span) -> list[int]:
    return [number for number, (start, end) in enumerate(spans) if start < span[1] and span[0] < end]


def choose_heads(attention: AttentionSet) -> list[Head]:
    """The heads whose mean attention has the lowest error rate: all of a layer, all of them, or a greedy selection."""
    layers = len(attention.weights) // attention.heads
    every = [(layer, head) for layer in range(layers) for head in range(attention.heads)]
    candidates = [[head for head in every if head[0] == layer] for layer in reversed(range(layers))]
    chosen, remaining, best = list[Head](), every, 2.0
    while remaining:
        rates = {head: attention.score([*chosen, head]).error_rate for head in remaining}
        added = min(rates, key=lambda head: rates[head])
        if rates[added] >= best:
            break
        best = rates[added]
        chosen, remaining = [*chosen, added], [head for head in remaining if head != added]
    return sorted(min([*candidates, every, chosen], key=lambda heads: attention.score(heads).error_rate))


def measured_alignment(model: Model, to_choose: Sequence[LinkedPair], to_score: Sequence[LinkedPair]) -> dict[str, Any]:
    """Choose heads on some sentences and score them on others: `heads` and `error_rate` for config.json."""
    heads = choose_heads(collect_attention(model, to_choose))
    score = collect_attention(model, to_score).score(heads)
    return {"heads": [list(head) for head in heads], "error_rate": round(score.error_rate, 4)}


def alignment_of_corpora(model: Model, data: DataConfig) -> dict[str, Any] | None:
    """`alignment` for config.json, measured on the corpora a translator is trained on; None without texts.

    The embedded grammar has exact links; those of other texts are estimated.
    """
    embedded = next((corpus for corpus in data.train if corpus.format == "embedded"), None)
    if embedded is not None:
        pairs = grammar_pairs(embedded.languages, embedded.level, "valid", 2 * NUM_SENTENCES)
    else:
        pairs = estimate_links(_training_texts(data), 2 * NUM_SENTENCES)
    if len(pairs) < 2:
        return None
    measured = measured_alignment(model, pairs[::2], pairs[1::2])
    return measured | {"measured_on": GRAMMAR if embedded is not None else ESTIMATE}


def _training_texts(data: DataConfig) -> list[tuple[str, str]]:
    """The first source and target texts of each corpus that are not empty."""
    share = max(1, NUM_ESTIMATED // max(1, len(data.train)))
    texts = []
    for corpus in data.train:
        for record in islice(raw_records(corpus, TRANSLATION, data.source_url), share):
            source, target = record.values
            if source.strip() and target.strip():
                texts.append((source, target))
    return texts


def evaluate_alignment(model: Model, languages: str, count: int = 500) -> dict[str, Any]:
    """Score the alignments of reference translations on the test sentences of the embedded grammar.

    `languages` is like en-de. The level is that of the model's own training data, if it is the grammar, else 3.
    """
    source, _, target = languages.partition("-")
    if source not in LANGUAGES or target not in LANGUAGES or source == target:
        raise UserError(f"alignment: {languages!r:.40} is not a pair of {', '.join(LANGUAGES)}; write it like en-de")
    corpora = () if model.data is None else model.data.train
    levels: list[Literal[1, 2, 3]] = [corpus.level for corpus in corpora if corpus.format == "embedded"]
    level = levels[0] if levels else 3
    pairs = grammar_pairs((source, target), level, "test", count)
    heads = alignment_heads(model)
    score = collect_attention(model, pairs).score(heads)
    return {
        "texts": len(pairs),
        "alignment_error_rate": score.error_rate,
        "alignment_precision": score.precision,
        "alignment_recall": score.recall,
        "alignment_heads": " ".join(f"{layer}.{head}" for layer, head in heads),
        "measured_on": f"{GRAMMAR}, level {level}, {languages}",
    }
