"""Fast paths on a CUDA device equal the reference: `make test-gpu`; skipped without one."""

import pytest
import torch
from torch import nn

from clearhead.config import preset
from clearhead.model import Documents, KVCache, Mask, Pattern, attend, attention_backend, build
from clearhead.model.heads import mean_pool
from clearhead.ops.attention.dispatch import BACKENDS, choose_backend
from clearhead.ops.attention.varlen import varlen_options
from clearhead.ops.linear.quantized import QuantizedLinear, quantize_rows
from tests.equality import check, inputs
from tests.quantization import quantize_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
PATTERNS = [
    Pattern(),
    Pattern("window", 1),
    Pattern("window", 50),
    Pattern("window", 300),
    Pattern("column", 7),
    Pattern("column", 64),
    Pattern("block", 64),
    Pattern("block", 33),
    Pattern("summary", 64, 8),
    Pattern("summary", 33, 33),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_pattern_equals_the_reference(pattern: Pattern, causal: bool, dtype: torch.dtype) -> None:
    for tokens, heads, groups, dim in ((1, 4, 2, 64), (200, 4, 4, 64), (777, 6, 2, 32)):
        for lengths in (None, torch.tensor([tokens, tokens // 2], device="cuda")):
            padding_mask = torch.ones(2, tokens, dtype=torch.bool, device="cuda")
            if lengths is not None:
                padding_mask = torch.arange(tokens, device="cuda") < lengths[:, None]
            mask = Mask(causal, pattern, lengths)
            for name in ("sdpa", "sparse"):  # flex compiles for every case and has its own test
                check(*inputs(2, heads, groups, tokens, dtype, dim, "cuda"), mask, padding_mask, name)


@pytest.mark.parametrize(
    ("kind", "dtype", "dim", "causal"),
    [
        ("window", torch.float32, 64, True),
        ("window", torch.bfloat16, 64, True),
        ("window", torch.bfloat16, 128, False),
        ("window", torch.float16, 32, True),
        ("summary", torch.bfloat16, 64, True),
        ("summary", torch.float32, 16, False),
    ],
    ids=str,
)
def test_flex_equals_the_reference(kind: str, dtype: torch.dtype, dim: int, causal: bool) -> None:
    """Few cases, because each compiles a forward and a backward kernel."""
    for tokens, size, summary in ((130, 5, 2), (1000, 129, 8)):
        q, k, v = inputs(2, 4, 2, tokens, dtype, dim, "cuda")
        mask = Mask(causal, Pattern(kind, size, summary if kind == "summary" else 0))
        assert choose_backend(q, k, mask) == "flex"
        check(q, k, v, mask, torch.ones(2, tokens, dtype=torch.bool, device="cuda"), "flex")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", [Pattern(), Pattern("window", 9)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_varlen_equals_the_reference(groups: int, causal: bool, pattern: Pattern, dtype: torch.dtype) -> None:
    documents = Documents.from_lengths([5, 1, 130, 64, 33], device="cuda")
    q, k, v = inputs(1, 4, groups, documents.total, dtype, 64, "cuda")
    mask = Mask(causal, pattern, documents=(documents, documents))
    if pattern.kind == "full" or "window_size" in varlen_options():
        assert choose_backend(q, k, mask) == "varlen"
    check(q, k, v, mask, torch.ones(1, documents.total, dtype=torch.bool, device="cuda"), None)


@every_dtype
def test_cross_attention_between_packed_batches_equals_the_reference(dtype: torch.dtype) -> None:
    targets, sources = (
        Documents.from_lengths([5, 1, 40], device="cuda"),
        Documents.from_lengths([7, 90, 2], device="cuda"),
    )
    q = inputs(1, 4, 4, targets.total, dtype, 32, "cuda")[0]
    _, k, v = inputs(1, 4, 4, sources.total, dtype, 32, "cuda")
    mask = Mask(documents=(targets, sources))
    check(q, k, v, mask, torch.ones(1, targets.total, dtype=torch.bool, device="cuda"), None)


@every_dtype
def test_a_fully_masked_row_gives_zeros(dtype: torch.dtype) -> None:
    for name in (None, *BACKENDS):
        q, k, v = inputs(2, 2, 2, 96, dtype, 64, "cuda")
        out = attend(q, k, v, Mask(lengths=torch.tensor([0, 96], device="cuda")), backend=name)
        assert out[0].abs().max() == 0
        early = attend(q, k, v, Mask(True, Pattern("summary", 32, 4)), backend=name)
        assert early[:, :, :28].abs().max() == 0
        (out.sum() + early.sum()).backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("name", ["tiny-translator", "tiny-encoder", "tiny-gpt", "tiny-llama"])
@pytest.mark.parametrize("attention", ["full", "window", "strided", "fixed"])
def test_the_gpu_equals_the_cpu(name: str, attention: str) -> None:
    extra = {"window": ["window=16"], "strided": ["stride=8"], "fixed": ["stride=8", "summary=2"]}.get(attention, [])
    network = build(preset(name, [f"attention={attention}", *extra])).eval()
    ids, lengths = torch.randint(4000, (3, 50)), torch.tensor([50, 31, 7])
    arguments = (
        {"lengths": lengths} if name != "tiny-translator" else {"source_lengths": lengths, "target_lengths": lengths}
    )
    inputs = (ids, ids) if name == "tiny-translator" else (ids,)
    padding_mask = torch.arange(50) < lengths[:, None]
    with torch.no_grad(), attention_backend("reference"):
        expected = network(*inputs, **arguments)
    network.cuda()
    with torch.no_grad():
        on_gpu = {key: value.cuda() for key, value in arguments.items()}
        fp32 = network(*(x.cuda() for x in inputs), **on_gpu).cpu()
        bf16 = network.bfloat16()(*(x.cuda() for x in inputs), **on_gpu).cpu().float()
    torch.testing.assert_close(fp32[padding_mask], expected[padding_mask], rtol=1e-4, atol=1e-4)
    assert (bf16[padding_mask] - expected[padding_mask]).norm() < 0.03 * expected[padding_mask].norm()


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama"])
def test_cached_equals_uncached_and_packed_equals_unpacked(name: str) -> None:
    network, ids = build(preset(name)).eval().cuda(), torch.randint(4000, (2, 40), device="cuda")
    with torch.no_grad():
        uncached = network(ids)
        cache = KVCache(network.config, 2, 40)
        chunks = [network(chunk, cache=cache) for chunk in ids.split([17, 1, 1, 5, 16], dim=1)]
        torch.testing.assert_close(torch.cat(chunks, dim=1), uncached, rtol=1e-4, atol=1e-4)
        network.bfloat16()
        packed = network(ids.view(1, -1), documents=Documents.from_lengths([40, 40], device="cuda")).view(2, 40, -1)
        assert (packed.float() - uncached).norm() < 0.03 * uncached.norm()


def test_int8_equals_the_formula_and_batch_mates_never_change_a_row() -> None:
    for in_features, out_features, exact in ((64, 24, True), (50, 7, False)):
        linear = nn.Linear(in_features, out_features, bias=False).cuda()
        layer = QuantizedLinear(linear)
        for rows in (1, 16, 17, 100):
            x = torch.randn(rows, in_features, device="cuda")
            quantized, scale = quantize_rows(x)
            weight, weight_scale = quantize_rows(linear.weight.detach())
            expected = (quantized.double() @ weight.double().T) * scale * weight_scale.T
            if exact:
                torch.testing.assert_close(layer(x).double(), expected, rtol=1e-6, atol=1e-6)
                assert torch.equal(layer(x[:1]), layer(x)[:1])
            else:  # no int8 matmul for this shape: only the weights are quantized
                assert (layer(x).double() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_network_runs_on_the_gpu(bits: int) -> None:
    network, ids = build(preset("tiny-llama")).eval().cuda(), torch.randint(4000, (2, 9), device="cuda")
    with torch.no_grad():
        before = network(ids)
        after = quantize_module(network, bits)(ids)
    assert (after - before).norm() < (0.05 if bits == 8 else 0.3) * before.norm()


@pytest.mark.parametrize("name", ["tiny-translator", "tiny-llama"])
def test_networks_compile_without_graph_breaks_and_stay_equal(name: str) -> None:
    torch.compiler.reset()
    network, ids = build(preset(name)).eval().cuda(), torch.randint(4000, (2, 64), device="cuda")
    inputs = (ids, ids) if name == "tiny-translator" else (ids,)
    with torch.no_grad():
        expected = network(*inputs)
        compiled = torch.compile(network, fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-4)


def test_layers_with_window_attention_compile() -> None:
    torch.compiler.reset()
    network = build(preset("tiny-llama", ["attention=[full, window]", "window=16"])).eval().cuda()
    ids = torch.randint(4000, (2, 200), device="cuda")
    with torch.no_grad():
        expected = network(ids)
        for layer in network.decoder.layers:
            layer.compile()
        torch.testing.assert_close(network(ids), expected, rtol=1e-4, atol=1e-4)


@every_dtype
def test_mean_pooling_accumulates_in_fp32(dtype: torch.dtype) -> None:
    hidden, documents = torch.ones(1, 4000, 8, device="cuda", dtype=dtype), Documents.from_lengths([3000, 1000], "cuda")
    torch.testing.assert_close(mean_pool(hidden, documents=documents), torch.ones_like(hidden[0, :2]))
