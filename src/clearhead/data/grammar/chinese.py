"""Chinese realization: measure words, aspect (了, 正在, 会), negation (不, 没有) and preverbal word order.

A measure word expresses the numeral before it, else the determiner (那 and 只 are both "the"). The definite article
is 那 with a measure word, 那些 in the plural and the suffix 们 for persons; places need no article.
"""

from typing import Literal

from clearhead.data.grammar.entries import Name, Noun
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
    Spot,
    Word,
)

NUMBERS = ("", "一", "两", "三", "四", "五", "六", "七", "八", "九", "十", "十一", "十二")
PRONOUNS = {"I": "我", "you": "你", "he": "他", "she": "她", "we": "我们", "they": "他们"}
POSSESSIVES = {"my": "我", "your": "你", "his": "他", "her": "她", "our": "我们"}
DETERMINERS = {"the": "那", "this": "这", "every": "每", "a": "一"}
MODALS = {"can": "能", "must": "必须", "want": "想", "should": "应该", "may": "可以"}


def sentence(clause: Clause) -> list[Word]:
    """Realize a main clause with its subordinate clause, without the final punctuation."""
    if not clause.inner:
        return _clause(clause)
    inner, link = clause.inner, (clause.at + LINK,)
    comma = Word("，", (inner.at + COMMA,))
    if clause.link == "if":
        return [Word("如果", link), *_clause(inner), comma, *_subject(clause), Word("就", link), *_predicate(clause)]
    if clause.link == "when":
        return [*_clause(inner, bare=True), Word("的", link), Word("时候", link), comma, *_clause(clause)]
    if clause.link == "because":
        return [*_clause(clause), comma, Word("因为", link), *_clause(inner)]
    if clause.link == "but":
        return [*_clause(clause), comma, Word("但是", link), *_clause(inner)]
    if clause.link == "to":
        return [*_clause(clause), *_action(inner)]
    return [*_clause(clause), *_clause(inner)]


def noun_phrase(phrase: NounPhrase, bare: bool = False) -> list[Word]:
    """Realize a noun phrase: 那三个红色的苹果; `bare` omits 一 under negation."""
    at, head = phrase.at, phrase.head
    if isinstance(head, Pronoun):
        return [Word(PRONOUNS[head.key], (at,))]
    if isinstance(head, Name):
        words = [Word(head.zh, (at,))]
        if phrase.second:
            words += [Word("和", (at + DETERMINER,)), *noun_phrase(phrase.second)]
        return words
    before, after, clause = [], [], phrase.relative
    people = phrase.determiner == "the" and phrase.number == 0 and "person" in head.classes and not clause
    if not bare and not people:
        before = _determiner(phrase, head)
    if clause:
        of = Word("的", (at + RELATIVE,))
        after = [*_clause(clause, bare=clause.gap == "object"), of]
        if clause.gap == "object":  # 那个女孩买的那本书, but 那个买了书的男人
            before, after = [*after, *before], []
    if phrase.adjective:
        after += [Word(text, (at + ADJECTIVE,)) for text in phrase.adjective.zh.split()]
    noun = Word(head.zh + "们", (at + HEAD, at + DETERMINER)) if people else Word(head.zh, (at + HEAD,))
    return [*before, *after, noun]


def _determiner(phrase: NounPhrase, head: Noun) -> list[Word]:
    """Determiner, numeral and measure word."""
    at, kind, number = phrase.at, phrase.determiner, phrase.number
    part = (at + DETERMINER,)
    words: list[Word] = []
    if kind in POSSESSIVES:
        words = [Word(POSSESSIVES[kind], part), Word("的", part)]
    elif kind == "some":
        return [Word("一些", part)]
    elif kind and number == 0:
        return [Word(DETERMINERS[kind] + "些", part)]
    elif kind:
        words = [Word(DETERMINERS[kind], part)]
    if number > 1:
        words.append(Word(numeral(number), (at + NUMBER,)))
    if phrase.measured:
        return [*words, Word(head.measure, (at + VESSEL,))]
    if number > 1 or kind in DETERMINERS:
        words.append(Word(head.measure, (at + NUMBER,) if number > 1 else part))
    return words


