"""Sentence plans: the sentence types of each level, their weights, and complex sentences."""

from functools import cache
from random import Random

from clearhead.data.grammar import times
from clearhead.data.grammar.clauses import (
    PERSON,
    Plan,
    act,
    activity,
    clause,
    compared,
    event,
    existing,
    fits,
    giving,
    going,
    living,
    located,
    meeting,
    quality,
    request,
    state,
)
from clearhead.data.grammar.entries import Name, Noun, Verb
from clearhead.data.grammar.nodes import Clause, NounPhrase, Pronoun, Quality, Spot, Tense
from clearhead.data.grammar.phrases import POSSESSIVES, SUBJECT_PRONOUNS, Draw, Pools, is_several

# Verbs of short events, for "when" clauses.
QUICK = frozenset(("open", "close", "call", "hug", "thank", "see", "turn off", "put on", "take off", "break"))
# Purposes of going somewhere.
ERRANDS = frozenset(("buy", "borrow", "pick up", "swim", "shop", "study", "exercise", "pray", "fish"))
# Leisure activities, contrasted with duties.
LEISURE = frozenset(("sleep", "sing", "dance", "swim", "watch TV", "fish", "read", "watch", "chat", "hike", "visit"))
DUTIES = frozenset(("work", "cook", "study", "shop", "clean", "wash", "repair", "help", "feed", "wait for", "pack"))
# Activities in bad weather.
INDOORS = frozenset(("read", "watch", "watch TV", "sleep", "study", "clean", "paint", "write", "cook", "try", "pack"))
# The object is gone afterwards.
GONE = frozenset(("throw away", "break"))
HE, SHE, THEY = SUBJECT_PRONOUNS[2], SUBJECT_PRONOUNS[3], SUBJECT_PRONOUNS[5]


def draw(pools: Pools, dice: Random) -> Clause:
    """Sample a sentence of the level."""
    plans = _plans(pools.level)
    return plans[int(dice.random() * len(plans))](Draw(pools, dice))


@cache
def _plans(level: int) -> tuple[Plan, ...]:
    """The plans of a level, repeated by weight."""
    return tuple(plan for plan, *weights in WEIGHTS for _ in range(weights[level - 1]))


def _person(d: Draw) -> tuple[NounPhrase, Pronoun]:
    """Sample a person, and the pronoun that refers back to it."""
    subject = d.subject(frozenset(("kin",)), known=True)
    head = subject.head
    if subject.second and not {"male"} & (head.classes | subject.second.head.classes):  # type: ignore[union-attr]
        subject = subject._replace(second=None)  # 她们 exists only in Chinese
    if isinstance(head, Pronoun):
        return subject, head
    if subject.second:
        return subject, THEY
    return subject, SHE if "female" in head.classes else HE


def _again(d: Draw, pronoun: Pronoun) -> NounPhrase:
    return NounPhrase(d.at(), pronoun)


def _choose(d: Draw, frames: tuple[str, ...], tag: str = "") -> Verb:
    """Sample a verb of one of the frames, with the tag."""
    return d.pick(_tagged(d.pools, frames, tag))


@cache
def _tagged(pools: Pools, frames: tuple[str, ...], tag: str) -> tuple[Verb, ...]:
    return tuple(v for frame in frames for v in pools.verbs(frame) if not tag or tag in v.tags)


@cache
def _listed(pools: Pools, keys: frozenset[str]) -> tuple[Verb, ...]:
    return tuple(v for frame in ("acts", "activity", "meets") for v in pools.verbs(frame) if v.key in keys)


def reason(d: Draw) -> Clause:
    """Anna is tired because she worked in the office yesterday."""
    kinds = tuple(a for a in d.pools.lexicon.adjectives if a.kind & {"good", "bad", "tiring"})
    adjective = d.pick(kinds)
    tag = next(kind for kind in ("good", "bad", "tiring") if kind in adjective.kind)
    subject, pronoun = _person(d)
    verb = _choose(d, ("activity", "acts", "meets", "event"), tag)
    inner_subject = _again(d, pronoun)
    if verb.frame == "event":  # another person, by name: a pronoun would refer to the subject
        inner_subject = NounPhrase(d.at(), d.name(subject.head.key))
    inner = clause(d, verb, "p", inner_subject, plain=True)
    return Clause(d.at(), subject, d.pools.verbs("is")[0], quality=Quality(adjective), inner=inner, link="because")


def _is_vague(first: NounPhrase, second: NounPhrase) -> bool:
    """Whether the reference is ambiguous: "Anna says that she …", "Anna says that Anna …"."""
    if isinstance(second.head, Pronoun):
        return second.head in (HE, SHE, THEY)
    return first.head == second.head or (isinstance(first.head, Name) and isinstance(second.head, Name))


