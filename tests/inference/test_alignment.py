"""Alignments are the cross-attention weights with which each token was predicted."""

import pytest
import torch

from clearhead.config import GenerationConfig, preset
from clearhead.errors import UserError
from clearhead.inference import (
    alignment_links,
    alignment_weights,
    default_alignment_heads,
    format_alignment,
    generate,
    translate,
)
from clearhead.interpret import capture_attention
from tests.inference.peers import PADDING, gpt2, marian, random_rows


@pytest.mark.parametrize("heads", [None, ((0, 1), (1, 0))])
def test_alignment_weights_equal_the_cross_attention_of_transformers(heads: tuple[tuple[int, int], ...] | None) -> None:
    pair = marian()
    pair.theirs.set_attn_implementation("eager")
    config = GenerationConfig(
        max_new_tokens=10, min_new_tokens=3, banned_ids=((PADDING,),), align=True, beam=3, n_best=2
    )
    sources = [[*row, pair.end] for row in random_rows(5)]
    results = translate(pair.ours, sources, config, bos_id=PADDING, eos_ids=pair.end, alignment_heads=heads)
    for source, outputs in zip(sources, results, strict=True):
        assert len(outputs) == 2
        for output in outputs:
            decoder_input = torch.tensor([[PADDING, *output.ids[:-1]]])
            theirs = pair.theirs(torch.tensor([source]), decoder_input_ids=decoder_input, output_attentions=True)
            layers = [weights[0] for weights in theirs.cross_attentions]
            chosen = layers[-1] if heads is None else torch.stack([layers[layer][head] for layer, head in heads])
            assert output.alignment.shape == (len(output.ids), len(source))
            torch.testing.assert_close(output.alignment, chosen.mean(dim=0), atol=1e-5, rtol=0)


def test_a_prefix_is_aligned_and_any_head_can_be_used() -> None:
    pair = marian()
    source, prompt, target = [4, 5, 6, pair.end], [PADDING, 7, 8], [9, 10]
    for layer, head in ((1, 1), (0, 0)):
        weights = alignment_weights(pair.ours, source, prompt, target, [(layer, head)])
        with capture_attention(pair.ours) as traces, torch.no_grad():
            pair.ours(torch.tensor([source]), torch.tensor([[*prompt, *target]]))
        expected = traces[f"decoder.layers.{layer}.cross_attention"].weights[0, head]
        torch.testing.assert_close(weights, expected[:4], atol=1e-6, rtol=0)


def test_the_default_is_a_late_layer() -> None:
    assert default_alignment_heads(preset("tiny-translator", ["decoder_layers=2"])) == [(1, head) for head in range(4)]
    assert default_alignment_heads(preset("tiny-translator", ["decoder_layers=6"])) == [(4, head) for head in range(4)]
    assert default_alignment_heads(preset("tiny-translator", ["decoder_layers=1"]))[0] == (0, 0)


def test_an_empty_target_has_an_empty_alignment() -> None:
    pair = marian()
    assert alignment_weights(pair.ours, [4, pair.end], [PADDING], []).shape == (0, 2)
    assert alignment_links(torch.zeros(0, 2)) == []
    assert format_alignment([]) == ""


def test_links_are_the_highest_weights_and_the_moses_format_sorts_them() -> None:
    weights = torch.tensor([[0.1, 0.7, 0.2], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3]])
    assert alignment_links(weights) == [(1, 0), (0, 1), (1, 2)]
    assert format_alignment(alignment_links(weights)) == "0-1 1-0 1-2"


def test_a_decoder_cannot_align() -> None:
    pair = gpt2()
    with pytest.raises(UserError, match="align"):
        generate(pair.ours, [[1]], GenerationConfig(align=True), eos_ids=0)
