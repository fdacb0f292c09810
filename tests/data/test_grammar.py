"""The embedded corpus: deterministic, unambiguous in every direction, exactly aligned, split by word pairs."""

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data.grammar import LANGUAGES, Example, Grammar
from clearhead.data.grammar.entries import Name, Noun, Place, load
from clearhead.data.grammar.example import clauses, phrases
from clearhead.data.grammar.nodes import HEAD, VERB
from clearhead.data.grammar.split import home, pairs

FULL = Grammar()
LEVELS = {level: Grammar(level) for level in (1, 2, 3)}
SAMPLE = [FULL.example("train", index, seed=5) for index in range(3000)]


def split_words(words: str) -> set[str]:
    return set(words.split())


indices = st.integers(0, 10**9)


def test_the_default_is_the_full_grammar() -> None:
    assert FULL.level == 3
    assert LANGUAGES == ("en", "de", "zh")


@given(indices, st.sampled_from(["train", "valid", "test"]), st.integers(0, 9), st.sampled_from([1, 2, 3]))
@settings(max_examples=200)
def test_an_example_is_a_function_of_its_arguments(index: int, split: str, seed: int, level: int) -> None:
    one, two = (Grammar(level).example(split, index, seed) for _ in range(2))
    for language in LANGUAGES:
        assert one.text(language) == two.text(language)
        assert one.entities(language) == two.entities(language)
    assert one.alignment("en", "zh") == two.alignment("en", "zh")


def test_seed_index_and_split_change_the_sentence() -> None:
    texts = {FULL.example(split, 7, seed).text("en") for split in ("train", "valid", "test") for seed in range(5)}
    assert len(texts) >= 14


def test_golden_sentences() -> None:
    """A change of these sentences changes the corpus of every trained model."""
    sentences = [
        tuple(LEVELS[level].example("test", 0).text(language) for language in LANGUAGES) for level in (1, 2, 3)
    ]
    assert sentences == GOLDEN


