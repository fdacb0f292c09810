"""Sample simple clauses: a verb with arguments, tense, polarity, mood, time and place that fit together."""

from collections.abc import Callable

from clearhead.data.grammar.entries import Noun, Verb
from clearhead.data.grammar.nodes import Clause, Modal, NounPhrase, Pronoun, Quality, Spot, Tense
from clearhead.data.grammar.phrases import FOREIGN, POSSESSIVES, SUBJECT_PRONOUNS, Draw

PERSON = frozenset(("person",))
GOODS = frozenset(("food", "volume", "dish", "person", "animal"))
ELSEWHERE = frozenset(("beast", "vehicle"))  # not found in gardens and kitchens
MODALS: tuple[Modal, ...] = ("can", "must", "want", "should", "may")
PAST_MODALS: tuple[Modal, ...] = ("can", "must", "want")
KINDS = frozenset(
    ("animal", "food", "clothing", "wearable", "vehicle", "furniture", "opening", "device", "dish", "tool", "building")
)
WILFUL = frozenset(("come", "leave", "get up", "come back", "set off", "win"))  # voluntary events

# Tenses by frame, as a string of equally likely initials:
# r progressive, p past, h habit, f future, m modal, d modal in the past, n negated present
TENSES = {
    "activity": "rrrppphhfmdn",
    "acts": "rrrppppphffmmdn",
    "meets": "pppppf",
    "event": "ppppff",
    "gives": "pppffm",
    "goes": "ppphffm",
}
EASY = {"activity": "rrrppphn", "acts": "rrrppphn", "meets": "p", "event": "p", "goes": "pph"}  # level 1


Plan = Callable[[Draw], Clause]


def _frame(name: str) -> Plan:
    return lambda d: clause(d, d.pick(d.pools.verbs(name)))


def act(d: Draw) -> Clause:
    """The girl is reading a book."""
    return clause(d, d.pick(d.pools.verbs("acts")))


activity, meeting, event, giving, going = map(_frame, ("activity", "meets", "event", "gives", "goes"))


def clause(d: Draw, verb: Verb, tenses: str = "", subject: NounPhrase | None = None, plain: bool = False) -> Clause:
    """Sample a clause of a verb; `plain` is an affirmative statement in default order, for nesting."""
    initial = d.pick(tenses or (EASY if d.level == 1 else TENSES)[verb.frame])
    if verb.frame == "event" and initial == "m" and verb.key not in WILFUL:
        initial = "f"
    if ("once" in verb.tags and initial in "hn") or ("mishap" in verb.tags and not plain):
        initial = "p"
    if ("instant" in verb.tags and initial == "r") or ("unwilled" in verb.tags and initial in "md"):
        initial = "p"
    roll = 1.0 if plain else d.random()
    if "once" in verb.tags and initial == "r" and roll < 0.14:
        initial = "p"
    negated = initial == "n" or (roll < 0.14 and initial != "h")
    asks = not negated and 0.14 <= roll < 0.25
    gap = d.pick(("subject", "object", "place", "time")) if not negated and d.level > 1 and 0.25 <= roll < 0.34 else ""
    tense: Tense = {"r": "progressive", "p": "past", "d": "past", "f": "future"}.get(initial, "present")  # type: ignore[assignment]
    habit = initial in "hn"
    known = negated or asks or bool(gap) or habit
    if not subject:
        subject = d.subject(verb.subject, known or plain, not known and not plain and initial != "r", asks or bool(gap))
    made = Clause(d.at(), subject, verb, tense, negated=negated)
    if initial in "md":
        modal = d.pick(PAST_MODALS if initial == "d" else MODALS)
        if modal == "can" and initial == "d" and not negated:  # differs from "was able to"
            modal = "want"
        made = made._replace(modal=modal)
    if verb.object:
        made = made._replace(object=d.thing(verb, subject, negated, habit))
    if verb.frame == "gives":
        used = subject.head.key
        other = d.subject(PERSON, known=True)
        while other.head.key == used or other.second or isinstance(other.head, Pronoun):
            other = d.subject(PERSON, known=True)
        made = made._replace(recipient=other)
    made = _adverbials(d, made, initial, plain)
    if asks:
        return made._replace(mood="question", fronted=False)
    return _asking(made, gap) if gap else made


