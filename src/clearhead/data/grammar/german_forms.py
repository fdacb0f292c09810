"""German inflection tables: articles, adjectives, nouns and verbs."""

from typing import Literal

from clearhead.data.grammar.entries import Noun, Verb
from clearhead.data.grammar.nodes import Modal, NounPhrase, Pronoun

Case = Literal["nom", "acc", "dat"]
Slot = Literal["m", "f", "n", "p"]  # gender, or plural
Person = Literal["ich", "du", "er", "wir"]  # "wir" is also the third person plural

# Endings by case, in the order m f n plural.
_SLOTS = "mfnp"
DEFINITE = {"nom": "der die das die", "acc": "den die das die", "dat": "dem der dem den"}
_STRONG_ARTICLE = {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en"}  # dieser, jeder, einige
_MIXED_ARTICLE = {"nom": "- e - e", "acc": "en e - e", "dat": "em er em en"}  # ein, mein, kein
_WEAK = {"nom": "e e e en", "acc": "en e e en", "dat": "en en en en"}
_MIXED = {"nom": "er e es en", "acc": "en e es en", "dat": "en en en en"}
_STRONG = {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en"}

_ARTICLE_STEMS = {"this": "dies", "every": "jed", "some": "einig"}
_MIXED_STEMS = {"a": "ein", "my": "mein", "your": "dein", "his": "sein", "her": "ihr", "our": "unser", "no": "kein"}

PRONOUNS: dict[str, dict[Case, str]] = {
    "I": {"nom": "ich", "acc": "mich", "dat": "mir"},
    "you": {"nom": "du", "acc": "dich", "dat": "dir"},
    "he": {"nom": "er", "acc": "ihn", "dat": "ihm"},
    "she": {"nom": "sie", "acc": "sie", "dat": "ihr"},
    "we": {"nom": "wir", "acc": "uns", "dat": "uns"},
    "they": {"nom": "sie", "acc": "sie", "dat": "ihnen"},
}
RELATIVES = DEFINITE | {"dat": "dem der dem denen"}

_PERSONS = ("ich", "du", "er", "wir")
_IRREGULAR: dict[str, tuple[str, str, str, str]] = {
    "sein": ("bin", "bist", "ist", "sind"),
    "war": ("war", "warst", "war", "waren"),
    "haben": ("habe", "hast", "hat", "haben"),
    "werden": ("werde", "wirst", "wird", "werden"),
    "wissen": ("weiß", "weißt", "weiß", "wissen"),
    "mögen": ("mag", "magst", "mag", "mögen"),
    "can": ("kann", "kannst", "kann", "können"),
    "must": ("muss", "musst", "muss", "müssen"),
    "want": ("will", "willst", "will", "wollen"),
    "should": ("sollte", "solltest", "sollte", "sollten"),
    "may": ("darf", "darfst", "darf", "dürfen"),
    "could": ("konnte", "konntest", "konnte", "konnten"),
    "had to": ("musste", "musstest", "musste", "mussten"),
    "wanted": ("wollte", "wolltest", "wollte", "wollten"),
}
_PAST_MODALS = {"can": "could", "must": "had to", "want": "wanted"}
CONTRACTIONS = {
    ("in", "dem"): "im",
    ("an", "dem"): "am",
    ("zu", "dem"): "zum",
    ("zu", "der"): "zur",
    ("in", "das"): "ins",
    ("an", "das"): "ans",
}


def cell(table: dict[str, str], case: Case, slot: str) -> str:
    """Look up an ending in one of the tables above."""
    return table[case].split()[_SLOTS.index(slot)]


def determiner(kind: str, case: Case, slot: str) -> str:
    """Inflect a determiner: dem, einen, dieses, ihre, keine."""
    if kind == "the":
        return cell(DEFINITE, case, slot)
    if kind in _ARTICLE_STEMS:
        return _ARTICLE_STEMS[kind] + cell(_STRONG_ARTICLE, case, slot)
    return _MIXED_STEMS[kind] + cell(_MIXED_ARTICLE, case, slot).strip("-")


def adjective_ending(kind: str, case: Case, slot: str) -> str:
    """The adjective ending after a determiner ("" for none)."""
    if kind in ("the", "this", "every"):
        return cell(_WEAK, case, slot)
    return cell(_MIXED if kind in _MIXED_STEMS else _STRONG, case, slot)


def noun(entry: Noun, case: Case, plural: bool) -> str:
    """Inflect a noun: den Jungen, den Kindern."""
    if not plural:
        return entry.de if case == "nom" else entry.de_oblique
    if case == "dat" and not entry.de_plural.endswith(("n", "s")):
        return entry.de_plural + "n"
    return entry.de_plural


def person(phrase: NounPhrase) -> Person:
    """The person that the verb agrees with."""
    if isinstance(phrase.head, Pronoun):
        return {"I": "ich", "you": "du", "he": "er", "she": "er"}.get(phrase.head.key, "wir")  # type: ignore[return-value]
    return "er" if phrase.number == 1 and phrase.second is None else "wir"


def irregular(name: str, who: Person) -> str:
    """Inflect sein, haben, werden or a modal verb."""
    return _IRREGULAR[name][_PERSONS.index(who)]


def modal(name: Modal, who: Person, past: bool) -> str:
    """kann, musste, sollte …"""
    return irregular(_PAST_MODALS[name] if past else name, who)


def base(verb: Verb) -> str:
    """The infinitive without its separable prefix."""
    return verb.de.removeprefix(verb.prefix)


def _stem(verb: Verb) -> str:
    return base(verb).removesuffix("n").removesuffix("e")


def present(verb: Verb, who: Person) -> str:
    """The present tense without a separable prefix."""
    if base(verb) in _IRREGULAR:
        return irregular(base(verb), who)
    if who == "wir":
        return base(verb)
    if who == "er":
        return verb.de_third
    if who == "ich":
        return _first(verb)
    root = verb.de_third[:-1]
    return root + ("t" if root.endswith(("s", "ß", "z")) else "st")


def _first(verb: Verb) -> str:
    stem = _stem(verb)
    return (stem[:-2] + "l" if verb.de.endswith("eln") else stem) + "e"  # ich sammle, but ich spiele


def imperative(verb: Verb) -> str:
    """The informal imperative: gib, lies, mach, warte."""
    stem, changed = _stem(verb), verb.de_third[:-1]
    if "e" in stem and changed != stem and "i" in changed and not changed.endswith("e"):
        return changed  # e becomes i or ie: iss, nimm, lies
    if stem.endswith(("t", "d")) or verb.de.endswith(("eln", "ern", "ieren")):
        return _first(verb)
    return stem


def zu_infinitive(verb: Verb) -> list[str]:
    """zu kaufen, aufzumachen"""
    return [verb.prefix + "zu" + base(verb)] if verb.prefix else ["zu", verb.de]


def slot(phrase: NounPhrase) -> str:
    """The table column of a noun phrase: its gender, or plural."""
    assert isinstance(phrase.head, Noun)
    return phrase.head.gender if phrase.number == 1 else "p"
