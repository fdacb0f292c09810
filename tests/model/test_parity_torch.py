"""Parity with torch.nn for the same weights: attention and a whole translator, forward and backward."""

import pytest
import torch
from torch import nn

from clearhead.config import ModelConfig
from clearhead.model import Mask, build
from clearhead.model.attention import Attention
from clearhead.ops.attention.dispatch import attention_with_weights
from tests.model.peers import TORCH_ATTENTION, TorchTranslator, assert_same, copy, disturb, from_torch

MODES = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


@MODES
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_attention_equals_multihead_attention(cross: bool, padded: bool, causal: bool, training: bool) -> None:
    dim, heads, queries = 32, 4, 11
    keys = 13 if cross else queries
    peer = nn.MultiheadAttention(dim, heads, batch_first=True).train(training)
    disturb(peer, 0.2)
    config = ModelConfig(family="decoder", decoder_layers=1, dim=dim, heads=heads, vocab_size=1)
    ours = Attention(config, cross=cross).train(training)
    copy(ours, peer, TORCH_ATTENTION)

    lengths = torch.tensor([keys, 7, 1]) if padded else torch.full((3,), keys)
    padding_mask = torch.arange(queries) < (torch.full((3,), queries) if cross else lengths)[:, None]
    mask = Mask(causal=causal, lengths=lengths if padded else None)
    x = torch.randn(3, queries, dim, requires_grad=True)
    y = x.detach().clone().requires_grad_()  # the same values, with a gradient of their own
    encoder_output = torch.randn(3, keys, dim) if cross else None
    theirs, expected_weights = peer(
        y,
        encoder_output if cross else y,
        encoder_output if cross else y,
        key_padding_mask=torch.arange(keys) >= lengths[:, None] if padded else None,
        attn_mask=torch.ones(queries, keys, dtype=torch.bool).triu(1) if causal else None,
        average_attn_weights=False,
    )
    assert_same(ours, peer, TORCH_ATTENTION, ours(x, mask, encoder_output)[padding_mask], theirs[padding_mask])
    torch.testing.assert_close(x.grad, y.grad, atol=1e-4 * y.grad.abs().max().item(), rtol=0)

    _, weights = attention_with_weights(ours.project_q(x), *ours.project_kv(encoder_output if cross else x), mask)
    weights, expected_weights = (w.transpose(1, 2)[padding_mask] for w in (weights, expected_weights))  # (N, H, S)
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=0)


@MODES
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
def test_translator_equals_torch_transformer(pre_norm: bool, activation: str, training: bool) -> None:
    peer = TorchTranslator(32, 4, layers=2, vocabulary=97, positions=20, activation=activation, pre_norm=pre_norm)
    disturb(peer, 0.1)
    config, table = from_torch(peer)
    network = build(config)
    copy(network, peer, table)
    network.train(training)
    peer.train(training)

    source, target = torch.randint(97, (4, 13)), torch.randint(97, (4, 10))
    source_lengths, target_lengths = torch.tensor([13, 5, 1, 9]), torch.tensor([4, 10, 7, 1])
    padding_mask = torch.arange(10) < target_lengths[:, None]
    ours = network(source, target, source_lengths, target_lengths)
    theirs = peer(source, target, torch.arange(13) >= source_lengths[:, None], ~padding_mask)
    assert_same(network, peer, table, ours[padding_mask], theirs[padding_mask])