def _adverbials(d: Draw, c: Clause, initial: str, plain: bool) -> Clause:
    """Add time, place and manner as the verb and tense allow."""
    verb, time, spot = c.verb, None, None
    if initial == "h":
        rare = "slow" in verb.tags and d.level > 1
        time = d.adverb("often" if d.chance(0.6) else "weekly" if rare else "daily")
    elif initial == "d" or (initial == "p" and verb.frame == "activity"):
        time = d.time(verb, "past", dated=False)  # in Chinese only the adverb marks the past
    elif initial in "pf" and d.chance(0.45):
        time = d.time(verb, c.tense, dated=not c.negated)
    bare = c.negated and (initial == "r" or (initial == "n" and c.object))
    if verb.frame == "goes" or (d.chance(0.4) and not bare and fits(c)):
        spot = d.spot(verb)
    manner = None
    if verb.manner and d.level > 1 and not c.negated and not spot and d.chance(0.3):
        kinds = tuple(kind for kind in sorted(verb.manner) if d.pools.adverbs(kind))
        manner = d.adverb(d.pick(kinds)) if kinds else None
    fronted = bool(time and time.kind not in ("often", "daily", "weekly") and not plain and d.chance(0.3))
    return c._replace(time=time, spot=spot, manner=manner, fronted=fronted)


def fits(c: Clause) -> bool:
    """Whether the object is sold in shops, for verbs of trading."""
    thing = c.object.head if c.object else None
    if isinstance(thing, Noun) and thing.classes & ELSEWHERE:
        return False
    return "shop" not in c.verb.where or not isinstance(thing, Noun) or bool(thing.classes & GOODS)


def _asking(c: Clause, gap: str) -> Clause:
    """Turn the clause into a question for `gap`, or a yes-no question if it has no such part."""
    c = c._replace(fronted=False)
    thing = c.object
    single = thing and isinstance(thing.head, Noun) and not thing.measured
    if gap == "subject" and not (isinstance(c.subject.head, Noun) and "animal" in c.subject.head.classes):
        alone = c.subject._replace(number=1, second=None, head=_one(c))
        return c._replace(mood="question", gap="subject", subject=alone)
    if gap == "object" and single and c.verb.en_particle != "for" and c.verb.key != "tell":
        return c._replace(mood="question", gap="object")
    if gap == "place" and c.spot and (c.tense == "progressive" or not c.time):
        return c._replace(mood="question", gap="place")
    if gap == "time" and c.time and c.tense == "future":
        return c._replace(mood="question", gap="time")
    return c._replace(mood="question")


def _one(c: Clause) -> Noun | Pronoun:
    """The head of a questioned subject: third person singular."""
    return c.subject.head if isinstance(c.subject.head, Noun) else SUBJECT_PRONOUNS[2]


def state(d: Draw) -> Clause:
    """The girl loves the dog. She has two cats."""
    verb = d.pick(d.pools.verbs("state"))
    roll = d.random()
    negated, asks = roll < 0.18, 0.18 <= roll < 0.33
    subject = d.subject(verb.subject, True, not negated and not asks, asks)
    if verb.key in ("have", "need"):
        noun = d.noun(verb.object, subject.head.key)
        thing = d.phrase(noun, known=False) if not negated and not asks else NounPhrase(d.at(), noun, "a")
    elif verb.key == "like" and d.chance(0.5):
        noun = d.noun(verb.object - {"person"}, subject.head.key)
        thing = NounPhrase(d.at(), noun, "", 0, d.adjective(noun, 0.3))
    else:
        thing = d.thing(verb, subject, True, False)
        if isinstance(thing.head, Noun) and thing.determiner == "a":
            thing = thing._replace(determiner="the")
    made = Clause(d.at(), subject, verb, negated=negated, object=thing)
    return made._replace(mood="question") if asks else made


def living(d: Draw) -> Clause:
    """Anna lives in Berlin."""
    verb = d.pick(d.pools.verbs("lives"))
    roll = d.random()
    subject = d.subject(verb.subject, known=True, asked=roll > 0.8)
    made = Clause(d.at(), subject, verb, negated=roll < 0.2, spot=d.spot(verb))
    return made._replace(mood="question") if roll > 0.8 else made


