"""The engine behind `generate` and `stream`: the texts of single calls, from any number of threads."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from clearhead.config import EngineConfig, GenerationConfig, ModelConfig
from clearhead.errors import UserError
from clearhead.inference import Engine, SharedEngine, generate, pack_for_steps, stream_text
from clearhead.inference.native_network import native_refuses
from clearhead.model import build
from clearhead.text import Tokenizer, train
from tests.inference.random_models import TEXTS, random_network
from tests.inference.test_engine import small_network


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS, "byte-bpe", 300)


def test_calls_from_several_threads_give_the_outputs_of_single_calls() -> None:
    network, shared = small_network("decoder"), SharedEngine(Engine(small_network("decoder"), eos_ids=0))
    config = GenerationConfig(max_new_tokens=20, temperature=1.0, samples=2, logprobs=True)

    def call(number: int) -> Any:
        prompts = [[1 + (number + each) % 20] * (1 + each) for each in range(3)]
        return shared.generate(prompts, config, seeds=[number, 5, 6]), prompts

    with ThreadPoolExecutor(4) as pool:
        for number, (outputs, prompts) in enumerate(pool.map(call, range(8))):
            expected = generate(network, prompts, config, eos_ids=0, seeds=[number, 5, 6])
            assert [[each.ids for each in row] for row in outputs] == [[each.ids for each in row] for row in expected]
            assert outputs[0][0].score == pytest.approx(expected[0][0].score)
    assert not shared.engine.busy


def test_a_stream_that_is_closed_frees_its_pages(tokenizer: Tokenizer) -> None:
    network = random_network("decoder", len(tokenizer), decoder_layers=1)
    shared = SharedEngine(Engine(network, eos_ids=(), tokenizer=tokenizer))
    config = GenerationConfig(max_new_tokens=60, temperature=1.0)
    text = "".join(shared.stream([5, 6], config, seed=3))
    assert text == "".join(stream_text(network, [5, 6], config, tokenizer, eos_ids=(), seed=3))
    pieces = shared.stream([5, 6], config, seed=3)
    assert text.startswith(next(pieces))
    assert shared.engine.stats.pages_used > 0
    pieces.close()
    assert shared.engine.stats.pages_used == 0
    with pytest.raises(UserError, match="beam=1 and samples=1"):
        shared.stream([5], GenerationConfig(beam=2))


def test_an_error_in_a_step_ends_the_engine_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedEngine(Engine(small_network("decoder"), eos_ids=0))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shared.engine, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        shared.generate([[1]], GenerationConfig(), seeds=[0])
    assert shared.failed
    with pytest.raises(RuntimeError, match="call again"):
        shared.generate([[1]], GenerationConfig(), seeds=[0])


@pytest.mark.parametrize("rows", [1, 7, 64, 256])
@pytest.mark.parametrize("native", [False, True])
def test_the_text_is_the_same_in_batches_of_any_size_in_fp32(rows: int, native: bool) -> None:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"dim": 32, "heads": 4, "kv_heads": 2, "decoder_layers": 2, "vocab_size": 90}
    network: Any = build(ModelConfig(family="decoder", max_positions=128, position="rotary", **sizes)).eval()
    with torch.no_grad():
        network.heads.lm_head.proj.weight.mul_(12)
    if native and (reason := native_refuses(network)):
        pytest.skip(reason)
    config = GenerationConfig(max_new_tokens=24, temperature=0.9)
    prompts = [[1 + (3 * row + column) % 80 for column in range(1 + row % 40)] for row in range(256)]

    def texts(batch: list[list[int]], first: int) -> list[list[int]]:
        packed = pack_for_steps(network, None) if native else network
        engine = Engine(packed, eos_ids=0, config=EngineConfig(max_batch_size=256))  # type: ignore[arg-type]
        seeds = list(range(first, first + len(batch)))
        return [row[0].ids for row in SharedEngine(engine).generate(batch, config, seeds=seeds)]

    assert texts(prompts[:rows], 0)[-1] == texts([prompts[rows - 1]], rows - 1)[0]
