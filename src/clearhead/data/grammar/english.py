"""English realization: do-support, third person -s, a or an, plurals, particles and word order."""

from clearhead.data.grammar.entries import Name, Noun, Verb
from clearhead.data.grammar.nodes import (
    ADJECTIVE,
    ASKING,
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

NUMBERS = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
OBJECT_FORMS = {"I": "me", "you": "you", "he": "him", "she": "her", "we": "us", "they": "them"}
VESSELS = {"cup": ("cup", "cups"), "glass": ("glass", "glasses"), "bottle": ("bottle", "bottles")}
SILENT_H = ("honest", "hour")  # "an honest man"
SPOKEN_U = ("use", "uni")  # "a useful map"
COPULAS = frozenset(("is", "located", "exists", "aged"))


def sentence(clause: Clause) -> list[Word]:
    """Realize a main clause, without the final punctuation."""
    words = _linked(clause) if clause.link in ("if", "when") else _main(clause)
    if clause.inner and clause.link not in ("if", "when"):
        words += _inner(clause)
    return words


def _linked(clause: Clause) -> list[Word]:
    """If … , main clause."""
    assert clause.inner
    comma = Word(",", (clause.inner.at + COMMA,))
    return [Word(clause.link, (clause.at + LINK,)), *_main(clause.inner), comma, *_main(clause)]


def _inner(clause: Clause) -> list[Word]:
    assert clause.inner
    link = (clause.at + LINK,)
    if clause.link == "to":
        return [Word("to", link), *_predicate(clause.inner, [Word(clause.inner.verb.en, (clause.inner.at,))])]
    comma = [Word(",", (clause.inner.at + COMMA,))] if clause.link == "but" else []
    return [*comma, Word(clause.link, link), *_main(clause.inner)]


def noun_phrase(phrase: NounPhrase, subject: bool = False) -> list[Word]:
    """Realize a noun phrase: "the three red apples", "a cup of tea", "Anna and Peter"."""
    at, head = phrase.at, phrase.head
    if isinstance(head, Pronoun):
        return [Word(head.key if subject else OBJECT_FORMS[head.key], (at,))]
    if isinstance(head, Name):
        words = [Word(head.en, (at,))]
        if phrase.second:
            words += [Word("and", (at + DETERMINER,)), *noun_phrase(phrase.second, subject)]
        return words
    plural = phrase.number != 1
    words = []
    if phrase.determiner == "this":
        words.append(Word("these" if plural else "this", (at + DETERMINER,)))
    elif phrase.determiner:
        words.append(Word(phrase.determiner, (at + DETERMINER,)))
    if phrase.number > 1:
        words.append(Word(numeral(phrase.number), (at + NUMBER,)))
    if phrase.measured:
        vessel = next(VESSELS[name] for name in VESSELS if name in head.classes)
        words += [Word(vessel[plural], (at + VESSEL,)), Word("of", (at + VESSEL,))]
    if phrase.adjective:
        words.append(Word(phrase.adjective.en, (at + ADJECTIVE,)))
    words.append(Word(head.en_plural if plural and not phrase.measured else head.en, (at + HEAD,)))
    if phrase.determiner == "a" and _starts_with_vowel(words[1].text):
        words[0] = Word("an", words[0].parts)
    if phrase.relative:
        words += relative(phrase, phrase.relative)
    return words


def relative(phrase: NounPhrase, clause: Clause) -> list[Word]:
    """Realize a relative clause: "who bought the book", "that the girl bought"."""
    person = isinstance(phrase.head, Noun) and "person" in phrase.head.classes
    pronoun = Word("who" if person and clause.gap == "subject" else "that", (phrase.at + RELATIVE,))
    return [pronoun, *_main(clause)]


def numeral(number: int) -> str:
    """Write numbers up to twelve as words."""
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


def _starts_with_vowel(word: str) -> bool:
    return word.startswith(SILENT_H) or (word[0] in "aeiou" and not word.startswith(SPOKEN_U))


def adverbial(node: Adverbial) -> list[Word]:
    """Realize an adverbial."""
    return [Word(text, tuple(node.at + offset for offset in offsets)) for text, offsets in node.en]


def spot(node: Spot, toward: bool) -> list[Word]:
    """Realize a place: "in the park", "to Berlin"."""
    place, at = node.place, node.at
    if isinstance(place, Noun):
        preposition = "on"
    else:
        preposition = "to" if toward else place.en_at
    article = [Word("the", (at + DETERMINER,))] if place.gender else []
    names = [Word(part, (at + HEAD,)) for part in place.en.split()]
    return [Word(preposition, (at + PREPOSITION,)), *article, *names]


def is_third(phrase: NounPhrase) -> bool:
    """Whether the verb is in the third person singular."""
    if isinstance(phrase.head, Pronoun):
        return phrase.head.key in ("he", "she")
    return phrase.number == 1 and phrase.second is None


def _be(subject: NounPhrase, past: bool) -> str:
    if isinstance(subject.head, Pronoun) and subject.head.key == "I":
        return "was" if past else "am"
    if is_third(subject):
        return "was" if past else "is"
    return "were" if past else "are"


def third_person(verb: str) -> str:
    """The present with -s: goes, watches, tries, has."""
    if verb == "have":
        return "has"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")


def _verb(clause: Clause) -> tuple[list[Word], list[Word]]:
    """The auxiliary that inverts with the subject, and the rest of the verb group."""
    at, verb, tense = clause.at, clause.verb, clause.tense
    does = clause.negated or (clause.mood == "question" and clause.gap != "subject")
    third = is_third(clause.subject)
    if verb.frame in COPULAS:
        if tense == "future":
            return [Word("will", (at + TENSE,))], [Word("be", (at + VERB,))]
        parts = (at + VERB, at + TENSE) if tense == "past" else (at + VERB,)
        return [Word(_be(clause.subject, tense == "past"), parts)], []
    if clause.modal == "may":  # "may" alone would mean "perhaps"
        allowed = [Word("allowed", (at + MODAL,)), Word("to", (at + MODAL,)), Word(verb.en, (at + VERB,))]
        return [Word(_be(clause.subject, False), (at + MODAL,))], allowed
    if clause.modal in ("can", "should"):
        past = clause.modal == "can" and tense == "past"
        return [Word("could" if past else clause.modal, (at + MODAL,))], [Word(verb.en, (at + VERB,))]
    if clause.modal:  # want to, have to
        base, past_form = ("want", "wanted") if clause.modal == "want" else ("have", "had")
        group, rest = at + MODAL, [Word("to", (at + MODAL,)), Word(verb.en, (at + VERB,))]
    else:
        base, past_form, group, rest = verb.en, verb.en_past, at + VERB, []
    if tense == "progressive":
        return [Word(_be(clause.subject, False), (at + TENSE,))], [Word(verb.en_ing, (at + VERB,))]
    if tense == "future":
        return [Word("will", (at + TENSE,))], [Word(base, (group,)), *rest]
    if does:
        why = at + NEGATION if clause.negated else at + ASKING
        if tense == "past":
            return [Word("did", (at + TENSE,))], [Word(base, (group,)), *rest]
        return [Word("does" if third else "do", (why,))], [Word(base, (group,)), *rest]
    if tense == "past":
        return [], [Word(past_form, (group, at + TENSE)), *rest]
    return [], [Word(third_person(base) if third else base, (group,)), *rest]


def _main(clause: Clause) -> list[Word]:
    """Realize a clause in the word order of its mood."""
    if clause.verb.frame == "exists":
        return _exists(clause)
    if clause.mood == "request":
        return _request(clause)
    auxiliary, rest = _verb(clause)
    negation = [Word("not", (clause.at + NEGATION,))] if clause.negated else []
    if negation and auxiliary and auxiliary[0].text == "can":  # written as one word
        auxiliary, negation = [Word("cannot", (*auxiliary[0].parts, *negation[0].parts))], []
    often = adverbial(clause.time) if clause.time and clause.time.kind == "often" else []
    if clause.gap == "subject":
        subject = [] if clause.mood == "relative" else [_asked(clause.subject)]
    elif clause.verb.frame == "rains":
        subject = [Word("it", (clause.subject.at,))]
    else:
        subject = noun_phrase(clause.subject, subject=True)
    behind = _predicate(clause, rest)
    if clause.mood == "question" and clause.gap != "subject":
        opening: list[Word] = []
        if clause.gap == "object" and clause.object:
            opening = [_asked(clause.object)]
        elif clause.gap == "place" and clause.spot:
            opening = [Word("where", (clause.spot.at + HEAD, clause.spot.at + PREPOSITION))]
        elif clause.gap == "time" and clause.time:
            opening = [Word("when", (clause.time.at + 1,))]
        return [*opening, *auxiliary, *subject, *negation, *often, *behind]
    fronted = adverbial(clause.time) if clause.time and clause.fronted else []
    return [*fronted, *subject, *auxiliary, *negation, *often, *behind]


def _asked(phrase: NounPhrase) -> Word:
    person = isinstance(phrase.head, (Name, Pronoun)) or "person" in phrase.head.classes
    return Word("who" if person else "what", (phrase.at + HEAD,))


def _predicate(clause: Clause, verb: list[Word]) -> list[Word]:
    """The verb group and its complements."""
    words = list(verb)
    particle = [Word(clause.verb.en_particle, (clause.at + VERB,))] if clause.verb.en_particle else []
    gone = clause.gap == "object"
    if clause.recipient:
        words += noun_phrase(clause.recipient)
    if clause.object and not gone:
        between = isinstance(clause.object.head, Pronoun) and not _is_preposition(clause.verb)
        thing = noun_phrase(clause.object)
        words += [*thing, *particle] if between else [*particle, *thing]
    else:
        words += particle
    if clause.quality:
        words += _quality(clause.at, clause.quality)
    if clause.manner:
        words += adverbial(clause.manner)
    if clause.spot and clause.gap != "place":
        words += spot(clause.spot, clause.verb.frame == "goes")
    if clause.span:
        words += adverbial(clause.span)
    if clause.time and not clause.fronted and clause.time.kind != "often" and clause.gap != "time":
        words += adverbial(clause.time)
    return words


def _is_preposition(verb: Verb) -> bool:
    return verb.en_particle == "for"


def _quality(at: int, quality: Quality) -> list[Word]:
    adjective, part = quality.adjective, (at + QUALITY,)
    if quality.degree == "very":
        return [Word("very", (at + DEGREE,)), Word(adjective.en, part)]
    if not quality.than:
        return [Word(adjective.en, part)]
    than = noun_phrase(quality.than, subject=True)
    if quality.degree == "more":
        words = [Word(text, part) for text in adjective.en_comparative.split()]
        return [*words, Word("than", (at + THAN,)), *than]
    return [Word("as", (at + THAN,)), Word(adjective.en, part), Word("as", (at + THAN,)), *than]


def _exists(clause: Clause) -> list[Word]:
    """There is something somewhere."""
    assert clause.spot
    there = Word("there", (clause.at + VERB,))
    verb, _ = _verb(clause)
    opening = [*verb, there] if clause.mood == "question" else [there, *verb]
    return [*opening, *noun_phrase(clause.subject), *spot(clause.spot, False)]


def _request(clause: Clause) -> list[Word]:
    """Please do not …"""
    not_ = [Word("do", (clause.at + NEGATION,)), Word("not", (clause.at + NEGATION,))] if clause.negated else []
    verb = [Word(clause.verb.en, (clause.at + VERB,))]
    return [Word("please", (clause.at + PLEASE,)), *not_, *_predicate(clause, verb)]
