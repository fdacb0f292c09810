"""word2vec: blocked gradients equal the per-pair formula, samples follow their distributions, neighbors are correct."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead.text.corpus as corpus_module
from clearhead.errors import ConfigError, UserError
from clearhead.text.corpus import Corpus, encode, lowercase_words, read_corpus
from clearhead.text.negative_sampling import cbow, context_masks, skip_gram
from clearhead.text.word2vec import (
    BLOCK_SIZE,
    SHARED_NEGATIVES,
    Training,
    Word2VecSettings,
    keep_probability,
    noise_distribution,
    sample_windows,
    train,
)
from tests.corpora import corpus

SENTENCES = ["the cat drinks milk", "the dog drinks water", "a cat eats fish", "a dog eats meat"]


def topics(seed: int = 0, sentences: int = 1500) -> Corpus:
    """Sentences of words sampled from one of four groups of six, so that words of a group are neighbors."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for _ in range(sentences):
        group = int(torch.randint(4, (1,), generator=generator))
        lines.append(
            " ".join(f"{'abcd'[group]}{n}" for n in torch.randint(6, (8,), generator=generator).tolist()) + "."
        )
    return encode([lines], 1)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**6))
def test_skip_gram_block_equals_the_sum_over_pairs(window: int, block: int, shared: int, seed: int) -> None:
    torch.manual_seed(seed)
    columns, dim, negatives = block + 2 * window, 3, 5
    left, right = torch.randint(window + 1, (2, block)).tolist()
    weight = torch.stack([context_masks(block, window)[b, left[b], right[b]] for b in range(block)]).double()
    negative_weight = weight.sum(-1, keepdim=True) * negatives / shared
    u, x = torch.randn(1, block, dim).double(), torch.randn(1, columns + shared, dim).double()
    du, dx = skip_gram(u, x, torch.cat([weight, negative_weight.expand(-1, shared)], 1)[None], shared)
    expected_u, expected_x = torch.zeros_like(u), torch.zeros_like(x)
    for b in range(block):
        center = b + window
        for column in [*range(center - left[b], center), *range(center + 1, center + right[b] + 1)]:
            g = sigmoid(float(u[0, b] @ x[0, column])) - 1
            expected_u[0, b] += g * x[0, column]
            expected_x[0, column] += g * u[0, b]
            for k in range(columns, columns + shared):  # weighted to `negatives` in total
                g = negatives / shared * sigmoid(float(u[0, b] @ x[0, k]))
                expected_u[0, b] += g * x[0, k]
                expected_x[0, k] += g * u[0, b]
    assert torch.allclose(du, expected_u, rtol=0, atol=1e-10)
    assert torch.allclose(dx, expected_x, rtol=0, atol=1e-10)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**6))