@pytest.mark.parametrize(("level", "count"), [(1, 20_000), (2, 20_000), (3, 100_000)])
def test_equal_sources_have_equal_targets_in_every_direction(level: int, count: int) -> None:
    seen: dict[tuple[str, str], tuple[str, ...]] = {}
    splits = ("train", "train", "train", "valid", "test") if level < 3 else ("train",)
    for index in range(count):
        example = LEVELS[level].example(splits[index % len(splits)], index, seed=3)
        texts = tuple(example.text(language) for language in LANGUAGES)
        for language, text in zip(LANGUAGES, texts, strict=True):
            assert seen.setdefault((language, text), texts) == texts
    if level == 3:
        assert len(seen) / 3 > 0.95 * count


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="use 1, 2 or 3"):
        Grammar(4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use train, valid or test"):
        FULL.example("dev", 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("level", "low", "high"), [(1, 100, 140), (2, 250, 350), (3, 400, 600)])
def test_lemma_counts_by_level(level: int, low: int, high: int) -> None:
    for language in LANGUAGES:
        assert low <= len(LEVELS[level].lemmas(language)) <= high
        assert LEVELS[1].lemmas(language) <= LEVELS[level].lemmas(language)


def _keys(example: Example) -> set[tuple[str, str]]:
    """The lexicon entries of a sentence, as (table, key)."""
    keys = set()
    for clause in clauses(example.clause):
        keys.add(("verbs", clause.verb.key))
        if clause.quality:
            keys.add(("adjectives", clause.quality.adjective.key))
        if clause.spot:
            keys.add(("places" if isinstance(clause.spot.place, Place) else "nouns", clause.spot.place.key))
        for phrase in phrases(clause):
            if isinstance(phrase.head, (Noun, Name)):
                keys.add(("nouns" if isinstance(phrase.head, Noun) else "names", phrase.head.key))
            if phrase.adjective:
                keys.add(("adjectives", phrase.adjective.key))
        for adverbial in (clause.time, clause.manner):
            if adverbial:
                keys.add(("adverbs", " ".join(word for word, _ in adverbial.en)))
    return keys


@pytest.mark.parametrize(("level", "count"), [(1, 5000), (2, 15_000), (3, 40_000)])
def test_every_word_of_a_level_occurs_in_train(level: int, count: int) -> None:
    missing = {(table, row.key) for table, rows in load(level)._asdict().items() for row in rows}
    missing = {(t, " ".join(p.split("/")[0] for p in k.split()) if t == "adverbs" else k) for t, k in missing}
    for index in range(count):
        missing -= _keys(LEVELS[level].example("train", index))
        if not missing:
            break
    assert not missing


def test_no_train_sentence_has_a_held_out_pair() -> None:
    for seed in (0, 1):
        for index in range(3000):
            train = set(map(home, pairs(FULL.example("train", index, seed).clause)))
            assert train <= {"train"}


@pytest.mark.parametrize("level", [1, 3])
def test_valid_and_test_sentences_have_pairs_that_never_occur_in_train(level: int) -> None:
    shown = {p for index in range(8000) for p in pairs(LEVELS[level].example("train", index).clause)}
    held: dict[str, set[tuple[str, str]]] = {"valid": set(), "test": set()}
    for split, seen in held.items():
        for index in range(600):
            new = {p for p in pairs(LEVELS[level].example(split, index).clause) if home(p) != "train"}
            assert new
            seen |= new
    assert not held["valid"] & held["test"]
    assert not shown & (held["valid"] | held["test"])
    assert len(held["valid"]) > 40


def test_no_sentence_is_in_two_splits() -> None:
    texts = {
        split: {LEVELS[1].example(split, i).text("en") for i in range(2000)} for split in ("train", "valid", "test")
    }
    for one, two in permutations(texts, 2):
        assert not texts[one] & texts[two]


@given(indices)
def test_alignment_is_sorted_in_range_and_symmetric(index: int) -> None:
    example = FULL.example("train", index)
    for source, target in permutations(LANGUAGES, 2):
        pairs = example.alignment(source, target)
        assert list(pairs) == sorted(set(pairs))
        assert sorted((j, i) for i, j in pairs) == list(example.alignment(target, source))
        assert all(i < len(example.words(source)) and j < len(example.words(target)) for i, j in pairs)


# Words without a counterpart in another language.
ALONE = {
    "en": split_words("the a an to that at is it for on in are did does do be am of was were"),
    "de": split_words(", um dass ist dem der den die das es in lang am nach ins an zur zum auf bist sein bin sind"),
    "zh": {"吗", "，"},
}


def test_every_content_word_is_aligned() -> None:
    for example in SAMPLE:
        for source, target in permutations(LANGUAGES, 2):
            aligned = {i for i, _ in example.alignment(source, target)}
            for i, word in enumerate(example.words(source)):
                assert i in aligned or word.lower() in ALONE[source], (example.text(source), word)


def test_heads_and_verbs_are_aligned_with_their_translations() -> None:
    """Nouns and names are located by their lexicon forms, not by part numbers, if they occur once."""
    checked = 0
    for example in SAMPLE:
        words = {language: Counter(example.words(language)) for language in LANGUAGES}
        for clause in clauses(example.clause):
            for phrase in phrases(clause):
                head = phrase.head
                if not isinstance(head, (Noun, Name)) or phrase.number != 1:
                    continue
                if words["en"][head.en] == 1 and words["zh"][head.zh] == 1:
                    pair = (example.words("en").index(head.en), example.words("zh").index(head.zh))
                    assert pair in example.alignment("en", "zh")
                    checked += 1
    assert checked > 1000


def _aligned(example: Example, source: str, target: str) -> set[tuple[str, str]]:
    left, right = example.words(source), example.words(target)  # type: ignore[arg-type]
    return {(left[i], right[j]) for i, j in example.alignment(source, target)}  # type: ignore[arg-type]


def test_all_parts_of_a_verb_are_aligned() -> None:
    """Separable prefixes, auxiliaries, particles and 了 align with their verb."""
    separable = [e for e in SAMPLE if e.clause.verb.prefix and e.clause.tense == "progressive"]
    assert len(separable) > 30
    for example in separable:
        verb = example.clause.verb
        assert (verb.en_ing, verb.prefix) in _aligned(example, "en", "de")
    past = [e for e in SAMPLE if e.clause.tense == "past" and "了" in e.words("zh") and not e.clause.modal]
    past = [e for e in past if e.clause.mood == "statement" and not e.clause.inner and e.clause.verb.frame == "acts"]
    past = [e for e in past if e.words("zh").count("了") == 1 and e.words("en").count(e.clause.verb.en_past) == 1]
    assert len(past) > 100
    for example in past:
        assert (example.clause.verb.en_past, "了") in _aligned(example, "en", "zh")
        assert (example.clause.verb.en_past, example.clause.verb.de_participle) in _aligned(example, "en", "de")


def test_no_two_nodes_share_part_numbers() -> None:
    for example in SAMPLE[:500]:
        starts = [c.at + VERB for c in clauses(example.clause)]
        starts += {p.at + HEAD for c in clauses(example.clause) for p in phrases(c)}
        assert len(starts) == len(set(starts))


def test_labels_match_the_sentence() -> None:
    for example in SAMPLE:
        words = example.words("de")
        if example.tense == "future":
            assert {"werde", "wirst", "wird", "werden"} & {word.lower() for word in words}
        if example.clause.quality and not example.clause.inner and not example.clause.subject.relative:
            sentiment, flips = example.clause.quality.adjective.sentiment, example.clause.negated
            expected = {"+": "positive", "-": "negative", "0": "neutral"}[sentiment]
            if flips and expected != "neutral":
                expected = "negative" if expected == "positive" else "positive"
            assert example.sentiment == expected
    for label, values in {"tense": "past present future", "sentiment": "positive negative neutral"}.items():
        counts = Counter(getattr(example, label) for example in SAMPLE)
        assert set(counts) == set(values.split())
        assert min(counts.values()) > 0.05 * len(SAMPLE)


def test_entities_match_their_type() -> None:
    names = {language: {getattr(n, language) for n in load(3).names} for language in LANGUAGES}
    lands = {language: {getattr(p, language) for p in load(3).places if not p.gender} for language in LANGUAGES}
    kinds: Counter[str] = Counter()
    for example in SAMPLE:
        for language in LANGUAGES:
            words = example.words(language)
            spans = example.entities(language)
            assert list(spans) == sorted(spans)
            for start, end, kind in spans:
                span = words[start:end]
                kinds[kind] += 1
                assert kind != "PERSON" or (len(span) == 1 and span[0] in names[language])
                assert kind != "PLACE" or (len(span) == 1 and span[0] in lands[language])
                assert kind != "NUMBER" or len(span) == 1
                assert kind not in ("TIME", "MONEY") or any(piece[0].isdigit() for piece in span)
                assert kind != "DATE" or 1 <= len(span) <= 2
            people = sum(kind == "PERSON" for _, _, kind in spans)
            assert people == sum(word in names[language] for word in words)
    assert set(kinds) == {"PERSON", "PLACE", "NUMBER", "TIME", "MONEY", "DATE"}


def test_answers_start_at_their_offset() -> None:
    count = 0
    for example in SAMPLE:
        for language in LANGUAGES:
            text = example.text(language)
            for question, answer, start, _ in example.questions(language):
                assert answer
                assert text[start : start + len(answer)] == answer
                assert question[-1] in "?？"
                assert question != text
                count += 1
    assert count > 2000


def test_spacing_and_punctuation() -> None:
    for example in SAMPLE:
        for language in LANGUAGES:
            text = example.text(language)
            assert text[0] == text[0].upper()
            assert "  " not in text
            assert " ," not in text
            assert ",," not in text
            asks = example.clause.mood == "question"
            assert text[-1] == ("？" if asks else "。") if language == "zh" else ("?" if asks else ".")
        assert " " not in example.text("zh")
        assert "".join(example.words("zh")) == example.text("zh")


GOLDEN: list[tuple[str, str, str]] = [
    ("The coat is white.", "Der Mantel ist weiß.", "那件外套是白色的。"),
    (
        "Will the strong baker send the policeman the big computer?",
        "Wird der starke Bäcker dem Polizisten den großen Computer schicken?",
        "那位强壮的面包师会寄给那名警察那台大电脑吗？",
    ),
    ("Hannah fears the elephants.", "Hannah fürchtet die Elefanten.", "汉娜害怕那些大象。"),
]


def test_each_of_two_coordinated_subjects_counts_for_the_split() -> None:
    """In "Anna and Paul sleep", both pairs, (Anna, sleep) and (Paul, sleep), decide the split."""
    grammar = Grammar(level=3)
    seen = 0
    for index in range(4000):
        clause = grammar.example("train", index).clause
        for part in clauses(clause):
            if part.subject.second is not None and not part.quality:
                seen += 1
                assert (part.subject.second.head.key, part.verb.key) in set(pairs(clause))
    assert seen > 20