def quality(d: Draw, plain: bool = False) -> Clause:
    """The dog is big. Anna was tired yesterday."""
    be = d.pools.verbs("is")[0]
    adjective = d.pick(d.pools.lexicon.adjectives)
    mood = "mood" in adjective.kind
    roll = 1.0 if plain else d.random()
    subject = d.subject(adjective.classes, True, not plain and roll > 0.3, 0.15 <= roll < 0.3)
    subject = subject._replace(adjective=None)  # "the black hat is white"
    made = Clause(d.at(), subject, be, negated=roll < 0.15, quality=Quality(adjective))
    if d.level > 1 and 0.3 < roll < 0.4 and "colour" not in adjective.kind:
        made = made._replace(quality=Quality(adjective, "very"))
    elif 0.15 <= roll < 0.3:
        made = made._replace(mood="question")
    if mood and d.chance(0.5):
        kind = d.pick(("past", "today", "future") if d.level > 1 else ("past", "today"))
        tense: Tense = {"past": "past", "today": "present", "future": "future"}[kind]  # type: ignore[assignment]
        made = made._replace(
            tense=tense, time=d.adverb(kind), fronted=made.mood == "statement" and not plain and d.chance(0.3)
        )
    return made


def compared(d: Draw) -> Clause:
    """The horse is bigger than the dog."""
    adjective = d.pick(d.pools.lexicon.adjectives)
    while adjective.en_comparative == "." or "mood" in adjective.kind:
        adjective = d.pick(d.pools.lexicon.adjectives)
    classes = d.noun(adjective.classes).classes
    kinds = sorted((adjective.classes & classes) - {"sized"} or classes & KINDS)  # compare like with like
    if not kinds:
        return quality(d)
    kind = frozenset((d.pick(kinds),))
    subject, other = d.subject(kind, known=True), d.subject(kind, known=True)
    if other.head.key == subject.head.key or isinstance(other.head, Pronoun) or other.second:
        return quality(d)
    if any(isinstance(p.head, Noun) and not p.head.classes & adjective.classes for p in (subject, other)):
        return quality(d)
    degree = "more" if d.chance(0.75) else "equal"
    subject, other = subject._replace(adjective=None), other._replace(adjective=None)
    return Clause(d.at(), subject, d.pools.verbs("is")[0], quality=Quality(adjective, degree, other))  # type: ignore[arg-type]


def located(d: Draw) -> Clause:
    """The key is on the table. The dog is in the garden."""
    be = d.pools.verbs("is")[0]._replace(frame="located")
    if d.chance(0.5):
        made = existing(d, known=True)
        return made._replace(verb=be)
    home = frozenset(("home", "inside", "outside", "visitable"))
    subject = d.subject(frozenset(("person", "pet")), known=True, asked=True)
    made = Clause(d.at(), subject, be, spot=Spot(d.at(), d.pick(d.pools.places(home))))
    roll = d.random()
    if roll < 0.3:
        return made._replace(tense="past", time=d.adverb("past"))
    return made._replace(negated=roll < 0.45, mood="question" if roll > 0.85 else "statement")


def existing(d: Draw, known: bool = False) -> Clause:
    """There are three books on the table."""
    be = d.pools.verbs("is")[0]._replace(frame="exists")
    subject = d.phrase(d.noun(frozenset(("volume", "dish", "tool", "fruit", "wearable"))), known)
    table = Spot(d.at(), d.noun(frozenset(("surface",))))
    made = Clause(d.at(), subject, be, spot=table)
    if not d.chance(0.15):
        return made
    if subject.determiner == "some":  # "are there newspapers on the table?"
        made = made._replace(subject=subject._replace(determiner=""))
    return made._replace(mood="question")


def request(d: Draw) -> Clause:
    """Please do not open the window."""
    verb = d.pick(d.pools.verbs("acts"))
    noun = d.noun(verb.object)
    while noun.classes & {"drink", "massfood"}:
        verb = d.pick(d.pools.verbs("acts"))
        noun = d.noun(verb.object)
    thing = d.phrase(noun, known=True)
    if "outfit" in verb.object:
        thing = thing._replace(number=1)
    if noun.classes & {"clothing"} and thing.determiner in POSSESSIVES:
        thing = thing._replace(determiner="your")
    elif verb.key in FOREIGN and thing.determiner in POSSESSIVES and "kin" not in noun.classes:
        thing = thing._replace(determiner="the")
    you = NounPhrase(d.at(), SUBJECT_PRONOUNS[1])
    return Clause(d.at(), you, verb, object=thing, mood="request", negated=d.chance(0.3))
