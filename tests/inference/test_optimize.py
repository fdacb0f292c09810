"""A network for reading gives what the network gives, leaves it as it was, and is small where that is asked for."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from clearhead.config import GenerationConfig, ModelConfig, preset
from clearhead.inference import alignment_weights, optimize_for_inference
from clearhead.inference.optimize import FusedAttention, FusedFeedForward, PackedLinear
from clearhead.inference.step import Step
from clearhead.inference.translator_decode_layer import MaskCache, NativeTranslatorDecodeLayer, TranslatorDecodeLayer
from clearhead.model import build
from clearhead.model.cache import KVCache, TreeCache
from clearhead.model.layer import Layer
from clearhead.ops.linear.int8 import Int8Linear
from clearhead.ops.linear.quantized import PackedInt8Weight, QuantizedLinear
from clearhead.ops.native import library as native
from tests.inference.peers import gpt2, llama, marian, random_rows
from tests.inference.random_writers import FEW, rows_for, same, sharpened, writers
from tests.inference.reference import search
from tests.inference.test_parity_transformers import ours
from tests.strategies import VOCABULARY, configs, network_of

PRESETS = ["tiny-translator", "tiny-encoder", "tiny-gpt", "tiny-llama"]
EPS = torch.finfo(torch.float32).eps


def scores(network: Any, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The network's words for the same ids on both sides, padding aside."""
    with torch.inference_mode():
        if network.config.family == "encoder-decoder":
            return network(ids, ids, lengths, lengths)
        return network(ids, lengths)


@FEW
@given(configs(), st.data())
def test_fused_and_packed_equal_the_plain_network(config: ModelConfig, data: st.DataObject) -> None:
    network, ids = network_of(config), torch.randint(VOCABULARY, (3, 6))
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, 6), min_size=3, max_size=3)))
    real = torch.arange(6) < lengths[:, None]
    exact = optimize_for_inference(network)
    torch.testing.assert_close(scores(exact, ids, lengths)[real], scores(network, ids, lengths)[real])
    rounded, plain = optimize_for_inference(network.float()), scores(network, ids, lengths)
    size = plain[real].abs().max().clamp(min=1)
    assert (scores(rounded, ids, lengths) - plain)[real].abs().max() <= 1e-5 * size


def translator(*changes: str) -> tuple[Any, Any]:
    """A small one whose norms differ from each other, too, and its twin for reading."""
    torch.manual_seed(0)
    network = build(preset("tiny-translator", changes)).eval()
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return network, optimize_for_inference(network)


@pytest.mark.parametrize("lengths", [None, [5, 2, 4]])
@pytest.mark.parametrize("change", ["norm_position=pre", "norm_position=post", "activation=gelu", "position=rotary"])
def test_light_steps_of_a_translator_equal_the_whole(change: str, lengths: list[int] | None, between: str) -> None:
    network, light = translator(change)
    kind = NativeTranslatorDecodeLayer if between == "native" else TranslatorDecodeLayer
    assert {type(layer) for layer in light.decoder.layers} == {Layer if "rotary" in change else kind}
    source, target = torch.randint(4000, (3, 5)), torch.randint(4000, (3, 6))
    sizes = None if lengths is None else torch.tensor(lengths)
    with torch.inference_mode():
        whole, cache = network(source, target, sizes), KVCache(light.config, 3, 6)
        encoder_output = light.encode(source, sizes)
        steps = [light.logits(light.decode(target[:, :2], encoder_output, cache=cache))]
        steps += [light.logits(light.decode(target[:, n : n + 1], None, cache=cache)) for n in range(2, 6)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [None, [5, 2, 4]])
@pytest.mark.parametrize("change", ["norm_position=pre", "norm_position=post", "position=rotary"])
def test_light_branches_of_a_translator_equal_the_whole(change: str, lengths: list[int] | None, between: str) -> None:
    """Each branch is read as if it stood alone, also after a row has gone on from other branches."""
    network, light = translator(change)
    source, begin, steps = torch.randint(4000, (3, 5)), torch.randint(4000, (3, 1)), torch.randint(4000, (4, 3, 2))
    sizes = None if lengths is None else torch.tensor(lengths)
    with torch.inference_mode():
        cache = KVCache(light.config, 3, 5)
        light.decode(begin, light.encode(source, sizes), cache=cache)
        tree, texts = TreeCache(cache, branches=2, steps=4), begin[:, None].expand(-1, 2, -1)  # (B, K, tokens)
        for ids in steps:
            parents = torch.randint(2, (3, 2))
            tree.reorder_beams(parents)
            texts = torch.cat([texts.gather(1, parents[:, :, None].expand_as(texts)), ids[:, :, None]], dim=2)
            found = light.logits(light.decode(ids, None, cache=tree))
            for branch in range(2):
                whole = network(source, texts[:, branch], sizes)[:, -1]
                torch.testing.assert_close(found[:, branch], whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["norm_position=pre", "norm_position=post", "activation=gelu", "bias=false"])
