"""German grammar: agreement, cases, conjugation, and the position of the verb and its prefix."""

import re
from collections.abc import Iterator

import pytest

from clearhead.data.grammar import Grammar
from clearhead.data.grammar import german_forms as forms
from clearhead.data.grammar.entries import Noun, Verb, load
from clearhead.data.grammar.example import clauses, phrases, realize
from clearhead.data.grammar.nodes import MODAL, STEP, TENSE, VERB, Clause, NounPhrase

SAMPLE = [Grammar().example("train", index, seed=9) for index in range(4000)]
VERBS = {verb.key: verb for verb in load(3).verbs}


def split_words(words: str) -> set[str]:
    return set(words.split())


# Articles and adjectives as in a school grammar: case → m, f, n, plural.
SCHOOL = {
    "the": {
        "nom": ("der -e", "die -e", "das -e", "die -en"),
        "acc": ("den -en", "die -e", "das -e", "die -en"),
        "dat": ("dem -en", "der -en", "dem -en", "den -en"),
    },
    "this": {
        "nom": ("dieser -e", "diese -e", "dieses -e", "diese -en"),
        "acc": ("diesen -en", "diese -e", "dieses -e", "diese -en"),
        "dat": ("diesem -en", "dieser -en", "diesem -en", "diesen -en"),
    },
    "every": {
        "nom": ("jeder -e", "jede -e", "jedes -e", ""),
        "acc": ("jeden -en", "jede -e", "jedes -e", ""),
        "dat": ("jedem -en", "jeder -en", "jedem -en", ""),
    },
    "a": {
        "nom": ("ein -er", "eine -e", "ein -es", ""),
        "acc": ("einen -en", "eine -e", "ein -es", ""),
        "dat": ("einem -en", "einer -en", "einem -en", ""),
    },
    "my": {
        "nom": ("mein -er", "meine -e", "mein -es", "meine -en"),
        "acc": ("meinen -en", "meine -e", "mein -es", "meine -en"),
        "dat": ("meinem -en", "meiner -en", "meinem -en", "meinen -en"),
    },
    "our": {
        "nom": ("unser -er", "unsere -e", "unser -es", "unsere -en"),
        "acc": ("unseren -en", "unsere -e", "unser -es", "unsere -en"),
        "dat": ("unserem -en", "unserer -en", "unserem -en", "unseren -en"),
    },
    "some": {
        "nom": ("", "", "", "einige -e"),
        "acc": ("", "", "", "einige -e"),
        "dat": ("", "", "", "einigen -en"),
    },
    "": {
        "nom": ("-er", "-e", "-es", "-e"),
        "acc": ("-en", "-e", "-es", "-e"),
        "dat": ("-em", "-er", "-em", "-en"),
    },
}


def _cases(clause: Clause) -> Iterator[tuple[NounPhrase, str]]:
    """The full noun phrases of a clause with their cases."""
    said = list(phrases(clause))
    dative = clause.verb.key in ("help", "thank", "trust")
    for phrase, case in (
        (clause.subject, "nom"),
        (clause.object, "dat" if dative else "acc"),
        (clause.recipient, "dat"),
        (clause.quality.than if clause.quality else None, "nom"),
    ):
        if phrase in said and phrase and isinstance(phrase.head, Noun) and not phrase.measured:
            yield phrase, case


def test_german_articles_adjectives_and_nouns_agree() -> None:
    checked = set()
    for example in SAMPLE:
        line = " " + " ".join(example.words("de")).lower() + " "
        for clause in clauses(example.clause):
            for phrase, case in _cases(clause):
                if phrase.determiner not in SCHOOL or clause.negated:
                    continue
                noun = phrase.head
                assert isinstance(noun, Noun)
                slot = "mfn".index(noun.gender) if phrase.number == 1 else 3
                *article, ending = SCHOOL[phrase.determiner][case][slot].split()
                number = forms_of(phrase.number)
                adjective = [phrase.adjective.de_stem + ending[1:]] if phrase.adjective else []
                expected = " ".join([*article, *number, *adjective]).lower()
                assert f" {expected} {_noun(noun, case, slot == 3)} ".lower().replace("  ", " ") in line
                checked.add((phrase.determiner, case, slot, bool(adjective)))
    assert len(checked) > 60


def forms_of(number: int) -> list[str]:
    names = ["zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"]
    return [] if number < 2 else [names[number - 2] if number <= 12 else str(number)]


def _noun(noun: Noun, case: str, plural: bool) -> str:
    if not plural:
        weak = noun.de_oblique != noun.de and case != "nom"
        return noun.de + ("n" if noun.de[-1] == "e" or noun.de in ("Nachbar", "Bauer") else "en") * weak
    return noun.de_plural + ("n" if case == "dat" and noun.de_plural[-1] not in "ns" else "")


