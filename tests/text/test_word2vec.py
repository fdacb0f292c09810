"""word2vec: the blocked gradients are the per-pair formula, the draws follow their laws, known neighbors are found."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import ConfigError, UserError
from clearhead.text.corpus import Corpus, encode, words_of
from clearhead.text.negatives import cbow, context, skip_gram
from clearhead.text.word2vec import (
    BLOCK,
    SHARED,
    Training,
    Word2VecSettings,
    kept_share,
    noise_share,
    reaches,
    train,
)
from tests.corpora import corpus

SENTENCES = ["the cat drinks milk", "the dog drinks water", "a cat eats fish", "a dog eats meat"]


def topics(seed: int = 0, sentences: int = 1500) -> Corpus:
    """Sentences that draw their words from one of four groups of six: words of a group are neighbors."""
    draw = torch.Generator().manual_seed(seed)
    lines = []
    for _ in range(sentences):
        group = int(torch.randint(4, (1,), generator=draw))
        lines.append(" ".join(f"{'abcd'[group]}{n}" for n in torch.randint(6, (8,), generator=draw).tolist()) + ".")
    return encode([lines], 1)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**6))
def test_skip_gram_block_is_the_sum_over_pairs(window: int, block: int, shared: int, seed: int) -> None:
    torch.manual_seed(seed)
    columns, dim, negatives = block + 2 * window, 3, 5
    left, right = torch.randint(window + 1, (2, block)).tolist()
    weight = torch.stack([context(block, window)[b, left[b], right[b]] for b in range(block)]).double()
    share = weight.sum(-1, keepdim=True) * negatives / shared
    u, x = torch.randn(1, block, dim).double(), torch.randn(1, columns + shared, dim).double()
    du, dx = skip_gram(u, x, torch.cat([weight, share.expand(-1, shared)], 1)[None], shared)
    expected_u, expected_x = torch.zeros_like(u), torch.zeros_like(x)
    for b in range(block):
        place = b + window
        for column in [*range(place - left[b], place), *range(place + 1, place + right[b] + 1)]:  # one pair each
            g = sigmoid(float(u[0, b] @ x[0, column])) - 1
            expected_u[0, b] += g * x[0, column]
            expected_x[0, column] += g * u[0, b]
            for k in range(columns, columns + shared):  # negatives / shared of each makes `negatives` in all
                g = negatives / shared * sigmoid(float(u[0, b] @ x[0, k]))
                expected_u[0, b] += g * x[0, k]
                expected_x[0, k] += g * u[0, b]
    assert torch.allclose(du, expected_u, rtol=0, atol=1e-10)
    assert torch.allclose(dx, expected_x, rtol=0, atol=1e-10)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**6))
def test_cbow_block_is_the_gradient_of_the_loss_of_each_word(window: int, block: int, shared: int, seed: int) -> None:
    torch.manual_seed(seed)
    columns, dim, negatives = block + 2 * window, 3, 5
    left, right = torch.randint(window + 1, (2, block)).tolist()
    seen = torch.stack([context(block, window)[b, left[b], right[b]] for b in range(block)]).double()
    c = torch.randn(1, columns, dim).double().requires_grad_()
    x = torch.randn(1, block + shared, dim).double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(block):
        place = b + window
        around = [*range(place - left[b], place), *range(place + 1, place + right[b] + 1)]
        if around:
            h = c[0, around].mean(0)
            loss = loss - torch.nn.functional.logsigmoid(h @ x[0, b])
            for k in range(block, block + shared):
                loss = loss - negatives / shared * torch.nn.functional.logsigmoid(-h @ x[0, k])
    if loss.requires_grad:
        loss.backward()
    with torch.no_grad():
        dc, dx = cbow(c, x, (seen / seen.sum(-1, keepdim=True).clamp(min=1))[None], negatives / shared)
    for found, wanted in ((dc, c.grad), (dx, x.grad)):
        assert torch.allclose(found, torch.zeros_like(found) if wanted is None else wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("use_cbow", [False, True])
def test_one_update_of_a_text_is_the_plain_formula_on_its_pairs(use_cbow: bool) -> None:
    """From the drawn stretch to the changed matrices: ids, sentence ends, weights and the fill at the end."""
    text = encode([[" ".join(SENTENCES[:2]) + ".", " ".join(SENTENCES[2:]) + "."]], 1)
    settings = Word2VecSettings(dim=4, window=2, negatives=3, epochs=1, cbow=use_cbow, sample=1, learning_rate=0.01)
    training = Training(text, settings)
    training.weight, training.damp = training.weight.double(), [each.double() for each in training.damp]
    assert all(bool((damp == 1).all()) for damp in training.damp)
    training.inputs, training.outputs = (torch.randn(len(text.words), 4).double() for _ in range(2))
    inputs, outputs = (each.clone().requires_grad_() for each in (training.inputs, training.outputs))
    stretch = training._stretch(0, torch.Generator().manual_seed(3))
    left, right = reaches_again(text, 2, 3)
    loss = torch.zeros((), dtype=torch.float64)
    noise = stretch.targets.flatten(0, 1)[:, -SHARED:]
    for t in range(len(text.ids)):
        around = text.ids[[*range(t - left[t], t), *range(t + 1, t + right[t] + 1)]].tolist()
        pairs = [(inputs[around].mean(0), int(text.ids[t]))] if use_cbow else [(inputs[text.ids[t]], o) for o in around]
        for h, word in pairs:
            loss = loss - torch.nn.functional.logsigmoid(h @ outputs[word])
            for k in noise[t // BLOCK].tolist():
                loss = loss - 3 / SHARED * torch.nn.functional.logsigmoid(-h @ outputs[k])
    loss.backward()
    assert len(stretch.views) == 1
    weight = training.weight[stretch.views[0]].view(-1, BLOCK, training.weight.shape[1])
    training._update(stretch.sources[0], stretch.targets[0], weight, 0.01)
    for found, before in ((training.inputs, inputs), (training.outputs, outputs)):
        expected = before.detach() - 0.01 * before.grad
        assert torch.allclose(found, expected, rtol=0, atol=1e-8)  # the table of weights (1/3, 3/14) is in fp32


def reaches_again(text: Corpus, window: int, seed: int) -> tuple[list[int], list[int]]:
    """The reaches that a stretch with this seed drew, when no word is thinned out."""
    generator = torch.Generator().manual_seed(seed)
    torch.rand(len(text.ids), generator=generator)  # what thinning draws first
    left, right = reaches(text.sentences, window, generator)
    return left.tolist(), right.tolist()


def test_frequent_words_are_thinned_out_by_the_formula() -> None:
    share = torch.tensor([0.1, 0.004, 0.001, 1e-6])
    assert kept_share(share, 1e-3).tolist() == pytest.approx([0.11, 0.75, 1, 1])  # √0.01 + 0.01; √0.25 + 0.25
    text = encode([["often " * 9 + f"w{n}" for n in range(20_000)]], 1)
    training = Training(text, Word2VecSettings(sample=0.1, window=2))
    kept = training._stretch(0, torch.Generator().manual_seed(1)).views.numel()
    ratio = 0.1 / 0.9
    expected = 100_000 * (0.9 * (ratio**0.5 + ratio) + 0.1)
    assert abs(kept - expected) < training.size + 4 * 100_000**0.5


def test_reach_is_uniform_and_ends_with_the_sentence() -> None:
    sentences = torch.arange(20_000) // 40
    left, right = reaches(sentences, 5, torch.Generator().manual_seed(0))
    place = torch.arange(20_000) % 40
    assert bool((left <= place).all())
    assert bool((right <= 39 - place).all())
    inside = (place >= 5) & (place < 35)
    assert torch.equal(left[inside], right[inside])
    share = left[inside].bincount(minlength=6) / inside.sum()
    assert share.tolist() == pytest.approx([0, 0.2, 0.2, 0.2, 0.2, 0.2], abs=0.015)


def test_negatives_follow_the_count_to_three_quarters() -> None:
    lines = ["a " * 1600 + "b " * 810 + "c " * 160 + "d " * 10] * 60  # the counts of one text
    text = encode([lines], 1)
    training = Training(text, Word2VecSettings(sample=1))
    drawn = training._stretch(0, torch.Generator().manual_seed(0)).targets[..., -SHARED:].flatten()
    power = text.counts.double() ** 0.75
    assert (drawn.bincount() / drawn.numel()).tolist() == pytest.approx((power / power.sum()).tolist(), abs=0.01)
    assert noise_share(torch.tensor([16.0, 1.0])).tolist() == pytest.approx([8 / 9, 1 / 9])


@pytest.mark.parametrize("use_cbow", [False, True])
def test_words_of_a_group_become_neighbors(use_cbow: bool) -> None:
    vectors = train(topics(), Word2VecSettings(dim=16, window=3, epochs=5, cbow=use_cbow, sample=1))
    for word in vectors.words:
        assert {near[0] for near, _ in vectors.neighbors(word, 5)} == {word[0]}


@pytest.mark.parametrize("use_cbow", [False, True])
def test_one_worker_and_one_seed_give_the_same_vectors(use_cbow: bool) -> None:
    text = topics(sentences=100)
    first, again, other = (
        train(text, Word2VecSettings(dim=8, epochs=2, seed=seed, cbow=use_cbow)).vectors for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_the_seed_also_decides_what_is_drawn() -> None:
    one, two = (Training(topics(sentences=100), Word2VecSettings(dim=8, epochs=1, seed=seed)) for seed in (1, 2))
    two.inputs = one.inputs.clone()
    assert list(one) == list(two)
    assert not torch.allclose(one.inputs, two.inputs)


def test_several_workers_learn_the_same_groups_and_leave_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        vectors = train(topics(), Word2VecSettings(dim=16, window=3, epochs=5, workers=3, sample=1))
        with ThreadPoolExecutor(1) as pool:  # a new thread takes the number that was set last, anywhere
            assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == (2, 2)
    finally:
        torch.set_num_threads(before)
    assert all(vectors.neighbors(word, 1)[0][0][0] == word[0] for word in vectors.words)


def test_a_text_of_which_nothing_is_kept_changes_nothing() -> None:
    training = Training(topics(sentences=10), Word2VecSettings(dim=8, epochs=1, sample=1e-12))
    start = training.inputs.clone()
    assert list(training) == [1]
    assert torch.equal(training.inputs, start)


def test_progress_rises_to_one() -> None:
    training = Training(topics(sentences=100), Word2VecSettings(dim=8, epochs=7))
    assert list(training) == pytest.approx([n / 7 for n in range(1, 8)])


def test_leaving_a_training_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    training, begun = Training(topics(sentences=100), Word2VecSettings(dim=8, epochs=2000)), []
    draw = training._stretch
    monkeypatch.setattr(training, "_stretch", lambda *given: begun.append(given) or draw(*given))
    for done in training:
        assert done == pytest.approx(1 / 2000)
        break
    assert len(begun) < 1000


def test_a_word_that_is_everywhere_stays_finite() -> None:
    """Hundreds of its gradients are summed in one update; without damping the vectors explode."""
    text = encode([["the the the the cat the the dog. the the a the"] * 20_000], 1)
    vectors = train(text, Word2VecSettings(dim=16, window=10, sample=1, epochs=2, workers=2, learning_rate=0.1))
    assert bool(vectors.vectors.isfinite().all())
    assert float(vectors.vectors.norm(dim=1).max()) < 50


@pytest.mark.parametrize("use_cbow", [False, True])
def test_damping_holds_each_word_to_the_stable_number_of_pairs(use_cbow: bool) -> None:
    text = encode([["the the the the cat the the dog a. the"] * 20_000], 1)
    settings = Word2VecSettings(dim=3, window=3, negatives=2, sample=1, cbow=use_cbow, learning_rate=0.1)
    training = Training(text, settings)
    share, reach = 0.7, 1 if use_cbow else 4  # of "the"; how many pairs a word is in on average
    noise = 7**0.75 / (7**0.75 + 3)
    assert training.size == 192  # 200,000 tokens, 1,000 updates, blocks of 24
    inputs, outputs = training.damp
    assert float(inputs[0]) == pytest.approx(5 / (192 * 0.1 * reach * share * 3))
    assert float(outputs[0]) == pytest.approx(5 / (192 * 0.1 * reach * (share + 2 * noise)))
    damped, plain = training, Training(text, settings)
    plain.damp = [torch.ones_like(each) for each in plain.damp]
    change = []
    for each in (damped, plain):
        each.outputs.normal_(generator=torch.Generator().manual_seed(0))
        start = each.inputs.clone()
        stretch = each._stretch(0, torch.Generator().manual_seed(0))
        weight = each.weight[stretch.views[0]].view(-1, BLOCK, each.weight.shape[1])
        each._update(stretch.sources[0], stretch.targets[0], weight, 0.1)
        change.append(each.inputs - start)
    assert torch.allclose(change[0], change[1] * inputs[:, None], atol=1e-5)


def test_sentences_are_cut_at_marks_and_files_and_rare_words_left_out() -> None:
    text = encode([["It's a cat, a", "Cat! It is a"], ["a 猫。cat"]], min_count=2)
    assert text.words == ["a", "cat"]
    assert text.counts.tolist() == [4, 3]
    assert [text.words[number] for number in text.ids] == ["a", "cat", "a", "cat", "a", "a", "cat"]
    assert text.sentences.unique(return_counts=True)[1].tolist() == [4, 1, 1, 1]
    assert text.raw_words == 11
    assert words_of("Don’t, it's_3 …") == ["don’t", "it's_3"]


@pytest.mark.parametrize(
    ("documents", "says"), [([], "no words"), ([["…", ""]], "no words"), ([["a b a"]], "no word oc")]
)
def test_a_text_without_enough_words_is_refused(documents: list[list[str]], says: str) -> None:
    with pytest.raises(UserError, match=says):
        encode(documents, 5)


def test_settings_are_bounded() -> None:
    for wrong in ({"dim": 0}, {"window": 51}, {"sample": 0.0}, {"learning_rate": 2.0}, {"windows": 5}):
        with pytest.raises(ConfigError):
            Word2VecSettings.build(wrong)


def test_two_novels_teach_who_is_who() -> None:
    from clearhead.text.corpus import read_corpus

    files = [corpus(f"english_novels/{name}.txt.gz") for name in ("Cbronte_Jane_1847", "Cbronte_Villette_1853")]
    vectors = train(read_corpus(files), Word2VecSettings(dim=50, epochs=3))
    near = [word for word, _ in vectors.neighbors("he", 5)]
    assert "she" in near
    assert vectors.similarity("husband", "wife") > vectors.similarity("husband", "window")
