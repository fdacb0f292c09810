"""Word alignments of translations: which source word each target word was translated from.

T target tokens · S source tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from clearhead.config.settings import Settings
from clearhead.errors import UserError
from clearhead.inference import alignment_links, default_alignment_heads
from clearhead.predict.encode_batch import normalize_texts
from clearhead.predict.results import Alignment
from clearhead.text import Tokenizer
from clearhead.text.word_split import split_words

if TYPE_CHECKING:
    from clearhead.predict.model import Model

Span = tuple[int, int]  # characters, start to before end
Index = Annotated[int, Field(ge=0)]


class AlignmentSettings(Settings):
    """`alignment` in config.json: the cross-attention heads that align best, and how well they were measured to."""

    model_config = ConfigDict(extra="ignore", strict=False)

    heads: tuple[tuple[Index, Index], ...] = Field(min_length=1)  # (decoder layer, head)
    error_rate: float | None = Field(default=None, ge=0, le=1)  # alignment error rate on held-out sentences
    measured_on: str = ""


class Words:
    """The words of a text as a tokenizer sees them: a word of several tokens is one, a token of several words, too."""

    def __init__(self, text: str, token_spans: Sequence[Span]):
        word_end = list(range(1, len(text) + 1))  # of each character, the end of its word
        for start, end in split_words(text):
            word_end[start:end] = [end] * (end - start)
        self.spans: list[Span] = []
        self.of_token: list[int | None] = []  # the word of each token; None: white space only
        for start, end in token_spans:
            while start < end and text[start].isspace():
                start += 1
            if start == end:
                self.of_token.append(None)
                continue
            if not self.spans or start >= self.spans[-1][1]:
                self.spans.append((start, start))
            first = self.spans[-1][0]
            self.spans[-1] = (first, max(self.spans[-1][1], end, word_end[end - 1]))
            self.of_token.append(len(self.spans) - 1)
        self.texts = tuple(text[start:end] for start, end in self.spans)

    def matrix(self, tokens: int) -> Tensor:
        """One row for each word, with 1 at its tokens: (words, tokens); further tokens belong to no word."""
        matrix = torch.zeros(len(self.spans), tokens)
        for token, word in enumerate(self.of_token[:tokens]):
            if word is not None:
                matrix[word, token] = 1
        return matrix


def source_words(model: Model, text: str) -> Words:
    """The words of a source; its begin token, language code and end token belong to none."""
    [text] = normalize_texts(model, [text])
    before = len(model.special_tokens.source_begin) + bool(model.extra.get("languages"))
    return Words(text, [(0, 0)] * before + [(start, end) for _, start, end in model.tokenizer.offsets(text)])


def target_words(tokenizer: Tokenizer, ids: Sequence[int]) -> Words:
    """The words of generated tokens, which need not be those that encoding their text would give."""
    texts = tokenizer.decode_batch([ids[: count + 1] for count in range(len(ids))])
    ends = [len(text.rstrip("\N{REPLACEMENT CHARACTER}")) for text in texts]  # without an incomplete character
    text = texts[-1] if texts else ""
    return Words(text, [(min(pair), min(max(pair), len(text))) for pair in pairwise([0, *ends])])


def word_weights(weights: Tensor, source: Words, target: Words) -> Tensor:
    """Attention weights (…, T, S) of tokens as weights of words: the mean over target tokens, the sum over source."""
    rows = target.matrix(weights.shape[-2])
    rows = rows / rows.sum(dim=1, keepdim=True)
    return rows @ weights.float().cpu() @ source.matrix(weights.shape[-1]).T


def align_words(model: Model, text: str, ids: Sequence[int], weights: Tensor) -> Alignment:
    """Align the words of target ids with those of the source text by attention weights (T, S) of the tokens."""
    source, target = source_words(model, text), target_words(model.tokenizers[-1], ids)
    words = word_weights(weights, source, target) if len(ids) else torch.zeros(0, len(source.spans))
    links = tuple(alignment_links(words)) if source.spans else ()
    return Alignment(source.texts, target.texts, links, tuple(map(tuple, words.tolist())))


def alignment_heads(model: Model) -> list[tuple[int, int]]:
    """The heads to align with: those measured for this model (`alignment` in config.json), else the default."""
    if model.extra.get("alignment") is None:
        return default_alignment_heads(model.config)
    heads = AlignmentSettings.build(model.extra["alignment"], where="config.json: alignment").heads
    for layer, head in heads:
        if layer >= model.config.decoder_layers or head >= model.config.heads:
            raise UserError(f"config.json: alignment.heads: there is no head {head} in decoder layer {layer}; fix it")
    return list(heads)