def report(d: Draw) -> Clause:
    """The teacher says that the students are hardworking."""
    verb = d.pick(d.pools.verbs("says"))
    subject = d.subject(PERSON, known=True)
    if verb.key == "hope that":
        inner = clause(d, _choose(d, ("acts", "event", "goes")), "f", plain=True)
    elif d.chance(0.4):
        inner = quality(d, plain=True)
    else:
        inner = clause(d, _choose(d, ("acts", "activity", "event", "goes", "meets")), "pf", plain=True)
    if _is_vague(subject, inner.subject):
        return report(d)
    return Clause(d.at(), subject, verb, inner=inner, link="that")


def condition(d: Draw) -> Clause:
    """If it rains tomorrow, the children will read a book."""
    if d.chance(0.35):
        rain = d.pick(d.pools.verbs("rains"))
        inner = Clause(d.at(), _again(d, HE), rain, "conditional", time=d.adverb("future"))
        main = clause(d, d.pick(_listed(d.pools, INDOORS)), "f", plain=True)._replace(spot=None)
    else:
        inner = clause(d, _choose(d, ("acts", "event")), "f", plain=True)
        inner = inner._replace(tense="conditional", time=None, spot=None)
        main = clause(d, _choose(d, ("acts", "activity", "goes")), "f", plain=True)
        if _is_vague(inner.subject, main.subject):
            return condition(d)
    return main._replace(time=None, manner=None, inner=inner, link="if")


def moment(d: Draw) -> Clause:
    """When the guest arrived, Peter closed the window."""
    inner = clause(d, d.pick(d.pools.verbs("event")), "p", plain=True)._replace(time=None)
    main = clause(d, d.pick(_listed(d.pools, QUICK)), "p", plain=True)
    return main._replace(time=None, spot=None, inner=inner, link="when")


def purpose(d: Draw) -> Clause:
    """Anna will go to the market to buy apples."""
    verb = d.pick(_listed(d.pools, ERRANDS))
    places = tuple(p for p in d.pools.places(verb.where) if "visitable" in p.classes)
    subject = d.subject(frozenset(("adult", "kin")), known=True)
    go = d.pools.verbs("goes")[0]
    main = clause(d, go, "fm", subject, plain=True)._replace(time=None, spot=Spot(d.at(), d.pick(places)))
    if main.modal:
        main = main._replace(modal="want" if d.chance(0.5) else "must")
    inner = Clause(d.at(), subject, verb, gap="subject")
    if verb.object:
        inner = inner._replace(object=d.thing(verb, subject, False, False))
        if not fits(inner):
            return purpose(d)
    return main._replace(inner=inner, link="to")


def contrast(d: Draw) -> Clause:
    """Peter wants to sleep, but he has to work."""
    subject, pronoun = _person(d)
    main = clause(d, d.pick(_listed(d.pools, LEISURE)), "m", subject, plain=True)
    inner = clause(d, d.pick(_listed(d.pools, DUTIES)), "m", _again(d, pronoun), plain=True)
    can = d.chance(0.4) and main.object is None
    inner = inner._replace(modal="must", spot=None)
    if can:  # "wants to swim, but cannot" uses the same verb
        inner = inner._replace(verb=main.verb, object=None, manner=None, modal="can", negated=True)
    return main._replace(modal="want", manner=None, inner=inner._replace(manner=None), link="but")


def _the(d: Draw, noun: Noun) -> NounPhrase:
    return NounPhrase(d.at(), noun, "the", 0 if d.chance(0.25) and "sole" not in noun.classes else 1)


def subject_relative(d: Draw) -> Clause:
    """The man who bought the newspaper is sleeping."""
    phrase = _the(d, d.noun(frozenset(("adult", "young"))))
    verb = _choose(d, ("acts", "activity"))
    while not verb.subject & phrase.head.classes:  # type: ignore[union-attr]
        verb = _choose(d, ("acts", "activity"))
    inner = clause(d, verb, "pr", phrase, plain=True)._replace(mood="relative", gap="subject")
    phrase = phrase._replace(relative=inner)
    main = _choose(d, ("acts", "activity"))
    while not main.subject & phrase.head.classes or main == verb:  # type: ignore[union-attr]
        main = _choose(d, ("acts", "activity"))
    return clause(d, main, "rf" if inner.tense == "past" else "f", phrase, plain=True)


