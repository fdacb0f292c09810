"""Alternatives are the most likely next tokens, each continued as from a prompt that ends with it."""

import pytest
import torch

from clearhead.config import GenerationConfig
from clearhead.errors import UserError
from clearhead.inference import alternatives, generate, translate
from tests.inference.random_models import random_network
from tests.inference.reference import next_logprobs


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_alternatives_are_the_most_likely_tokens_each_continued(family: str) -> None:
    layers = {"decoder_layers": 2} | ({"encoder_layers": 1} if family == "encoder-decoder" else {})
    network, prompt, source = random_network(family, 30, **layers), [1, 5, 9], [4, 3, 8]
    config = GenerationConfig(max_new_tokens=8, logprobs=True, banned_ids=((13,),))
    translator = family == "encoder-decoder"
    outputs = alternatives(network, prompt, 6, config, eos_ids=0, source=source if translator else None)
    logprobs = next_logprobs(network, (source, prompt), [])
    logprobs[13] = -torch.inf
    expected = logprobs.topk(6).indices.tolist()
    assert [output.ids[0] if output.ids else 0 for output in outputs] == expected
    rest = config.model_copy(update={"max_new_tokens": 7})
    for output, token in zip(outputs, expected, strict=True):
        assert output.logprobs[0] == pytest.approx(float(logprobs[token]), abs=1e-5)
        if token == 0:
            continue
        if translator:
            [[continuation]] = translate(network, [source], rest, bos_id=1, eos_ids=0, prefixes=[[*prompt[1:], token]])
        else:
            [[continuation]] = generate(network, [[*prompt, token]], rest, eos_ids=0)
        assert output.ids[1:] == continuation.ids


def test_alternatives_refuse_beams_and_more_tokens_than_the_vocabulary_has() -> None:
    network = random_network("decoder", 30, decoder_layers=1)
    with pytest.raises(UserError, match="beam=1"):
        alternatives(network, [1], 3, GenerationConfig(beam=2), eos_ids=0)
    with pytest.raises(UserError, match="1 to 30"):
        alternatives(network, [1], 31, GenerationConfig(), eos_ids=0)
