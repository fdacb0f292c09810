"""Scores of labels, values, tags and answers: cases worked out by hand, and the field's libraries where installed."""

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import UserError
from clearhead.evaluate import (
    accuracy,
    answers,
    binary_f1,
    confusion,
    entities,
    entity_f1,
    macro_f1,
    matthews,
    micro_f1,
    pearson,
    spearman,
)

SAID = ["cat", "cat", "dog", "dog", "dog", "cow"]
TRUE = ["cat", "dog", "dog", "dog", "cat", "dog"]
labels = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)
values = st.lists(st.tuples(*2 * [st.floats(-1e6, 1e6) | st.integers(0, 3).map(float)]), min_size=2, max_size=30)
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-LOC-A", "I-LOC-A", "I-A"]
tag = st.sampled_from(TAGS)
often_right = st.tuples(tag, tag) | tag.map(lambda same: (same, same))
tagged = st.lists(st.lists(often_right, min_size=1, max_size=12), min_size=1, max_size=4)


def test_shares_are_those_counted_by_hand() -> None:
    assert accuracy(SAID, TRUE) == 3 / 6
    assert binary_f1(SAID, TRUE, "dog") == pytest.approx((2 / 3, 2 / 4, 4 / 7))  # 2 right of 3 said and 4 true
    assert binary_f1(SAID, TRUE, "horse") == (0, 0, 0)
    cat, dog, cow = (1 / 2, 1 / 2, 1 / 2), (2 / 3, 2 / 4, 4 / 7), (0, 0, 0)
    assert macro_f1(SAID, TRUE) == pytest.approx([sum(column) / 3 for column in zip(cat, dog, cow, strict=True)])
    assert micro_f1(SAID, TRUE) == pytest.approx((3 / 6, 3 / 6, 3 / 6))
    assert confusion(SAID, TRUE, ["cat", "dog", "cow"]) == [[1, 1, 0], [1, 2, 1], [0, 0, 0]]


def test_matthews_is_the_formula_of_two_classes() -> None:
    said, true = [1, 1, 1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0, 1, 1]  # 3 true positives, 1 false, 3 negatives, 1 missed
    assert matthews(said, true) == pytest.approx((3 * 3 - 1 * 1) / math.sqrt(4 * 4 * 4 * 4))
    assert matthews(true, true) == 1
    assert matthews([1 - label for label in true], true) == -1
    assert matthews([1] * 8, true) == 0, "always the same answer knows nothing"


def test_correlations_are_those_worked_out_by_hand() -> None:
    assert pearson([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)  # 3 / √(5 · 5)
    assert spearman([1, 10, 100, 1000], [1, 2, 3, 4]) == 1
    # Ranks 1, 2.5, 2.5, 4 beside 1, 2, 3, 4: 4.5 / √(4.5 · 5).
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([-math.inf, 0, 5], [3, 2, 1]) == -1


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1.0, 1e150, 1e300])
def test_the_unit_of_a_value_never_changes_a_correlation(scale: float) -> None:
    assert pearson([scale * x for x in (1, 2, 3, 4)], [2, 1, 4, 3]) == pytest.approx(0.6)


def test_a_correlation_with_nothing_to_correlate_is_not_a_number() -> None:
    for said in ([0.1] * 3, [1, 2, math.nan]):
        assert math.isnan(pearson(said, [1, 2, 3]))
        assert math.isnan(spearman(said, [1, 2, 3]))
    assert math.isnan(pearson([1, 2, math.inf], [1, 2, 3]))
    assert math.isnan(pearson([1], [1]))


def test_entities_begin_and_end_as_in_the_conll_script() -> None:
    assert entities(["B-PER", "I-PER", "O", "B-LOC"]) == [("PER", 0, 1), ("LOC", 3, 3)]
    assert entities(["B-PER", "B-PER", "I-PER"]) == [("PER", 0, 0), ("PER", 1, 2)]
    assert entities(["O", "I-PER", "I-PER"]) == [("PER", 1, 2)], "an I- with nothing before it begins"
    assert entities(["B-PER", "I-LOC", "I-LOC", "I-PER"]) == [("PER", 0, 0), ("LOC", 1, 2), ("PER", 3, 3)]
    assert entities(["I-PER", "O", "I-PER"]) == [("PER", 0, 0), ("PER", 2, 2)]
    assert entities([]) == []


