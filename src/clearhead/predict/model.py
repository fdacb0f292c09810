"""One loaded model: raw text in, raw text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from clearhead.checkpoint import load_model
from clearhead.config import ModelConfig
from clearhead.config.data import DataConfig
from clearhead.config.decode import DecodeConfig
from clearhead.data.clean import cleaned
from clearhead.decode import Output, Stops, for_reading, generate, hard, stream_text, translate
from clearhead.errors import UserError
from clearhead.model import Decoder, Encoder, EncoderDecoder, Network
from clearhead.model.device import choose_device
from clearhead.predict.find import find_model
from clearhead.text import Tokenizer

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "int8")}


class Text(NamedTuple):
    """A text that was written, and what is known about it."""

    text: str
    score: float | None = None
    alignment: list[tuple[int, int]] | None = None  # (source token, target token)
    finished: bool = True


@dataclass(frozen=True)
class Model:
    """A network with its tokenizers, ready to use."""

    network: Network
    tokenizers: tuple[Tokenizer, ...]
    extra: dict[str, Any] = field(default_factory=dict)  # task and labels, as config.json has them
    name: str = ""
    dtype: torch.dtype | None = None  # what it reads in, if that was asked for

    @cached_property
    def reader(self) -> Network:
        """The network as it is fastest where nothing is trained: fused, packed, or int8 (see `for_reading`)."""
        return for_reading(self.network, self.dtype)

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.network.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, or that of the source."""
        return self.tokenizers[0]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.network.parameters()).device

    @cached_property
    def data(self) -> DataConfig | None:
        """The data that the model was trained on, as far as config.json says."""
        return DataConfig.build(self.extra["data"], where="config.json: data") if "data" in self.extra else None

    def logits(self, ids: Tensor, target_ids: Tensor | None = None) -> Tensor:
        """The score of every word at every position: ids (B, T) to (B, T, V); a translator needs a target, too."""
        with torch.inference_mode():
            if isinstance(self.network, EncoderDecoder):
                if target_ids is None:
                    raise ValueError("logits: a translator needs target_ids, too")
                return self.network(ids.to(self.device), target_ids.to(self.device))
            return self.network(ids.to(self.device))

    def translate(self, texts: Sequence[str] | str, prefixes: Sequence[str] | None = None, **options: Any) -> list[str]:
        """The best translation of each text; options are those of DecodeConfig, like beam=4."""
        return [found[0].text for found in self.translations(texts, prefixes, **options)]

    def translations(
        self, texts: Sequence[str] | str, prefixes: Sequence[str] | None = None, **options: Any
    ) -> list[list[Text]]:
        """The `n_best` translations of each text, scores beside, alignments for align=True; empty texts stay empty."""
        network = self._as(EncoderDecoder, "translate")
        texts = [texts] if isinstance(texts, str) else list(texts)
        source, target = self.tokenizers[0], self.tokenizers[-1]
        rows = [[*ids, source.id("end")] for ids in source.encode_all(self._cleaned(texts))]
        starts = None if prefixes is None else target.encode_all(self._cleaned(prefixes))
        config = DecodeConfig.build({"max_new_tokens": self._room(rows), **options})
        full = [number for number, row in enumerate(rows) if len(row) > 1]
        found = translate(
            network,
            [rows[number] for number in full],
            config,
            begin=target.id("begin"),
            end=target.id("end"),
            prefixes=None if starts is None else [starts[number] for number in full],
        )
        answers: list[list[Text]] = [[Text("")] for _ in texts]
        for number, outputs in zip(full, found, strict=True):
            head = [] if starts is None else starts[number]
            answers[number] = [self._text(target, output, head) for output in outputs]
        return answers

    def _cleaned(self, texts: Sequence[str]) -> list[str]:
        """Texts as the training data was made, which is all that the model knows."""
        return list(texts) if self.data is None else [cleaned(text, self.data) for text in texts]

    def _room(self, rows: Sequence[Sequence[int]]) -> int:
        """Tokens that a translation may have: three times the longest source and some, within the model's positions."""
        longest = max((len(row) for row in rows), default=1)
        return max(1, min(3 * longest + 20, self.config.max_positions - 1))

    def _text(self, tokenizer: Tokenizer, output: Output, head: Sequence[int] = ()) -> Text:
        links = hard(output.alignment) if output.alignment is not None else None
        return Text(tokenizer.decode([*head, *output.ids]), output.score, links, output.finished)

    def generate(
        self, prompts: Sequence[str] | str, *, seed: int = 0, stop: Sequence[str] = (), **options: Any
    ) -> list[list[Text]]:
        """What the model writes after each prompt, `samples` (or `n_best`) texts each; options as DecodeConfig."""
        network = self._as(Decoder, "generate")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        config = DecodeConfig.build(options)
        rows = self._prompts(prompts, config.max_new_tokens)
        stops = Stops(stop, self.tokenizer) if stop else None
        seeds = [seed + number for number in range(len(rows))]
        found = generate(network, rows, config, end=self._ends, seeds=seeds, stops=stops)
        texts = [[self._text(self.tokenizer, output) for output in outputs] for outputs in found]
        if stops is None:
            return texts
        return [[each._replace(text=stops.cut(each.text)) for each in row] for row in texts]

    def stream(self, prompt: str, *, seed: int = 0, stop: Sequence[str] = (), **options: Any) -> Iterator[str]:
        """The text after a prompt in pieces, as they are written; joined, they are what `generate` gives."""
        network = self._as(Decoder, "stream")
        config = DecodeConfig.build(options)
        row = self._prompts([prompt], config.max_new_tokens)[0]
        return stream_text(network, row, config, self.tokenizer, end=self._ends, seed=seed, stop=tuple(stop))

    @property
    def _ends(self) -> list[int]:
        return [self.tokenizer.roles["end"]] if "end" in self.tokenizer.roles else []

    def _prompts(self, prompts: Sequence[str], new: int) -> list[list[int]]:
        roles = self.tokenizer.roles
        begin = [roles["begin"]] if "begin" in roles else [roles["end"]] if "end" in roles else []
        rows = [[*begin, *ids] for ids in self.tokenizer.encode_all(self._cleaned(prompts))]
        room = self.config.max_positions
        for number, row in enumerate(rows):
            if not row:
                raise UserError("prompt: empty, and this tokenizer has no begin token; give some text")
            if len(row) + new > room:
                raise UserError(
                    f"prompt {number + 1} has {len(row)} tokens and {new} more are asked for, but the model has {room} "
                    f"positions; shorten the prompt, or ask for at most {max(0, room - len(row))} with max_new_tokens"
                )
        return rows

    def _as(self, family: type[Any], act: str) -> Any:
        if not isinstance(self.network, family):
            can = {EncoderDecoder: "translate", Decoder: "generate and chat", Encoder: "fill, classify, tag and embed"}
            family_name = f"{'a' if self.config.family == 'decoder' else 'an'} {self.config.family}"
            what = f"{self.name or 'this model'} is {family_name}"
            raise UserError(f"{act}: {what}; it can {can[type(self.network)]}")
        return cast(Any, self.reader)


def load(name: str | Path, device: str = "auto", dtype: str | None = None) -> Model:
    """The model of a name, a model folder or a run folder; with dtype="int8" it reads in int8."""
    chosen = choose_device(device)
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype: {dtype!r} is not allowed; use {', '.join(DTYPES)}")
    folder = find_model(name)
    kind = None if dtype is None else DTYPES[dtype]
    loaded = load_model(folder, chosen, None if kind == torch.int8 else kind)
    if not loaded.tokenizers:
        raise UserError(f"{folder} has no tokenizer.json; a model needs its tokenizer")
    return Model(loaded.network, loaded.tokenizers, loaded.extra, str(name), kind)
