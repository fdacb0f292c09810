"""Hand-written sentences, and rules of English and Chinese: do-support, agreement, measure words, aspect."""

from itertools import pairwise

import pytest

from clearhead.data.grammar import Example, Grammar, english
from clearhead.data.grammar.english import third_person
from clearhead.data.grammar.entries import Noun, load
from clearhead.data.grammar.example import clauses, phrases
from clearhead.data.grammar.nodes import Clause, NounPhrase, Pronoun, Quality, Spot

GRAMMAR = Grammar()
SAMPLE = [GRAMMAR.example("train", index, seed=9) for index in range(4000)]
WORDS = load(3)
VERBS = {verb.key: verb for verb in WORDS.verbs}
NOUNS = {noun.key: noun for noun in WORDS.nouns}
ADJECTIVES = {adjective.en: adjective for adjective in WORDS.adjectives}
PLACES = {place.key: place for place in WORDS.places}


def split_words(words: str) -> set[str]:
    return set(words.split())


def _realize_words(verb: str, subject: NounPhrase, **more: object) -> list[str]:
    clause = Clause(100, subject, VERBS[verb], **more)  # type: ignore[arg-type]
    return [Example(clause).text(language) for language in ("en", "de", "zh")]


def _np(at: int, key: str, determiner: str = "the", number: int = 1, **more: object) -> NounPhrase:
    return NounPhrase(at, NOUNS[key], determiner, number, **more)  # type: ignore[arg-type]


GIRL, DOOR, HE = _np(1, "girl"), _np(20, "door"), NounPhrase(1, Pronoun("he"))
PARK = Spot(40, PLACES["park"])
EXPECTED = [
    (("open", GIRL, {"object": DOOR, "tense": "past", "negated": True}),
     "The girl did not open the door. Das Mädchen hat die Tür nicht aufgemacht. 那个女孩没有打开那扇门。"),
    (("open", GIRL, {"object": DOOR, "tense": "progressive"}),
     "The girl is opening the door. Das Mädchen macht gerade die Tür auf. 那个女孩正在打开那扇门。"),
    (("open", GIRL, {"object": DOOR, "tense": "future", "mood": "question"}),
     "Will the girl open the door? Wird das Mädchen die Tür aufmachen? 那个女孩会打开那扇门吗？"),
    (("open", HE, {"object": _np(20, "window"), "mood": "request"}),
     "Please open the window. Mach bitte das Fenster auf. 请打开那扇窗户。"),
    (("buy", HE, {"object": _np(20, "apple", "a"), "tense": "past", "negated": True}),
     "He did not buy an apple. Er hat keinen Apfel gekauft. 他没有买苹果。"),
    (("help", GIRL, {"object": _np(20, "boy"), "tense": "past"}),
     "The girl helped the boy. Das Mädchen hat dem Jungen geholfen. 那个女孩帮助了那个男孩。"),
    (("wait for", HE, {"object": _np(20, "bus"), "spot": PARK, "tense": "progressive"}),
     "He is waiting for the bus in the park. Er wartet gerade im Park auf den Bus. 他正在公园里等那辆公交车。"),
    (("give", GIRL, {"object": _np(20, "book", "a"), "recipient": _np(60, "child", "the", 0), "tense": "past"}),
     "The girl gave the children a book. Das Mädchen hat den Kindern ein Buch gegeben. 那个女孩给了孩子们一本书。"),
    (("go", HE, {"spot": PARK, "tense": "past"}),
     "He went to the park. Er ist in den Park gegangen. 他去了公园。"),
    (("sleep", GIRL, {"spot": PARK, "modal": "must", "negated": True}),
     "The girl does not have to sleep in the park. Das Mädchen muss nicht im Park schlafen. "
     "那个女孩不用在公园里睡觉。"),
    (("drink", HE, {"object": _np(20, "tea", "", 2, measured=True), "tense": "past"}),
     "He drank two cups of tea. Er hat zwei Tassen Tee getrunken. 他喝了两杯茶。"),
    (("pick up", GIRL, {"object": NounPhrase(20, Pronoun("he")), "tense": "future"}),
     "The girl will pick him up. Das Mädchen wird ihn abholen. 那个女孩会接他。"),
    (("call", HE, {"object": NounPhrase(20, Pronoun("she")), "tense": "past"}),
     "He called her. Er hat sie angerufen. 他给她打了电话。"),
    (("have", GIRL, {"object": _np(20, "dog", "a"), "negated": True}),
     "The girl does not have a dog. Das Mädchen hat keinen Hund. 那个女孩没有狗。"),
    (("read", GIRL, {"object": _np(20, "book"), "tense": "past", "mood": "question", "gap": "object"}),
     "What did the girl read? Was hat das Mädchen gelesen? 那个女孩读了什么？"),
    (("read", _np(1, "man"), {"object": _np(20, "book"), "tense": "past", "mood": "question", "gap": "subject"}),
     "Who read the book? Wer hat das Buch gelesen? 谁读了那本书？"),
    (("close", GIRL, {"object": DOOR, "tense": "progressive"}),
     "The girl is closing the door. Das Mädchen macht gerade die Tür zu. 那个女孩正在关那扇门。"),
    (("work", HE, {"spot": PARK, "tense": "progressive", "mood": "question", "gap": "place"}),
     "Where is he working? Wo arbeitet er gerade? 他在哪里工作？"),
    (("open", GIRL, {"object": DOOR, "tense": "past", "modal": "can", "negated": True}),
     "The girl could not open the door. Das Mädchen konnte die Tür nicht aufmachen. 那个女孩没能打开那扇门。"),
    (("open", GIRL, {"object": DOOR, "modal": "may"}),
     "The girl is allowed to open the door. Das Mädchen darf die Tür aufmachen. 那个女孩可以打开那扇门。"),
    (("be", _np(1, "map"), {"negated": True, "quality": Quality(ADJECTIVES["useless"])}),
     "The map is not useless. Die Landkarte ist nicht nutzlos. 那张地图不是没用。"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "expected"), EXPECTED, ids=[text for _, text in EXPECTED])