def object_relative(d: Draw) -> Clause:
    """The book that Anna bought is expensive. Peter read the book that Anna bought."""
    verb = _choose(d, ("acts", "meets"))
    while verb.de_object or verb.zh_before or verb.en_particle == "for" or verb.key == "eat":
        verb = _choose(d, ("acts", "meets"))
    noun = d.noun(verb.object - {"drink", "massfood"}) if verb.object - {"drink", "massfood"} else d.noun(PERSON)
    if not noun.classes & verb.object or "kin" in noun.classes:
        return object_relative(d)
    phrase = _the(d, noun)
    inner = clause(d, verb, "p", plain=True)
    if "outfit" in verb.object and is_several(inner.subject):
        return object_relative(d)
    inner = inner._replace(object=phrase, time=None, spot=None, mood="relative", gap="object")
    phrase = phrase._replace(relative=inner)
    fitting = tuple(a for a in d.pools.lexicon.adjectives if a.classes & noun.classes)
    if fitting and d.chance(0.6):
        return Clause(d.at(), phrase, d.pools.verbs("is")[0], quality=Quality(d.pick(fitting)))
    mains = tuple(
        v
        for v in _tagged(d.pools, ("acts", "meets"), "")
        if v.object & noun.classes and v != verb and v.en_particle != "for" and not v.zh_before and not v.de_object
    )
    if not mains or verb.key in GONE:
        return object_relative(d)
    made = clause(d, d.pick(mains), "p", plain=True)
    return made._replace(object=phrase, time=None, spot=None)


def lasting(d: Draw) -> Clause:
    """The children played in the garden for three hours."""
    verb = d.pick(d.pools.verbs("activity"))
    while not verb.zh_short:
        verb = d.pick(d.pools.verbs("activity"))
    made = clause(d, verb, "p", plain=True)
    return made._replace(span=times.hours(d.at(), d.random), manner=None, time=made.time if d.chance(0.5) else None)


def price(d: Draw) -> Clause:
    """This coat costs 80 euros."""
    verb = d.pools.verbs("costs")[0]
    subject = d.phrase(d.noun(verb.subject), known=True)
    if subject.determiner in POSSESSIVES:
        subject = subject._replace(determiner="the")
    return Clause(d.at(), subject, verb, span=times.price(d.at(), d.between(2, 99)))


def age(d: Draw) -> Clause:
    """My daughter is 9 years old."""
    be = d.pools.verbs("is")[0]._replace(frame="aged")
    subject = d.subject(frozenset(("adult", "young", "pet")), known=True)
    while subject.number != 1 or subject.second or subject.head.key in ("I", "we", "they"):
        subject = d.subject(frozenset(("adult", "young", "pet")), known=True)
    subject = subject._replace(adjective=None)  # "the old man is 23 years old"
    head = subject.head
    if isinstance(head, (Name, Pronoun)):
        low, high = 5, 90
    else:
        low, high = (20, 70) if "adult" in head.classes else (2, 12)
    return Clause(d.at(), subject, be, span=times.age(d.at(), d.between(low, high)))


def weather(d: Draw) -> Clause:
    """It snowed in Vienna yesterday."""
    verb = d.pick(d.pools.verbs("rains"))
    made = Clause(d.at(), _again(d, HE), verb, "progressive", spot=d.spot(verb))
    if d.chance(0.7):
        tense: Tense = "past" if d.chance(0.5) else "future"
        made = made._replace(tense=tense, time=d.adverb(tense), fronted=d.chance(0.4))
    return made if d.chance(0.8) else made._replace(mood="question", fronted=False)


# Weights of the plans at levels 1, 2 and 3.
WEIGHTS: tuple[tuple[Plan, int, int, int], ...] = (
    (act, 34, 60, 120),
    (activity, 18, 18, 8),
    (meeting, 8, 8, 10),
    (event, 4, 6, 2),
    (state, 16, 14, 14),
    (quality, 16, 14, 4),
    (going, 5, 5, 5),
    (living, 4, 3, 1),
    (giving, 0, 10, 20),
    (compared, 0, 7, 8),
    (located, 0, 6, 3),
    (existing, 0, 6, 2),
    (request, 0, 6, 3),
    (price, 0, 0, 3),
    (age, 0, 0, 1),
    (weather, 0, 0, 1),
    (reason, 0, 0, 16),
    (report, 0, 0, 24),
    (condition, 0, 0, 18),
    (moment, 0, 0, 12),
    (purpose, 0, 0, 3),
    (contrast, 0, 0, 6),
    (subject_relative, 0, 0, 16),
    (object_relative, 0, 0, 12),
    (lasting, 0, 0, 3),
)