def numeral(number: int) -> str:
    """Write numbers up to twelve in characters."""
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


def adverbial(node: Adverbial) -> list[Word]:
    """Realize an adverbial."""
    return [Word(text, tuple(node.at + offset for offset in offsets)) for text, offsets in node.zh]


def _inside(node: Spot) -> list[Word]:
    """The place with its localizer, without 在: 公园里."""
    side = "上" if isinstance(node.place, Noun) else node.place.zh_at
    after = [Word(side, (node.at + PREPOSITION,))] if side else []
    return [Word(node.place.zh, (node.at + HEAD,)), *after]


def _where(clause: Clause) -> list[Word]:
    if not clause.spot:
        return []
    if clause.gap == "place":
        return [Word("哪里", (clause.spot.at + HEAD,))]
    return _inside(clause.spot)


def _subject(clause: Clause) -> list[Word]:
    """The fronted time, and the subject (for weather and existence, the place)."""
    words = adverbial(clause.time) if clause.time and clause.fronted else []
    if clause.verb.frame in ("rains", "exists"):
        return words + _where(clause)
    if clause.gap == "subject":
        return words if clause.mood == "relative" else [*words, _asked(clause.subject)]
    return words + noun_phrase(clause.subject)


def _asked(phrase: NounPhrase) -> Word:
    person = isinstance(phrase.head, (Name, Pronoun)) or "person" in phrase.head.classes
    return Word("谁" if person else "什么", (phrase.at + HEAD,))


def _clause(clause: Clause, bare: bool = False) -> list[Word]:
    """Subject and predicate; `bare` omits 了 before 的 and 的时候."""
    if clause.mood == "request":
        no = [Word("不要", (clause.at + NEGATION,))] if clause.negated else []
        return [Word("请", (clause.at + PLEASE,)), *no, *_action(clause)]
    words = [*_subject(clause), *_predicate(clause, bare)]
    if clause.mood == "question" and not clause.gap:
        words.append(Word("吗", (clause.at + ASKING,)))
    return words


def _predicate(clause: Clause, bare: bool = False) -> list[Word]:
    """Everything after the subject: time, negation, aspect or modal verb, and the action."""
    at, frame = clause.at, clause.verb.frame
    words: list[Word] = []
    if clause.gap == "time" and clause.time:
        words = [Word("什么时候", (clause.time.at + 1,))]
    elif clause.time and not clause.fronted:
        words = adverbial(clause.time)
    if clause.subject.determiner == "every" and clause.gap != "subject":
        words.append(Word("都", (clause.subject.at + DETERMINER,)))
    no = [Word("不", (at + NEGATION,))] if clause.negated else []
    if clause.quality:
        return words + _quality(clause, no)
    if frame == "costs" and clause.span:
        cost = [Word("的", (at + VERB,)), Word("价格", (at + VERB,)), Word("是", (at + VERB,))]
        return [*words, *cost, *adverbial(clause.span)]
    if frame == "aged" and clause.span:
        return [*words, *adverbial(clause.span)]
    if frame == "exists":
        return [*words, Word("有", (at + VERB,)), *noun_phrase(clause.subject)]
    if clause.modal:
        if clause.modal == "must" and clause.negated:
            modal = [Word("不用", (at + NEGATION, at + MODAL))]
        elif clause.modal == "can" and clause.negated and clause.tense == "past":
            modal = [Word("没能", (at + NEGATION, at + MODAL))]
        else:
            must = "不得不" if clause.modal == "must" and clause.tense == "past" else MODALS[clause.modal]
            modal = [*no, Word(must, (at + MODAL,))]
        return [*words, *modal, *_action(clause)]
    if clause.tense == "future":
        return [*words, *no, Word("会", (at + TENSE,)), *_action(clause)]
    if clause.tense == "progressive" and clause.negated:
        return [*words, Word("没有", (at + NEGATION,)), Word("在", (at + TENSE,)), *_action(clause)]
    if clause.tense == "progressive":
        return [*words, *_action(clause, "doing")]
    if clause.tense == "past" and clause.negated:
        return [*words, Word("没有", (at + NEGATION, at + TENSE)), *_action(clause)]
    if clause.tense == "past":
        manner = clause.manner and clause.mood == "statement"
        timed = frame == "activity" and (manner or clause.mood == "relative")  # here the adverb marks the past
        done = not bare and (not timed or clause.span)
        return [*words, *_action(clause, "done" if done else "past")]
    if clause.verb.zh == "有" and no:
        no = [Word("没", no[0].parts)]
    return [*words, *no, *_action(clause)]


