"""Language codes of multilingual translators: tokens like eng_Latn (NLLB), __en__ (M2M100) and en_XX (mBART-50)."""

import re
from collections.abc import Mapping
from typing import Any

from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.text import Tokenizer

CODE = re.compile(r"(?P<nllb>[a-z]{3}_[A-Z][a-z]{3})|__(?P<m2m100>[a-z]{2,4})__|(?P<mbart>[a-z]{2}_[A-Z]{2})")
MIN_CODES = 2  # a single match may be a token of another kind


def language_codes(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the languages of a tokenizer and the ids of their tokens, or {}."""
    found = {
        match[match.lastgroup or 0]: number
        for token, number in tokenizer.special_tokens.items()
        if (match := CODE.fullmatch(token))
    }
    return dict(sorted(found.items())) if len(found) >= MIN_CODES else {}


def default_languages(settings: Fields, languages: Mapping[str, int], forced: list[int]) -> dict[str, Any]:
    """Return the languages that a tokenizer_config.json or a forced first token sets."""
    defaults: dict[str, Any] = {}
    for key in ("src_lang", "tgt_lang"):
        value = settings.data.get(key)
        if isinstance(value, str) and (code := value.strip("_")) in languages:
            defaults[key] = code
    if target := next((code for code, number in languages.items() if [number] == forced), None):
        defaults["tgt_lang"] = target
    return defaults
