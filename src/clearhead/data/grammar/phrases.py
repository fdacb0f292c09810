"""Sample the parts of a sentence: noun phrases, places, dates and times that fit together."""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import TypeVar

from clearhead.data.grammar import times
from clearhead.data.grammar.entries import Adjective, Adverb, Classes, Lexicon, Name, Noun, Place, Verb
from clearhead.data.grammar.nodes import STEP, Adverbial, Determiner, NounPhrase, Pronoun, Spot

T = TypeVar("T")
PEOPLE = frozenset(("person", "adult", "aged", "young", "kin"))
PLURALS = frozenset(("", "some"))  # plural determiners
POSSESSIVES: tuple[Determiner, ...] = ("my", "your", "his", "her", "our")
SUBJECT_PRONOUNS = tuple(Pronoun(key) for key in ("I", "you", "he", "she", "we", "they"))
ASKED_PRONOUNS = tuple(pronoun for pronoun in SUBJECT_PRONOUNS if pronoun.key not in ("I", "we"))
OBJECT_PRONOUNS = SUBJECT_PRONOUNS[:5]  # without "them": German "sie" is ambiguous
# Determiners by context; repetition is weight.
KNOWN: tuple[Determiner, ...] = ("the", "the", "the", "the", "this", "my", "your", "his", "her", "our")
SHARED: tuple[Determiner, ...] = ("the", "the", "the", "this")  # not owned by a person
FRESH: tuple[Determiner, ...] = ("a", "a", "some", "")  # "": a numeral
OWN: dict[str, Determiner] = {"I": "my", "you": "your", "he": "his", "she": "her", "we": "our"}
# Habits take bare plurals ("apples"), except for these classes ("the dog"); traded goods take bare plurals.
SINGLE = frozenset(("person", "animal", "openable", "furniture", "device", "vehicle", "lamp"))
TRADES = frozenset(("buy", "sell", "steal", "rent", "collect", "plant"))
# Verbs whose object does not belong to the subject (yet).
FOREIGN = TRADES | {"borrow", "choose", "order", "learn", "write", "paint", "build", "try"}
FIXED = frozenset(("openable", "device", "lamp", "furniture"))  # usually one of a kind


class Pools:
    """The words of a lexicon, grouped by class."""

    def __init__(self, lexicon: Lexicon, level: int) -> None:
        self.level, self.lexicon = level, lexicon
        self.adjectives = {
            noun.key: tuple(a for a in lexicon.adjectives if a.classes & noun.classes and "predicate" not in a.kind)
            for noun in lexicon.nouns
        }
        self.nouns = cache(self._nouns)
        self.places = cache(self._places)
        self.adverbs = cache(self._adverbs)
        self.verbs = cache(self._verbs)

    def _nouns(self, classes: Classes) -> tuple[Noun, ...]:
        return tuple(noun for noun in self.lexicon.nouns if noun.classes & classes)

    def _places(self, classes: Classes) -> tuple[Place, ...]:
        return tuple(place for place in self.lexicon.places if place.classes & classes)

    def _adverbs(self, kind: str) -> tuple[Adverb, ...]:
        return tuple(adverb for adverb in self.lexicon.adverbs if adverb.kind == kind)

    def _verbs(self, frame: str) -> tuple[Verb, ...]:
        return tuple(verb for verb in self.lexicon.verbs if verb.frame == frame)