def _action(clause: Clause, aspect: Literal["", "doing", "done", "past"] = "") -> list[Word]:
    """Place, manner, verb and objects; "doing" adds 正在 before, "done" 了 after the verb, "past" no word."""
    at, verb, frame = clause.at, clause.verb, clause.verb.frame
    words: list[Word] = []
    placed = clause.spot and frame not in ("goes", "lives", "located", "rains")
    if aspect == "doing":
        at_place = (clause.spot.at + PREPOSITION,) if placed and clause.spot else ()
        words = [Word("在" if clause.gap == "place" else "正在", (at + TENSE, *at_place))]  # 他在哪里工作
    elif placed and clause.spot:
        words = [Word("在", (clause.spot.at + PREPOSITION,))]
    if placed:
        words += _where(clause)
    if clause.manner:
        words += adverbial(clause.manner)
    if frame == "located" and clause.spot:
        located = Word("在", (at + VERB, at + TENSE, clause.spot.at + PREPOSITION))
        return [*words, located, *_where(clause)]
    people = noun_phrase(clause.recipient) if clause.recipient else []
    things: list[Word] = []
    if clause.object and clause.gap == "object":
        things = [_asked(clause.object)] if clause.mood == "question" else []
    elif clause.object:
        things = noun_phrase(clause.object, bare=clause.negated and clause.object.determiner == "a")
    if verb.zh_before:  # 给他打电话, 给他看一本书
        front, (people, things) = (people, ([], things)) if people else (things, ([], []))
        words += [Word(verb.zh_before, (at + VERB,)), *front]
    parts = (at + VERB, at + TENSE) if aspect == "past" else (at + VERB,)
    short = clause.span or (aspect == "doing" and frame == "acts" and verb.zh_short)  # 正在关门, not 正在关上门
    first, *rest = (verb.zh_short if short else verb.zh).split()
    words.append(Word(first, parts))
    if aspect == "done":
        words.append(Word("了", (at + TENSE,)))
    words += [Word(text, parts) for text in rest]
    if frame == "lives" and clause.spot:
        words.append(Word("在", (clause.spot.at + PREPOSITION,)))
    if frame in ("goes", "lives") and clause.spot:
        goal = clause.gap != "place" and frame == "goes"
        words += [Word(clause.spot.place.zh, (clause.spot.at + HEAD,))] if goal else _where(clause)
    return [*words, *people, *things, *(adverbial(clause.span) if clause.span else [])]


def _quality(clause: Clause, no: list[Word]) -> list[Word]:
    """很大, 不大, 是红色的, 比那只猫大, 和那只猫一样大"""
    at, quality = clause.at, clause.quality
    assert quality
    adjective = [Word(text, (at + QUALITY,)) for text in quality.adjective.zh_predicate.split()]
    be = (at + VERB, at + TENSE) if clause.tense == "past" else (at + VERB,)
    will = [Word("会", (at + TENSE,))] if clause.tense == "future" else []
    if quality.than and quality.degree == "more":
        return [Word("比", (at + THAN,)), *noun_phrase(quality.than), *adjective]
    if quality.than:
        return [Word("和", (at + THAN,)), *noun_phrase(quality.than), Word("一样", (at + THAN,)), *adjective]
    if "colour" in quality.adjective.kind:
        return [*no, Word("是", be), *adjective]
    if no and adjective[0].text == "没用":
        no = [Word("不是", no[0].parts)]
    if no and adjective[0].text == "有":
        no = [Word("没", no[0].parts)]
    if quality.degree == "very":
        return [*will, Word("非常", (at + DEGREE,)), *adjective]
    if no or clause.mood == "question":
        return [*no, *will, *adjective]
    return [*will, Word("很", be), *adjective]
