"""The languages of a translator of several: codes to the ids that go before a source and a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from clearhead.errors import UserError
from clearhead.predict.language_names import did_you_mean

if TYPE_CHECKING:
    from clearhead.predict.model import Model


class Languages(NamedTuple):
    """The codes to translate from and to; None means the model's default."""

    src_lang: str | None = None
    tgt_lang: str | None = None


def split_languages(options: Mapping[str, Any]) -> tuple[Languages, dict[str, Any]]:
    """Return the languages of the options of a translation, and the other options."""
    others = dict(options)
    return Languages(others.pop("src_lang", None), others.pop("tgt_lang", None)), others


def language_ids(
    model: Model, languages: Languages, names: Sequence[str] = Languages._fields
) -> tuple[list[int], list[int]]:
    """Return the ids before a source and before a target; two empty lists for a model of one pair of languages.

    `names` are those in error messages: of the arguments, or of the options of the command line.
    """
    known: dict[str, int] = model.extra.get("languages") or {}
    if not known:
        if given := next((name for name, code in zip(names, languages, strict=True) if code is not None), None):
            raise UserError(f"{given}: {model.label} translates between two languages only; leave it out")
        return [], []
    ids = []
    for key, name, code in zip(Languages._fields, names, languages, strict=True):
        chosen = model.extra.get(key) if code is None else code
        if chosen is None:
            sign = " " if name.startswith("--") else "="
            several = f"{model.label} knows {len(known)} languages"
            raise UserError(f"{name}: {several}; name one, like {name}{sign}{example(known)}")
        if not isinstance(chosen, str) or chosen not in known:
            raise UserError(f"{name}: no language {chosen!r:.40}{did_you_mean(str(chosen), known)}")
        ids.append([known[chosen]])
    if beyond := next((code for code, number in known.items() if number >= model.config.target_vocab), None):
        raise UserError(f"config.json: languages: the token of {beyond:.40} is outside the vocabulary; fix config.json")
    return ids[0], ids[1]


def example(known: dict[str, int]) -> str:
    """Return a code to show: English, if it is there."""
    return next((code for code in known if code[:2] == "en"), next(iter(known)))
