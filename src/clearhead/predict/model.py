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
from clearhead.config.generation import GenerationConfig
from clearhead.config.model import supported_commands
from clearhead.errors import UserError
from clearhead.inference import (
    INT4,
    GenerationOutput,
    StopStrings,
    alignment_links,
    enable_cuda_graphs,
    generate,
    optimize_for_inference,
    stream_text,
    translate,
)
from clearhead.model import Decoder, EncoderDecoder, Network
from clearhead.ops.device import choose_device
from clearhead.predict.answer import Answer, answer
from clearhead.predict.classify import Label, classify, regress
from clearhead.predict.embed import Match, Vectors, embed, nearest
from clearhead.predict.fill import MaskFill, fill
from clearhead.predict.find import find_model
from clearhead.predict.requests import SpecialTokens, check_sizes, opened, requests, settings, special_tokens_of
from clearhead.predict.tag import Tagged, tag
from clearhead.text import Tokenizer

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "int8", "int4")}


class GenerationResult(NamedTuple):
    """A text that was written, and what is known about it."""

    text: str
    score: float | None = None
    alignment: list[tuple[int, int]] | None = None  # (source token, target token)
    finished: bool = True


@dataclass(frozen=True)
class Model:
    """A network with its tokenizers, ready to use; without any it knows ids alone."""

    network: Network
    own_tokenizers: tuple[Tokenizer, ...]
    extra: dict[str, Any] = field(default_factory=dict)  # task and labels, as config.json has them
    name: str = ""
    dtype: torch.dtype | None = None  # what it reads in, if that was asked for

    @cached_property
    def inference_network(self) -> Network:
        """The network as it is fastest where nothing is trained: fused, packed, or int8 (see `optimize_for_inference`)."""
        return optimize_for_inference(self.network, self.dtype)

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.network.config

    @property
    def tokenizers(self) -> tuple[Tokenizer, ...]:
        """One for all, or one for sources and one for targets."""
        if not self.own_tokenizers:
            raise UserError(f"{self.name or 'the model'} has no tokenizer.json; to read and write texts it needs one")
        return self.own_tokenizers

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
        """The best translation of each text; options are those of GenerationConfig, like beam=4."""
        return [found[0].text for found in self.translations(texts, prefixes, **options)]

    def translations(
        self, texts: Sequence[str] | str, prefixes: Sequence[str] | None = None, **options: Any
    ) -> list[list[GenerationResult]]:
        """The `n_best` translations of each text, scores beside, alignments for align=True; empty texts stay empty."""
        network = self._as(EncoderDecoder, "translate")
        texts = [texts] if isinstance(texts, str) else list(texts)
        asked = requests(self, texts, options, prefixes)
        together = dict[GenerationConfig, list[int]]()
        for number, request in enumerate(asked):
            if request.source:
                together.setdefault(request.config, []).append(number)
        answers: list[list[GenerationResult]] = [[GenerationResult("")] for _ in texts]
        for config, numbers in together.items():
            sources = [asked[number].source or [] for number in numbers]
            heads = [asked[number].prompt[1:] for number in numbers]
            begin, ends = self.special_tokens.begin[0], self.special_tokens.eos_ids
            found = translate(network, sources, config, begin=begin, end=ends, prefixes=heads, seeds=numbers)
            for number, head, outputs in zip(numbers, heads, found, strict=True):
                answers[number] = [self._text(output, head) for output in outputs]
        return answers

    def _text(
        self, output: GenerationOutput, head: Sequence[int] = (), stops: StopStrings | None = None
    ) -> GenerationResult:
        text = self.tokenizers[-1].decode([*head, *output.ids])
        links = alignment_links(output.alignment) if output.alignment is not None else None
        return GenerationResult(text if stops is None else stops.truncate(text), output.score, links, output.finished)

    def generate(
        self, prompts: Sequence[str] | str, *, seed: int = 0, stop: Sequence[str] = (), **options: Any
    ) -> list[list[GenerationResult]]:
        """What the model writes after each prompt, `samples` (or `n_best`) texts each; options as GenerationConfig."""
        network = self._as(Decoder, "generate")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        asked = requests(self, prompts, options)
        stops = StopStrings(stop, self.tokenizer) if stop else None
        seeds = [seed + number for number in range(len(asked))]
        rows, config = [request.prompt for request in asked], asked[0].config if asked else settings(self, options)
        found = generate(network, rows, config, end=self.special_tokens.eos_ids, seeds=seeds, stops=stops)
        return [[self._text(output, stops=stops) for output in outputs] for outputs in found]

    def stream(
        self, prompt: str | Sequence[int], *, seed: int = 0, stop: Sequence[str] = (), **options: Any
    ) -> Iterator[str]:
        """The text after a prompt in pieces, as they are written; joined, they are what `generate` gives.

        A prompt of ids is read as it is.
        """
        network = self._as(Decoder, "stream")
        if isinstance(prompt, str):
            [(row, _, config)] = requests(self, [prompt], options)
        else:
            row, config = list(prompt), settings(self, options)
            check_sizes(self, "prompt", [row], config.max_new_tokens)
        return stream_text(
            network, row, config, self.tokenizer, end=self.special_tokens.eos_ids, seed=seed, stop=tuple(stop)
        )

    # What a model that reads says about texts; each answer stands where its text stood

    def fill(self, texts: Sequence[str] | str, top: int = 5) -> list[list[MaskFill]]:
        """The `top` words for every mask of each text."""
        return fill(self, _several(texts), top)

    def classify(
        self, texts: Sequence[str] | str, seconds: Sequence[str] | str | None = None, *, truncate: bool = False
    ) -> list[list[Label]]:
        """All labels of each text (or of each pair), the best first; `cut` reads only the beginning of long texts."""
        return classify(self, _several(texts), None if seconds is None else _several(seconds), truncate)

    def regress(
        self, texts: Sequence[str] | str, seconds: Sequence[str] | str | None = None, *, truncate: bool = False
    ) -> list[float]:
        """The number that a regression gives for each text (or for each pair)."""
        return regress(self, _several(texts), None if seconds is None else _several(seconds), truncate)

    def tag(
        self, texts: Sequence[str | Sequence[str]] | str, *, spaced: bool = False, truncate: bool = False
    ) -> list[Tagged]:
        """Words, tags and spans of each text; a text given as a list of words keeps them, as a `spaced` one does."""
        return tag(self, [texts] if isinstance(texts, str) else texts, spaced, truncate)

    def answer(
        self,
        questions: Sequence[str] | str,
        contexts: Sequence[str] | str,
        *,
        top: int = 1,
        require_answer: bool = False,
        truncate: bool = False,
    ) -> list[list[Answer]]:
        """The `top` answers to each question, as parts of its context (or of the one context of all)."""
        asked = _several(questions)
        given = [contexts] * len(asked) if isinstance(contexts, str) else contexts
        return answer(self, asked, given, top, require_answer, truncate)

    def embed(
        self, texts: Sequence[str] | str, *, pooling: str | None = None, normalize: bool = True, truncate: bool = False
    ) -> Vectors:
        """A vector for each text: (N, D)."""
        return embed(self, _several(texts), pooling, normalize, truncate)

    def similar(self, queries: Sequence[str] | str, texts: Sequence[str], *, top: int = 5) -> list[list[Match]]:
        """The `top` texts that are most like each query, by the cosine of their vectors."""
        return nearest(self.embed(_several(queries)), self.embed(texts), top)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """What begins and ends a text, and what is never written."""
        return special_tokens_of(self)

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of a prompt as the model reads it, opened by its begin token where it has one."""
        return opened(self, [prompt])[0]

    def _as(self, family: type[Any], act: str) -> Any:
        if not isinstance(self.network, family):
            family_name = f"{'a' if self.config.family == 'decoder' else 'an'} {self.config.family}"
            what = f"{self.name or 'this model'} is {family_name}"
            raise UserError(f"{act}: {what}; it can {' and '.join(supported_commands(self.config)[:-1])}")
        return cast(Any, self.inference_network)


def _several(texts: Sequence[str] | str) -> Sequence[str]:
    return [texts] if isinstance(texts, str) else texts


def load(name: str | Path, device: str = "auto", dtype: str | None = None, compiled: bool = False) -> Model:
    """The model of a name, a model folder or a run folder; dtype="int8" or "int4" reads with small weights.

    With `compiled`, a decoder on a GPU spends some tens of seconds at the first text of each batch size to write faster
    from then on; all others go on as without.
    """
    chosen = choose_device(device)
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype: {dtype!r} is not allowed; use {', '.join(DTYPES)}")
    folder = find_model(name)
    kind = None if dtype is None else DTYPES[dtype]
    small = kind in (torch.int8, INT4)
    loaded = load_model(folder, chosen, None if small else kind)
    _check_finite(loaded.network, folder)
    enable_cuda_graphs(loaded.network, compiled)
    network = loaded.network
    if small and isinstance(network, Decoder) and chosen.type == "cpu":
        network = optimize_for_inference(network, kind)  # the full weights are not kept beside the small ones
    return Model(network, loaded.tokenizers, loaded.extra, str(name), kind)


def _check_finite(network: Network, folder: Path) -> None:
    """Weights that are no numbers would write nonsense without a word."""
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"{folder}: {name} holds NaN or infinity; take an earlier checkpoint, or train again")
