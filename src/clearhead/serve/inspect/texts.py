"""A text of a request as a trace: its tokens with their characters, and the pass of the network over them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clearhead.data.labeled_tasks import add_special_tokens
from clearhead.errors import UserError
from clearhead.interpret.switches import Switch, loss_of, switched_off
from clearhead.interpret.trace import Trace, own_copy, read_out, run_network, trace_network
from clearhead.limits import MAX_TEXT_CHARS
from clearhead.model import Decoder, Encoder, EncoderDecoder, Network
from clearhead.predict import Model
from clearhead.predict.encode_batch import check_text, max_length, normalize_texts
from clearhead.predict.export import require_unquantized
from clearhead.predict.fill import MASK, masked_rows
from clearhead.predict.requests import requests
from clearhead.serve.inspect.requests import Request
from clearhead.text import Tokenizer

MAX_TOKENS = 1024  # of a text on the page: one head is then a picture of a million cells
WORD_START = "▁"  # of vocabularies that write a space so
KEPT_TRACES = 4  # of each model; the page asks for many views of one text
Span = tuple[int, int, int]  # text (0, or 1 of a pair), first character, end


@dataclass(frozen=True)
class Side:
    """The tokens of one stack: ids, the characters that each stands for (None: special tokens), and the texts."""

    ids: tuple[int, ...]
    spans: tuple[Span | None, ...]
    texts: tuple[str, ...]
    pieces: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ids": self.ids, "spans": self.spans, "texts": self.texts, "pieces": self.pieces, "parts": self.parts}

    @property
    def parts(self) -> list[tuple[int, int] | None]:
        """For a token that is only a part of its characters: which one of how many."""
        shared: dict[Span, list[int]] = {}
        for position, span in enumerate(self.spans):
            if span is not None and span[1] < span[2]:
                shared.setdefault(span, []).append(position)
        result: list[tuple[int, int] | None] = [None] * len(self.ids)
        for positions in shared.values():
            for number, position in enumerate(positions if len(positions) > 1 else ()):
                result[position] = (number + 1, len(positions))
        return result


@dataclass(frozen=True)
class TextTrace:
    """A trace with the tokens of its text; `labels` (T,) are the tokens that came next, -100 where none did."""

    trace: Trace
    source: Side | None
    target: Side | None
    segments: tuple[int, ...] | None
    labels: Tensor | None

    @cached_property
    def logits(self) -> Tensor:
        """What the network reads out of the last hidden states; see `trace.read_out`."""
        with torch.no_grad():
            return read_out(self.trace.network, self.trace.hidden)

    @property
    def loss(self) -> float | None:
        """Mean negative logprob of the tokens that came next, in nats."""
        return loss_of(self.logits, self.labels)

    @property
    def last(self) -> Side:
        """The tokens whose hidden states the heads read."""
        side = self.target or self.source
        assert side is not None
        return side

    def without(self, switches: Sequence[Switch]) -> Tensor:
        """The same read-out with some parts switched off."""
        trace, network = self.trace, self.trace.network
        segments = None if self.segments is None else torch.tensor([self.segments], device=trace.hidden.device)
        with torch.no_grad(), switched_off(network, switches):
            return read_out(network, run_network(network, trace.source, trace.target, segments)[0])


class ExploredModel:
    """A model for the page: a copy of its network that hooks may watch, and the traces of its last texts."""

    def __init__(self, model: Model, name: str):
        require_unquantized(model, "explore")
        self.model, self.name, self.lock, self.waiting = model, name, threading.Lock(), 0
        self.traces: OrderedDict[tuple[str, str | None, tuple[int, ...]], TextTrace] = OrderedDict()

    @cached_property
    def network(self) -> Network:
        """The copy, made when it is first needed; parameters are shared."""
        return own_copy(self.model.network)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of what the model writes."""
        return self.model.tokenizers[-1]

    def show(self, token: int) -> str:
        """A token as a reader sees it."""
        return spelled(self.tokenizer, token) if token < len(self.tokenizer) else f"[{token}]"

    def trace(self, body: Request) -> TextTrace:
        """The trace of a request's text; hold the lock."""
        key = (body.text, body.target, tuple(body.appended))
        if key not in self.traces:
            self.traces[key] = self._trace(*key)
            while len(self.traces) > KEPT_TRACES:
                self.traces.popitem(last=False)
        self.traces.move_to_end(key)
        return self.traces[key]

    def _trace(self, text: str, target: str | None, appended: tuple[int, ...]) -> TextTrace:
        check_text(0, text)
        if target is not None:
            check_text(0, target, "target: ")
        if not text.strip():
            raise UserError("text: it is empty; write some text")
        network = self.network
        if any(token >= self.model.config.target_vocab for token in appended):
            raise UserError(f"appended: a token outside the vocabulary of {self.model.config.target_vocab}; remove it")
        if isinstance(network, EncoderDecoder):
            return self._translation(network, text, target, appended)
        if isinstance(network, Decoder):
            return self._continuation(network, text, target, appended)
        assert isinstance(network, Encoder)
        if appended:
            raise UserError("appended: an encoder writes nothing; leave it out")
        return self._encoding(network, text, target)

    def _translation(
        self, network: EncoderDecoder, text: str, target: str | None, appended: tuple[int, ...]
    ) -> TextTrace:
        model = self.model
        _check_length("text", len(model.tokenizer.encode(text)), model.config.max_positions)
        [(prompt, source, _)] = requests(model, [text], {}, [target or ""])
        if not source:
            raise UserError("text: no token in it; write some text")
        if target is None and not appended:
            written = list(model.translate(text).ids)[: min(model.config.max_positions, MAX_TOKENS) - len(prompt)]
            right = _written_side(self.tokenizer, prompt, written)
            prompt = [*prompt, *written]
        else:
            right = _append(_side(self.tokenizer, model, prompt, [target or ""]), self.tokenizer, appended)
            prompt = list(right.ids)
            _check_length("target", len(prompt), model.config.max_positions)
        sides = (_side(model.tokenizer, model, source, [text]), right)
        labels = torch.tensor([*prompt[1:], *model.special_tokens.eos_ids[:1]], device=model.device)
        return TextTrace(trace_network(network, source, prompt), *sides, None, labels)

    def _continuation(self, network: Decoder, text: str, target: str | None, appended: tuple[int, ...]) -> TextTrace:
        if target is not None:
            raise UserError("target: a decoder reads one text; leave the target out")
        prompt = self.model.prompt_ids(text)
        ids = [*prompt, *appended]
        _check_length("text", len(ids), self.model.config.max_positions)
        labels = torch.tensor([*ids[1:], -100], device=self.model.device)
        side = _append(_side(self.tokenizer, self.model, prompt, [text]), self.tokenizer, appended)
        return TextTrace(trace_network(network, None, ids), None, side, None, labels)

    def _encoding(self, network: Encoder, text: str, second: str | None) -> TextTrace:
        model = self.model
        texts = [text, *([second] if second else [])]
        has_masks = network.heads.lm_head is not None and "mask" in self.tokenizer.roles
        if len(texts) == 1 and has_masks and MASK.search(text):
            [(ids, boundary)] = masked_rows(model, texts)
        else:
            encoded = self.tokenizer.encode_batch(normalize_texts(model, texts))
            _check_length("text", sum(map(len, encoded)), max_length(model) - 3)
            ids, boundary = add_special_tokens(self.tokenizer, max_length(model), *encoded)
        _check_length("text", len(ids), model.config.max_positions)
        segments = None
        if model.config.segments > 1:
            segments = tuple(int(position >= boundary) for position in range(len(ids)))
        side = _side(self.tokenizer, model, ids, texts)
        return TextTrace(trace_network(network, ids, None, segments), side, None, segments, None)


