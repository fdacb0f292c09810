"""A loaded model: texts in, typed results out; one result for a text, a list for a list of texts.

The calls behind a generated token: Model.generate → predict/generate_texts.py → inference/shared_engine.py →
inference/engine.py → inference/sampling.py (temperature); docs/one-token.md walks through all files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.config.data import DataConfig
from clearhead.config.model import supported_commands
from clearhead.errors import UserError
from clearhead.inference import has_hooks, optimize_for_inference
from clearhead.model import Network
from clearhead.predict.answer import answer
from clearhead.predict.check_arguments import as_path, check_prompt_ids, check_string, texts_of
from clearhead.predict.classify import classify, regress
from clearhead.predict.embed import Vectors, embed, nearest
from clearhead.predict.fill import fill
from clearhead.predict.generate_texts import alternative_texts, generate_texts, stream_pieces, translate_texts
from clearhead.predict.logits import logits
from clearhead.predict.options import EngineOptions, GenerationOptions, TranslationOptions
from clearhead.predict.requests import SpecialTokens, encode_prompts, special_tokens_of
from clearhead.predict.results import Answer, Classification, GenerationResult, MaskFill, Match, Tagging, Translation
from clearhead.predict.summary import summary
from clearhead.predict.tag import tag
from clearhead.text import Tokenizer

if TYPE_CHECKING:
    from clearhead.interpret import Inspection
    from clearhead.predict.batch_generate import ModelEngine
    from clearhead.predict.chat import Chat

A = TypeVar("A")
Texts = Sequence[str]


@dataclass(frozen=True, repr=False)
class Model:
    """A network with its tokenizers; without a tokenizer, it works on ids only (`logits`)."""

    network: Network  # the reference network
    own_tokenizers: tuple[Tokenizer, ...]
    extra: dict[str, Any] = field(default_factory=dict)  # all keys of config.json but the architecture
    name: str = ""
    dtype: torch.dtype | None = None  # as passed to `load`; None: as stored
    folder: Path | None = None  # that it was loaded from; None: made in Python

    def __repr__(self) -> str:
        return summary(self)

    # Generation: translators and decoders

    @overload
    def translate(  # type: ignore[overload-overlap]
        self,
        texts: str,
        prefix: str | None = None,
        *,
        seed: int = 0,
        stop: Sequence[str] = (),
        draft: Model | str | None = None,
        **options: Unpack[TranslationOptions],
    ) -> Translation: ...
    @overload
    def translate(
        self,
        texts: Texts,
        prefix: str | Texts | None = None,
        *,
        seed: int = 0,
        stop: Sequence[str] = (),
        draft: Model | str | None = None,
        **options: Unpack[TranslationOptions],
    ) -> list[Translation]: ...
    def translate(
        self,
        texts: str | Texts,
        prefix: str | Texts | None = None,
        *,
        seed: int = 0,
        stop: Sequence[str] = (),
        draft: Model | str | None = None,
        **options: Unpack[TranslationOptions],
    ) -> Translation | list[Translation]:
        """Translate; n_best=3 gives `candidates`, align=True an `alignment`, every translation starts with `prefix`.

        `src_lang` and `tgt_lang` are codes like eng_Latn, for a model of several languages.
        `draft` is for speculative decoding: a smaller model (or its name) or "prompt-lookup"; the text stays the same.
        """

        def run(texts: list[str]) -> list[Translation]:
            prefixes = [prefix] * len(texts) if isinstance(prefix, str) else prefix
            prefixes = None if prefixes is None else texts_of("prefix", prefixes)
            return translate_texts(self, texts, options, prefixes=prefixes, seed=seed, stop=stop, draft=draft)

        return _one_or_many("translate", texts, run)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str,
        *,
        seed: int = 0,
        stop: Sequence[str] = (),
        draft: Model | str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> GenerationResult: ...
    @overload
    def generate(
        self,
        prompts: Texts,
        *,
        seed: int = 0,
        stop: Sequence[str] = (),
        draft: Model | str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[GenerationResult]: ...
    def generate(
        self,
        prompts: str | Texts,
        *,
        seed: int = 0,
        stop: Sequence[str] = (),
        draft: Model | str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> GenerationResult | list[GenerationResult]:
        """Continue prompts up to the end token or one of the `stop` strings; samples=3 gives `candidates`.

        Prompt n of a list draws from seed + n. `draft` is as for `translate`.
        """
        return _one_or_many(
            "generate",
            prompts,
            lambda prompts: generate_texts(self, prompts, options, seed=seed, stop=stop, draft=draft),
        )

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        seed: int = 0,
        stop: Sequence[str] = (),
        draft: Model | str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[str]:
        """Yield the text of `generate` in pieces as they are generated; a prompt of ids is used as is."""
        if not isinstance(prompt, str):
            check_prompt_ids(prompt, self.config.target_vocab)
        return stream_pieces(self, prompt, options, seed=seed, stop=stop, draft=draft)

    def alternatives(
        self, text: str, count: int = 5, *, prefix: str = "", seed: int = 0, **options: Unpack[GenerationOptions]
    ) -> list[GenerationResult]:
        """Return a text for each of the `count` most likely next tokens, most likely first.

        The next token follows the prompt or, for a translator, the `prefix` of its translation.
        """
        return alternative_texts(self, text, count, options, prefix=prefix, seed=seed)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] = (),
        *,
        system: str = "",
        seed: int = 0,
        **options: Unpack[GenerationOptions],
    ) -> Chat:
        """Begin a conversation, or continue one of {"role", "content"} messages; `ask` answers, `say` streams."""
        from clearhead.predict.chat import Chat  # here: it imports this module

        return Chat(self, messages, system=system, seed=seed, **options)

    def engine(self, **limits: Unpack[EngineOptions]) -> ModelEngine:
        """The batching engine on its own thread: `with model.engine() as engine: engine.submit(text)`."""
        from clearhead.predict.batch_generate import ModelEngine  # here: it imports this module

        return ModelEngine(self, **limits)

    # Encoder tasks

    @overload
    def fill(self, texts: str, top: int = 5) -> MaskFill: ...  # type: ignore[overload-overlap]
    @overload
    def fill(self, texts: Texts, top: int = 5) -> list[MaskFill]: ...
    def fill(self, texts: str | Texts, top: int = 5) -> MaskFill | list[MaskFill]:
        """Fill every [MASK] or <mask> of a text; `masks` holds the `top` tokens for each."""
        return _one_or_many("fill", texts, lambda texts: fill(self, texts, top))

    @overload
    def classify(self, texts: str, text_pairs: str | None = None, *, truncate: bool = False) -> Classification: ...  # type: ignore[overload-overlap]
    @overload
    def classify(
        self, texts: Texts, text_pairs: Texts | None = None, *, truncate: bool = False
    ) -> list[Classification]: ...
    def classify(
        self, texts: str | Texts, text_pairs: str | Texts | None = None, *, truncate: bool = False
    ) -> Classification | list[Classification]:
        """Label texts, or pairs of texts; `truncate` keeps the beginning of a text that is too long."""
        pairs = None if text_pairs is None else texts_of("classify", text_pairs)
        return _one_or_many("classify", texts, lambda texts: classify(self, texts, pairs, truncate))

    @overload
    def regress(self, texts: str, text_pairs: str | None = None, *, truncate: bool = False) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def regress(self, texts: Texts, text_pairs: Texts | None = None, *, truncate: bool = False) -> list[float]: ...
    def regress(
        self, texts: str | Texts, text_pairs: str | Texts | None = None, *, truncate: bool = False
    ) -> float | list[float]:
        """Predict the value of texts, or pairs of texts, with a regression model."""
        pairs = None if text_pairs is None else texts_of("regress", text_pairs)
        return _one_or_many("regress", texts, lambda texts: regress(self, texts, pairs, truncate))

    @overload
    def tag(self, texts: str, *, pretokenized: bool = False, truncate: bool = False) -> Tagging: ...  # type: ignore[overload-overlap]
    @overload
    def tag(
        self, texts: Sequence[str | Sequence[str]], *, pretokenized: bool = False, truncate: bool = False
    ) -> list[Tagging]: ...
    def tag(
        self, texts: str | Sequence[str | Sequence[str]], *, pretokenized: bool = False, truncate: bool = False
    ) -> Tagging | list[Tagging]:
        """Tag the words of texts; a text can be a list of words, and `pretokenized` splits at spaces only."""
        return _one_or_many("tag", texts, lambda texts: tag(self, texts, pretokenized, truncate))

    @overload
    def answer(  # type: ignore[overload-overlap]
        self, questions: str, contexts: str, *, top: int = 1, require_answer: bool = False, truncate: bool = False
    ) -> Answer: ...
    @overload
    def answer(
        self,
        questions: Texts,
        contexts: str | Texts,
        *,
        top: int = 1,
        require_answer: bool = False,
        truncate: bool = False,
    ) -> list[Answer]: ...
    def answer(
        self,
        questions: str | Texts,
        contexts: str | Texts,
        *,
        top: int = 1,
        require_answer: bool = False,
        truncate: bool = False,
    ) -> Answer | list[Answer]:
        """Find the answer in a context (each question's own, or one for all); top=3 gives `candidates`."""

        def run(questions: list[str]) -> list[Answer]:
            given = [contexts] * len(questions) if isinstance(contexts, str) else texts_of("answer", contexts)
            return answer(self, questions, given, top, require_answer, truncate)

        return _one_or_many("answer", questions, run)

    def embed(
        self, texts: str | Texts, *, pooling: str | None = None, normalize: bool = True, truncate: bool = False
    ) -> Vectors:
        """Embed texts: (D,) for one text, (N, D) for a list; `pooling` is mean or cls, by default as in training."""
        vectors = embed(self, texts_of("embed", texts), pooling, normalize, truncate)
        return cast(Vectors, vectors[0]) if isinstance(texts, str) else vectors

    @overload
    def similar(self, queries: str, texts: Texts, *, top: int = 5, truncate: bool = False) -> list[Match]: ...  # type: ignore[overload-overlap]
    @overload
    def similar(self, queries: Texts, texts: Texts, *, top: int = 5, truncate: bool = False) -> list[list[Match]]: ...
    def similar(
        self, queries: str | Texts, texts: Texts, *, top: int = 5, truncate: bool = False
    ) -> list[Match] | list[list[Match]]:
        """Rank the `top` texts by cosine similarity with each query, best first."""
        searched = texts_of("similar", texts)
        vectors = embed(self, searched, truncate=truncate)
        return _one_or_many(
            "similar",
            queries,
            lambda queries: nearest(embed(self, queries, truncate=truncate), vectors, searched, top),
        )

    # The network itself

    def logits(self, ids: Tensor, target_ids: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the reference network for ids (B, T); a translator also needs target ids."""
        return logits(self, ids, target_ids)

    def inspect(self, text: str, target: str | None = None, *, top: int = 5) -> Inspection:
        """Attention, Q/K/V, per-head updates and the logit lens of one pass; see `clearhead.interpret.Inspection`.

        `target` is what a translator's decoder reads (by default its own translation) or an encoder's second text.
        """
        from clearhead.predict.inspect import inspect_text

        return inspect_text(self, text, target, top)

    def save(self, folder: str | Path) -> None:
        """Write a model folder; an existing model folder is replaced."""
        from clearhead.predict.export import save

        save(self, as_path("save", folder))

    def export(self, folder: str | Path, to: str = "hf") -> None:
        """Write the model for another library: hf, ctranslate2, onnx, gguf or gguf-q8_0."""
        from clearhead.predict.export import export

        export(self, as_path("export", folder), to)

    # Properties

    @property
    def inference_network(self) -> Network:
        """The network that all methods run: the optimized copy, or the network itself while hooks watch it."""
        return self.network if has_hooks(self.network) else self.optimized_network

    @cached_property
    def optimized_network(self) -> Network:
        """Copy of the network optimized for inference: fused, packed or quantized (see `optimize_for_inference`)."""
        return optimize_for_inference(self.network, self.dtype)

    @cached_property
    def engines(self) -> dict[str, Any]:
        """What `engines.py` keeps for this model."""
        return {}

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.network.config

    @property
    def label(self) -> str:
        """The name used in messages."""
        return self.name or "this model"

    @property
    def kind(self) -> str:
        """The family with its article, used in messages."""
        return f"{'a' if self.config.family == 'decoder' else 'an'} {self.config.family}"

    @property
    def tokenizers(self) -> tuple[Tokenizer, ...]:
        """One for all texts, or one for sources and one for targets."""
        if not self.own_tokenizers:
            raise UserError(f"{self.name or 'the model'} has no tokenizer.json; to read and write texts it needs one")
        return self.own_tokenizers

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer (for sources, if there are two)."""
        return self.tokenizers[0]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.network.parameters()).device

    @cached_property
    def data(self) -> DataConfig | None:
        """The data settings used in training, if config.json has them."""
        return DataConfig.build(self.extra["data"], where="config.json: data") if "data" in self.extra else None

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """The tokens that begin and end a text, and those that are never generated."""
        return special_tokens_of(self)

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of a prompt, starting with BOS if the model has one."""
        check_string("prompt_ids", prompt)
        return encode_prompts(self, [prompt])[0]

    def inference_network_for(self, family: type[Any], command: str) -> Any:
        """The inference network, if the model is of this family."""
        self.check_family(family, command)
        return cast(Any, self.inference_network)

    def check_family(self, family: type[Any], command: str) -> None:
        """Refuse a command of another family of models."""
        if not isinstance(self.network, family):
            what = " and ".join(supported_commands(self.config)[:-1])
            raise UserError(f"{command}: {self.label} is {self.kind}; it can {what}")


def _one_or_many(command: str, texts: Any, run: Callable[[list[Any]], list[A]]) -> Any:
    """The result of one text, or a list of results."""
    results = run(texts_of(command, texts))
    return results[0] if isinstance(texts, str) else results
