"""The lexicon: nouns, verbs, adjectives, places, names and adverbs, with their forms in each language.

A row is one concept with one word per language; an empty cell means a regular form. `level` is the lowest grammar
level that uses the word; classes restrict which words can combine.
"""

from functools import cache
from importlib import resources
from typing import Literal, NamedTuple

Language = Literal["en", "de", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "de", "zh")
Classes = frozenset[str]


class Noun(NamedTuple):
    """A noun; `de_oblique` is the accusative and dative of weak nouns (den Jungen)."""

    key: str
    level: int
    classes: Classes
    en: str
    en_plural: str
    de: str
    gender: str  # m f n
    de_plural: str
    de_oblique: str
    zh: str
    measure: str


class Verb(NamedTuple):
    """A verb; `frame` defines its arguments, `subject`, `object` and `where` their classes."""

    key: str
    level: int
    frame: str
    subject: Classes
    object: Classes
    where: Classes
    manner: Classes
    en: str
    en_past: str
    en_ing: str
    en_particle: str  # "up" in "wake up"; "for" is a preposition
    de: str
    de_third: str  # third person singular, without the separable prefix
    de_participle: str
    aux: str  # "s": perfect with sein
    prefix: str  # separable
    de_object: str  # "" accusative, "dat", or a preposition with the accusative
    zh: str
    zh_before: str  # 给 in 给…打电话
    zh_short: str  # form with durations and 正在: 睡 in 睡了三个小时, 关 in 正在关门
    tags: Classes  # good, bad, tiring: effect on people; slow, long: may, must be a year away


class Adjective(NamedTuple):
    """An adjective; endings attach to `de_stem`; `en_comparative` "." means no comparative."""

    key: str
    level: int
    classes: Classes
    sentiment: str  # + - 0
    en: str
    en_comparative: str
    de: str
    de_stem: str
    de_comparative: str
    zh: str
    zh_predicate: str
    kind: Classes  # colour; mood: temporary; predicate: never attributive


class Place(NamedTuple):
    """A place, with prepositions for location and direction. Cities and countries have no article."""

    key: str
    level: int
    classes: Classes
    en: str
    en_at: str
    de: str
    gender: str
    de_at: str
    de_to: str
    zh: str
    zh_at: str


class Name(NamedTuple):
    """A personal name."""

    key: str
    level: int
    classes: Classes
    en: str
    de: str
    zh: str


class Adverb(NamedTuple):
    """An adverb of one or more words with the part each expresses (0: none), as `last/1 week/2`."""

    key: str
    level: int
    kind: str
    en: str
    de: str
    zh: str


class Lexicon(NamedTuple):
    """All tables of a level."""

    nouns: tuple[Noun, ...]
    verbs: tuple[Verb, ...]
    adjectives: tuple[Adjective, ...]
    places: tuple[Place, ...]
    names: tuple[Name, ...]
    adverbs: tuple[Adverb, ...]


def _rows(table: str, level: int) -> list[dict[str, str]]:
    text = (resources.files("clearhead.data.grammar") / "lexicon" / f"{table}.tsv").read_text(encoding="utf-8")
    head, *lines = (line.split("\t") for line in text.splitlines())
    return [row for line in lines if int((row := dict(zip(head, line, strict=True)))["level"]) <= level]


def _set(cell: str) -> Classes:
    return frozenset(cell.split())


def _noun(row: dict[str, str]) -> Noun:
    values = row | {"en_plural": row["en_plural"] or row["en"] + "s", "de_oblique": row["de_oblique"] or row["de"]}
    return Noun(row["en"], int(values.pop("level")), _set(values.pop("classes")), **values)


def _verb(row: dict[str, str]) -> Verb:
    en, de, prefix = row["en"], row["de"], row["prefix"]
    ing = row["en_ing"] or (en[:-1] if en.endswith("e") and not en.endswith("ee") else en) + "ing"
    if en.endswith("e"):
        regular = en + "d"
    elif en.endswith("y") and en[-2] not in "aeiou":
        regular = en[:-1] + "ied"
    else:
        regular = ing[:-3] + "ed"  # keeps a doubled consonant: hugging, hugged
    stem = de.removeprefix(prefix).removesuffix("n").removesuffix("e")
    soft = "e" if stem.endswith(("t", "d")) else ""  # arbeitet, gearbeitet
    participle = prefix + ("" if de.endswith("ieren") else "ge") + stem + soft + "t"
    filled = row | {
        "en_past": row["en_past"] or regular,
        "en_ing": ing,
        "de_third": row["de_third"] or stem + soft + "t",
        "de_participle": row["de_participle"] or participle,
    }
    key = f"{en} {row['en_particle']}".rstrip() + ("" if row["frame"] != "says" else " that")
    level = int(filled.pop("level"))
    sets = {name: _set(filled.pop(name)) for name in ("subject", "object", "where", "manner", "tags")}
    return Verb(key, level, **sets, **filled)  # type: ignore[arg-type]


def _adjective(row: dict[str, str]) -> Adjective:
    stem = row["de_stem"] or row["de"]
    filled = row | {"de_stem": stem, "de_comparative": row["de_comparative"] or stem + "er"}
    level, classes, kind = int(filled.pop("level")), _set(filled.pop("of")), _set(filled.pop("kind"))
    return Adjective(f"{row['en']} {row['zh'][0]}", level, classes, kind=kind, **filled)


@cache
def load(level: int) -> Lexicon:
    """Load the lexicon of a level."""
    names = _rows("names", level)
    lands = tuple(
        Place(r["en"], int(r["level"]), _set(r["kind"]), r["en"], "in", r["de"], "", "in", "nach", r["zh"], "")
        for r in names
        if r["kind"] in ("city", "country")
    )
    sites = tuple(
        Place(row["en"], int(row.pop("level")), _set(row.pop("classes")), **row) for row in _rows("places", level)
    )
    return Lexicon(
        nouns=tuple(map(_noun, _rows("nouns", level))),
        verbs=tuple(map(_verb, _rows("verbs", level))),
        adjectives=tuple(map(_adjective, _rows("adjectives", level))),
        places=sites + lands,
        names=tuple(
            Name(r["en"], int(r["level"]), _set(r["kind"]), r["en"], r["de"], r["zh"])
            for r in names
            if r["kind"] in ("male", "female")
        ),
        adverbs=tuple(Adverb(row["en"], int(row.pop("level")), **row) for row in _rows("adverbs", level)),
    )


def lemmas(lexicon: Lexicon, language: Language) -> frozenset[str]:
    """Return the lemmas of all content words in one language."""
    forms = {getattr(entry, language) for table in lexicon[:5] for entry in table}
    verbs = {f"{verb.en} {verb.en_particle}".rstrip() for verb in lexicon.verbs} if language == "en" else set()
    for adverb in lexicon.adverbs:
        forms.add(" ".join(part.partition("/")[0] for part in getattr(adverb, language).split()))
    return frozenset(forms | verbs)
