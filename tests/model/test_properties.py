"""Invariants of every config of every family, in float64: causality, padding, packing, caching, backends."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.config import ModelConfig
from clearhead.interpret import capture_attention
from clearhead.model import Documents, EncoderDecoder, KVCache, attention_backend
from tests.strategies import configs, logits, network_of, tokens

EXACT = {"rtol": 1e-9, "atol": 1e-9}
DECODERS = ("encoder-decoder", "decoder")


@given(configs(DECODERS), st.integers(2, 14), st.data())
def test_a_later_token_never_changes_an_earlier_output(config: ModelConfig, length: int, data: st.DataObject) -> None:
    network, ids = network_of(config), tokens(2, length)
    position = data.draw(st.integers(1, length - 1))
    changed = ids.clone()
    changed[:, position:] = (ids[:, position:] + 1) % config.target_vocab
    before, after = logits(network, ids), logits(network, changed)
    torch.testing.assert_close(before[:, :position], after[:, :position], **EXACT)
    assert not torch.allclose(before[:, position:], after[:, position:]), "the change had no effect"


@given(configs(), st.lists(st.integers(1, 12), min_size=2, max_size=4), st.integers(0, 3))
def test_padding_and_batch_mates_never_change_a_row(config: ModelConfig, lengths: list[int], extra: int) -> None:
    network, max_length = network_of(config), max(lengths) + extra
    ids = tokens(len(lengths), max_length)
    together = logits(network, ids, lengths=torch.tensor(lengths))
    for row, length in enumerate(lengths):
        alone = logits(network, ids[row : row + 1, :length])
        torch.testing.assert_close(together[row, :length], alone[0], **EXACT)


@given(configs(("encoder-decoder",)), st.lists(st.integers(0, 9), min_size=2, max_size=4))
def test_source_padding_never_changes_a_translation(config: ModelConfig, lengths: list[int]) -> None:
    network = network_of(config)
    source, target = tokens(len(lengths), max(lengths) + 2), tokens(len(lengths), 4)
    together = network(source, target, source_lengths=torch.tensor(lengths))
    assert together.isfinite().all(), "an empty source must not give NaN"
    for row, length in enumerate(lengths):
        if length:
            alone = network(source[row : row + 1, :length], target[row : row + 1])
            torch.testing.assert_close(together[row], alone[0], **EXACT)


@given(configs(), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_packed_equals_unpacked(config: ModelConfig, lengths: list[int], data: st.DataObject) -> None:
    network = network_of(config)
    rows = [tokens(1, length) for length in lengths]
    packed, documents = torch.cat(rows, dim=1), Documents.from_lengths(lengths)
    if isinstance(network, EncoderDecoder):
        sizes = [data.draw(st.integers(1, 7)) for _ in lengths]
        sources = [tokens(1, size) for size in sizes]
        together = network(
            torch.cat(sources, dim=1),
            packed,
            source_documents=Documents.from_lengths(sizes),
            target_documents=documents,
        )
        alone = [network(source, row) for source, row in zip(sources, rows, strict=True)]
    else:
        together = network(packed, documents=documents)
        alone = [network(row) for row in rows]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), **EXACT)


@given(configs(DECODERS), st.integers(1, 12), st.data())
def test_cached_equals_uncached_token_by_token_and_in_chunks(
    config: ModelConfig, length: int, data: st.DataObject
) -> None:
    network, ids = network_of(config), tokens(3, length)
    uncached = logits(network, ids)
    cache, chunks, start = KVCache(config, rows=3, capacity=length), [], 0
    encoder_output = (
        network.encode(torch.arange(5)[None].expand(3, -1)) if isinstance(network, EncoderDecoder) else None
    )
    while start < length:
        step = data.draw(st.integers(1, length - start))
        if isinstance(network, EncoderDecoder):
            hidden = network.decode(ids[:, start : start + step], encoder_output if start == 0 else None, cache=cache)
        else:
            hidden = network.decode(ids[:, start : start + step], cache=cache)
        chunks.append(network.logits(hidden))
        start += step
    torch.testing.assert_close(torch.cat(chunks, dim=1), uncached, **EXACT)


@given(configs(("decoder",)), st.data())
def test_rows_of_a_cache_may_have_different_lengths(config: ModelConfig, data: st.DataObject) -> None:
    """Ragged prompts, ragged chunks, and rows reordered, repeated and dropped between the steps."""
    network, rows = network_of(config), 3
    cache = KVCache(config, rows, capacity=20)
    rows_ids: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(data.draw(st.integers(1, 4))):
        counts = [data.draw(st.integers(0 if row_ids else 1, 5)) for row_ids in rows_ids]
        ids = tokens(len(rows_ids), max(*counts, 1))
        out = network(ids, torch.tensor(counts), cache=cache)
        for row, count in enumerate(counts):
            rows_ids[row] = rows_ids[row] + ids[row, :count].tolist()
            if count:
                alone = network(torch.tensor([rows_ids[row]]))[0, -count:]
                torch.testing.assert_close(out[row, :count], alone, **EXACT)
        keep = data.draw(st.lists(st.integers(0, len(rows_ids) - 1), min_size=2, max_size=4))
        cache.select(torch.tensor(keep), tighten=data.draw(st.booleans()))
        rows_ids = [rows_ids[row] for row in keep]
    assert cache.lengths.tolist() == [len(row_ids) for row_ids in rows_ids]


@given(configs(("encoder-decoder",)), st.data())
def test_a_cached_translator_keeps_each_row_with_its_source(config: ModelConfig, data: st.DataObject) -> None:
    """Padded sources, and rows reordered, repeated and dropped after the first step."""
    network, source_lengths = network_of(config), [data.draw(st.integers(1, 6)) for _ in range(3)]
    source, target = tokens(3, 6), tokens(3, 5)
    cache = KVCache(config, rows=3, capacity=5)
    encoder_output = network.encode(source, torch.tensor(source_lengths))
    network.decode(target[:, :2], encoder_output, cache=cache)
    keep = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    cache.select(torch.tensor(keep), tighten=data.draw(st.booleans()))
    late = network.logits(network.decode(target[keep, 2:], None, cache=cache))
    for row, kept in enumerate(keep):
        alone = network(source[kept : kept + 1, : source_lengths[kept]], target[kept : kept + 1])
        torch.testing.assert_close(late[row], alone[0, 2:], **EXACT)


@given(configs(("decoder",)), st.integers(1, 6))
def test_padding_beyond_the_capacity_of_a_cache_changes_nothing(config: ModelConfig, length: int) -> None:
    network, ids = network_of(config), tokens(1, 12)
    cache = KVCache(config, rows=1, capacity=length + 1)
    first = network(ids, torch.tensor([length]), cache=cache)
    second = network(ids[:, length:], torch.tensor([1]), cache=cache)
    uncached = network(ids[:, : length + 1])
    torch.testing.assert_close(torch.cat([first[:, :length], second[:, :1]], dim=1), uncached, **EXACT)


@given(configs(), st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_every_backend_equals_the_reference_in_a_whole_network(config: ModelConfig, lengths: list[int]) -> None:
    network, ids, sizes = network_of(config), tokens(len(lengths), max(lengths)), torch.tensor(lengths)
    padding_mask = torch.arange(max(lengths)) < sizes[:, None]
    with attention_backend("reference"):
        expected = logits(network, ids, lengths=sizes)
    for name in (None, "sdpa", "sparse"):
        with attention_backend(name):
            out = logits(network, ids, lengths=sizes)
        torch.testing.assert_close(out[padding_mask], expected[padding_mask], **EXACT)


@given(configs(), st.integers(1, 9))
def test_the_updates_of_the_heads_sum_to_the_output(config: ModelConfig, length: int) -> None:
    network = network_of(config)
    with torch.no_grad(), capture_attention(network) as traces:
        logits(network, tokens(2, length), lengths=torch.tensor([length, max(1, length - 2)]))
    attentions = config.encoder_layers + config.decoder_layers * (2 if config.family == "encoder-decoder" else 1)
    assert len(traces) == attentions
    for name, trace in traces.items():
        unpadded = slice(0, max(1, length - 2)) if "encoder" not in name else slice(None)
        total = trace.updates.sum(dim=1) + (0 if trace.bias is None else trace.bias)
        torch.testing.assert_close(total[:, unpadded], trace.output[:, unpadded], **EXACT)


@given(configs(), st.integers(1, 9))
def test_gradients_are_finite_under_padding(config: ModelConfig, length: int) -> None:
    network, ids = network_of(config).train(), tokens(2, length + 3)
    out = logits(network, ids, lengths=torch.tensor([length, 1]))
    padding_mask = torch.arange(length + 3) < torch.tensor([[length], [1]])
    out[padding_mask].square().sum().backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


@given(configs(DECODERS, norms=("batch",)), st.lists(st.integers(1, 6), min_size=2, max_size=3))
def test_padding_ids_never_change_a_batch_norm_in_training(config: ModelConfig, lengths: list[int]) -> None:
    network, sizes = network_of(config).train(), torch.tensor(lengths)
    ids = tokens(len(lengths), max(lengths) + 2)
    padding_mask = torch.arange(ids.shape[1]) < sizes[:, None]
    other = torch.where(padding_mask, ids, (ids + 1) % config.target_vocab)
    before, after = (logits(network, x, lengths=sizes)[padding_mask] for x in (ids, other))
    torch.testing.assert_close(before, after, **EXACT)


@given(configs(DECODERS), st.integers(2, 9))
def test_traces_of_a_cached_step_are_those_of_the_last_query(config: ModelConfig, length: int) -> None:
    network, ids = network_of(config), tokens(2, length)
    cache = KVCache(config, rows=2, capacity=length)
    source = [network.encode(tokens(2, 5))] if isinstance(network, EncoderDecoder) else []
    with capture_attention(network) as uncached:
        network.decode(ids, *source)
    network.decode(ids[:, :-1], *source, cache=cache)
    with capture_attention(network) as cached:
        network.decode(ids[:, -1:], *([None] if source else []), cache=cache)
    for name, trace in cached.items():
        torch.testing.assert_close(trace.weights, uncached[name].weights[:, :, -1:], **EXACT)
        torch.testing.assert_close(trace.updates, uncached[name].updates[:, :, -1:], **EXACT)
