"""Generation on a GPU equals generation on a CPU, in float64: `make test-gpu`."""

import copy
from typing import Any

import pytest
import torch

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.model import build
from tests.inference.random_models import same_outputs
from tests.inference.reference import search

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
VOCAB_SIZE = 1003  # large enough for the CPU's blockwise top-k, with a remainder
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": True},
    "beam 4": {"beam": 4, "n_best": 4, "logprobs": True},
    "beam 8": {"beam": 8, "n_best": 3, "length_penalty": 0.6, "length_form": "gnmt", "min_new_tokens": 4},
    "no early stop": {"beam": 3, "early_stopping": "never", "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    "sampling": {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "samples": 2, "logprobs": True},
}


@pytest.mark.parametrize("family", ["encoder-decoder", "decoder"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_gpu_generates_the_same_tokens_as_the_cpu(family: str, name: str) -> None:
    settings = GenerationConfig(max_new_tokens=20, **SETTINGS[name])
    layers = {"decoder_layers": 2} | ({"encoder_layers": 2} if family == "encoder-decoder" else {})
    torch.manual_seed(3)
    network = build(ModelConfig(family=family, dim=64, heads=4, vocab_size=VOCAB_SIZE, max_positions=64, **layers))
    network = network.double().eval()
    with torch.no_grad():
        ids = torch.randint(VOCAB_SIZE, (8, 6))
        out = network(ids, ids) if family == "encoder-decoder" else network(ids)
        network.heads.lm_head.proj.weight.mul_(2 / out.std(dim=-1).mean())
    lengths = (5, 1, 9, 3, 7)
    prompts = [torch.randint(4, VOCAB_SIZE, (length,)).tolist() for length in lengths]
    rows = [(prompt, [1]) if family == "encoder-decoder" else ([], prompt) for prompt in prompts]
    expected = search(network, rows, settings)
    outputs = search(copy.deepcopy(network).to("cuda"), rows, settings)
    assert same_outputs(
        outputs, expected, within=1e-4
    )  # sinusoidal positions are fp32, and a GPU's sines differ slightly
