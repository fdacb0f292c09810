"""Stop strings end a text wherever they appear, whatever the token boundaries, streamed or not."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import GenerationConfig
from clearhead.inference import DraftModel, StopStrings, generate, stream_text
from clearhead.text import Tokenizer, train
from tests.inference.random_models import TEXTS, random_network


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS, "byte-bpe", 300)


@pytest.mark.parametrize(
    ("strings", "text", "kept"),
    [
        (["two", "one"], "zero one two", "zero "),  # the first in the text, not in the list
        (["abc", "ab"], "xabc", "x"),  # both begin at the same position
        (["abcd", "c"], "xabcd", "xab"),  # "c" is complete first, though "abcd" begins earlier
        (["c", "abc"], "xabc", "x"),  # both end at the same position: the longest counts
        (["bc", "abd"], "xabc", "xa"),  # "abd" only begins
        (["z"], "xabc", "xabc"),
    ],
)
def test_the_stop_string_that_is_complete_first_counts(
    tokenizer: Tokenizer, strings: list[str], text: str, kept: str
) -> None:
    for order in (strings, strings[::-1]):
        stop = StopStrings(order, tokenizer)
        assert stop.truncate(text) == kept
        assert "".join(stop.truncate_stream(text)) == kept, "character by character"
        assert stop.find(text) == (len(kept) if kept != text else None)


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_a_stream_ends_where_the_text_is_truncated(
    tokenizer: Tokenizer, text: str, strings: list[str], data: Any
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stop, read = StopStrings(strings, tokenizer), []
    yielded = list(stop.truncate_stream(read.append(piece) or piece for piece in pieces))
    ends = [(n, -len(string)) for n in range(len(text) + 1) for string in strings if text[:n].endswith(string)]
    end, length = min(ends, default=(len(text), 0))
    assert "".join(yielded) == stop.truncate(text) == text[: end + length]
    assert all(yielded)
    # Nothing is read after the piece that completes the first stop string.
    needed = next((n for n in range(len(pieces) + 1) if stop.find("".join(pieces[:n])) is not None), len(pieces))
    assert len(read) == needed


def test_text_is_held_back_only_while_it_may_be_a_stop_string(tokenizer: Tokenizer) -> None:
    stop = StopStrings(["END"], tokenizer)
    pieces = iter(["x", "E", "yEN", "D", "z"])
    assert list(stop.truncate_stream(pieces)) == ["x", "Ey"]
    assert next(pieces) == "z"


@pytest.mark.parametrize("use_draft", [False, True])
def test_stop_strings_end_rows_of_a_batch_where_they_truncate_each_text(tokenizer: Tokenizer, use_draft: bool) -> None:
    torch.manual_seed(3)
    network = random_network("decoder", len(tokenizer), decoder_layers=2)
    end, prompts = tokenizer.id("end"), [tokenizer.encode(text)[:4] for text in TEXTS[:3] * 4]
    config = GenerationConfig(max_new_tokens=40, temperature=1.0, logprobs=True)
    texts = [tokenizer.decode(output.ids) for [output] in generate(network, prompts, config, eos_ids=end)]
    strings = [text[n : n + 2] for n, text in enumerate(texts) if len(text) > n + 2][:3]
    stop = StopStrings(strings, tokenizer)
    draft = DraftModel(network) if use_draft else None
    outputs = [row[0] for row in generate(network, prompts, config, eos_ids=end, stop_strings=stop, draft=draft)]
    assert [stop.truncate(tokenizer.decode(output.ids)) for output in outputs] == [
        stop.truncate(text) for text in texts
    ]
    stopped = [output for output, text in zip(outputs, texts, strict=True) if stop.find(text) is not None]
    assert stopped
    for output in stopped:
        assert output.finished
        assert stop.find(tokenizer.decode(output.ids)) is not None, "the last token completes the stop string"
        assert stop.find(tokenizer.decode(output.ids[:-1])) is None
        assert len(output.logprobs) == len(output.ids)
    for number, text in enumerate(texts):
        pieces = stream_text(network, prompts[number], config, tokenizer, eos_ids=end, seed=number, stop=tuple(strings))
        assert "".join(pieces) == stop.truncate(text)


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""], tokenizer)
