"""What a model that writes is given: texts as ids, framed as it was made to read them, and the rules of the search.

Single calls and the batching engine both take it from here, so that they write the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from clearhead.config import GenerationConfig
from clearhead.config.generation import Words
from clearhead.config.settings import Settings
from clearhead.errors import UserError
from clearhead.model import EncoderDecoder
from clearhead.predict.encode_batch import InvalidText, clean

if TYPE_CHECKING:
    from clearhead.predict.model import Model

Ids = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=1 << 24)], ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    Field(max_length=256),
]


class SpecialTokens(Settings):
    """What stands around texts, as ids: config.json of an imported model says it, else the roles of tokenizers do."""

    begin: Ids = ()  # before a prompt or, of a translator, before the target
    eos_ids: Ids = ()  # any of them ends what is written
    source_end: bool = True  # whether a source has an end token
    banned: Words = ()  # what is never written


def special_tokens_of(model: Model) -> SpecialTokens:
    """The marks of a model; a config.json that says something else is an error."""
    told = {name: model.extra[name] for name in SpecialTokens.model_fields if model.extra.get(name) is not None}
    found, roles, words = (
        SpecialTokens.build(told, where="config.json"),
        model.tokenizers[-1].roles,
        model.config.target_vocab,
    )
    for name, ids in (("begin", found.begin), ("ends", found.eos_ids), *(("banned", word) for word in found.banned)):
        for token in (token for token in ids if token >= words):
            raise UserError(f"config.json: {name}: token {token} is outside the vocabulary of {words} tokens; mend it")
    begin, ends = found.begin, found.eos_ids or ((roles["end"],) if "end" in roles else ())
    if isinstance(model.network, EncoderDecoder):
        begin = begin[:1] or (model.tokenizers[-1].id("begin"),)
        ends = ends or (model.tokenizers[-1].id("end"),)
    elif "begin" not in told:
        begin = (roles["begin"],) if "begin" in roles else (roles["end"],) if "end" in roles else ()
    return found.model_copy(update={"begin": begin, "ends": ends})


class Request(NamedTuple):
    """One text to write: what it opens with, what it translates, and how it is searched for."""

    prompt: list[int]
    source: list[int] | None  # of a translator; nothing is written about an empty one
    config: GenerationConfig


def requests(
    model: Model, texts: Sequence[str], options: dict[str, Any], prefixes: Sequence[str] | None = None
) -> list[Request]:
    """One for each text: a prompt to go on from or, for a translator, a source; options are those of GenerationConfig."""
    if not isinstance(model.network, EncoderDecoder):
        config = settings(model, options)
        return [Request(row, None, config) for row in prompts(model, texts, config.max_new_tokens)]
    begin, end = model.special_tokens.begin, [model.tokenizer.id("end")] if model.special_tokens.source_end else []
    encoded = model.tokenizer.encode_batch(clean(model, texts))
    sources = [[*ids, *end] if ids and text.strip() else [] for ids, text in zip(encoded, texts, strict=True)]
    most = model.config.max_positions
    for number, source in enumerate(sources):
        if len(source) > most:
            raise InvalidText(number, f"{len(source):,} tokens, but the model has {most:,} positions; shorten it")
    heads = [""] * len(texts) if prefixes is None else prefixes
    if len(heads) != len(texts):
        raise ValueError(f"{len(texts)} texts, but {len(heads)} prefixes; give one for each, or none")
    targets = [[*begin, *ids] for ids in model.tokenizers[-1].encode_batch(clean(model, heads))]
    check_sizes(model, "prefix", targets)
    asked = GenerationConfig.build({**options, "max_new_tokens": most})
    least = max(asked.min_new_tokens, sum(map(len, asked.forced_ids))) + 1  # with the end
    rooms = [max(room(model, source), min(least, most - 1)) for source in sources]
    configs = {new: settings(model, {"max_new_tokens": new, **options}) for new in {*rooms}}
    return [Request(row, source, configs[new]) for row, source, new in zip(targets, sources, rooms, strict=True)]


def room(model: Model, source: Sequence[int]) -> int:
    """Tokens that a translation may have: at least three times its source and some, within the model's positions.

    It depends on the source alone, never on others beside it; doubling from one size to the next, it is the same for
    many, which can then be searched for together.
    """
    return max(1, min(1 << (3 * len(source) + 19).bit_length(), model.config.max_positions - 1))


def opened(model: Model, texts: Sequence[str]) -> list[list[int]]:
    """Prompts as the model reads them, opened by its begin token where it has one."""
    begin = model.special_tokens.begin
    return [[*begin, *ids] for ids in model.tokenizer.encode_batch(clean(model, texts))]


def prompts(model: Model, texts: Sequence[str], new: int) -> list[list[int]]:
    """The same, with room for `new` tokens behind them; a prompt without a token is an error."""
    rows = opened(model, texts)
    if not all(rows):
        raise UserError("prompt: empty, and this tokenizer has no begin token; give some text")
    check_sizes(model, "prompt", rows, new)
    return rows


def check_sizes(model: Model, what: str, rows: Sequence[Sequence[int]], new: int = 0) -> None:
    """Each row fits into the model's positions, with `new` tokens behind it."""
    most = model.config.max_positions
    for number, row in enumerate(rows):
        if len(row) + new > most:
            name = what if len(rows) == 1 else f"{what} {number + 1}"
            asked = f" and {new} more are asked for" if new else ""
            less = f", or ask for at most {most - len(row)} with max_new_tokens" if len(row) < most and new else ""
            raise UserError(
                f"{name}: {len(row)} tokens{asked}, but the model has {most} positions; shorten the {what}{less}"
            )


def settings(model: Model, options: dict[str, Any]) -> GenerationConfig:
    """How to search: the options, and what the model never writes."""
    own = model.special_tokens.banned
    given = GenerationConfig.build(options)
    config = (
        GenerationConfig.build(options | {"banned": tuple(dict.fromkeys([*own, *given.banned_ids]))}) if own else given
    )
    if config.beam > model.config.target_vocab:
        raise UserError(f"beam: {config.beam} is more than the {model.config.target_vocab} words there are; lower it")
    return config
