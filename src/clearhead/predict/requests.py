"""Texts to requests: ids with their special tokens, and the GenerationConfig of each.

Single calls and the batching engine both start here, so that they generate the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from clearhead.config import GenerationConfig
from clearhead.config.generation import TokenSequences
from clearhead.config.settings import Settings
from clearhead.errors import UserError
from clearhead.model import EncoderDecoder
from clearhead.predict.encode_batch import InvalidText, normalize_texts
from clearhead.predict.languages import language_ids, split_languages

if TYPE_CHECKING:
    from clearhead.predict.model import Model

Ids = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=1 << 24)], ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    Field(max_length=256),
]


class SpecialTokens(Settings):
    """Token ids around texts: from config.json of an imported model, else from the roles of its tokenizers."""

    begin: Ids = ()  # before a prompt or, of a translator, before the target
    eos_ids: Ids = ()  # any of them ends a text
    source_begin: Ids = ()  # before a source
    source_end: bool = True  # whether a source ends with an end token
    banned_ids: TokenSequences = ()  # never generated


def special_tokens_of(model: Model) -> SpecialTokens:
    """The special tokens of a model; an invalid config.json is an error."""
    given = {name: model.extra[name] for name in SpecialTokens.model_fields if model.extra.get(name) is not None}
    tokens, roles = SpecialTokens.build(given, where="config.json"), model.tokenizers[-1].roles
    vocab = model.config.target_vocab
    groups = (("begin", tokens.begin), ("eos_ids", tokens.eos_ids), *(("banned_ids", ids) for ids in tokens.banned_ids))
    for name, ids in groups:
        for token in (token for token in ids if token >= vocab):
            raise UserError(
                f"config.json: {name}: token {token} is outside the vocabulary of {vocab} tokens; fix config.json"
            )
    begin, eos_ids = tokens.begin, tokens.eos_ids or ((roles["end"],) if "end" in roles else ())
    if isinstance(model.network, EncoderDecoder):
        begin = begin or (model.tokenizers[-1].id("begin"),)
        eos_ids = eos_ids or (model.tokenizers[-1].id("end"),)
    elif "begin" not in given:
        begin = (roles["begin"],) if "begin" in roles else (roles["end"],) if "end" in roles else ()
    if any(token >= model.config.source_vocab for token in tokens.source_begin):
        raise UserError("config.json: source_begin: a token is outside the vocabulary; fix config.json")
    return tokens.model_copy(update={"begin": begin, "eos_ids": eos_ids})


class PreparedRequest(NamedTuple):
    """One text to generate."""

    prompt: list[int]  # of a translator, the begin token and the prefix
    source: list[int] | None  # of a translator; nothing is generated for an empty one
    config: GenerationConfig


def requests(
    model: Model, texts: Sequence[str], options: Mapping[str, Any], prefixes: Sequence[str] | None = None
) -> list[PreparedRequest]:
    """Return a request for each text: a prompt or, for a translator, a source; options as GenerationConfig."""
    if not isinstance(model.network, EncoderDecoder):
        config = generation_config(model, options)
        rows = encode_checked_prompts(model, texts, needed_tokens(config, options))
        return [PreparedRequest(row, None, config) for row in rows]
    languages, options = split_languages(options)
    before, target_language = language_ids(model, languages)
    before = [*model.special_tokens.source_begin, *before]
    begin = [*model.special_tokens.begin, *target_language]
    end = [model.tokenizer.id("end")] if model.special_tokens.source_end else []
    encoded = model.tokenizer.encode_batch(normalize_texts(model, texts))
    sources = [[*before, *ids, *end] if ids and text.strip() else [] for ids, text in zip(encoded, texts, strict=True)]
    positions = model.config.max_positions
    for number, source in enumerate(sources):
        if len(source) > positions:
            raise InvalidText(number, f"{len(source):,} tokens, but the model has {positions:,} positions; shorten it")
    starts = [""] * len(texts) if prefixes is None else prefixes
    if len(starts) != len(texts):
        raise UserError(f"prefix: {len(texts)} texts, but {len(starts)} prefixes; give one for each, or none")
    targets = [[*begin, *ids] for ids in model.tokenizers[-1].encode_batch(normalize_texts(model, starts))]
    check_sizes(model, "prefix", targets)
    config = GenerationConfig.build({**options, "max_new_tokens": positions})
    needed = max(config.min_new_tokens, sum(map(len, config.forced_ids))) + 1  # with the end
    limits = [max(max_target_length(model, source), min(needed, positions - 1)) for source in sources]
    configs = {limit: generation_config(model, {"max_new_tokens": limit, **options}) for limit in {*limits}}
    return [
        PreparedRequest(row, source, configs[limit])
        for row, source, limit in zip(targets, sources, limits, strict=True)
    ]


def max_target_length(model: Model, source: Sequence[int]) -> int:
    """Maximum tokens of a translation: at least three times its source plus 20, within the model's positions.

    A power of two, so that many sources share one config and can be searched together; it depends on the source alone,
    never on its batch.
    """
    return max(1, min(1 << (3 * len(source) + 19).bit_length(), model.config.max_positions - 1))


def encode_prompts(model: Model, texts: Sequence[str]) -> list[list[int]]:
    """Prompts as ids, starting with BOS if the model has one."""
    begin = model.special_tokens.begin
    return [[*begin, *ids] for ids in model.tokenizer.encode_batch(normalize_texts(model, texts))]


def needed_tokens(config: GenerationConfig, options: Mapping[str, Any]) -> int:
    """How many new tokens must fit: those that were asked for; by default, a text may end where the positions do."""
    return config.max_new_tokens if "max_new_tokens" in options else max(1, config.min_new_tokens)


def encode_checked_prompts(model: Model, texts: Sequence[str], max_new_tokens: int) -> list[list[int]]:
    """Encode prompts and check that `max_new_tokens` fit; a prompt without a token is an error."""
    rows = encode_prompts(model, texts)
    if not all(rows):
        raise UserError("prompt: empty, and this tokenizer has no begin token; give some text")
    check_sizes(model, "prompt", rows, max_new_tokens)
    return rows


def check_sizes(model: Model, what: str, rows: Sequence[Sequence[int]], max_new_tokens: int = 0) -> None:
    """Refuse a row that does not fit into the model's positions with its new tokens."""
    positions = model.config.max_positions
    for number, row in enumerate(rows):
        if len(row) + max_new_tokens > positions:
            name = what if len(rows) == 1 else f"{what} {number + 1}"
            requested = f" and {max_new_tokens} more are requested" if max_new_tokens else ""
            can_lower = len(row) < positions and max_new_tokens
            less = f", or ask for at most {positions - len(row)} with max_new_tokens" if can_lower else ""
            raise UserError(
                f"{name}: {len(row)} tokens{requested}, but the model has {positions} positions; "
                f"shorten the {what}{less}"
            )


def sampling_defaults(model: Model) -> dict[str, Any]:
    """The sampling settings that an imported model recommends, for commands that sample by default."""
    return {key: value for key, value in (model.extra.get("sampling") or {}).items() if value is not None}


def generation_config(model: Model, options: Mapping[str, Any]) -> GenerationConfig:
    """The options as a config, with the tokens that the model never generates."""
    config = GenerationConfig.build(options)
    if never := model.special_tokens.banned_ids:
        config = GenerationConfig.build({**options, "banned_ids": tuple(dict.fromkeys([*never, *config.banned_ids]))})
    if config.beam > model.config.target_vocab:
        raise UserError(f"beam: {config.beam} is more than the vocabulary size {model.config.target_vocab}; lower it")
    return config
