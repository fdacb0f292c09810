"""Wrong inputs to a network raise an error that says what was expected."""

from pathlib import Path

import pytest
import torch

from clearhead.config import preset
from clearhead.model import Documents, EncoderDecoder, KVCache, build

IDS = torch.randint(4000, (2, 6))


@pytest.fixture(scope="module")
def translator() -> EncoderDecoder:
    network = build(preset("tiny-translator")).eval()
    assert isinstance(network, EncoderDecoder)
    return network


@pytest.mark.parametrize(
    "lengths", [torch.tensor([6]), torch.tensor([[6], [6]]), torch.tensor(6), [6, 6], torch.ones(2, 6)], ids=repr
)
def test_lengths_need_one_number_a_row(lengths: object) -> None:
    for name in ("tiny-gpt", "tiny-encoder"):
        with pytest.raises(ValueError, match="lengths: expected a tensor with one number for each of 2 rows"):
            build(preset(name))(IDS, lengths)


def test_ids_must_be_a_batch_within_the_vocabulary() -> None:
    network = build(preset("tiny-gpt"))
    with pytest.raises(ValueError, match=r"expected shape \(batch, tokens\), got \(6,\); for one row use ids\[None\]"):
        network(IDS[0])
    for wrong in (4000, -1):
        with pytest.raises(ValueError, match="outside the vocabulary of 4000 tokens"):
            network(torch.tensor([[1, wrong]]))


def test_segments_of_a_model_without_them_are_refused() -> None:
    network = build(preset("tiny-encoder", ["segments=0"]))
    with pytest.raises(ValueError, match="segments: this model has none"):
        network(IDS, segments=torch.zeros_like(IDS))


def test_documents_must_fit_the_row() -> None:
    network = build(preset("tiny-gpt"))
    with pytest.raises(ValueError, match=r"lengths add up to 5 tokens, but ids are \(1, 6\)"):
        network(IDS[:1], documents=Documents.from_lengths([2, 3]))
    with pytest.raises(ValueError, match="neither padding nor a cache"):
        network(IDS[:1], torch.tensor([6]), documents=Documents.from_lengths([6]))


def test_a_cache_must_fit_its_model_and_its_batch() -> None:
    network = build(preset("tiny-gpt"))
    with pytest.raises(ValueError, match="the cache has 3 rows, ids have 2"):
        network(IDS, cache=KVCache(network.config, rows=3, capacity=9))
    with pytest.raises(ValueError, match="another config"):
        network(IDS, cache=KVCache(preset("tiny-gpt", ["decoder_layers=3"]), rows=2, capacity=9))


def test_a_cache_takes_dtype_and_device_from_the_model() -> None:
    network = build(preset("tiny-llama")).bfloat16().eval()
    cache = KVCache(network.config, rows=2, capacity=6)
    with torch.no_grad():
        uncached = network(IDS)
        network(IDS[:, :5], cache=cache)
        last = network(IDS[:, 5:], cache=cache)
    assert last.dtype == torch.bfloat16
    assert (last - uncached[:, 5:]).float().norm() < 0.02 * uncached[:, 5:].float().norm()


def test_a_length_beyond_the_step_is_clamped_to_the_step() -> None:
    network, ids = build(preset("tiny-gpt")).eval(), torch.randint(4000, (1, 4))
    caches = [KVCache(network.config, rows=1, capacity=9) for _ in range(2)]
    with torch.no_grad():
        network(ids[:, :3], torch.tensor([5]), cache=caches[0])
        network(ids[:, :3], cache=caches[1])
        outputs = [network(ids[:, 3:], cache=cache) for cache in caches]
    assert torch.equal(outputs[0], outputs[1])


def test_a_cache_may_have_no_rows() -> None:
    network = build(preset("tiny-gpt"))
    cache = KVCache(network.config, rows=0, capacity=9)
    assert network(IDS[:0], cache=cache).shape == (0, 6, 4000)
    assert cache.max_length == 6


def test_source_and_target_must_match(translator: EncoderDecoder) -> None:
    encoder_output = translator.encode(IDS)
    with pytest.raises(ValueError, match="2 rows of source, but 1 of target"):
        translator(IDS, IDS[:1])
    with pytest.raises(ValueError, match=r"pass encode\(source\)"):
        translator.decode(IDS, None)
    with pytest.raises(ValueError, match="pack both or neither"):
        translator.decode(IDS[:1], encoder_output, documents=Documents.from_lengths([6]))
    packed = translator.encode(IDS[:1], documents=Documents.from_lengths([2, 4]))
    with pytest.raises(ValueError, match="2 in the source, but 1 in the target"):
        translator.decode(IDS[:1], packed, documents=Documents.from_lengths([6]))


def test_a_cache_belongs_to_one_source(translator: EncoderDecoder) -> None:
    cache, encoder_output = KVCache(translator.config, rows=2, capacity=9), translator.encode(IDS)
    translator.decode(IDS[:, :1], encoder_output, cache=cache)
    translator.decode(IDS[:, 1:2], encoder_output, cache=cache)
    translator.decode(IDS[:, 2:3], None, cache=cache)
    with pytest.raises(ValueError, match="belongs to another source"):
        translator.decode(IDS[:, :1], translator.encode(IDS), cache=cache)


def test_preset_takes_a_path_and_a_single_override(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("preset: tiny-gpt\n")
    assert preset(tmp_path / "mine", "heads=2").heads == 2


def test_padding_may_exceed_the_learned_positions() -> None:
    network, ids = build(preset("tiny-gpt", ["max_positions=8"])).eval(), torch.randint(4000, (1, 11))
    cache = KVCache(network.config, rows=1, capacity=8)
    with torch.no_grad():
        network(ids[:, :6], cache=cache)
        late = network(ids[:, 6:], torch.tensor([2]), cache=cache)  # two tokens, three of padding
        torch.testing.assert_close(late[:, :2], network(ids[:, :8])[:, 6:], rtol=1e-4, atol=1e-5)
