"""Decode steps replayed from CUDA graphs, compiled or not, equal eager decoding: `make test-gpu`."""

import gc
from typing import Any

import pytest
import torch

from clearhead.config import GenerationConfig, preset
from clearhead.inference import cuda_graph_replay as graphs
from clearhead.inference import enable_cuda_graphs, generate, stream
from clearhead.inference.cuda_graph import GraphSampling
from clearhead.inference.model_runner import ModelRunner
from clearhead.model import build
from clearhead.ops.triton import decode_attention as kernel
from clearhead.ops.triton.decode_attention import triton_decode_attention_supports
from tests.inference.decode_attention_cases import check_case, random_case
from tests.inference.random_models import same_outputs
from tests.quantization import quantize_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
SETTINGS = [
    GenerationConfig(max_new_tokens=600),  # outgrows the first graph
    GenerationConfig(max_new_tokens=40, logprobs=True),
    GenerationConfig(max_new_tokens=40, temperature=1.3, top_k=9, top_p=0.9, min_p=0.02, logprobs=True),
    GenerationConfig(max_new_tokens=40, temperature=0.7, samples=3),
    GenerationConfig(max_new_tokens=40, temperature=0.9, repetition_penalty=1.2, no_repeat_ngram_size=3),
]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [3, 3]]


