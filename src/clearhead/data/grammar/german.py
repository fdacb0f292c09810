"""German realization: verb second and verb last, the verb bracket, cases and word order."""

from clearhead.data.grammar import german_forms as forms
from clearhead.data.grammar.entries import Name, Noun
from clearhead.data.grammar.german_forms import Case
from clearhead.data.grammar.nodes import (
    ADJECTIVE,
    COMMA,
    DEGREE,
    DETERMINER,
    HEAD,
    LINK,
    MODAL,
    NEGATION,
    NUMBER,
    PLEASE,
    PREPOSITION,
    QUALITY,
    RELATIVE,
    TENSE,
    THAN,
    VERB,
    VESSEL,
    Adverbial,
    Clause,
    NounPhrase,
    Pronoun,
    Quality,
    Spot,
    Word,
)

NUMBERS = ("", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf")
LINKS = {"that": "dass", "because": "weil", "if": "wenn", "when": "als", "but": "aber"}
VESSELS = {"cup": ("f", "Tasse", "Tassen"), "glass": ("n", "Glas", "Gläser"), "bottle": ("f", "Flasche", "Flaschen")}
LATE = frozenset(("oft", "selten", "nie"))  # placed after definite objects: "Er lädt den Arzt nie ein"
ASKED = {"nom": ("wer", "was"), "acc": ("wen", "was"), "dat": ("wem", "wem")}


def sentence(clause: Clause) -> list[Word]:
    """Realize a main clause with its subordinate clause, without the final punctuation."""
    if not clause.inner:
        return _main(clause)
    inner, link = clause.inner, Word(LINKS.get(clause.link, "um"), (clause.at + LINK,))
    comma = Word(",", (inner.at + COMMA,))
    if clause.link in ("if", "when"):  # a fronted clause takes the first position: the finite verb follows
        return [link, *_verb_last(inner), comma, *_verb_first(clause)]
    if clause.link == "but":
        return [*_main(clause), comma, link, *_main(inner)]
    if clause.link == "to":
        zu = [Word(text, (inner.at + VERB,)) for text in forms.zu_infinitive(inner.verb)]
        return [*_main(clause), comma, link, *_middle(inner), *zu]
    return [*_main(clause), comma, link, *_verb_last(inner)]


def noun_phrase(phrase: NounPhrase, case: Case, negation: int | None = None) -> list[Word]:
    """Realize a noun phrase; `negation` is the part that turns "ein" or no article into "kein"."""
    at, head = phrase.at, phrase.head
    if isinstance(head, Pronoun):
        return [Word(forms.PRONOUNS[head.key][case], (at,))]
    if isinstance(head, Name):
        words = [Word(head.de, (at,))]
        if phrase.second:
            words += [Word("und", (at + DETERMINER,)), *noun_phrase(phrase.second, case)]
        return words
    plural = phrase.number != 1
    kind: str = phrase.determiner if negation is None else "no"
    slot, vessel = forms.slot(phrase), None
    if phrase.measured:
        vessel = next(VESSELS[name] for name in VESSELS if name in head.classes)
        slot = "p" if plural else vessel[0]
    words = []
    if kind:
        parts = (at + DETERMINER,) if negation is None else (negation, at + DETERMINER)
        words.append(Word(forms.determiner(kind, case, slot), parts))
    if phrase.number > 1:
        words.append(Word(numeral(phrase.number), (at + NUMBER,)))
    if vessel:
        return [*words, Word(vessel[1 + plural], (at + VESSEL,)), Word(head.de, (at + HEAD,))]
    if phrase.adjective:
        ending = forms.adjective_ending(kind, case, slot)
        words.append(Word(phrase.adjective.de_stem + ending, (at + ADJECTIVE,)))
    words.append(Word(forms.noun(head, case, plural), (at + HEAD,)))
    return words


def numeral(number: int) -> str:
    """Write numbers up to twelve as words."""
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


def relative(phrase: NounPhrase) -> list[Word]:
    """Realize a relative clause after its comma: ", das das Mädchen gekauft hat"."""
    clause = phrase.relative
    if not clause:
        return []
    case: Case = "nom" if clause.gap == "subject" else object_case(clause)
    pronoun = forms.cell(forms.RELATIVES, case, forms.slot(phrase))
    return [Word(",", (clause.at + COMMA,)), Word(pronoun, (phrase.at + RELATIVE,)), *_verb_last(clause)]


def object_case(clause: Clause) -> Case:
    """The case of the verb's object."""
    return "dat" if clause.verb.de_object == "dat" else "acc"


def adverbial(node: Adverbial) -> list[Word]:
    """Realize an adverbial."""
    return [Word(text, tuple(node.at + offset for offset in offsets)) for text, offsets in node.de]


def spot(node: Spot, toward: bool) -> list[Word]:
    """Realize a place: dative for locations, accusative for directions (except "zu" and "nach")."""
    place, at = node.place, node.at
    preposition = "auf" if isinstance(place, Noun) else place.de_to if toward else place.de_at
    head = Word(place.de, (at + HEAD,))
    if not place.gender:
        return [Word(preposition, (at + PREPOSITION,)), head]
    article = forms.determiner("the", "acc" if toward and preposition != "zu" else "dat", place.gender)
    if short := forms.CONTRACTIONS.get((preposition, article)):
        return [Word(short, (at + PREPOSITION, at + DETERMINER)), head]
    return [Word(preposition, (at + PREPOSITION,)), Word(article, (at + DETERMINER,)), head]


def _verb(clause: Clause) -> tuple[Word, str, list[Word]]:
    """The finite verb, its separable prefix, and the non-finite forms at the end of the clause."""
    at, verb, who = clause.at, clause.verb, forms.person(clause.subject)
    infinitive = [Word(verb.de, (at + VERB,))]
    if clause.modal:
        parts = (at + MODAL,)
        return Word(forms.modal(clause.modal, who, clause.tense == "past"), parts), "", infinitive
    if clause.tense == "future":
        return Word(forms.irregular("werden", who), (at + TENSE,)), "", infinitive
    if clause.tense == "past" and verb.de == "sein":
        return Word(forms.irregular("war", who), (at + VERB, at + TENSE)), "", []
    if clause.tense == "past":
        auxiliary = forms.irregular("sein" if verb.aux else "haben", who)
        return Word(auxiliary, (at + TENSE,)), "", [Word(verb.de_participle, (at + VERB,))]
    if verb.frame in ("located", "exists") and (stance := _stance(clause.subject)):
        return Word(stance + ("t" if who == "er" else "en"), (at + VERB,)), "", []
    return Word(forms.present(verb, who), (at + VERB,)), verb.prefix, []


def _stance(phrase: NounPhrase) -> str:
    """The stem of the positional verb of a thing, steh- or lieg-; empty for people and animals."""
    if not isinstance(phrase.head, Noun) or phrase.head.classes & {"person", "animal"}:
        return ""
    return "steh" if "stands" in phrase.head.classes else "lieg"


def _is_definite(phrase: NounPhrase) -> bool:
    return not isinstance(phrase.head, Noun) or phrase.determiner not in ("", "a", "some")


def _middle(clause: Clause) -> list[Word]:
    """The middle field, between the finite verb (or the subject) and the end of the clause."""
    at, thing = clause.at, clause.object if clause.gap != "object" else None
    weak: list[Word] = []  # pronouns come first
    person = noun_phrase(clause.recipient, "dat") if clause.recipient else []
    if clause.recipient and isinstance(clause.recipient.head, Pronoun):
        weak, person = person, []
    time = adverbial(clause.time) if clause.time and not clause.fronted and clause.gap != "time" else []
    if clause.tense == "progressive":
        time.append(Word("gerade", (at + TENSE,)))
    if clause.span and clause.verb.frame not in ("costs", "aged"):
        time += adverbial(clause.span)
    place = spot(clause.spot, clause.verb.frame == "goes") if clause.spot and clause.gap != "place" else []
    place += adverbial(clause.manner) if clause.manner else []
    if clause.span and clause.verb.frame in ("costs", "aged"):
        place += adverbial(clause.span)
    if clause.quality:
        place += _quality(at, clause.quality)
    preposition = clause.verb.de_object if clause.verb.de_object != "dat" else ""
    not_ = Word("nicht", (at + NEGATION,))
    if not thing:
        return [*weak, *person, *time, *([not_] if clause.negated else []), *place]
    if preposition:
        words = [Word(preposition, (at + VERB,)), *noun_phrase(thing, "acc")]
        return [*weak, *time, *([not_] if clause.negated else []), *place, *words]
    case = object_case(clause)
    if isinstance(thing.head, Pronoun):
        weak, words = [*noun_phrase(thing, case), *weak], []
        return [*weak, *person, *time, *([not_] if clause.negated else []), *place]
    if not _is_definite(thing):
        negation = at + NEGATION if clause.negated else None
        front, back = (person, time) if clause.negated else (time, person)
        return [*weak, *front, *back, *place, *noun_phrase(thing, case, negation)]
    words = noun_phrase(thing, case)
    if clause.negated:
        return [*weak, *person, *words, *time, not_, *place]
    if clause.time and clause.time.de[0][0] in LATE:
        return [*weak, *person, *words, *time, *place]
    return [*weak, *time, *person, *words, *place]


def _quality(at: int, quality: Quality) -> list[Word]:
    adjective, part = quality.adjective, (at + QUALITY,)
    if quality.degree == "very":
        return [Word("sehr", (at + DEGREE,)), Word(adjective.de, part)]
    if not quality.than:
        return [Word(adjective.de, part)]
    than = noun_phrase(quality.than, "nom")
    if quality.degree == "more":
        return [Word(adjective.de_comparative, part), Word("als", (at + THAN,)), *than]
    return [Word("genauso", (at + THAN,)), Word(adjective.de, part), Word("wie", (at + THAN,)), *than]


def _subject(clause: Clause) -> list[Word]:
    if clause.verb.frame == "rains":
        return [Word("es", (clause.subject.at,))]
    if clause.gap == "subject":
        return [] if clause.mood == "relative" else [_asked(clause.subject, "nom")]
    words = noun_phrase(clause.subject, "nom")
    if clause.subject.relative:
        words += [*relative(clause.subject), Word(",", ())]
    return words


def _asked(phrase: NounPhrase, case: Case) -> Word:
    person = isinstance(phrase.head, (Name, Pronoun)) or "person" in phrase.head.classes
    return Word(ASKED[case][not person], (phrase.at + HEAD,))


def _close(clause: Clause, prefix: str, infinite: list[Word]) -> list[Word]:
    """The right verb bracket, followed by the relative clause of the object."""
    words = [Word(prefix, (clause.at + VERB,))] if prefix else []
    tail = relative(clause.object) if clause.object and clause.gap != "object" else []
    return [*words, *infinite, *tail]


def _main(clause: Clause) -> list[Word]:
    """Verb second: the first position is the subject, the time, or the interrogative."""
    if clause.mood == "request":
        return _request(clause)
    if clause.mood == "question" and not clause.gap:
        return _verb_first(clause)
    finite, prefix, infinite = _verb(clause)
    end = _close(clause, prefix, infinite)
    first: list[Word] = []
    if clause.verb.frame == "exists" and clause.spot:
        return [*spot(clause.spot, False), finite, *_subject(clause)]
    if clause.fronted and clause.time:
        first = adverbial(clause.time)
    elif clause.gap == "object" and clause.object:
        first = [_asked(clause.object, object_case(clause))]
    elif clause.gap == "place" and clause.spot:
        where = "wohin" if clause.verb.frame == "goes" else "wo"
        first = [Word(where, (clause.spot.at + HEAD, clause.spot.at + PREPOSITION))]
    elif clause.gap == "time" and clause.time:
        first = [Word("wann", (clause.time.at + 1,))]
    if first:
        return [*first, finite, *_subject(clause), *_middle(clause), *end]
    return [*_subject(clause), finite, *_middle(clause), *end]


def _verb_first(clause: Clause) -> list[Word]:
    finite, prefix, infinite = _verb(clause)
    return [finite, *_subject(clause), *_middle(clause), *_close(clause, prefix, infinite)]


def _verb_last(clause: Clause) -> list[Word]:
    """Subordinate clause: the finite verb is last and joined with its separable prefix."""
    finite, prefix, infinite = _verb(clause)
    return [*_subject(clause), *_middle(clause), *infinite, Word(prefix + finite.text, finite.parts)]


def _request(clause: Clause) -> list[Word]:
    """Mach bitte die Tür nicht auf"""
    verb = Word(forms.imperative(clause.verb), (clause.at + VERB,))
    prefix = [Word(clause.verb.prefix, (clause.at + VERB,))] if clause.verb.prefix else []
    return [verb, Word("bitte", (clause.at + PLEASE,)), *_middle(clause), *prefix]