def test_cbow_block_equals_the_gradient_of_the_loss(window: int, block: int, shared: int, seed: int) -> None:
    torch.manual_seed(seed)
    columns, dim, negatives = block + 2 * window, 3, 5
    left, right = torch.randint(window + 1, (2, block)).tolist()
    mask = torch.stack([context_masks(block, window)[b, left[b], right[b]] for b in range(block)]).double()
    c = torch.randn(1, columns, dim).double().requires_grad_()
    x = torch.randn(1, block + shared, dim).double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(block):
        center = b + window
        context = [*range(center - left[b], center), *range(center + 1, center + right[b] + 1)]
        if context:
            h = c[0, context].mean(0)
            loss = loss - torch.nn.functional.logsigmoid(h @ x[0, b])
            for k in range(block, block + shared):
                loss = loss - negatives / shared * torch.nn.functional.logsigmoid(-h @ x[0, k])
    if loss.requires_grad:
        loss.backward()
    with torch.no_grad():
        dc, dx = cbow(c, x, (mask / mask.sum(-1, keepdim=True).clamp(min=1))[None], negatives / shared)
    for actual, expected in ((dc, c.grad), (dx, x.grad)):
        assert torch.allclose(actual, torch.zeros_like(actual) if expected is None else expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("use_cbow", [False, True])
def test_one_update_equals_the_formula_on_all_pairs(use_cbow: bool) -> None:
    """From the sampled segment to the updated matrices: ids, sentence ends, weights and padding."""
    text = encode([[" ".join(SENTENCES[:2]) + ".", " ".join(SENTENCES[2:]) + "."]], 1)
    settings = Word2VecSettings(dim=4, window=2, negatives=3, epochs=1, cbow=use_cbow, sample=1, lr=0.01)
    training = Training(text, settings)
    training.weight = training.weight.double()
    training.gradient_scales = [scale.double() for scale in training.gradient_scales]
    assert all(bool((scale == 1).all()) for scale in training.gradient_scales)
    training.inputs, training.outputs = (torch.randn(len(text.vocab), 4).double() for _ in range(2))
    inputs, outputs = (each.clone().requires_grad_() for each in (training.inputs, training.outputs))
    segment = training._sample_segment(0, torch.Generator().manual_seed(3))
    left, right = resample_windows(text, 2, 3)
    loss = torch.zeros((), dtype=torch.float64)
    noise = segment.targets.flatten(0, 1)[:, -SHARED_NEGATIVES:]
    for t in range(len(text.ids)):
        context = text.ids[[*range(t - left[t], t), *range(t + 1, t + right[t] + 1)]].tolist()
        pairs = [(inputs[text.ids[t]], word) for word in context]
        pairs = [(inputs[context].mean(0), int(text.ids[t]))] if use_cbow else pairs
        for h, word in pairs:
            loss = loss - torch.nn.functional.logsigmoid(h @ outputs[word])
            for k in noise[t // BLOCK_SIZE].tolist():
                loss = loss - 3 / SHARED_NEGATIVES * torch.nn.functional.logsigmoid(-h @ outputs[k])
    loss.backward()
    assert len(segment.weight_rows) == 1
    weight = training.weight[segment.weight_rows[0]].view(-1, BLOCK_SIZE, training.weight.shape[1])
    training._update(segment.sources[0], segment.targets[0], weight, 0.01)
    for actual, before in ((training.inputs, inputs), (training.outputs, outputs)):
        expected = before.detach() - 0.01 * before.grad
        assert torch.allclose(actual, expected, rtol=0, atol=1e-8)  # the weight table (1/3, 3/14) is in fp32


def resample_windows(text: Corpus, window: int, seed: int) -> tuple[list[int], list[int]]:
    """The windows of a segment with this seed, without subsampling."""
    generator = torch.Generator().manual_seed(seed)
    torch.rand(len(text.ids), generator=generator)  # consumed by subsampling
    left, right = sample_windows(text.sentences, window, generator)
    return left.tolist(), right.tolist()


def test_frequent_words_are_subsampled_by_the_formula() -> None:
    frequency = torch.tensor([0.1, 0.004, 0.001, 1e-6])
    assert keep_probability(frequency, 1e-3).tolist() == pytest.approx([0.11, 0.75, 1, 1])  # √0.01 + 0.01; √0.25 + 0.25
    text = encode([["often " * 9 + f"w{n}" for n in range(20_000)]], 1)
    training = Training(text, Word2VecSettings(sample=0.1, window=2))
    kept = training._sample_segment(0, torch.Generator().manual_seed(1)).weight_rows.numel()
    ratio = 0.1 / 0.9
    expected = 100_000 * (0.9 * (ratio**0.5 + ratio) + 0.1)
    assert abs(kept - expected) < training.update_size + 4 * 100_000**0.5


def test_window_sizes_are_uniform_and_clipped_to_the_sentence() -> None:
    sentences = torch.arange(20_000) // 40
    left, right = sample_windows(sentences, 5, torch.Generator().manual_seed(0))
    position = torch.arange(20_000) % 40
    assert bool((left <= position).all())
    assert bool((right <= 39 - position).all())
    inside = (position >= 5) & (position < 35)
    assert torch.equal(left[inside], right[inside])
    frequency = left[inside].bincount(minlength=6) / inside.sum()
    assert frequency.tolist() == pytest.approx([0, 0.2, 0.2, 0.2, 0.2, 0.2], abs=0.015)


def test_negatives_follow_the_counts_to_the_power_of_three_quarters() -> None:
    lines = ["a " * 1600 + "b " * 810 + "c " * 160 + "d " * 10] * 60  # counts of the words
    text = encode([lines], 1)
    training = Training(text, Word2VecSettings(sample=1))
    segment = training._sample_segment(0, torch.Generator().manual_seed(0))
    negatives = segment.targets[..., -SHARED_NEGATIVES:].flatten()
    power = text.counts.double() ** 0.75
    assert (negatives.bincount() / negatives.numel()).tolist() == pytest.approx(
        (power / power.sum()).tolist(), abs=0.01
    )
    assert noise_distribution(torch.tensor([16.0, 1.0])).tolist() == pytest.approx([8 / 9, 1 / 9])


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


def test_the_seed_also_determines_the_samples() -> None:
    one, two = (Training(topics(sentences=100), Word2VecSettings(dim=8, epochs=1, seed=seed)) for seed in (1, 2))
    two.inputs = one.inputs.clone()
    assert list(one) == list(two)
    assert not torch.allclose(one.inputs, two.inputs)


def test_several_workers_learn_the_groups_and_restore_the_thread_count() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        vectors = train(topics(), Word2VecSettings(dim=16, window=3, epochs=5, workers=3, sample=1))
        with ThreadPoolExecutor(1) as pool:  # a new thread inherits the number set last
            assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == (2, 2)
    finally:
        torch.set_num_threads(before)
    assert all(vectors.neighbors(word, 1)[0][0][0] == word[0] for word in vectors.words)


def test_a_fully_subsampled_text_changes_nothing() -> None:
    training = Training(topics(sentences=10), Word2VecSettings(dim=8, epochs=1, sample=1e-12))
    start = training.inputs.clone()
    assert list(training) == [1]
    assert torch.equal(training.inputs, start)


def test_progress_rises_to_one() -> None:
    training = Training(topics(sentences=100), Word2VecSettings(dim=8, epochs=7))
    assert list(training) == pytest.approx([n / 7 for n in range(1, 8)])


def test_breaking_out_of_the_iteration_stops_training(monkeypatch: pytest.MonkeyPatch) -> None:
    training, started = Training(topics(sentences=100), Word2VecSettings(dim=8, epochs=2000)), []
    sample = training._sample_segment
    monkeypatch.setattr(training, "_sample_segment", lambda *args: started.append(args) or sample(*args))
    for done in training:
        assert done == pytest.approx(1 / 2000)
        break
    assert len(started) < 1000


def test_a_very_frequent_word_stays_finite() -> None:
    """Hundreds of its gradients are summed in one update; without scaling the vectors diverge."""
    text = encode([["the the the the cat the the dog. the the a the"] * 20_000], 1)
    vectors = train(text, Word2VecSettings(dim=16, window=10, sample=1, epochs=2, workers=2, lr=0.1))
    assert bool(vectors.vectors.isfinite().all())
    assert float(vectors.vectors.norm(dim=1).max()) < 50


@pytest.mark.parametrize("use_cbow", [False, True])
def test_gradient_scales_limit_the_pairs_per_word(use_cbow: bool) -> None:
    text = encode([["the the the the cat the the dog a. the"] * 20_000], 1)
    settings = Word2VecSettings(dim=3, window=3, negatives=2, sample=1, cbow=use_cbow, lr=0.1)
    training = Training(text, settings)
    frequency, pairs = 0.7, 1 if use_cbow else 4  # of "the"; average pairs per word
    noise = 7**0.75 / (7**0.75 + 3)
    assert training.update_size == 192  # 200,000 words, 1,000 updates, blocks of 24
    inputs, outputs = training.gradient_scales
    assert float(inputs[0]) == pytest.approx(5 / (192 * 0.1 * pairs * frequency * 3))
    assert float(outputs[0]) == pytest.approx(5 / (192 * 0.1 * pairs * (frequency + 2 * noise)))
    scaled, unscaled = training, Training(text, settings)
    unscaled.gradient_scales = [torch.ones_like(scale) for scale in unscaled.gradient_scales]
    changes = []
    for each in (scaled, unscaled):
        each.outputs.normal_(generator=torch.Generator().manual_seed(0))
        start = each.inputs.clone()
        segment = each._sample_segment(0, torch.Generator().manual_seed(0))
        weight = each.weight[segment.weight_rows[0]].view(-1, BLOCK_SIZE, each.weight.shape[1])
        each._update(segment.sources[0], segment.targets[0], weight, 0.1)
        changes.append(each.inputs - start)
    assert torch.allclose(changes[0], changes[1] * inputs[:, None], atol=1e-5)


def test_sentences_end_at_punctuation_and_files_and_rare_words_are_dropped() -> None:
    text = encode([["It's a cat, a", "Cat! It is a"], ["a 猫。cat"]], min_count=2)
    assert text.vocab == ["a", "cat"]
    assert text.counts.tolist() == [4, 3]
    assert [text.vocab[word] for word in text.ids] == ["a", "cat", "a", "cat", "a", "a", "cat"]
    assert text.sentences.unique(return_counts=True)[1].tolist() == [4, 1, 1, 1]
    assert text.total_words == 11
    assert lowercase_words("Don’t, it's_3 …") == ["don’t", "it's_3"]


@pytest.mark.parametrize(
    ("documents", "message"), [([], "no words"), ([["…", ""]], "no words"), ([["a b a"]], "no word oc")]
)
def test_a_text_without_frequent_words_is_refused(documents: list[list[str]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        encode(documents, 5)


def test_settings_are_bounded() -> None:
    for wrong in ({"dim": 0}, {"window": 51}, {"sample": 0.0}, {"lr": 2.0}, {"windows": 5}):
        with pytest.raises(ConfigError):
            Word2VecSettings.build(wrong)


def test_neighbors_from_two_novels() -> None:
    from clearhead.text.corpus import read_corpus

    files = [corpus(f"english_novels/{name}.txt.gz") for name in ("Cbronte_Jane_1847", "Cbronte_Villette_1853")]
    vectors = train(read_corpus(files), Word2VecSettings(dim=50, epochs=3))
    near = [word for word, _ in vectors.neighbors("he", 5)]
    assert "she" in near
    assert vectors.similarity("husband", "wife") > vectors.similarity("husband", "window")


def test_a_text_of_far_too_many_different_words_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "MAX_WORDS", 50)
    (tmp_path / "text").write_text("".join(f"w{n}\n" for n in range(100)) + "the same words " * 300)
    with pytest.raises(UserError, match=r"text: \d+ different words in \d+ characters; give natural text"):
        read_corpus([tmp_path / "text"])
    monkeypatch.setattr(corpus_module, "MAX_WORDS", 110)
    assert read_corpus([tmp_path / "text"]).vocab == ["the", "same", "words"]