@pytest.mark.parametrize(
    ("key", "expected"),
    {
        "read": "lese liest liest lesen lies",
        "eat": "esse isst isst essen iss",
        "give": "gebe gibst gibt geben gib",
        "throw away": "werfe wirfst wirft werfen wirf",
        "run": "laufe läufst läuft laufen lauf",
        "wash": "wasche wäschst wäscht waschen wasch",
        "invite": "lade lädst lädt laden lade",
        "work": "arbeite arbeitest arbeitet arbeiten arbeite",
        "wait for": "warte wartest wartet warten warte",
        "play": "spiele spielst spielt spielen spiel",
        "dance": "tanze tanzt tanzt tanzen tanz",
        "collect": "sammle sammelst sammelt sammeln sammle",
        "feed": "füttere fütterst füttert füttern füttere",
        "repair": "repariere reparierst repariert reparieren repariere",
        "like": "mag magst mag mögen",
        "have": "habe hast hat haben",
        "be": "bin bist ist sind",
        "know that": "weiß weißt weiß wissen",
        "open": "mache machst macht machen mach",
        "help": "helfe hilfst hilft helfen hilf",
        "water": "gieße gießt gießt gießen gieß",
    }.items(),
)
def test_german_verbs_are_conjugated(key: str, expected: str) -> None:
    conjugated = [forms.present(VERBS[key], who) for who in ("ich", "du", "er", "wir")]
    *present, imperative = expected.split() if len(expected.split()) == 5 else [*expected.split(), ""]
    assert conjugated == present
    assert not imperative or forms.imperative(VERBS[key]) == imperative


AUXILIARIES = split_words("habe hast hat haben bin bist ist sind war warst waren werde wirst wird werden")
MODALS = split_words(
    "kann kannst können muss musst müssen will willst wollen sollte solltest sollten darf darfst "
    "dürfen konnte konntest konnten musste musstest mussten wollte wolltest wollten"
)


def _is_finite(word: str, verb: Verb, clause: Clause) -> bool:
    """Whether a word is a finite form that the clause needs, by lists independent of the realizer."""
    word = word.lower()
    if clause.modal:
        return word in MODALS
    if clause.tense in ("past", "future") or verb.de == "sein":
        return word in AUXILIARIES or word in ("liegt", "liegen", "steht", "stehen")
    base = verb.de.removeprefix(verb.prefix)
    stem = re.sub("e?n$", "", base)
    if verb.de in ("mögen", "wissen", "haben"):
        return word in ["mag", "magst", "mögen", "weiß", "weißt", "wissen", "habe", "hast", "hat", "haben"]
    return word in {base, verb.de_third, stem + "e", stem[:-2] + "le", verb.de_third[:-1] + "st", verb.de_third}


def test_german_main_clauses_are_verb_second() -> None:
    fronted = 0
    for example in SAMPLE:
        c = example.clause
        if c.mood != "statement" or c.link in ("if", "when"):
            continue
        words = realize(c, "de")
        first = next(i for i, word in enumerate(words) if {c.at + VERB, c.at + TENSE, c.at + MODAL} & set(word.parts))
        assert _is_finite(words[first].text, c.verb, c), example.text("de")
        before = {(part - 1) // STEP for word in words[:first] for part in word.parts}
        assert before <= _field(c), example.text("de")
        if c.time and c.fronted:
            fronted += 1
            assert before == {(c.time.at - 1) // STEP}
    assert fronted > 50


def _field(c: Clause) -> set[int]:
    """The nodes that can precede the verb, one at a time with its dependents."""
    if c.fronted and c.time:
        return {(c.time.at - 1) // STEP}
    if c.verb.frame == "exists" and c.spot:
        return {(c.spot.at - 1) // STEP}
    nodes = {c.subject.at} | ({c.subject.second.at} if c.subject.second else set())
    if c.subject.relative:
        inner = c.subject.relative
        parts = (inner, inner.subject, inner.object, inner.spot, inner.time, inner.manner)
        nodes |= {part.at for part in parts if part}
        if inner.subject.second:
            nodes.add(inner.subject.second.at)
    return {(at - 1) // STEP for at in nodes}


def test_german_questions_and_clauses_after_a_fronted_clause_are_verb_first() -> None:
    seen = 0
    for example in SAMPLE:
        c, words = example.clause, example.words("de")
        if c.mood == "question" and not c.gap:
            assert _is_finite(words[0], c.verb, c), example.text("de")
            seen += 1
        elif c.link in ("if", "when"):
            assert _is_finite(words[words.index(",") + 1], c.verb, c), example.text("de")
            seen += 1
    assert seen > 300


def test_german_subordinate_clauses_end_with_the_verb() -> None:
    seen = 0
    for example in SAMPLE:
        c, words = example.clause, example.words("de")
        inner = c.inner
        if inner and c.link in ("that", "because"):
            end = words[-2]
        elif inner and c.link in ("if", "when"):
            end = words[words.index(",") - 1]
        elif c.object and c.object.relative:
            inner, end = c.object.relative, words[-2]
        else:
            continue
        assert _is_finite(end.removeprefix(inner.verb.prefix), inner.verb, inner), example.text("de")
        seen += 1
    assert seen > 400


def test_german_separable_prefixes_close_the_clause() -> None:
    kinds = dict.fromkeys(("apart", "together", "zu"), 0)
    for example in SAMPLE:
        c, words = example.clause, example.words("de")
        inner = c.inner
        if c.verb.prefix and c.tense in ("present", "progressive") and not c.modal and not inner and not c.object:
            assert words[-2] == c.verb.prefix
            kinds["apart"] += 1
        if inner and inner.verb.prefix and inner.tense == "conditional":
            assert words[words.index(",") - 1].startswith(inner.verb.prefix)
            kinds["together"] += 1
        if inner and inner.verb.prefix and c.link == "to":
            assert words[-2] == inner.verb.prefix + "zu" + inner.verb.de.removeprefix(inner.verb.prefix)
            kinds["zu"] += 1
    assert min(kinds.values()) > 3
