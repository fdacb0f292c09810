"""Texts as they come: streams of pieces, stop strings at any place, token log-probabilities, alternatives."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.errors import UserError
from clearhead.inference import DraftModel, StopStrings, alternatives, generate, stream, stream_text, translate
from clearhead.model import build
from clearhead.text import Tokenizer, train
from tests.inference.reference import scores

TEXTS = ["The cat sat on the mat, and the dog sat on the cat.", "Ärger über Öl!", "猫坐在垫子上。狗坐在猫上。"] * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS, "byte-bpe", 300)


@pytest.fixture
def gpt(tokenizer: Tokenizer) -> Any:
    torch.manual_seed(3)
    return writer("decoder", len(tokenizer), decoder_layers=2)


def writer(family: str, words: int, **layers: int) -> Any:
    """A network of which nothing is likely for long."""
    config = ModelConfig(family=family, dim=16, heads=2, vocab_size=words, max_positions=128, **layers)
    network = build(config).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_pieces_end_where_the_text_is_cut(tokenizer: Tokenizer, text: str, strings: list[str], data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stops, asked = StopStrings(strings, tokenizer), []
    given_out = list(stops.watch(asked.append(piece) or piece for piece in pieces))
    ends = [(n, -len(string)) for n in range(len(text) + 1) for string in strings if text[:n].endswith(string)]
    complete, size = min(ends, default=(len(text), 0))
    assert "".join(given_out) == stops.truncate(text) == text[: complete + size]
    assert all(given_out)
    # Nothing is asked for beyond the piece with which the first stop is complete.
    needed = next((n for n in range(len(pieces) + 1) if stops.find("".join(pieces[:n])) is not None), len(pieces))
    assert len(asked) == needed


def test_nothing_is_held_back_longer_than_needed(tokenizer: Tokenizer) -> None:
    stops = StopStrings(["END"], tokenizer)
    pieces = iter(["x", "E", "yEN", "D", "z"])
    assert list(stops.watch(pieces)) == ["x", "Ey"]
    assert next(pieces) == "z"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_text_is_the_unstreamed_text(gpt: Any, tokenizer: Tokenizer, temperature: float) -> None:
    config = GenerationConfig(max_new_tokens=40, temperature=temperature)
    end = tokenizer.id("end")
    for seed in range(10):
        prompt = tokenizer.encode(TEXTS[seed % 3])[:5]
        [[output]] = generate(gpt, [prompt], config, end=end, seeds=[seed])
        pieces = list(stream_text(gpt, prompt, config, tokenizer, end=end, seed=seed))
        assert "".join(pieces) == tokenizer.decode(output.ids)
        assert list(stream(gpt, prompt, config, end=end, seed=seed)) == output.ids


@pytest.mark.parametrize("guess", [False, True])
def test_stop_strings_cut_rows_of_a_batch_where_they_cut_each_text(
    gpt: Any, tokenizer: Tokenizer, propose: bool
) -> None:
    end, prompts = tokenizer.id("end"), [tokenizer.encode(text)[:4] for text in TEXTS[:3] * 4]
    config = GenerationConfig(max_new_tokens=40, temperature=1.0, logprobs=True)
    whole = [tokenizer.decode(output.ids) for [output] in generate(gpt, prompts, config, end=end)]
    strings = [text[n : n + 2] for n, text in enumerate(whole) if len(text) > n + 2][:3]
    stops = StopStrings(strings, tokenizer)
    draft = DraftModel(gpt) if propose else None
    found = [outputs[0] for outputs in generate(gpt, prompts, config, end=end, stops=stops, draft=draft)]
    assert [stops.truncate(tokenizer.decode(output.ids)) for output in found] == [
        stops.truncate(text) for text in whole
    ]
    stopped = [output for output, text in zip(found, whole, strict=True) if stops.find(text) is not None]
    assert stopped
    for output in stopped:
        assert output.finished
        assert stops.find(tokenizer.decode(output.ids)) is not None, "the last token completes the stop"
        assert stops.find(tokenizer.decode(output.ids[:-1])) is None
        assert len(output.logprobs) == len(output.ids)
    for number, text in enumerate(whole):
        pieces = stream_text(gpt, prompts[number], config, tokenizer, end=end, seed=number, stop=tuple(strings))
        assert "".join(pieces) == stops.truncate(text)


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""], tokenizer)


def test_log_probabilities_are_those_of_the_model_whatever_the_rules(gpt: Any) -> None:
    config = GenerationConfig(
        max_new_tokens=6, logprobs=True, temperature=2.0, top_k=40, repetition_penalty=1.5, banned_ids=((9,),)
    )
    prompts = [[5, 6], [7]]
    for prompt, [output] in zip(prompts, generate(gpt, prompts, config, end=2), strict=True):
        text = [*output.ids, 2] if output.finished else output.ids
        expected = [float(scores(gpt, ([], prompt), text[:n])[token]) for n, token in enumerate(text)]
        assert output.logprobs == pytest.approx(expected, abs=1e-5)
        assert output.score == pytest.approx(sum(expected) / len(text), abs=1e-5)


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_alternatives_are_the_likeliest_words_each_completed(family: str) -> None:
    layers = {"decoder_layers": 2} | ({"encoder_layers": 1} if family == "encoder-decoder" else {})
    network, prompt, source = writer(family, 30, **layers), [1, 5, 9], [4, 3, 8]
    row = (source, prompt)
    config = GenerationConfig(max_new_tokens=8, logprobs=True, banned_ids=((13,),))
    translator = family == "encoder-decoder"
    found = alternatives(network, prompt, 6, config, end=0, source=source if translator else None)
    chances = scores(network, row, [])
    chances[13] = -torch.inf
    first = chances.topk(6).indices.tolist()
    assert [output.ids[0] if output.ids else 0 for output in found] == first
    rest = config.model_copy(update={"max_new_tokens": 7})
    for output, token in zip(found, first, strict=True):
        assert output.logprobs[0] == pytest.approx(float(chances[token]), abs=1e-5)
        if token == 0:
            continue
        if translator:
            [[follows]] = translate(network, [source], rest, begin=1, end=0, prefixes=[[*prompt[1:], token]])
        else:
            [[follows]] = generate(network, [[*prompt, token]], rest, end=0)
        assert output.ids[1:] == follows.ids


def test_alternatives_refuse_a_beam_and_more_words_than_there_are() -> None:
    network = writer("decoder", 30, decoder_layers=1)
    with pytest.raises(UserError, match="beam=1"):
        alternatives(network, [1], 3, GenerationConfig(beam=2), end=0)
    with pytest.raises(UserError, match="1 to 30"):
        alternatives(network, [1], 31, GenerationConfig(), end=0)


def test_samples_differ_and_the_first_is_the_one_of_a_single_sample() -> None:
    network = writer("decoder", 30, decoder_layers=1)
    config = GenerationConfig(max_new_tokens=10, temperature=1.0, samples=8)
    [several] = generate(network, [[3, 4]], config, end=0, seeds=[11])
    [[one]] = generate(network, [[3, 4]], config.model_copy(update={"samples": 1}), end=0, seeds=[11])
    assert several[0] == one
    assert len({tuple(output.ids) for output in several}) > 5


def test_several_tokens_may_end_a_text() -> None:
    network = writer("decoder", 12, decoder_layers=1)
    for beam in (1, 3):
        config = GenerationConfig(max_new_tokens=20, beam=beam)
        [[plain]] = generate(network, [[3, 4]], config, end=[])
        assert len(plain.ids) == 20
        assert not plain.finished
    [[plain]] = generate(network, [[3, 4]], GenerationConfig(max_new_tokens=20), end=())
    ends = (plain.ids[7], plain.ids[4])
    [[cut]] = generate(network, [[3, 4]], GenerationConfig(max_new_tokens=20), end=ends)
    first = min(plain.ids.index(end) for end in ends)
    assert cut.ids == plain.ids[:first]
    assert cut.finished
