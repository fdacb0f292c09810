"""Translate finished messages with a gettext catalog whose msgids are templates: `{path} is missing`.

The sources hold plain English f-strings. A message is matched against the templates, and its parts are translated in
turn where they are messages themselves: in `a.yaml: heads: unknown setting; did you mean dim?`, three of four are.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from itertools import islice
from string import Formatter

MAX_CHARS = 5000  # longer lines are data
MAX_DEPTH = 8  # of messages inside messages
MAX_LOOKUPS = 300  # for a text, so that a strange one costs little
MAX_MATCHES = 3  # templates that are tried for a message
MAX_SPLITS = 20  # places tried for the border between two parts
PREFIX = "clearhead: "  # of every error
MIN_LETTERS = 2  # in the literals of a template: others say nothing
WIDE = {";": "；", ",": "，", ":": "："}
MARGIN = re.compile(r"^(\s*[;,:]?\s*)(.*?)(\s*[;,:]?\s*)$", re.S)
KEY = re.compile(r"([^\s'\"`]+): ")
SEPARATOR = re.compile("[;,:] | ")
CONTEXT = "\x04"  # between context and msgid, as in gettext; the context of a word is the name of its placeholder
CJK = r"\u3000-\u303f\u4e00-\u9fff\uff00-\uffef"


@dataclass(frozen=True)
class Template:
    """A msgid as literals and the names between them, and the msgstr."""

    literals: tuple[str, ...]
    names: tuple[str, ...]
    translation: str

    @property
    def weight(self) -> int:
        """How much of a message the template explains."""
        return sum(map(len, self.literals))


def parse(template: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a template into the literals and the placeholder names between them; adjacent ones have "" between."""
    literals, names = [""], []
    for literal, name, _, _ in Formatter().parse(template):
        literals[-1] += literal
        if name is not None:
            names.append(name)
            literals.append("")
    return tuple(literals), tuple(names)


def split_margin(text: str) -> tuple[str, str, str]:
    """Split a text into leading separators, the message, and trailing ones; msgids are messages without either."""
    match = MARGIN.match(text)
    assert match
    return match[1], match[2], match[3]


def read_po(text: str) -> dict[str, str]:
    """Read the msgids and msgstrs of a .po file."""
    messages: dict[str, str] = {}
    for entry in text.split("\n\n"):
        parts = {"msgctxt": "", "msgid": "", "msgstr": ""}
        key = ""
        for line in entry.splitlines():
            word, _, rest = line.partition(" ")
            if word in parts:
                key, line = word, rest
            if line.startswith('"') and key:
                parts[key] += ast.literal_eval(line)  # C escapes of one line, which are Python's
        if parts["msgid"]:
            context = parts["msgctxt"] + CONTEXT if parts["msgctxt"] else ""
            messages[context + parts["msgid"]] = parts["msgstr"]
    return messages


