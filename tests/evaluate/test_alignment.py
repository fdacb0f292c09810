"""Alignment error rate: exact links of the grammar, estimated links of other texts, and heads chosen by either."""

import json
from pathlib import Path

import pytest
import torch

from clearhead.checkpoint import load_model
from clearhead.checkpoint.card import Score, read_card, replace_score
from clearhead.config.recipe import load_recipe
from clearhead.errors import UserError
from clearhead.evaluate.alignment import AttentionSet, choose_heads, collect_attention
from clearhead.evaluate.api import evaluate
from clearhead.evaluate.word_links import LinkedPair, estimate_links, grammar_pairs
from clearhead.inference import default_alignment_heads
from clearhead.predict import load
from clearhead.predict.align import alignment_heads
from clearhead.train.loop import train
from tests.cli.models import clearhead, make


def attention(*heads: list[list[list[float]]]) -> AttentionSet:
    """Heads of one layer with weights (N, T, S); the first two source words are linked to the first two targets."""
    weights = torch.tensor(heads)
    links = torch.eye(2, dtype=torch.bool).expand(weights.shape[1], 2, 2)
    return AttentionSet(weights, links, torch.ones(weights.shape[1], 2, dtype=torch.bool), len(heads))


def test_the_error_rate_is_one_minus_f1() -> None:
    one_right = attention([[[0.9, 0.1], [0.8, 0.2]]]).score([(0, 0)])
    assert one_right == (0.5, 0.5, 0.5)
    many = attention([[[1.0, 0.0], [0.0, 1.0]]])
    more_links = many._replace(links=torch.ones(1, 2, 2, dtype=torch.bool)).score([(0, 0)])
    assert more_links == (pytest.approx(1 - 2 * 2 / (2 + 4)), 1.0, 0.5)
    no_word = many._replace(is_word=torch.tensor([[True, False]])).score([(0, 0)])
    assert no_word.precision == 1.0


def test_the_best_heads_are_chosen_together() -> None:
    wrong, first, second = [[0.0, 1.0], [1.0, 0.0]], [[0.9, 0.1], [0.6, 0.4]], [[0.4, 0.6], [0.0, 1.0]]
    assert choose_heads(attention([wrong], [first], [second])) == [(0, 1), (0, 2)]


def test_gold_links_are_the_words_of_the_grammar() -> None:
    [pair] = grammar_pairs(("en", "de"), 1, "test", 1)
    words = {(pair.source[slice(*i)], pair.target[slice(*j)]) for i, j in pair.links}
    assert (".", ".") in words
    assert all(source and target for source, target in words)


def test_estimated_links_are_mostly_those_of_the_grammar() -> None:
    known = grammar_pairs(("en", "de"), 1, "train", 600)
    estimated = estimate_links([(pair.source, pair.target) for pair in known], 200)
    hits = sum(len({*a.links} & {*b.links}) for a, b in zip(estimated, known[:200], strict=True))
    made, true = (sum(len({*pair.links}) for pair in pairs) for pairs in (estimated, known[:200]))
    assert hits / made > 0.9, "precision"
    assert hits / true > 0.7, "recall"


def test_texts_without_words_have_no_links() -> None:
    assert estimate_links([("a", "b"), ("", "b"), ("a", "")], 3)[1:] == [
        LinkedPair("", "b", ()),
        LinkedPair("a", "", ()),
    ]


@pytest.mark.parametrize("name", ["en-de", "de-en", "zh-en"])
def test_the_stored_heads_of_packaged_models_are_the_better_ones(name: str) -> None:
    model = load(name, "cpu")
    source, _, target = name.partition("-")
    found = collect_attention(model, grammar_pairs((source, target), 3, "test", 60))  # type: ignore[arg-type]
    stored = found.score(alignment_heads(model)).error_rate
    first_layer = found.score([(0, head) for head in range(model.config.heads)]).error_rate
    assert stored < first_layer - 0.02
    assert stored <= found.score(default_alignment_heads(model.config)).error_rate + 0.02
    card = Path("src/clearhead/models", name, "README.md").read_text(encoding="utf-8")
    rate = next(score.value for score in read_card(card).scores if score.metric == "alignment error rate")
    assert rate == pytest.approx(model.extra["alignment"]["error_rate"], abs=1e-4)
    assert stored == pytest.approx(rate, abs=0.05)


def test_the_error_rate_is_reported_by_the_command_and_in_python(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "tiny-translator")
    code, output, _ = clearhead("evaluate", folder, "--alignment", "en-de", "--json")
    assert code == 0
    assert 0.5 < json.loads(output)["alignment_error_rate"] <= 1, "random weights"
    assert json.loads(output)["alignment_heads"] == "1.0 1.1"
    for wrong in ("en", "en-fr", "de-de"):
        with pytest.raises(UserError, match=r"alignment: .* is not a pair"):
            evaluate(folder, alignment=wrong)
    with pytest.raises(UserError, match="is a decoder"):
        evaluate(make(tmp_path / "gpt", "tiny-gpt"), alignment="en-de")
    code, _, errors = clearhead("evaluate", folder, "--alignment", "en-de", "--data", folder)
    assert (code, "leave --data out" in errors) == (2, True)


@pytest.mark.parametrize("known", [True, False])
def test_training_stores_the_heads_that_align_best(tmp_path: Path, known: bool) -> None:
    changes = [
        "train.steps=2",
        "train.validate_every=2",
        "train.metric=loss",
        "train.eval_samples=0",
        "model.dim=16",
        "model.ff_dim=16",
    ]
    changes += ["data.train.count=200", "data.valid.count=20", "tokenizer.vocab_size=300", "model.heads=2"]
    if not known:
        rows = [f"{pair.source}\t{pair.target}" for pair in grammar_pairs(("en", "de"), 1, "train", 200)]
        (tmp_path / "pairs.tsv").write_text("\n".join(rows), encoding="utf-8")
        files = f"{{format: tsv, files: [{tmp_path / 'pairs.tsv'}]}}"
        changes = [change for change in changes if not change.startswith("data")]
        changes += [f"data.train={files}", f"data.valid={files}"]
    train(load_recipe("mini-en-de", changes), tmp_path / "run")
    for name in ("best", "last"):
        loaded = load_model(tmp_path / "run" / name)
        stored = loaded.extra["alignment"]
        assert stored["heads"]
        assert 0 <= stored["error_rate"] <= 1
        assert ("exact" if known else "IBM model 1") in stored["measured_on"]
        assert alignment_heads(load(tmp_path / "run" / name, "cpu")) == [tuple(head) for head in stored["heads"]]


def test_a_score_in_a_card_is_replaced() -> None:
    card = Path("src/clearhead/models/en-de/README.md").read_text(encoding="utf-8")
    changed = replace_score(card, Score("bleu", 1.5, "x", "y"))
    scores = read_card(changed).scores
    kept = [score.metric for score in read_card(card).scores if score.metric != "bleu"]
    assert [score.metric for score in scores] == [*kept, "bleu"]
    assert read_card(changed).recipe == read_card(card).recipe
    assert read_card(changed).license == read_card(card).license
