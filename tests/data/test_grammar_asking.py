"""Questions about texts of the embedded grammar are answered by exactly one sentence, or by none."""

import re
from collections import Counter
from random import Random

import pytest

from clearhead.config.data import Corpus
from clearhead.data.formats import ANSWERS
from clearhead.data.grammar import LANGUAGES, Grammar
from clearhead.data.grammar.asking import ask, may_answer
from clearhead.data.grammar.entries import Name
from clearhead.data.grammar.example import clauses
from clearhead.data.grammar.nodes import NounPhrase, Pronoun
from clearhead.data.synthetic import records

FULL = Grammar(3)
SAMPLE = [FULL.example("train", index) for index in range(3000)]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("sentences", [1, 4])
def test_a_question_is_answered_once_or_not_at_all(language: str, sentences: int) -> None:
    corpus = Corpus(format="embedded", languages=(language,), count=600, sentences=sentences)  # type: ignore[arg-type]
    ends = {"en": r"(?<=[.?]) ", "de": r"(?<=[.?])(?<!\d\.) ", "zh": r"(?<=[。？])(?=.)"}[language]  # am 6. Mai
    examples = {each.text(language): each for each in SAMPLE[:600]}
    answers = {text: {q.text: q.answer for q in each.questions(language)} for text, each in examples.items()}
    sizes, gaps, without, confused = Counter[int](), Counter[str](), 0, 0
    rows = [record.values for record in records(corpus, ANSWERS)]
    for context, question, answer, start in rows:
        assert context[start : start + len(answer)] == answer
        parts = re.split(ends, context)
        own = [answers[part][question] for part in parts if question in answers[part]]
        assert own == ([answer] if answer else [])
        sizes[len(parts)] += 1
        gaps[question.split()[0]] += 1
        without += not answer
        verbs = Counter(examples[part].clause.verb.key for part in parts)
        confused += len(parts) > 1 and max(verbs.values()) > 1
    assert set(sizes) == set(range(1, sentences + 1))
    assert 0.15 < without / len(rows) < 0.4
    assert sentences == 1 or confused > 0.2 * len(rows), "the verb alone does not identify the sentence"
    assert language != "en" or {"Who", "What", "Where", "When"} == set(gaps)


def test_questions_come_with_and_without_time_and_place() -> None:
    asked = {q.text: q.answer for each in SAMPLE for q in each.questions("en")}
    assert asked["When did the king sell seven jackets?"] == "last Friday"
    assert asked["Who sold seven jackets last Friday?"] == asked["Who sold seven jackets?"] == "The king"
    whens = [answer for question, answer in asked.items() if question.startswith("When")]
    assert {"the day before yesterday", "yesterday"} <= set(whens)
    assert not any(answer.startswith(("day ", "week ", "every ", "often")) for answer in whens)


def test_may_answer_compares_verb_arguments_and_the_requested_part() -> None:
    plain = [each for each in SAMPLE if each.questions("en") and each.clause.verb.frame == "acts"]
    plain = [each for each in plain if each.clause.time and each.clause.tense == "past"]
    one = next(each for each in plain if isinstance(each.clause.subject.head, Name) and not each.clause.subject.second)
    clause, (who, *_) = one.clause, one.questions("en")
    when = next(question for question in one.questions("en") if question.clause.gap == "time")
    assert clause.object is not None
    somebody = next(each.clause.subject for each in plain if each.clause.subject.head != clause.subject.head)
    something = next(each.clause.object for each in plain if each.clause.object.head != clause.object.head)  # type: ignore[union-attr]
    it = NounPhrase(0, Pronoun("they"))
    assert who.clause.gap == "subject"
    for other, answers_who, answers_when in (
        (clause, True, True),
        (clause._replace(negated=True), True, True),
        (clause._replace(time=None), True, False),
        (clause._replace(subject=somebody), True, False),
        (clause._replace(object=something), False, False),
        (clause._replace(object=it), True, True),
        (clause._replace(subject=it), True, True),
        (clause._replace(verb=clause.verb._replace(key="another")), False, False),
    ):
        assert may_answer(who.clause, other) == answers_who
        assert may_answer(when.clause, other) == answers_when


def test_no_question_has_two_answers() -> None:
    examples = SAMPLE[:800]
    by_text = {each.text("en"): each for each in examples}
    for _, text, questions in ask(examples, "en", 4, Random("0")):
        parts = [by_text[part] for part in re.split(r"(?<=[.?]) ", text)]
        for question in questions:
            fit = [any(may_answer(question.clause, statement) for statement in clauses(part.clause)) for part in parts]
            assert sum(fit) == bool(question.answer)
            assert not question.answer or question.answer in parts[fit.index(True)].text("en")
