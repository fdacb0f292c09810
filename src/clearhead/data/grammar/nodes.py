"""What a sentence means, before any language: phrases and clauses, with the part numbers that align words.

Every node owns a short range of part numbers that starts at `at`. A realiser writes each word with the parts that it
expresses, so two words of two languages are aligned exactly when they express a common part.
"""

from typing import Literal, NamedTuple

from clearhead.data.grammar.entries import Adjective, Name, Noun, Place, Verb

STEP = 12  # part numbers a node owns
FINAL = 0  # the mark that ends the sentence

# Parts of a noun phrase, counted from its `at`.
HEAD, DETERMINER, ADJECTIVE, NUMBER, PREPOSITION, RELATIVE, VESSEL = range(7)
# Parts of a clause.
VERB, TENSE, NEGATION, MODAL, ASKING, LINK, COMMA, QUALITY, DEGREE, THAN, PLEASE = range(11)

Tense = Literal["present", "progressive", "past", "future", "conditional"]
Modal = Literal["", "can", "must", "want", "should", "may"]
Mood = Literal["statement", "question", "relative", "request"]
Gap = Literal["", "subject", "object", "place", "time"]  # what a question asks for, what a relative pronoun stands for
Determiner = Literal["", "the", "a", "this", "some", "every", "my", "your", "his", "her", "our"]
Link = Literal["", "that", "because", "if", "when", "to", "but"]


class Word(NamedTuple):
    """A word of a sentence and the parts it expresses."""

    text: str
    parts: tuple[int, ...]


class Pronoun(NamedTuple):
    """A personal pronoun: its forms are few and stand in the realisers, by key."""

    key: Literal["I", "you", "he", "she", "we", "they"]


class NounPhrase(NamedTuple):
    """A noun with its company, a name, or a pronoun. `number` 1 is singular, 0 plural, 2 and more are said."""

    at: int
    head: Noun | Name | Pronoun
    determiner: Determiner = ""
    number: int = 1
    adjective: Adjective | None = None
    measured: bool = False  # "two cups of tea"
    relative: "Clause | None" = None
    second: "NounPhrase | None" = None  # "Anna and Peter"


class Adverbial(NamedTuple):
    """An adverb, date, time or amount, already in words: (text, offsets of its parts) in each language."""

    at: int
    kind: str
    en: tuple[tuple[str, tuple[int, ...]], ...]
    de: tuple[tuple[str, tuple[int, ...]], ...]
    zh: tuple[tuple[str, tuple[int, ...]], ...]


class Spot(NamedTuple):
    """Where: at a place, or on a piece of furniture."""

    at: int
    place: Place | Noun


class Quality(NamedTuple):
    """What the copula says of the subject: an adjective, perhaps compared ("bigger than …", "as big as …")."""

    adjective: Adjective
    degree: Literal["", "very", "more", "equal"] = ""
    than: NounPhrase | None = None


class Clause(NamedTuple):
    """A verb with everything that belongs to it."""

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
    fronted: bool = False  # the time opens the sentence
    manner: Adverbial | None = None
    span: Adverbial | None = None  # "for three hours", or the amount of a price or an age
    quality: Quality | None = None
    inner: "Clause | None" = None
    link: Link = ""  # what joins `inner` to this clause
    mood: Mood = "statement"
    gap: Gap = ""
