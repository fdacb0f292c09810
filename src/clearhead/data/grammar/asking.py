"""Reading comprehension: texts of similar sentences, with answerable and unanswerable questions."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from random import Random

from clearhead.data.grammar.entries import Language
from clearhead.data.grammar.example import HABITS, Example, Question, clauses, together, told
from clearhead.data.grammar.nodes import Clause, NounPhrase, Pronoun
from clearhead.data.grammar.split import home, pairs

PARTNERS = ("subject", "object", "recipient")
UNANSWERED = 0.9  # fraction of texts with an unanswerable question, about 3 of 10 questions
TRIES = 6


def ask(
    examples: Sequence[Example], language: Language, sentences: int, dice: Random
) -> Iterator[tuple[int, str, list[Question]]]:
    """Yield for each simple statement its index, a text of up to `sentences` sentences with it, and questions."""
    index = _ExampleIndex(examples, language, dice)
    for number, example in enumerate(examples):
        if not example.questions(language):
            continue
        group = [example]
        for _ in range(int(dice.random() * sentences)):
            other = index.companion(group)
            if all(other is not each for each in group):
                group.insert(int(dice.random() * (len(group) + 1)), other)
        questions = index.answered(group)
        if dice.random() < UNANSWERED:
            questions += index.unanswered(group)
        yield number, together(group, language), questions


def may_answer(question: Clause, other: Clause) -> bool:
    """Whether a clause could answer a question: same verb, compatible participants, and the requested part."""
    if question.verb.key != other.verb.key:
        return False
    if (question.gap == "time" and not other.time) or (question.gap == "place" and not other.spot):
        return False
    return all(_compatible(getattr(question, part), getattr(other, part)) for part in PARTNERS if part != question.gap)


def _compatible(one: NounPhrase | None, other: NounPhrase | None) -> bool:
    """Whether two phrases can refer to the same entity; a pronoun matches anyone."""
    heads = _heads(one), _heads(other)
    return not all(heads) or bool(heads[0] & heads[1])


def _heads(phrase: NounPhrase | None) -> set[str]:
    if phrase is None or isinstance(phrase.head, Pronoun):
        return set()
    return {phrase.head.key} | _heads(phrase.second)


def _keys(clause: Clause) -> list[str]:
    """Index keys of a statement: its verb and the heads of its phrases."""
    heads = set[str]().union(*(_heads(getattr(clause, part)) for part in PARTNERS))
    return [f"to {clause.verb.key}", *sorted(heads)]


class _ExampleIndex:
    """Examples, indexed by the verbs and participants of simple statements."""

    def __init__(self, examples: Sequence[Example], language: Language, dice: Random):
        self.examples, self.language, self.dice = examples, language, dice
        self.plain = [example for example in examples if example.questions(language)]
        self.about = defaultdict[str, list[Example]](list)
        for example in self.plain:
            for key in _keys(example.clause):
                self.about[key].append(example)

    def like(self, clause: Clause) -> Example:
        """Sample a statement that shares the verb or a participant; any statement if there is none."""
        keys = _keys(clause)
        return self.dice.choice(
            self.about.get(keys[0] if self.dice.random() < 0.5 else self.dice.choice(keys)) or self.plain
        )

    def companion(self, group: list[Example]) -> Example:
        """Sample a sentence to add to a group: mostly one similar to a member."""
        roll = self.dice.random()
        if roll < 0.3:
            return self.dice.choice(self.examples if roll < 0.15 else self.plain)
        return self.like(self.dice.choice(group).clause)

    def answered(self, group: list[Example]) -> list[Question]:
        """One question per statement that no other sentence could answer."""
        questions = []
        for position, example in enumerate(group):
            others = [clause for other in group if other is not example for clause in clauses(other.clause)]
            fit = [q for q in example.questions(self.language) if not any(may_answer(q.clause, o) for o in others)]
            if fit:
                gap = self.dice.choice(sorted({question.clause.gap for question in fit}))
                question = self.dice.choice([question for question in fit if question.clause.gap == gap])
                before = len(together(group[: position + 1], self.language)) - len(example.text(self.language))
                questions.append(question._replace(start=before + question.start))
        return questions

    def unanswered(self, group: list[Example]) -> list[Question]:
        """An unanswerable question: a mix of two statements, about a missing part, or of a similar statement."""
        statements = [clause for example in group for clause in clauses(example.clause)]
        plain = [example.clause for example in group if example.questions(self.language)]
        for _ in range(TRIES):
            clause = self.dice.choice(plain)
            roll = self.dice.random()
            question = self.mixed(clause, self.dice.choice(plain)) if roll < 0.6 else None
            question = self.left_open(clause) if roll > 0.8 else question
            question = question or self.dice.choice(self.like(clause).questions(self.language)).clause
            if not any(may_answer(question, each) for each in statements):
                return [Question(told(question, self.language), "", 0, question)]
        return []

    def mixed(self, clause: Clause, other: Clause) -> Clause | None:
        """A question that combines one statement with the object or subject of another."""
        asked = clause._replace(mood="question", fronted=False, time=None, spot=None)
        if clause.verb.frame == "goes" or not clause.object or isinstance(clause.object.head, Pronoun):
            return None
        candidates = []
        thing, person = other.object, other.subject
        if thing and not isinstance(thing.head, Pronoun) and clause.verb.object & thing.head.classes:
            alone = clause.subject._replace(number=1, second=None)
            candidates.append(asked._replace(gap="subject", subject=alone, object=thing))
        if not isinstance(person.head, Pronoun) and clause.verb.subject & person.head.classes:
            candidates.append(asked._replace(gap="object", subject=person))
        known = {home(pair) for each in (clause, other) for pair in pairs(each)} | {"train"}
        candidates = [question for question in candidates if {home(pair) for pair in pairs(question)} <= known]
        return self.dice.choice(candidates) if candidates else None

    def left_open(self, clause: Clause) -> Clause | None:
        """A question for a time or place that the statement does not mention."""
        if clause.verb.frame == "state" or clause.time:
            return None
        lent = self.dice.choice(self.plain).clause
        question = clause._replace(mood="question", fronted=False)
        if lent.spot and not clause.spot and clause.verb.frame != "event":
            return question._replace(gap="place", spot=lent.spot)
        tenses = ("future",) if self.language == "zh" else ("past", "future")
        if lent.time and lent.time.kind not in HABITS and clause.tense in tenses:
            return question._replace(gap="time", time=lent.time)
        return None
