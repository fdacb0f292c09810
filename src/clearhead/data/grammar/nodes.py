"""Language-independent meaning of a sentence: phrases and clauses, with part numbers for word alignment.

Every node owns a range of part numbers that starts at `at`. Each realized word lists the parts it expresses; words of
two languages are aligned if they share a part.
"""

from typing import Literal, NamedTuple

from clearhead.data.grammar.entries import Adjective, Name, Noun, Place, Verb

STEP = 12  # part numbers per node
FINAL = 0  # final punctuation

# Parts of a noun phrase, relative to its `at`.
HEAD, DETERMINER, ADJECTIVE, NUMBER, PREPOSITION, RELATIVE, VESSEL = range(7)
# Parts of a clause.
VERB, TENSE, NEGATION, MODAL, ASKING, LINK, COMMA, QUALITY, DEGREE, THAN, PLEASE = range(11)

Tense = Literal["present", "progressive", "past", "future", "conditional"]
Modal = Literal["", "can", "must", "want", "should", "may"]
Mood = Literal["statement", "question", "relative", "request"]
Gap = Literal["", "subject", "object", "place", "time"]  # the part replaced by an interrogative or relative pronoun
Determiner = Literal["", "the", "a", "this", "some", "every", "my", "your", "his", "her", "our"]
Link = Literal["", "that", "because", "if", "when", "to", "but"]


class Word(NamedTuple):
    """A word and the parts it expresses."""

    text: str
    parts: tuple[int, ...]


class Pronoun(NamedTuple):
    """A personal pronoun; the realizers hold its forms by key."""

    key: Literal["I", "you", "he", "she", "we", "they"]


class NounPhrase(NamedTuple):
    """A noun with its modifiers, a name, or a pronoun. `number`: 1 singular, 0 plural, 2 and more numerals."""

    at: int
    head: Noun | Name | Pronoun
    determiner: Determiner = ""
    number: int = 1
    adjective: Adjective | None = None
    measured: bool = False  # "two cups of tea"
    relative: "Clause | None" = None
    second: "NounPhrase | None" = None  # "Anna and Peter"


class Adverbial(NamedTuple):
    """An adverb, date, time or amount in words: (text, part offsets) in each language."""

    at: int
    kind: str
    en: tuple[tuple[str, tuple[int, ...]], ...]
    de: tuple[tuple[str, tuple[int, ...]], ...]
    zh: tuple[tuple[str, tuple[int, ...]], ...]


class Spot(NamedTuple):
    """A location: a place, or a piece of furniture."""

    at: int
    place: Place | Noun


class Quality(NamedTuple):
    """A predicate adjective, optionally compared ("bigger than …", "as big as …")."""

    adjective: Adjective
    degree: Literal["", "very", "more", "equal"] = ""
    than: NounPhrase | None = None


class Clause(NamedTuple):
    """A verb with its arguments and adverbials."""

    at: int
    subject: NounPhrase
    verb: Verb
    tense: Tense = "present"
    modal: Modal = ""
    negated: bool = False
    object: NounPhrase | None = None
    recipient: NounPhrase | None = None
    spot: Spot | None = None
    time: Adverbial | None = None
    fronted: bool = False  # the time comes first
    manner: Adverbial | None = None
    span: Adverbial | None = None  # "for three hours", or the amount of a price or an age
    quality: Quality | None = None
    inner: "Clause | None" = None
    link: Link = ""  # conjunction between this clause and `inner`
    mood: Mood = "statement"
    gap: Gap = ""
