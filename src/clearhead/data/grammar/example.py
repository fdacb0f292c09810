"""A sentence in three languages, with alignments, labels, entities and questions."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from clearhead.data.grammar import chinese, english, german
from clearhead.data.grammar.entries import Language, Name, Noun, Place
from clearhead.data.grammar.nodes import FINAL, HEAD, NUMBER, STEP, Clause, NounPhrase, Word

REALIZERS = {"en": english.sentence, "de": german.sentence, "zh": chinese.sentence}
TENSES: dict[str, Literal["past", "present", "future"]] = {"past": "past", "future": "future"}
TIMES = {"date": "DATE", "clock": "TIME", "money": "MONEY"}
HABITS = ("often", "daily", "weekly")  # times that "when" does not ask for
Entity = tuple[int, int, str]


class Question(NamedTuple):
    """A question, its answer (empty: unanswerable), the answer's start offset, and the question's meaning."""

    text: str
    answer: str
    start: int
    clause: Clause


class Example:
    """One sentence of the grammar; realizations are lazy and cached."""

    def __init__(self, clause: Clause) -> None:
        self.clause = clause
        self._words: dict[Language, tuple[Word, ...]] = {}
        self._questions: dict[Language, tuple[Question, ...]] = {}

    def _realize(self, language: Language) -> tuple[Word, ...]:
        if language not in self._words:
            self._words[language] = realize(self.clause, language)
        return self._words[language]

    def words(self, language: Language) -> tuple[str, ...]:
        """The words and punctuation of the sentence; Chinese is segmented."""
        return tuple(word.text for word in self._realize(language))

    def text(self, language: Language) -> str:
        """The sentence as text."""
        return join(self.words(language), language)

    def alignment(self, source: Language, target: Language) -> tuple[tuple[int, int], ...]:
        """Sorted pairs (i, j) of source word i and target word j that express a common part."""
        target_words: dict[int, list[int]] = {}
        for j, word in enumerate(self._realize(target)):
            for part in word.parts:
                target_words.setdefault(part, []).append(j)
        pairs = {
            (i, j)
            for i, word in enumerate(self._realize(source))
            for part in word.parts
            for j in target_words.get(part, ())
        }
        return tuple(sorted(pairs))

    @property
    def tense(self) -> Literal["past", "present", "future"]:
        """The tense of the main clause."""
        return TENSES.get(self.clause.tense, "present")

    @property
    def sentiment(self) -> Literal["positive", "negative", "neutral"]:
        """The sign of the summed sentiment of the adjectives."""
        total = sum(_sentiments(self.clause))
        return "positive" if total > 0 else "negative" if total < 0 else "neutral"

    def entities(self, language: Language) -> tuple[Entity, ...]:
        """Entities (start word, end word, kind): PERSON, PLACE, DATE, TIME, NUMBER and MONEY."""
        words = self._realize(language)
        spans = []
        for kind, parts in _entities(self.clause):
            at = [i for i, word in enumerate(words) if parts.intersection(word.parts)]
            if at:  # exclude the measure word after a numeral
                spans.append((at[0], at[0] + 1 if kind == "NUMBER" else at[-1] + 1, kind))
        return tuple(sorted(spans))

    def questions(self, language: Language) -> tuple[Question, ...]:
        """The questions that a simple statement answers, each also without its time or place."""
        if language not in self._questions:
            self._questions[language] = tuple(self._ask(language))
        return self._questions[language]

    def _ask(self, language: Language) -> Iterator[Question]:
        words = self._realize(language)
        for clause, parts in _questions(self.clause):
            at = [i for i, word in enumerate(words) if word.parts and parts.issuperset(word.parts)]
            if not at or at != list(range(at[0], at[-1] + 1)):
                continue
            if clause.gap == "time" and at[0] and not words[at[0] - 1].parts:
                at.insert(0, at[0] - 1)  # an article only in English: the day before yesterday
            if (
                clause.gap == "time" and clause.tense == "past" and language == "zh"
            ):  # the 是 … 的 construction is not covered
                continue
            texts = self.words(language)
            answer = join(texts[at[0] : at[-1] + 1], language)
            before = join(texts[: at[0]], language)
            start = len(before) + (1 if before and language != "zh" else 0)
            yield Question(told(clause, language), answer, start, clause)


def realize(clause: Clause, language: Language) -> tuple[Word, ...]:
    """Realize a sentence with capitalization and final punctuation."""
    words = REALIZERS[language](clause)
    mark = "?" if clause.mood == "question" else "."
    if language == "zh":
        mark = {"?": "？", ".": "。"}[mark]
    first = words[0]
    words[0] = Word(first.text[0].upper() + first.text[1:], first.parts)
    if words[-1].text == ",":  # no closing comma after a final relative clause
        words.pop()
    return (*words, Word(mark, (FINAL,)))


def told(clause: Clause, language: Language) -> str:
    """Realize a clause as text."""
    return join([word.text for word in realize(clause, language)], language)


def join(words: tuple[str, ...] | list[str], language: Language) -> str:
    """Join words to text: no spaces in Chinese, none before punctuation elsewhere."""
    if language == "zh":
        return "".join(words)
    return " ".join(words).replace(" ,", ",").replace(" .", ".").replace(" ?", "?")


def together(group: Sequence[Example], language: Language) -> str:
    """Join sentences to one text."""
    return ("" if language == "zh" else " ").join(example.text(language) for example in group)


def clauses(clause: Clause) -> Iterator[Clause]:
    """Yield the clause and its nested clauses."""
    yield clause
    for phrase in (clause.subject, clause.object):
        if phrase and phrase.relative:
            yield from clauses(phrase.relative)
    if clause.inner:
        yield from clauses(clause.inner)


def phrases(clause: Clause) -> Iterator[NounPhrase]:
    """Yield the realized noun phrases of a clause (not interrogatives and relative pronouns)."""
    if clause.gap != "subject" and clause.verb.frame != "rains" and clause.mood != "request":
        yield clause.subject
        if clause.subject.second:
            yield clause.subject.second
    if clause.object and clause.gap != "object":
        yield clause.object
    if clause.recipient:
        yield clause.recipient
    if clause.quality and clause.quality.than:
        yield clause.quality.than


def _sentiments(clause: Clause) -> Iterator[int]:
    value = {"+": 1, "-": -1, "0": 0}
    for part in clauses(clause):
        for phrase in phrases(part):
            if phrase.adjective:
                yield value[phrase.adjective.sentiment]
        if part.quality:
            sign = value[part.quality.adjective.sentiment]
            yield -sign if part.negated else sign


def _entities(clause: Clause) -> Iterator[tuple[str, set[int]]]:
    for part in clauses(clause):
        for phrase in phrases(part):
            if isinstance(phrase.head, Name):
                yield "PERSON", {phrase.at + HEAD}
            elif isinstance(phrase.head, Noun) and phrase.number > 1:
                yield "NUMBER", {phrase.at + NUMBER}
        if part.spot and part.gap != "place" and isinstance(part.spot.place, Place) and not part.spot.place.gender:
            yield "PLACE", {part.spot.at + HEAD}
        for adverbial in (part.time, part.span):
            if adverbial and part.gap != "time" and adverbial.kind in TIMES:
                yield TIMES[adverbial.kind], {adverbial.at + 1, adverbial.at + 2}


def _questions(clause: Clause) -> Iterator[tuple[Clause, set[int]]]:
    """Yield the questions that a simple statement answers, and the parts of the answer."""
    simple = clause.mood == "statement" and not clause.negated and not clause.inner and not clause.modal
    if not simple or clause.verb.frame not in ("activity", "acts", "meets", "goes", "gives", "event", "state"):
        return
    if clause.subject.relative or (clause.object and clause.object.relative) or clause.span:
        return
    ask = clause._replace(mood="question", fronted=False)
    head = clause.subject.head
    person = isinstance(head, Name) or (isinstance(head, Noun) and "person" in head.classes)
    if person and clause.subject.determiner != "every":
        alone = clause.subject._replace(number=1, second=None)
        yield from _shorter(ask._replace(gap="subject", subject=alone), _range(clause.subject))
    thing = clause.object
    if (
        thing
        and isinstance(thing.head, (Name, Noun))
        and clause.verb.en_particle != "for"
        and clause.verb.key != "tell"
    ):
        yield from _shorter(ask._replace(gap="object"), _range(thing))
    if clause.spot and (clause.tense == "progressive" or not clause.time):
        yield ask._replace(gap="place"), set(range(clause.spot.at, clause.spot.at + STEP))
    if clause.time and clause.time.kind not in HABITS and clause.tense in ("past", "future"):
        yield from _shorter(ask._replace(gap="time"), set(range(clause.time.at, clause.time.at + STEP)))


def _shorter(question: Clause, parts: set[int]) -> Iterator[tuple[Clause, set[int]]]:
    """Yield a question, and the same without its time or place."""
    yield question, parts
    if question.time and question.gap != "time":
        yield question._replace(time=None), parts
    if question.spot and question.verb.frame != "goes":
        yield question._replace(spot=None), parts


def _range(phrase: NounPhrase) -> set[int]:
    parts = set(range(phrase.at, phrase.at + STEP))
    return parts | _range(phrase.second) if phrase.second else parts