def test_an_entity_is_right_when_type_and_ends_are() -> None:
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O"]]
    said = [["B-PER", "O", "O", "B-LOC"], ["B-PER", "O"]]  # too short, right, of the wrong type
    found = entity_f1(said, true)
    assert found.all == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert found.types == {"LOC": pytest.approx((1, 1 / 2, 2 / 3)), "PER": (0, 0, 0)}
    assert found.counts == {"LOC": 2, "PER": 1}
    assert entity_f1([["O"]], [["O"]]).all == (0, 0, 0)


def test_an_entity_never_reaches_into_the_next_text() -> None:
    assert entity_f1([["B-PER"], ["I-PER"]], [["B-PER"], ["I-PER"]]).counts == {"PER": 2}


def test_answers_follow_the_rules_of_squad() -> None:
    assert answers(["The  U.S. Army!"], [["us army"]]) == (1, 1)
    assert answers(["theatre an"], [["atre"]]) == (0, 0), "articles go as words, not as letters"
    # 2 of 3 words said are right, of 4 true ones; the other reference shares 1 of 1.
    assert answers(["red big dog"], [["a big red old cat", "dog"]]) == pytest.approx((0, 4 / 7))
    assert answers(["dog dog"], [["dog"]]) == pytest.approx((0, 2 / 3)), "a word counts as often as it is there"
    assert answers(["cat", "x"], [["dog", "cat"], ["y"]]) == (1 / 2, 1 / 2)


def test_a_question_without_an_answer_wants_none() -> None:
    assert answers(["", "dog"], [[], []]) == (1 / 2, 1 / 2)
    assert answers([""], [["dog"]]) == (0, 0)
    assert answers(["the"], [["a", "."]]) == (1, 1), "references of articles and punctuation are none"
    assert answers([""], [["The", "dog"]]) == (0, 0), "one real reference is an answer"


@pytest.mark.parametrize("score", [accuracy, macro_f1, micro_f1, matthews, pearson, spearman, entity_f1, answers])
def test_sides_of_other_lengths_and_nothing_at_all_are_refused(score) -> None:
    for sides in (([], []), (["O"], ["O", "O"])):
        with pytest.raises(ValueError, match="outputs and"):
            score(*sides)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="'cow' occurs"):
        confusion(SAID, TRUE, ["cat", "dog"])
    with pytest.raises(ValueError, match="text 1: 1 tags were said and 2"):
        entity_f1([["O"], ["O"]], [["O"], ["O", "O"]])
    with pytest.raises(ValueError, match="list of references"):
        answers(["dog"], ["dog"])  # type: ignore[list-item]


@pytest.mark.parametrize("tag", ["NOUN", "B-", "I", "S-PER", "", "b-PER"])
def test_a_tag_of_another_scheme_is_named(tag: str) -> None:
    with pytest.raises(UserError, match=f"tag '{tag}': entities need"):
        entities(["O", tag])


@given(labels)
def test_label_scores_equal_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    said, true = (list(side) for side in zip(*pairs, strict=True))
    assert accuracy(said, true) == pytest.approx(metrics.accuracy_score(true, said))
    for average, score in (("macro", macro_f1), ("micro", micro_f1)):
        peer = metrics.precision_recall_fscore_support(true, said, average=average, zero_division=0)
        assert score(said, true) == pytest.approx(peer[:3])
    peer = metrics.precision_recall_fscore_support(true, said, labels=[1], average="macro", zero_division=0)
    assert binary_f1(said, true, 1) == pytest.approx(peer[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert matthews(said, true) == pytest.approx(metrics.matthews_corrcoef(true, said))
    assert confusion(said, true, range(4)) == metrics.confusion_matrix(true, said, labels=range(4)).tolist()


@given(values)
def test_correlations_equal_scipy(pairs: list[tuple[float, float]]) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    said, true = (list(side) for side in zip(*pairs, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert pearson(said, true) == pytest.approx(stats.pearsonr(said, true).statistic, abs=1e-6, nan_ok=True)
        assert spearman(said, true) == pytest.approx(stats.spearmanr(said, true).statistic, abs=1e-9, nan_ok=True)


@given(tagged)
def test_entity_scores_equal_seqeval(texts: list[list[tuple[str, str]]]) -> None:
    peer = pytest.importorskip("seqeval.metrics.sequence_labeling", reason="seqeval is not installed")
    said, true = ([[pair[side] for pair in text] for text in texts] for side in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = entity_f1(said, true)
        assert found.all == pytest.approx(peer.precision_recall_fscore_support(true, said, average="micro")[:3])
        if found.types:
            columns = peer.precision_recall_fscore_support(true, said, average=None)
            expected = [tuple(row) for row in zip(*columns[:3], strict=True)]
            assert list(found.types.values()) == [pytest.approx(row) for row in expected]
            assert list(found.counts.values()) == columns[3].tolist()
