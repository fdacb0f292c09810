"""Alignments link words, whatever the tokens, with the heads that were measured for the model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clearhead.config.generation import GenerationConfig
from clearhead.errors import UserError
from clearhead.inference import cross_attention_weights, default_alignment_heads
from clearhead.predict import Alignment, Model, load
from clearhead.predict.align import Words, alignment_heads, source_words, target_words, word_weights
from clearhead.predict.requests import requests
from tests.cli.models import clearhead, make

TEXTS = ("My sister bought two old books.", "Don't you see a café?", "火车站在哪里？", "a  b")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make(tmp_path_factory.mktemp("align") / "model", "tiny-translator"), "cpu")


def test_pieces_of_a_word_are_one_word_and_white_space_is_none() -> None:
    words = Words("an old café.", [(0, 2), (2, 3), (3, 5), (5, 6), (6, 9), (9, 10), (10, 11), (11, 12)])
    assert words.texts == ("an", "old", "café", ".")
    assert words.of_token == [0, None, 1, 1, 2, 2, 2, 3]
    assert Words("火车站在", [(0, 3), (3, 4)]).texts == ("火车站", "在"), "a token of several words is one"


@pytest.mark.parametrize("name", ["en-de", "zh-en"])
@pytest.mark.parametrize("text", TEXTS)
def test_words_cover_the_text_of_any_tokenizer(name: str, text: str) -> None:
    tokenizer = load(name, "cpu").tokenizer
    ids = tokenizer.encode(text)
    for words in (source_words(load(name, "cpu"), text), target_words(tokenizer, ids)):
        assert len(words.of_token) == len(ids)
        if tokenizer.decode(ids) == text:  # no unknown character
            assert "".join(words.texts) == "".join(text.split())


def test_word_weights_keep_the_mass_of_words() -> None:
    source, target = Words("ab c", [(0, 1), (1, 2), (3, 4)]), Words("x yz", [(0, 1), (2, 3), (3, 4)])
    tokens = torch.tensor([[0.1, 0.2, 0.6, 0.1], [0.5, 0.2, 0.2, 0.1], [0.1, 0.0, 0.8, 0.1]])  # the end token is last
    expected = torch.tensor([[0.3, 0.6], [0.4, 0.5]])
    torch.testing.assert_close(word_weights(tokens, source, target), expected)


def test_an_alignment_is_by_words_with_the_weights_it_comes_from(model: Model) -> None:
    result = model.translate("a man sees the dog", prefix="the", align=True, max_new_tokens=8)
    alignment = result.alignment
    assert isinstance(alignment, Alignment)
    assert alignment.source == ("a", "man", "sees", "the", "dog")
    assert alignment.target[0] == "the", "the prefix is aligned, too"
    assert len(alignment.links) == len(alignment.target) == len(alignment.weights)
    for source, target in alignment.links:
        assert alignment.weights[target][source] == max(alignment.weights[target])
    assert alignment.pairs[0] == (alignment.source[alignment.links[0][0]], "the")
    assert model.translate("a man").alignment is None


def test_the_heads_of_the_model_folder_are_used(model: Model) -> None:
    text = "a man sees the dog"
    one_head = replace(model, extra=model.extra | {"alignment": {"heads": [[0, 1]]}})
    result = one_head.translate(text, align=True, max_new_tokens=8)
    [(prompt, source, _)] = requests(model, [text], {})
    weights = cross_attention_weights(model.network, source or [], [*prompt, *result.ids])[0, 1]
    expected = word_weights(weights, source_words(model, text), target_words(model.tokenizer, result.ids))
    assert result.alignment is not None
    torch.testing.assert_close(torch.tensor(result.alignment.weights), expected, atol=1e-5, rtol=0)
    assert alignment_heads(model) == default_alignment_heads(model.config)


@pytest.mark.parametrize(
    ("value", "message"),
    [({"heads": [[9, 0]]}, "no head 0 in decoder layer 9"), ({"heads": []}, "heads"), (3, "expected")],
)
def test_wrong_heads_in_a_model_folder_are_named(model: Model, value: object, message: str) -> None:
    with pytest.raises(UserError, match=rf"config.json: alignment.*{message}"):
        replace(model, extra={"alignment": value}).translate("a man", align=True)
    assert GenerationConfig(align=True).align


def test_the_command_prints_links_and_words(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "tiny-translator")
    code, output, _ = clearhead("translate", folder, "the dog", "--align", "--beam", 1)
    text, links, words = output.splitlines()[0].split("\t")
    assert code == 0
    assert len(links.split()) == len(words.split()) == len(text.split())
    assert {pair.split("→")[0] for pair in words.split()} <= {"the", "dog"}


def test_an_empty_translation_has_no_words() -> None:
    words = target_words(load("en-de", "cpu").tokenizer, [])
    assert (words.texts, words.of_token) == ((), [])