def _check_length(what: str, tokens: int, positions: int) -> None:
    if not 0 < tokens <= min(positions, MAX_TOKENS):
        limit = min(positions, MAX_TOKENS)
        raise UserError(f"{what}: {tokens:,} tokens, but this page shows 1 to {limit:,} of this model; shorten it")


def _side(tokenizer: Tokenizer, model: Model, ids: Sequence[int], texts: Sequence[str]) -> Side:
    """The tokens with their characters: the ids of the texts in order, with special tokens among them."""
    texts = normalize_texts(model, texts)
    assert sum(map(len, texts)) <= 2 * MAX_TEXT_CHARS
    mask = tokenizer.roles.get("mask")
    expected: list[tuple[int | None, Span]] = []
    for number, text in enumerate(texts):
        start = 0
        for match in [*MASK.finditer(text), None] if mask in ids else [None]:
            end = match.start() if match else len(text)
            expected += [(token, (number, start + a, start + b)) for token, a, b in tokenizer.offsets(text[start:end])]
            if match:
                expected.append((mask, (number, *match.span())))
                start = match.end()
    spans: list[Span | None] = []
    position = 0
    for token in ids:
        ahead = next((each for each in range(position, min(position + 2, len(expected)))
                      if expected[each][0] == token), None)  # fmt: skip
        spans.append(None if ahead is None else expected[ahead][1])
        position = position if ahead is None else ahead + 1
    return _with_pieces(tokenizer, ids, spans, texts)