class Catalog:
    """The messages of one language."""

    def __init__(self, messages: dict[str, str]):
        self.exact: dict[str, str] = {}
        self.templates: list[Template] = []
        for msgid, msgstr in messages.items():
            literals, names = parse(msgid)
            if not msgstr:
                continue
            if not names:
                self.exact[literals[0]] = "".join(parse(msgstr)[0])
            elif sum(map(str.isalpha, "".join(literals))) >= MIN_LETTERS:
                self.templates.append(Template(literals, names, msgstr))
        self.templates.sort(key=lambda template: -template.weight)
        self.budget = 0
        self.lookup = lru_cache(1000)(self._lookup)

    def translate(self, text: str) -> str:
        """Translate a text line by line."""
        if self.budget < 0:
            self.lookup.cache_clear()  # what was not found may be there
        lines, self.budget = text.split("\n"), MAX_LOOKUPS
        return "\n".join(
            PREFIX + self._line(line.removeprefix(PREFIX)) if line.startswith(PREFIX) else self._line(line)
            for line in lines
        )

    def _line(self, text: str, depth: int = 0) -> str:
        """Translate a message, or the parts of it that are messages."""
        before, core, after = split_margin(text)
        if not core or len(core) > MAX_CHARS or depth > MAX_DEPTH or is_quoted(core):
            return text
        translated = self.lookup(core, depth)
        if translated is None:
            start, end = self._split(core, depth)
            translated = self._line(start, depth + 1)
            if end.startswith(":"):
                translated = _location(translated)
            translated += self._line(end, depth + 1)
        if translated == core and core[0] + core[-1] == "()":
            translated = f"（{inner}）" if (inner := self._line(core[1:-1], depth + 1)) != core[1:-1] else core
        return text if translated == core else join(_wide(before), translated) + _wide(after)

    def _lookup(self, text: str, depth: int) -> str | None:
        """Translate a whole message by the template that leaves the least of it in English."""
        if text in self.exact:
            return self.exact[text]
        self.budget -= 1
        if self.budget < 0:
            return None
        matches = ((template, match(template.literals, text)) for template in self.templates)
        best = islice(((template, values) for template, values in matches if values is not None), MAX_MATCHES)
        return min((self._fill(template, values, depth) for template, values in best), key=letters, default=None)

    def _split(self, text: str, depth: int) -> tuple[str, str]:
        """Split a text before a separator where a message begins, or else where one ends."""
        places = [found.start() for found in islice(SEPARATOR.finditer(text), MAX_SPLITS)]
        for place in places:
            rest = split_margin(text[place:])[1]
            if rest and self.lookup(rest, depth + 1) is not None:
                return text[:place], text[place:]
        for place in places:
            if text[place] == ";" and self.lookup(text[:place], depth + 1) is not None:
                return text[:place], text[place:]
        return text, ""

    def _fill(self, template: Template, values: list[str], depth: int) -> str:
        """Put the values into the translation, translated themselves where they are messages."""
        filled: dict[str, str] = {}
        for number, name in enumerate(template.names):
            last = number
            while last + 1 < len(values) and not template.literals[last + 1]:
                last += 1
            if last > number:  # adjacent placeholders: all of the text is the value of the last one
                values[number], values[last] = self._split(values[last], depth)
            if template.literals[number + 1] == ": " and number + 1 < len(values):
                values[number], values[number + 1] = self._split_location(values[number], values[number + 1], depth)
            word = self.exact.get(f"{name}{CONTEXT}{values[number]}")
            filled[name] = word or self._line(values[number], depth + 1)
        literals, names = parse(template.translation)
        text = literals[0]
        for name, literal in zip(names, literals[1:], strict=True):
            value = filled.get(name, "")
            if literal.startswith("："):
                value = _location(value)
            text = join(join(text, value), literal)
        return text.replace("？；", "？")

    def _split_location(self, where: str, rest: str, depth: int) -> tuple[str, str]:
        """Take the keys that begin `rest` as a part of the location, unless all of it is a message."""
        while (key := KEY.match(rest)) and self.lookup(rest, depth + 1) is None:
            where, rest = f"{where}: {key[1]}", rest[key.end() :]
        return where, rest


def match(literals: tuple[str, ...], text: str) -> list[str] | None:
    """Return what stands between the literals if a text consists of them; each is taken at its first place."""
    first, last = literals[0], literals[-1]
    if not (text.startswith(first) and text.endswith(last) and len(text) >= len(first) + len(last)):
        return None
    values, at, end = [], len(first), len(text) - len(last)
    for literal in literals[1:-1]:
        found = text.find(literal, at, end)
        if found < 0:
            return None
        values.append(text[at:found])
        at = found + len(literal)
    values.append(text[at:end])
    numbered = [value for literal, value in zip(literals, values, strict=False) if literal.endswith("line ")]
    return values if all(value.replace(",", "").isdigit() for value in numbered) else None


def is_quoted(text: str) -> bool:
    """Whether a text is one quoted value, which is never translated."""
    return len(text) > 1 and text[0] in "'\"`" and text[-1] == text[0] and text[0] not in text[1:-1]


def letters(text: str) -> int:
    """Count the Latin letters of a text."""
    return sum(character.isascii() and character.isalpha() for character in text)


def _location(text: str) -> str:
    """Write the colons of a location (file, section, key) in full width."""
    return text if re.search("['\"]", text) else text.replace(": ", "：")


def _wide(margin: str) -> str:
    """Replace a separator by its full-width form."""
    return WIDE.get(margin.strip(), margin)


def join(left: str, right: str) -> str:
    """Join two texts without a space between Chinese and Chinese."""
    if (
        left.endswith(" ")
        and re.match("[，；：。）]" if left == " " else f"[{CJK}]", right)
        and re.search(f"(^|[{CJK}]) $", left)
    ):
        return left[:-1] + right
    if right.startswith(" ") and re.match(f" [{CJK}]", right) and re.search(f"[{CJK}]$", left):
        return left + right[1:]
    return left + right


@cache
def load_catalog(language: str) -> Catalog:
    """Read the catalog of a language."""
    path = resources.files("clearhead.cli") / "locale" / f"{language}.po"
    return Catalog(read_po(path.read_text(encoding="utf-8")))
