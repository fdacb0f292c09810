"""Which served translator translates what, and the language of a text."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from clearhead.serve.errors import ApiError
from clearhead.serve.registry import Registry, ServedModel

PAIR = re.compile(r"(?:^|[^a-zA-Z])([a-z]{2,3})-([a-z]{2,3})$")  # at the end of a name: en-de, opus-mt-en-de
NAMES = {
    "ar": "Arabic", "bg": "Bulgarian", "bn": "Bengali", "ca": "Catalan", "cs": "Czech", "da": "Danish", "de": "German",
    "el": "Greek", "en": "English", "es": "Spanish", "et": "Estonian", "fa": "Persian", "fi": "Finnish", "fr": "French",
    "he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "id": "Indonesian", "it": "Italian",
    "ja": "Japanese", "ko": "Korean", "lt": "Lithuanian", "lv": "Latvian", "ms": "Malay", "nl": "Dutch",
    "no": "Norwegian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sk": "Slovak",
    "sl": "Slovenian", "sr": "Serbian", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "uk": "Ukrainian",
    "ur": "Urdu", "vi": "Vietnamese", "zh": "Chinese",
}  # fmt: skip
MAX_DETECTED_CHARS = 2000  # read of a text


class Translator(NamedTuple):
    """A served model and the languages that it translates between."""

    served: ServedModel
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    is_multilingual: bool

    def options(self, source: str, target: str) -> dict[str, Any]:
        """Options of `Model.translate`."""
        return {"src_lang": source, "tgt_lang": target} if self.is_multilingual else {}


def translators(registry: Registry) -> list[Translator]:
    """The served translators whose languages are known: from their folders or from their names."""
    found = []
    for served in registry.models.values():
        if "translate" not in served.commands:
            continue
        codes = served.model.extra.get("languages")
        folder = served.model.folder
        names = (served.name, served.model.name, "" if folder is None else folder.name)
        if isinstance(codes, dict) and codes:
            found.append(Translator(served, tuple(codes), tuple(codes), True))
        elif pair := next(filter(None, map(PAIR.search, names)), None):
            found.append(Translator(served, (pair[1],), (pair[2],), False))
    return found


def find_translator(registry: Registry, model: str | None, source: str, target: str) -> Translator:
    """The first translator between two languages."""
    if model is not None:
        registry.get(model, "translate")
    able = [each for each in translators(registry) if model in (None, each.served.name)]
    for each in able:
        if source in each.sources and target in each.targets and source != target:
            return each
    if model is not None and not able:
        message = "model: its languages are not known; serve it under a name that ends with them, like en-de"
        raise ApiError(400, message, param="model")
    if not any(source in each.sources for each in able):
        raise ApiError(400, "source: this language is not served; /languages lists those that are", param="source")
    raise ApiError(400, "target: not served for this source; /languages lists all pairs", param="target")


class Detector:
    """Tell the language of a text, among some languages; the first use loads a table of 4 MB."""

    def __init__(self, languages: Sequence[str]):
        self.languages = sorted(set(languages))
        self._lock = threading.Lock()

    @functools.cached_property
    def _identifier(self) -> Any:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier  # type: ignore[import-untyped]

        identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        known = [each for each in self.languages if each in identifier.labels]
        if not known:
            raise ApiError(400, "source: these languages cannot be told apart; name the source", param="source")
        identifier.set_languages(known)
        return identifier

    def detect(self, text: str) -> list[tuple[str, float]]:
        """The languages and their probabilities, best first."""
        if len(self.languages) == 1:
            return [(self.languages[0], 1.0)]
        with self._lock:
            ranked = self._identifier.rank(text[:MAX_DETECTED_CHARS])
        return [(str(code), float(score)) for code, score in ranked]
