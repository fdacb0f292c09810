"""Metrics of labels, values, tags and answers: hand-computed cases, and parity with scikit-learn, SciPy and seqeval."""

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import UserError
from clearhead.evaluate import (
    accuracy,
    binary_f1,
    confusion_matrix,
    entities,
    entity_f1,
    macro_f1,
    matthews_corrcoef,
    pearson,
    spearman,
    squad_scores,
)

PREDICTIONS = ["cat", "cat", "dog", "dog", "dog", "cow"]
REFERENCES = ["cat", "dog", "dog", "dog", "cat", "dog"]
labels = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)
values = st.lists(st.tuples(*2 * [st.floats(-1e6, 1e6) | st.integers(0, 3).map(float)]), min_size=2, max_size=30)
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-LOC-A", "I-LOC-A", "I-A"]
tag = st.sampled_from(TAGS)
often_correct = st.tuples(tag, tag) | tag.map(lambda same: (same, same))
tagged_texts = st.lists(st.lists(often_correct, min_size=1, max_size=12), min_size=1, max_size=4)


def test_accuracy_f1_and_confusion_matrix_of_a_hand_computed_case() -> None:
    assert accuracy(PREDICTIONS, REFERENCES) == 3 / 6
    assert binary_f1(PREDICTIONS, REFERENCES, "dog") == pytest.approx((2 / 3, 2 / 4, 4 / 7))  # 2 of 3 and of 4
    assert binary_f1(PREDICTIONS, REFERENCES, "horse") == (0, 0, 0)
    cat, dog, cow = (1 / 2, 1 / 2, 1 / 2), (2 / 3, 2 / 4, 4 / 7), (0, 0, 0)
    expected = [sum(column) / 3 for column in zip(cat, dog, cow, strict=True)]
    assert macro_f1(PREDICTIONS, REFERENCES) == pytest.approx(expected)
    assert confusion_matrix(PREDICTIONS, REFERENCES, ["cat", "dog", "cow"]) == [[1, 1, 0], [1, 2, 1], [0, 0, 0]]


def test_matthews_corrcoef_is_the_formula_of_two_classes() -> None:
    # 3 true positives, 1 false positive, 3 true negatives, 1 false negative
    predictions, references = [1, 1, 1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0, 1, 1]
    assert matthews_corrcoef(predictions, references) == pytest.approx((3 * 3 - 1 * 1) / math.sqrt(4 * 4 * 4 * 4))
    assert matthews_corrcoef(references, references) == 1
    assert matthews_corrcoef([1 - label for label in references], references) == -1
    assert matthews_corrcoef([1] * 8, references) == 0, "a constant prediction has no correlation"


def test_correlations_of_hand_computed_cases() -> None:
    assert pearson([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)  # 3 / √(5 · 5)
    assert spearman([1, 10, 100, 1000], [1, 2, 3, 4]) == 1
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: 4.5 / √(4.5 · 5).
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([-math.inf, 0, 5], [3, 2, 1]) == -1


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1.0, 1e150, 1e300])
def test_scale_never_changes_a_correlation(scale: float) -> None:
    assert pearson([scale * x for x in (1, 2, 3, 4)], [2, 1, 4, 3]) == pytest.approx(0.6)


def test_correlation_of_constant_or_nonfinite_values_is_nan() -> None:
    for predictions in ([0.1] * 3, [1, 2, math.nan]):
        assert math.isnan(pearson(predictions, [1, 2, 3]))
        assert math.isnan(spearman(predictions, [1, 2, 3]))
    assert math.isnan(pearson([1, 2, math.inf], [1, 2, 3]))
    assert math.isnan(pearson([1], [1]))


def test_entities_begin_and_end_as_in_the_conll_script() -> None:
    assert entities(["B-PER", "I-PER", "O", "B-LOC"]) == [("PER", 0, 1), ("LOC", 3, 3)]
    assert entities(["B-PER", "B-PER", "I-PER"]) == [("PER", 0, 0), ("PER", 1, 2)]
    assert entities(["O", "I-PER", "I-PER"]) == [("PER", 1, 2)], "an I- after O begins an entity"
    assert entities(["B-PER", "I-LOC", "I-LOC", "I-PER"]) == [("PER", 0, 0), ("LOC", 1, 2), ("PER", 3, 3)]
    assert entities(["I-PER", "O", "I-PER"]) == [("PER", 0, 0), ("PER", 2, 2)]
    assert entities([]) == []


def test_an_entity_is_correct_if_type_and_span_are() -> None:
    references = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O"]]
    predictions = [["B-PER", "O", "O", "B-LOC"], ["B-PER", "O"]]  # too short, correct, wrong type
    scores = entity_f1(predictions, references)
    assert scores.all == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert scores.types == {"LOC": pytest.approx((1, 1 / 2, 2 / 3)), "PER": (0, 0, 0)}
    assert scores.counts == {"LOC": 2, "PER": 1}
    assert entity_f1([["O"]], [["O"]]).all == (0, 0, 0)