def test_hand_written_sentences(plan: tuple[str, NounPhrase, dict[str, object]], expected: str) -> None:
    verb, subject, more = plan
    assert " ".join(_realize_words(verb, subject, **more)) == expected


def test_verbs_and_their_particles_are_aligned_across_languages() -> None:
    past = Example(Clause(100, GIRL, VERBS["open"], "past", object=DOOR, negated=True))
    left, right = past.words("en"), past.words("de")
    pairs = {(left[i], right[j]) for i, j in past.alignment("en", "de")}
    nouns = {("The", "Das"), ("girl", "Mädchen"), ("the", "die"), ("door", "Tür"), (".", ".")}
    assert pairs == nouns | {("did", "hat"), ("not", "nicht"), ("open", "aufgemacht")}
    chinese = past.words("zh")
    pairs = {(left[i], chinese[j]) for i, j in past.alignment("en", "zh")}
    assert {("did", "没有"), ("not", "没有"), ("open", "打开"), ("the", "那"), ("the", "扇")} <= pairs


@pytest.mark.parametrize(
    ("base", "third"),
    [("go", "goes"), ("watch", "watches"), ("try", "tries"), ("play", "plays"), ("have", "has"), ("fix", "fixes")],
)
def test_english_third_person(base: str, third: str) -> None:
    assert third_person(base) == third


def test_english_subjects_and_verbs_agree() -> None:
    be = {"I": "am", "you": "are", "he": "is", "she": "is", "we": "are", "they": "are"}
    seen = set()
    for example in SAMPLE:
        c = example.clause
        if c.mood != "statement" or c.inner or c.subject.relative or c.verb.frame in ("exists", "rains"):
            continue
        words = [word.lower() for word in example.words("en")]
        head = c.subject.head
        single = c.subject.number == 1 and not c.subject.second
        if c.tense == "progressive":
            expected = be[head.key] if isinstance(head, Pronoun) else "is" if single else "are"
            assert words[words.index(c.verb.en_ing) - 1 - c.negated] == expected, example.text("en")
            seen.add(expected)
        if c.tense == "present" and c.verb.frame == "state" and not c.negated:
            third = head.key in ("he", "she") if isinstance(head, Pronoun) else single
            base = c.verb.en
            assert ({"have": "has", "miss": "misses"}.get(base, base + "s") if third else base) in words, example.text(
                "en"
            )
            seen.add(third)
    assert seen == {"am", "is", "are", True, False}


def test_english_negations_and_questions_have_an_auxiliary() -> None:
    auxiliaries = split_words("do does did am is are was were will can could should may cannot")
    for example in SAMPLE:
        c, words = example.clause, [word.lower() for word in example.words("en")]
        if c.mood == "question" and not c.gap:
            assert words[0] in auxiliaries
        elif c.mood == "question" and c.gap != "subject":
            assert words[1] in auxiliaries
        elif c.negated and "not" in words and c.mood == "statement":
            assert words[words.index("not") - 1] in auxiliaries