def test_bytes_are_read_alike_by_native_code_and_by_torch(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is None:
        pytest.skip("native.c was not compiled here")
    sources = [torch.randint(4000, (3 + n % 5,)).tolist() for n in range(9)]
    prompts, steps = [[1]] * 9, torch.randint(4000, (6, 9, 1))

    def read() -> Tensor:
        torch.manual_seed(0)
        twin = optimize_for_inference(translator(change)[0], torch.int8)
        with torch.inference_mode():
            step = Step(twin, 9, 10)
            return torch.stack([step.start(prompts, sources), *(step.next(ids)[:, 0] for ids in steps)])

    ours = read()
    monkeypatch.setattr(native, "library", lambda: None)
    theirs = read()
    assert not torch.equal(ours, theirs)
    assert (ours - theirs).square().mean() <= 2e-4 * theirs.var(), "a number between two bytes may go either way"


def test_bytes_of_a_network_in_halves_are_those_of_its_numbers(between: str) -> None:
    network, _ = translator("norm_position=post")
    source, target = torch.randint(4000, (3, 5)), torch.randint(4000, (3, 1))
    halved = build(network.config).eval()
    halved.load_state_dict(network.bfloat16().float().state_dict())
    found = []
    for one in (network.bfloat16(), halved):
        twin = optimize_for_inference(one, torch.int8)
        with torch.inference_mode():
            cache = KVCache(twin.config, 3, 4)
            twin.decode(target, twin.encode(source), cache=cache)
            found.append(twin.decode(target, None, cache=cache).float())
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("lengths", [torch.tensor([5, 2, 4], dtype=torch.int32), torch.tensor(5).expand(3)])
def test_lengths_of_any_kind_are_read(lengths: Tensor, between: str) -> None:
    network, light = translator("norm_position=post")
    source, target = torch.randint(4000, (3, 5)), torch.randint(4000, (3, 3))
    with torch.inference_mode():
        cache = KVCache(light.config, 3, 4)
        light.decode(target[:, :2], light.encode(source, lengths), cache=cache)
        last = light.logits(light.decode(target[:, 2:], None, cache=cache))
        torch.testing.assert_close(last[:, 0], network(source, target, lengths)[:, -1], rtol=1e-4, atol=1e-4)


class Interrupted(MaskCache):
    """As if another worker always came in between: what is held is another's as soon as it was read or put there."""

    others = (torch.tensor([9, 9]), torch.full((2, 1, 1, 9), 7.0))

    @property
    def held(self) -> Any:
        """What this worker put there, once."""
        found, self.__dict__["own"] = self.__dict__["own"], self.others
        return found

    @held.setter
    def held(self, pair: Any) -> None:
        self.__dict__["own"] = self.others if "own" in self.__dict__ else pair


def test_workers_that_share_a_network_never_see_each_others_sources() -> None:
    unseen, lengths = Interrupted(), torch.tensor([2, 5])
    for _ in range(2):
        hidden = unseen.of(lengths, 9)
        assert hidden is not None
        assert (hidden == 0).sum(dim=3).flatten().tolist() == [2, 5]
    astray, paths = Interrupted(), torch.tensor([[[True, False], [True, True]]])
    for _ in range(2):
        hidden = astray.off(paths, 3)
        assert hidden is not None
        assert torch.equal(hidden[:, 0, :, :2] == 0, paths)
        assert hidden[:, 0, :, 2].isneginf().all()


@pytest.mark.parametrize("name", PRESETS)
def test_every_family_is_fused_packed_and_shared(name: str) -> None:
    network = build(preset(name)).eval()
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    twin, ids = optimize_for_inference(network), torch.randint(4000, (2, 9))
    kinds = [type(module) for module in twin.modules()]
    assert {FusedAttention, FusedFeedForward, PackedLinear} <= set(kinds)
    assert nn.Linear not in kinds
    torch.testing.assert_close(scores(twin, ids), scores(network, ids), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())
    assert nn.Linear in [type(module) for module in network.modules()]
    stacks = [(getattr(twin, side, None), getattr(network, side, None)) for side in ("encoder", "decoder")]
    for theirs, own in ((a, b) for a, b in stacks if b is not None):
        assert theirs.embedding.tokens.weight is own.embedding.tokens.weight, "shared, not copied"


@pytest.mark.parametrize("make", [marian, gpt2, llama], ids=lambda make: make.__name__)
@pytest.mark.parametrize("beam", [1, 3])
def test_a_network_for_reading_writes_the_same_texts(make: Any, beam: int) -> None:
    pair, rows = make(), random_rows(12)
    config = GenerationConfig(max_new_tokens=10, beam=beam, logprobs=True)
    twin = optimize_for_inference(pair.ours)
    assert same(ours(pair._replace(ours=twin), rows, config), ours(pair, rows, config), within=1e-5)


def test_alignments_of_a_fused_network_are_those_of_the_plain_one() -> None:
    network = marian().ours
    expected = alignment_weights(network, [3, 4, 5], [60], [7, 8])
    torch.testing.assert_close(
        alignment_weights(optimize_for_inference(network), [3, 4, 5], [60], [7, 8]), expected, rtol=1e-5, atol=1e-6
    )


def test_halves_are_read_in_float32_unless_they_are_asked_for() -> None:
    network, ids = build(preset("tiny-translator")).eval().bfloat16(), torch.randint(4000, (2, 9))
    twin = optimize_for_inference(network)
    wide = build(preset("tiny-translator")).eval()
    wide.load_state_dict(network.state_dict())  # the same numbers, which float32 holds exactly
    assert scores(twin, ids).dtype == torch.float32
    torch.testing.assert_close(scores(twin, ids), scores(wide, ids), rtol=1e-5, atol=1e-5)
    assert {tensor.dtype for tensor in network.parameters()} == {torch.bfloat16}
    words = twin.decoder.embedding.tokens.weight
    assert words is twin.encoder.embedding.tokens.weight, "what was one matrix stays one"
    half = scores(optimize_for_inference(wide, torch.bfloat16), ids)
    assert half.dtype == torch.bfloat16
    assert (half.float() - scores(wide, ids)).norm() < 0.05 * scores(wide, ids).norm()


@given(st.integers(2, 40), st.integers(1, 70), st.sampled_from([7, 32, 96]), st.booleans())
def test_an_int8_product_is_off_by_no_more_than_its_steps(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    """Both factors are off by half a step at the most, a step being the largest of the row over 127:
    |Σ (x + d)(w + e) - Σ x w| ≤ Σ |x| |e| + |w| |d| + |d| |e|."""
    linear, x = nn.Linear(inputs, outputs, bias=bias), torch.randn(rows, inputs)
    weight = linear.weight.detach()
    d, e = (values.abs().amax(dim=1) / 254 * (1 + 8 * EPS) for values in (x, weight))  # (rows,), (outputs,)
    bound = x.abs().sum(1)[:, None] * e + d[:, None] * weight.abs().sum(1) + inputs * d[:, None] * e
    with torch.no_grad():
        off = (QuantizedLinear(linear)(x).double() - linear.double()(x.double())).abs()
    assert (off <= bound + 1e-5).all()
    assert outputs * rows < 50 or off.max() > 0


@pytest.mark.parametrize("name", PRESETS)
def test_int8_is_close_to_float32_in_every_family(name: str) -> None:
    network, ids = build(preset(name)).eval(), torch.randint(4000, (2, 9))
    small = optimize_for_inference(network, torch.int8)
    kinds = {type(module) for module in small.modules()}
    assert kinds & {QuantizedLinear, Int8Linear}
    assert not kinds & {nn.Linear, PackedLinear}
    found, expected = scores(small, ids), scores(network, ids)
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert not torch.equal(found, expected)


@FEW
@given(writers, st.integers(0, 1 << 30))
def test_in_int8_a_row_never_depends_on_its_batch_mates(config: ModelConfig, seed: int) -> None:
    """The numbers of a row are its own to the last bit, as far as the products go: attention may add in another order,
    so that a text can differ only where two words are nearly as good."""
    network = optimize_for_inference(sharpened(config).float(), torch.int8)
    rows = rows_for(config, seed)
    together = _first_scores(network, rows)
    for row, found in zip(rows, together, strict=True):
        alone = _first_scores(network, [row])[0]
        step = alone.abs().max() / 127  # a difference in the last bit may become one of a step of some activation
        assert (found - alone).abs().max() <= 2 * step
        assert torch.corrcoef(torch.stack([found, alone]))[0, 1] > 0.99 or alone.std() < 1e-3


def _first_scores(network: Any, rows: Any) -> Tensor:
    from clearhead.inference import Step

    sources, prompts = zip(*rows, strict=True)
    with torch.inference_mode():
        return Step(network, len(rows), 20).start(prompts, sources if any(sources) else None)


def test_int8_weights_take_a_quarter_of_float32_and_a_half_once_they_are_laid_out() -> None:
    network = build(preset("transformer-base").model_copy(update={"encoder_layers": 1, "decoder_layers": 1})).eval()
    small = optimize_for_inference(network, torch.int8)
    full = sum(module.weight.nbytes for module in network.modules() if type(module) is nn.Linear)
    layers = [module for module in small.modules() if isinstance(module, QuantizedLinear)]
    assert sum(layer.weight.nbytes + layer.scale.nbytes for layer in layers) < 0.26 * full
    scores(small, torch.randint(4000, (2, 9)))
    laid = sum(layer._packed.weights.numel() for layer in layers if isinstance(layer._packed, PackedInt8Weight))
    assert sum(layer.weight.nbytes for layer in layers) == laid == full / 4


def test_one_row_and_many_take_different_kernels_and_give_the_same() -> None:
    layer, x = QuantizedLinear(nn.Linear(2048, 300)), torch.randn(5, 2048)
    x[0] = 100  # as large as sums become: beyond what float32 holds exactly
    with torch.inference_mode():
        together = layer(x)
        assert layer._packed is not None or not torch.backends.mkldnn.is_available()
        assert torch.equal(together, torch.cat([layer(row[None]) for row in x]))


@pytest.mark.parametrize("name", ["tiny-translator", "tiny-encoder"])
def test_only_what_reads_a_relu_is_known_to_be_never_below_zero(name: str) -> None:
    """And is rounded as ever."""
    network = optimize_for_inference(build(preset(name)).eval(), torch.int8)
    known = [part for part, module in network.named_modules() if getattr(module, "nonnegative", False)]
    relu = name == "tiny-translator"
    assert all(part.endswith("feed_forward.down") for part in known)
    assert len(known) == (sum(".down" in part for part, _ in network.named_modules()) if relu else 0)
    layer = QuantizedLinear(nn.Linear(64, 32))
    x = torch.randn(9, 64).relu()
    expected = layer(x), layer(x[:1])
    layer.nonnegative, layer._packed = True, None
    for found, wanted in zip((layer(x), layer(x[:1])), expected, strict=True):
        assert torch.equal(found, wanted)


def test_weights_that_are_loaded_or_moved_are_laid_out_anew() -> None:
    first, second = (QuantizedLinear(nn.Linear(64, 32)) for _ in range(2))
    x = torch.randn(3, 64)
    first(x)
    first.load_state_dict(second.state_dict())
    assert torch.equal(first(x), second(x))


def test_a_cache_of_the_plain_network_fits_the_fused_one() -> None:
    network = build(preset("tiny-llama")).eval()
    twin, ids = optimize_for_inference(network), torch.randint(4000, (2, 8))
    cache = KVCache(network.config, 2, 8)
    with torch.inference_mode():
        parts = [twin(ids[:, :5], cache=cache), twin(ids[:, 5:], cache=cache)]
        torch.testing.assert_close(torch.cat(parts, dim=1), network(ids), rtol=1e-4, atol=1e-5)


@FEW
@given(writers, st.integers(0, 1 << 30), st.sampled_from([1, 3]))
def test_several_workers_find_what_one_finds(config: ModelConfig, seed: int, beam: int) -> None:
    network, rows = sharpened(config), rows_for(config, seed, count=7)
    threads = torch.get_num_threads()
    found = [
        search(
            network, rows, GenerationConfig(max_new_tokens=6, beam=beam, batch_size=2, workers=workers, logprobs=True)
        )
        for workers in (1, 3, 0)
    ]
    assert same(found[1], found[0])
    assert same(found[2], found[0])
    assert torch.get_num_threads() == threads