def _parse(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Parse `last/1 week/2` to words with part offsets; 0 is no part."""
    pairs = (part.split("/") for part in text.split())
    return tuple((word, tuple(int(digit) for digit in digits if digit != "0")) for word, digits in pairs)


_parsed = cache(_parse)


def _own(subject: NounPhrase) -> Determiner | None:
    """The possessive that refers to the subject, if it exists in all three languages."""
    head = subject.head
    if isinstance(head, Pronoun):
        return OWN.get(head.key)
    if subject.number != 1 or subject.second or (isinstance(head, Noun) and head.gender == "n"):
        return None  # "das Mädchen": "sein" by grammar, "ihr" by meaning
    return "his" if "male" in head.classes else "her" if "female" in head.classes else None


def is_several(phrase: NounPhrase) -> bool:
    """Whether a phrase is plural."""
    if isinstance(phrase.head, Pronoun):
        return phrase.head.key in ("we", "they")
    return phrase.number != 1 or phrase.second is not None


class Draw:
    """Random choices for one sentence, and the next free part number."""

    def __init__(self, pools: Pools, dice: Random) -> None:
        self.pools, self.random, self.next = pools, dice.random, 1
        self.level = pools.level

    def at(self) -> int:
        """Allocate the part numbers of a node."""
        first, self.next = self.next, self.next + STEP
        return first

    def between(self, low: int, high: int) -> int:
        """Sample an integer from low … high."""
        return low + int(self.random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        """Sample one of the options."""
        return options[int(self.random() * len(options))]

    def name(self, other: str = "") -> Name:
        """Sample a name other than `other`."""
        names = self.pools.lexicon.names
        found = self.pick(names)
        return found if found.key != other else names[names.index(found) - 1]

    def noun(self, classes: Classes, other: str = "") -> Noun:
        """Sample a noun of one of the classes, other than `other` if possible."""
        pool = self.pools.nouns(classes)
        found = self.pick(pool)
        return found if found.key != other else pool[pool.index(found) - 1]

    def subject(self, classes: Classes, known: bool = False, every: bool = False, asked: bool = False) -> NounPhrase:
        """Sample a subject; `known` restricts it to definite phrases, `asked` excludes the first person."""
        if classes & PEOPLE:
            roll = self.random()
            if roll < 0.14:
                second = None
                name = self.name()
                if self.level > 1 and self.chance(0.2):
                    second = NounPhrase(self.at(), self.name(name.key))
                    if second.head.key == name.key:
                        second = None
                return NounPhrase(self.at(), name, second=second)
            if roll < 0.3:
                return NounPhrase(self.at(), self.pick(ASKED_PRONOUNS if asked else SUBJECT_PRONOUNS))
        noun = self.noun(classes)
        if every and self.level > 1 and not noun.classes & {"kin", "sole"} and self.chance(0.06):
            return NounPhrase(self.at(), noun, "every", 1, self.adjective(noun, 0.2))
        return self.phrase(noun, known or self.chance(0.75))

    def phrase(self, noun: Noun, known: bool) -> NounPhrase:
        """Sample determiner, number and optional adjective of a noun."""
        if "kin" in noun.classes:
            return NounPhrase(self.at(), noun, self.pick(POSSESSIVES))
        if "sole" in noun.classes:  # unique
            return NounPhrase(self.at(), noun, "the", 1, self.adjective(noun, 0.3))
        determiner = self.pick((SHARED if "shared" in noun.classes else KNOWN) if known else FRESH)
        number = 1
        if determiner in PLURALS:
            number = 0 if determiner else self.number()
        elif determiner in ("the", "this") and self.chance(0.35):
            number = self.number() if self.chance(0.2) else 0
        elif determiner in POSSESSIVES and self.chance(0.15):
            number = self.between(2, 4)
        adjective = self.adjective(noun, 0.3)
        if determiner == "his" and "ladies" in noun.classes:
            determiner = "her"
        if adjective and number == 1 and determiner in POSSESSIVES and adjective.zh.endswith("的"):
            adjective = None  # avoid two 的: 我的友好的老师
        return NounPhrase(self.at(), noun, determiner, number, adjective)

    def number(self) -> int:
        """Sample a numeral, mostly small."""
        if self.level == 1 or self.chance(0.7):
            return self.between(2, 5)
        return self.between(2, 12)

    def adjective(self, noun: Noun, probability: float) -> Adjective | None:
        """Sample an adjective of the noun, or none."""
        pool = self.pools.adjectives[noun.key]
        return self.pick(pool) if pool and self.random() < probability else None

    def thing(self, verb: Verb, subject: NounPhrase, negated: bool, habit: bool) -> NounPhrase:
        """Sample an object of the verb."""
        plain = not isinstance(subject.head, Pronoun)
        if plain and verb.object & {"person", "kin"} and self.chance(0.3):
            if self.chance(0.5):
                return NounPhrase(self.at(), self.pick(OBJECT_PRONOUNS))
            used = subject.second.head.key if subject.second else subject.head.key
            name = self.name(used)
            if name.key not in (used, subject.head.key):
                return NounPhrase(self.at(), name)
        noun = self.noun(verb.object, subject.head.key)
        if noun.classes & {"drink", "massfood"}:
            return self.mass(noun, negated or habit)
        if habit and (verb.key in TRADES or not noun.classes & SINGLE):
            return NounPhrase(self.at(), noun, "", 0, None if negated else self.adjective(noun, 0.25))
        if negated and "collectible" in verb.object:
            return NounPhrase(self.at(), noun, "", 0)
        if negated and self.chance(0.4) and not habit and not noun.classes & SINGLE and "once" not in verb.tags:
            return NounPhrase(self.at(), noun, "the" if verb.frame == "gives" else "a")
        if self.level == 3 and verb.key in TRADES and not negated and self.chance(0.12):
            return NounPhrase(self.at(), noun, "", self.between(13, 99))
        if "collectible" in verb.object and not negated:
            return NounPhrase(self.at(), noun, "some", 0, self.adjective(noun, 0.3))
        fixed = noun.classes & FIXED and verb.key not in TRADES
        made = self.phrase(noun, negated or habit or bool(fixed) or self.chance(0.5))
        if "outfit" in verb.object and made.number != 1:  # one coat at a time
            made = made._replace(number=1, determiner=made.determiner if made.determiner not in PLURALS else "a")
        if "outfit" in verb.object and is_several(subject):
            known = made.determiner != "a"
            return made._replace(number=0, determiner="the" if known else "some")
        if made.determiner not in POSSESSIVES:
            return made
        if fixed:
            made = made._replace(number=1)
        own = _own(subject) if verb.key not in FOREIGN else None
        if own == "his" and "ladies" in noun.classes:
            own = None
        if own or "kin" not in noun.classes:
            made = made._replace(determiner=own or "the")
        return made

    def mass(self, noun: Noun, plain: bool) -> NounPhrase:
        """Sample a mass noun phrase: bread, tea, two cups of tea."""
        if plain or "drink" not in noun.classes or self.chance(0.4):
            return NounPhrase(self.at(), noun)
        number = self.number() if self.chance(0.4) else 1
        return NounPhrase(self.at(), noun, "a" if number == 1 else "", number, measured=True)

    def spot(self, verb: Verb) -> Spot | None:
        """Sample a location or direction of the verb, if the level has one."""
        places = self.pools.places(verb.where)
        return Spot(self.at(), self.pick(places)) if places else None

    def adverb(self, kind: str) -> Adverbial:
        """Sample an adverb of a kind."""
        entry = self.pick(self.pools.adverbs(kind))
        return Adverbial(self.at(), kind, _parsed(entry.en), _parsed(entry.de), _parsed(entry.zh))

    def time(self, verb: Verb, tense: str, dated: bool) -> Adverbial:
        """Sample a time; `dated` allows dates and clock times, which do not mark the tense."""
        slow = "slow" in verb.tags
        if "long" in verb.tags:
            return self.adverb("long-" + tense)
        if dated and self.level == 3 and self.chance(0.4):
            if slow:
                return (
                    times.date(self.at(), self.random)
                    if self.chance(0.6)
                    else times.weekday(self.at(), self.random, tense)
                )
            return times.clock(self.at(), self.random)
        if slow and self.chance(0.5):
            return self.adverb("long-" + tense)
        return self.adverb(tense if self.pools.adverbs(tense) else "long-" + tense)