@pytest.mark.parametrize(
    ("noun", "adjective", "expected"),
    [
        ("apple", "", "an apple"),
        ("man", "honest", "an honest man"),
        ("map", "useful", "a useful map"),
        ("umbrella", "", "an umbrella"),
        ("house", "old", "an old house"),
        ("orange", "big", "a big orange"),
    ],
)
def test_english_a_and_an_follow_the_sound(noun: str, adjective: str, expected: str) -> None:
    entry = next((entry for entry in WORDS.adjectives if entry.en == adjective), None)
    words = english.noun_phrase(_np(1, noun, "a", adjective=entry))
    assert " ".join(word.text for word in words) == expected


def test_english_articles_in_sentences_follow_the_sound() -> None:
    for example in SAMPLE:
        words = [word.lower() for word in example.words("en")]
        for article, word in pairwise(words):
            if article in ("a", "an"):
                vowel = word[0] in "aeiou" and word not in ("useful", "useless")
                assert article == ("an" if vowel or word == "honest" else "a"), example.text("en")


def test_chinese_numerals_and_determiners_take_the_measure_word_of_the_noun() -> None:
    seen = set()
    for example in SAMPLE:
        words = example.words("zh")
        for clause in clauses(example.clause):
            for phrase in phrases(clause):
                noun = phrase.head
                if not isinstance(noun, Noun) or phrase.relative or clause.negated or phrase.measured:
                    continue
                adjective = tuple(phrase.adjective.zh.split()) if phrase.adjective else ()
                tail = (*adjective, noun.zh)
                if phrase.number > 1:
                    numerals = ["两", "三", "四", "五", "六", "七", "八", "九", "十", "十一", "十二"]
                    number = numerals[phrase.number - 2] if phrase.number <= 12 else str(phrase.number)
                    expected: tuple[str, ...] = (number, noun.measure, *tail)
                elif phrase.number == 1 and phrase.determiner in ("the", "this", "a", "every"):
                    which = {"the": "那", "this": "这", "a": "一", "every": "每"}[phrase.determiner]
                    expected = (which, noun.measure, *tail)
                elif phrase.number == 0 and phrase.determiner == "the" and "person" in noun.classes:
                    expected = (*adjective, noun.zh + "们")
                else:
                    continue
                assert any(words[i : i + len(expected)] == expected for i in range(len(words))), example.text("zh")
                seen.add(noun.measure)
    assert len(seen) > 25


def test_chinese_aspect_and_negation_mark_the_tense() -> None:
    for example in SAMPLE:
        c, words = example.clause, example.words("zh")
        if c.inner or c.subject.relative or c.mood == "request" or c.modal or (c.object and c.object.relative):
            continue
        if c.tense == "future":
            assert "会" in words
        elif c.tense == "progressive":
            assert "正在" in words or ((c.negated or c.gap == "place") and "在" in words)
        elif c.tense == "past" and c.verb.frame not in ("is", "located"):
            assert "了" in words or "没有" in words or (c.time and c.manner)
        assert ("吗" in words) == (c.mood == "question" and not c.gap)
        assert "在在" not in example.text("zh")


def test_every_noun_has_a_chinese_measure_word() -> None:
    assert all(noun.measure for noun in WORDS.nouns)


def test_translations_are_one_to_one() -> None:
    """Only these few words have two translations, told apart by context."""
    shared = {"en": {"old", "think", "know"}, "de": {"alt", "lernen"}, "zh": {"看"}}
    for table in (WORDS.nouns, WORDS.adjectives, WORDS.names, WORDS.places):
        for language in ("en", "de", "zh"):
            words = [getattr(entry, language) for entry in table]
            assert {word for word in words if words.count(word) > 1} <= shared[language]
    for language in ("de", "zh"):
        words = [getattr(verb, language) for verb in VERBS.values()]
        assert {word for word in words if words.count(word) > 1} <= shared[language]


def test_no_chinese_adjective_and_noun_spell_another_noun() -> None:
    """短 + 信 would be ambiguous: 短信 is a short letter or a text message."""
    nouns = {noun.zh for noun in WORDS.nouns}
    together = {adjective.zh.replace(" ", "") + noun.zh for adjective in WORDS.adjectives for noun in WORDS.nouns}
    assert not together & nouns