def _append(side: Side, tokenizer: Tokenizer, ids: Sequence[int]) -> Side:
    """A side with further tokens at its end."""
    if not ids:
        return side
    text = side.texts[-1]
    more = _written_side(tokenizer, [], ids)
    moved = [span and (len(side.texts) - 1, span[1] + len(text), span[2] + len(text)) for span in more.spans]
    texts = (*side.texts[:-1], text + more.texts[0])
    return Side((*side.ids, *ids), (*side.spans, *moved), texts, (*side.pieces, *more.pieces))


def _written_side(tokenizer: Tokenizer, prompt: Sequence[int], written: Sequence[int]) -> Side:
    """The tokens of a generated text, which need not be those that encoding it would give."""
    texts = tokenizer.decode_batch([written[: count + 1] for count in range(len(written))]) or [""]
    spans: list[Span | None] = []
    end, waiting = 0, 1
    for text in texts[: len(written)]:
        complete = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        if complete > end:  # the tokens that waited for the rest of a character stand for it together
            spans += [(0, end, complete)] * waiting
            end, waiting = complete, 1
        else:
            waiting += 1
    spans += [None] * (len(written) - len(spans))
    return _with_pieces(tokenizer, [*prompt, *written], [None] * len(prompt) + spans, [texts[-1]])


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself: its text, else its bytes (a part of a character), else its name (a special token)."""
    text = tokenizer.decode([token])
    name = tokenizer.id_to_token(token)
    if name.startswith(WORD_START) and "\N{REPLACEMENT CHARACTER}" not in text:
        return " " + text.removeprefix(" ")  # a decoder leaves out the space at the beginning of a text
    if text and "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    data = None if token in tokenizer.roles.values() else byte_spelling(name)
    return name if data is None else f"⟨{bytes(data).hex(' ').upper()}⟩"


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for every byte: printable Latin-1 stands for itself, the others for U+0100 and following."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()


def byte_spelling(name: str) -> list[int] | None:
    """The bytes of a byte-level spelling, or of <0x41>; None where the spelling is plain text."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return [int(name[3:5], 16)]
    if all(letter in BYTE_LETTERS for letter in name) and not name.isascii():
        return [BYTE_LETTERS[letter] for letter in name]
    return None


def _with_pieces(tokenizer: Tokenizer, ids: Sequence[int], spans: Sequence[Span | None], texts: Sequence[str]) -> Side:
    """A side whose pieces are the characters of the text, else the vocabulary's spelling."""
    pieces = [
        texts[span[0]][span[1] : span[2]] if span and span[1] < span[2] else spelled(tokenizer, token)
        for token, span in zip(ids, spans, strict=True)
    ]
    return Side(tuple(ids), tuple(spans), tuple(texts), tuple(pieces))