def test_an_entity_never_continues_in_the_next_text() -> None:
    assert entity_f1([["B-PER"], ["I-PER"]], [["B-PER"], ["I-PER"]]).counts == {"PER": 2}


def test_squad_scores_follow_the_official_rules() -> None:
    assert squad_scores(["The  U.S. Army!"], [["us army"]]) == (1, 1)
    assert squad_scores(["theatre an"], [["atre"]]) == (0, 0), "articles are removed as words, not as letters"
    # 2 of 3 predicted words are correct, of 4 reference words; the other reference shares 1 of 1.
    assert squad_scores(["red big dog"], [["a big red old cat", "dog"]]) == pytest.approx((0, 4 / 7))
    assert squad_scores(["dog dog"], [["dog"]]) == pytest.approx((0, 2 / 3)), "words are counted with multiplicity"
    assert squad_scores(["cat", "x"], [["dog", "cat"], ["y"]]) == (1 / 2, 1 / 2)


def test_a_question_without_an_answer_needs_an_empty_prediction() -> None:
    assert squad_scores(["", "dog"], [[], []]) == (1 / 2, 1 / 2)
    assert squad_scores([""], [["dog"]]) == (0, 0)
    assert squad_scores(["the"], [["a", "."]]) == (1, 1), "references of only articles and punctuation are empty"
    assert squad_scores([""], [["The", "dog"]]) == (0, 0), "one reference is not empty"


@pytest.mark.parametrize("metric", [accuracy, macro_f1, matthews_corrcoef, pearson, spearman, entity_f1, squad_scores])
def test_empty_lists_and_lists_of_different_lengths_are_refused(metric) -> None:
    for sides in (([], []), (["O"], ["O", "O"])):
        with pytest.raises(ValueError, match="outputs and"):
            metric(*sides)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="'cow' occurs"):
        confusion_matrix(PREDICTIONS, REFERENCES, ["cat", "dog"])
    with pytest.raises(ValueError, match="text 1: 1 predicted tags, but 2"):
        entity_f1([["O"], ["O"]], [["O"], ["O", "O"]])
    with pytest.raises(ValueError, match="list of references"):
        squad_scores(["dog"], ["dog"])  # type: ignore[list-item]


@pytest.mark.parametrize("tag", ["NOUN", "B-", "I", "S-PER", "", "b-PER"])
def test_a_tag_of_another_scheme_is_named_in_the_error(tag: str) -> None:
    with pytest.raises(UserError, match=f"tag '{tag}': entities need"):
        entities(["O", tag])


@given(labels)
def test_label_metrics_equal_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    predictions, references = (list(side) for side in zip(*pairs, strict=True))
    assert accuracy(predictions, references) == pytest.approx(metrics.accuracy_score(references, predictions))
    peer = metrics.precision_recall_fscore_support(references, predictions, average="macro", zero_division=0)
    assert macro_f1(predictions, references) == pytest.approx(peer[:3])
    peer = metrics.precision_recall_fscore_support(
        references, predictions, labels=[1], average="macro", zero_division=0
    )
    assert binary_f1(predictions, references, 1) == pytest.approx(peer[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = metrics.matthews_corrcoef(references, predictions)
    assert matthews_corrcoef(predictions, references) == pytest.approx(expected)
    matrix = metrics.confusion_matrix(references, predictions, labels=range(4)).tolist()
    assert confusion_matrix(predictions, references, range(4)) == matrix


@given(values)
def test_correlations_equal_scipy(pairs: list[tuple[float, float]]) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    predictions, references = (list(side) for side in zip(*pairs, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = stats.pearsonr(predictions, references).statistic, stats.spearmanr(predictions, references).statistic
    assert pearson(predictions, references) == pytest.approx(expected[0], abs=1e-6, nan_ok=True)
    assert spearman(predictions, references) == pytest.approx(expected[1], abs=1e-9, nan_ok=True)


@given(tagged_texts)
def test_entity_scores_equal_seqeval(texts: list[list[tuple[str, str]]]) -> None:
    seqeval = pytest.importorskip("seqeval.metrics.sequence_labeling", reason="seqeval is not installed")
    predictions, references = ([[pair[side] for pair in text] for text in texts] for side in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = entity_f1(predictions, references)
        micro = seqeval.precision_recall_fscore_support(references, predictions, average="micro")
        assert scores.all == pytest.approx(micro[:3])
        if scores.types:
            columns = seqeval.precision_recall_fscore_support(references, predictions, average=None)
            expected = [tuple(row) for row in zip(*columns[:3], strict=True)]
            assert list(scores.types.values()) == [pytest.approx(row) for row in expected]
            assert list(scores.counts.values()) == columns[3].tolist()