def random_decoder(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A random network on the GPU whose logits have a standard deviation of about 2."""
    torch.manual_seed(1)
    network = build(preset(name, ["max_positions=2048"])).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        out = network(torch.randint(4000, (8, 6)))
        network.heads.lm_head.proj.weight.mul_(2 / out.std(dim=-1).mean())
    return network.to("cuda", dtype)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama"])
def test_replayed_steps_generate_the_same_tokens_as_eager_steps(name: str) -> None:
    network = random_decoder(name)
    for config in SETTINGS:
        graphs._GRAPHS.pop(network, None)
        expected = generate(network, PROMPTS, config, eos_ids=0, seeds=[5, 6, 5, 2**40])
        assert enable_cuda_graphs(network)
        for _ in range(2):  # captured, then replayed from a graph that was used before
            assert same_outputs(generate(network, PROMPTS, config, eos_ids=0, seeds=[5, 6, 5, 2**40]), expected)
        assert graphs._GRAPHS[network].captured


@pytest.mark.parametrize(
    ("name", "rows", "compiled"),  # few are compiled, because autotuning is slow
    [
        *((name, rows, False) for name in ("tiny-gpt", "tiny-llama") for rows in (1, 3, 32)),
        ("tiny-gpt", 1, True),
        ("tiny-llama", 1, True),
        ("tiny-llama", 64, True),  # so many rows that the cache is not split
    ],
)
def test_replayed_steps_have_the_same_logits_as_eager_steps(name: str, rows: int, compiled: bool) -> None:
    prompts = [torch.randint(4000, (1 + 37 * n % 100,)).tolist() for n in range(rows)]
    ids = torch.randint(4000, (12, rows, 1), device="cuda")
    for dtype, tolerance in ((torch.bfloat16, 0.03),) if compiled else ((torch.float32, 1e-4), (torch.bfloat16, 0.03)):
        network = random_decoder(name, dtype)
        graph_cache = graphs.GraphCache(network, compiled)
        with torch.inference_mode():
            eager, other = (ModelRunner(network, rows, 200) for _ in range(2))
            for step in (eager, other):
                step.prefill(prompts)
            replayed = graphs.ReplayRunner(other, graph_cache, GraphSampling(None))
            for tokens in ids:
                expected, logits = eager.decode_step(tokens)[:, 0].float(), replayed.decode_step(tokens)[:, 0].float()
                assert (logits - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize(("temperature", "rows"), [(0.0, 1), (1.0, 4)])
def test_compiled_steps_generate_the_same_tokens_as_eager_steps(temperature: float, rows: int) -> None:
    network, config = random_decoder("tiny-llama"), GenerationConfig(max_new_tokens=60, temperature=temperature)
    expected = generate(network, PROMPTS[:rows], config, eos_ids=0)
    assert enable_cuda_graphs(network, compiled=True)
    assert same_outputs(generate(network, PROMPTS[:rows], config, eos_ids=0), expected)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "group"),
    [
        ((1, 8, 512, 64), 4),  # split
        ((32, 8, 512, 64), 4),
        ((16, 12, 512, 64), 1),
        ((3, 3, 200, 128), 3),
        ((5, 2, 4096, 32), 8),
        ((2, 1, 130, 16), 16),
        ((130, 1, 300, 256), 5),
    ],
)
def test_the_kernel_equals_the_reference(
    shape: tuple[int, int, int, int], group: int, dtype: torch.dtype, rotated: bool
) -> None:
    edges = [shape[2] - 1, 0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129]
    lengths = [edges[row % 13] if row % 13 < 12 else row * 61 % shape[2] for row in range(shape[0])]
    case = random_case(shape, group, lengths, dtype, rotated, "cuda")
    assert triton_decode_attention_supports(case.heads, case.keys)
    check_case(case)


@pytest.mark.parametrize("splits", [1, 2, 7, 64])
def test_any_number_of_splits_equals_the_reference(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    monkeypatch.setattr(kernel, "split_cache", lambda keys: (64, splits))
    for length in (0, 63, 64, 65, 1000, 2047):
        check_case(random_case((2, 4, 2048, 64), 4, [length, 2047 - length], torch.bfloat16, True, "cuda"))


def test_unsupported_shapes_and_dtypes_are_refused() -> None:
    keys = torch.empty(2, 2, 64, 64, device="cuda")
    assert triton_decode_attention_supports(torch.empty(2, 8, 64, device="cuda"), keys)
    assert not triton_decode_attention_supports(torch.empty(2, 8, 64, device="cuda").double(), keys.double())
    assert not triton_decode_attention_supports(torch.empty(2, 8, 64, device="cuda").bfloat16(), keys)
    assert not triton_decode_attention_supports(torch.empty(2, 2 * (17 + 2), 64, device="cuda"), keys)
    assert not triton_decode_attention_supports(torch.empty(2, 8, 64, device="cuda"), keys.transpose(2, 3))
    for dim in (8, 48, 512):
        assert not triton_decode_attention_supports(
            torch.empty(2, 8, dim, device="cuda"), torch.empty(2, 2, 64, dim, device="cuda")
        )


@pytest.mark.parametrize(("name", "rows"), [("tiny-gpt", 1), ("tiny-llama", 1), ("tiny-llama", 64)])
def test_compiled_steps_with_the_kernel_generate_the_same_tokens_as_eager_steps(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int
) -> None:
    network, config = random_decoder(name, torch.float32), GenerationConfig(max_new_tokens=60)
    prompts = [[5 + row, 6, 7][: 1 + row % 3] for row in range(rows)]
    expected = generate(network, prompts, config, eos_ids=0)
    monkeypatch.setattr("clearhead.inference.static_decoder.cached_attention", None)  # only the kernel attends
    monkeypatch.setattr("clearhead.inference.static_decoder.sdpa", None)
    assert enable_cuda_graphs(network, compiled=True)
    outputs = generate(network, prompts, config, eos_ids=0)
    equal = [output.ids == other.ids for [output], [other] in zip(outputs, expected, strict=True)]
    assert sum(equal) >= 0.95 * rows, "all but near ties"


def test_int8_weights_have_nearly_the_same_logits_as_bf16_weights() -> None:
    network = random_decoder("tiny-llama", torch.bfloat16)
    quantized = quantize_module(random_decoder("tiny-llama", torch.bfloat16))
    ids = torch.randint(4000, (12, 1, 1), device="cuda")
    for compiled in (False, True):
        with torch.inference_mode():
            eager, other = ModelRunner(network, 1, 200), ModelRunner(quantized, 1, 200)
            eager.prefill([[5, 6, 7]]), other.prefill([[5, 6, 7]])
            replayed = graphs.ReplayRunner(other, graphs.GraphCache(quantized, compiled), GraphSampling(None))
            for tokens in ids:
                expected, logits = eager.decode_step(tokens).float(), replayed.decode_step(tokens).float()
                assert (logits - expected).norm() < 0.1 * expected.norm()


def test_concurrent_streams_are_independent_and_memory_is_freed() -> None:
    network, config = random_decoder("tiny-llama"), GenerationConfig(max_new_tokens=50, temperature=1.0)
    expected = [list(stream(network, [prompt], config, eos_ids=0, seed=prompt)) for prompt in (3, 4)]
    allocated = []
    for _ in range(2):  # what the first graph leaves behind, such as cuBLAS workspaces, is reused by the second
        assert enable_cuda_graphs(network)
        texts: list[list[int]] = [[], []]
        streams = [stream(network, [prompt], config, eos_ids=0, seed=prompt) for prompt in (3, 4)]
        for _ in range(50):
            for text, tokens in zip(texts, streams, strict=True):
                text.extend(token for token in [next(tokens, None)] if token is not None)
        assert texts == expected
        del graphs._GRAPHS[network], streams, tokens
        gc.collect()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] < allocated[0] + (4 << 20)
