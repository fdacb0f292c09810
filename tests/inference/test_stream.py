"""Streamed tokens and text equal those of `generate`."""

import pytest
import torch

from clearhead.config import GenerationConfig
from clearhead.inference import generate, stream, stream_text
from clearhead.text import train
from tests.inference.random_models import TEXTS, random_network


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_text_is_the_unstreamed_text(temperature: float) -> None:
    tokenizer = train(TEXTS, "byte-bpe", 300)
    torch.manual_seed(3)
    network = random_network("decoder", len(tokenizer), decoder_layers=2)
    config = GenerationConfig(max_new_tokens=40, temperature=temperature)
    end = tokenizer.id("end")
    for seed in range(10):
        prompt = tokenizer.encode(TEXTS[seed % 3])[:5]
        [[output]] = generate(network, [prompt], config, eos_ids=end, seeds=[seed])
        pieces = list(stream_text(network, prompt, config, tokenizer, eos_ids=end, seed=seed))
        assert "".join(pieces) == tokenizer.decode(output.ids)
        assert list(stream(network, prompt, config, eos_ids=end, seed=seed)) == output.ids
