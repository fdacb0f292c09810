"""Parity with transformers for the same weights: BERT, GPT, GPT-2, Llama, Mistral, Marian; forward and backward."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.model import Network, build
from tests.model.peers import (
    NameTable,
    assert_same,
    copy,
    disturb,
    from_hugging_face,
)

MODES = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
GPT = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 20, "bos_token_id": None, "eos_token_id": None}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
# Of the eight frequencies of head_dim 16, one is kept, two are interpolated and five divided by the factor.
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}


def peer_of(model: Any, **settings: Any) -> Any:
    """Return a tiny transformers model with random weights."""
    peer = model(model.config_class(vocab_size=97, attn_implementation="eager", **settings))
    disturb(peer, 0.12)
    return peer


def ours_and_table(peer: Any, training: bool) -> tuple[Any, NameTable]:
    """Return our network with the peer's weights, both in the same mode, and the table of names."""
    config, table = from_hugging_face(peer)
    network = build(config)
    copy(network, peer, table)
    peer.train(training)
    return network.train(training), table


def assert_decoder_parity(peer: Any, training: bool, tokens: int = 17) -> None:
    """Assert that logits and gradients agree for a batch with padding."""
    network, table = ours_and_table(peer, training)
    ids, lengths = torch.randint(97, (3, tokens)), torch.tensor([tokens, tokens // 2, 1])
    padding_mask = torch.arange(tokens) < lengths[:, None]
    ours = network(ids, lengths)
    theirs = peer(input_ids=ids, attention_mask=padding_mask.long()).logits
    assert_same(network, peer, table, ours[padding_mask], theirs[padding_mask])


def logits_difference(peer: Any, tokens: int, **changed: Any) -> float:
    """Return the largest change of the logits when our config is changed, to show that a setting matters here."""
    config, table = from_hugging_face(peer)
    ids = torch.randint(97, (2, tokens))
    logits: list[Tensor] = []
    for settings in ({}, changed):
        network: Network = build(ModelConfig(**(config.model_dump() | settings)))
        copy(network, peer, table)
        with torch.no_grad():
            logits.append(network(ids))
    return (logits[0] - logits[1]).abs().max().item()


@MODES
def test_bert_has_the_same_logits_and_next_sentence(training: bool) -> None:
    peer = peer_of(
        transformers.BertForPreTraining,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=80,
        max_position_embeddings=20,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    network, table = ours_and_table(peer, training)
    ids, segments, lengths = torch.randint(97, (3, 17)), torch.randint(2, (3, 17)), torch.tensor([17, 8, 1])
    padding_mask = torch.arange(17) < lengths[:, None]
    hidden = network.encode(ids, lengths, segments=segments)
    logits, next_sentence = network.logits(hidden), network.heads.next_sentence(network.heads.pool(hidden, lengths))
    theirs = peer(input_ids=ids, attention_mask=padding_mask.long(), token_type_ids=segments)
    assert theirs.seq_relationship_logits.std() > 0.1
    assert_same(
        network,
        peer,
        table,
        torch.cat([logits[padding_mask].flatten(), next_sentence.flatten()]),
        torch.cat([theirs.prediction_logits[padding_mask].flatten(), theirs.seq_relationship_logits.flatten()]),
    )


@MODES
def test_gpt1_has_the_same_logits(training: bool) -> None:
    peer = peer_of(transformers.OpenAIGPTLMHeadModel, **GPT, **NO_DROPOUT)
    assert_decoder_parity(peer, training)


@MODES
@pytest.mark.parametrize("inner", [None, 80], ids=["four-times", "own-ff-dim"])
def test_gpt2_has_the_same_logits(inner: int | None, training: bool) -> None:
    peer = peer_of(transformers.GPT2LMHeadModel, **GPT, **NO_DROPOUT, n_inner=inner)
    assert_decoder_parity(peer, training)


@MODES
@pytest.mark.parametrize("scaled", [False, True], ids=["plain-rope", "llama3-rope"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama_has_the_same_logits(kv_heads: int, tied: bool, scaled: bool, training: bool) -> None:
    rope = LLAMA3_SCALING if scaled else {"rope_type": "default", "rope_theta": 500.0}
    peer = peer_of(
        transformers.LlamaForCausalLM,
        **LLAMA,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        rope_parameters=rope,
        max_position_embeddings=64,
    )
    assert_decoder_parity(peer, training)
    if scaled:
        assert logits_difference(peer, 17, rope_scaling=None) > 0.01


@MODES
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"])
def test_qwen_and_phi3_have_the_same_logits(model: str, tied: bool, training: bool) -> None:
    settings = {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": tied, "pad_token_id": None}
    peer = peer_of(getattr(transformers, model), **settings, head_dim=16)
    assert_decoder_parity(peer, training)


@MODES
def test_llama_with_its_own_head_dim_has_the_same_logits(training: bool) -> None:
    peer = peer_of(transformers.LlamaForCausalLM, **LLAMA, num_key_value_heads=2, head_dim=24)
    assert_decoder_parity(peer, training)


@MODES
@pytest.mark.parametrize(("window", "tokens"), [(4, 17), (70, 200)], ids=["one-block", "several-blocks"])
def test_mistral_with_a_window_has_the_same_logits(window: int, tokens: int, training: bool) -> None:
    peer = peer_of(transformers.MistralForCausalLM, **LLAMA, num_key_value_heads=2, sliding_window=window)
    assert_decoder_parity(peer, training, tokens)
    assert logits_difference(peer, tokens, attention="full", window=None) > 0.01


@MODES
@pytest.mark.parametrize("shared", [True, False], ids=["one-vocabulary", "two-vocabularies"])
def test_marian_has_the_same_logits(shared: bool, training: bool) -> None:
    padding = 96
    peer = peer_of(
        transformers.MarianMTModel,
        decoder_vocab_size=97 if shared else 83,
        share_encoder_decoder_embeddings=shared,
        d_model=48,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=80,
        decoder_ffn_dim=80,
        max_position_embeddings=20,
        activation_function="swish",
        scale_embedding=True,
        dropout=0.0,
        pad_token_id=padding if shared else 82,
        decoder_start_token_id=padding if shared else 82,
        tie_word_embeddings=True,
    )
    with torch.no_grad():  # a buffer there, a bias here; it needs a gradient to be compared
        peer.final_logits_bias.normal_().requires_grad_()
    network, table = ours_and_table(peer, training)
    source, target = torch.randint(97, (4, 13)), torch.randint(83, (4, 11))
    target[:, 0] = peer.config.decoder_start_token_id  # the padding id, at a position that is not padding
    source_lengths, target_lengths = torch.tensor([13, 5, 1, 9]), torch.tensor([4, 11, 7, 1])
    source_mask = torch.arange(13) < source_lengths[:, None]
    target_mask = torch.arange(11) < target_lengths[:, None]
    source[~source_mask] = peer.config.pad_token_id
    ours = network(source, target, source_lengths, target_lengths)
    theirs = peer(
        input_ids=source,
        attention_mask=source_mask.long(),
        decoder_input_ids=target,
        decoder_attention_mask=target_mask.long(),
    ).logits
    assert_same(network, peer, table, ours[target_mask], theirs[target_mask])


@MODES
@pytest.mark.parametrize("model", ["RobertaForMaskedLM", "DistilBertForMaskedLM", "ModernBertForMaskedLM"])
def test_later_encoders_have_the_same_logits(model: str, training: bool) -> None:
    """A batch with padding; positions of RoBERTa start after the id of padding."""
    if model.startswith("Distil"):
        settings: dict[str, Any] = {"dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 80, "dropout": 0.0}
        settings |= {"attention_dropout": 0.0, "max_position_embeddings": 20}
    else:
        settings = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 80}
        settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1}
        settings |= {"max_position_embeddings": 22}
    if model.startswith("Modern"):
        settings |= {"local_attention": 6, "cls_token_id": 3, "sep_token_id": 3, "bos_token_id": 3, "eos_token_id": 3}
    peer = peer_of(getattr(transformers, model), **settings)
    network, table = ours_and_table(peer, training)
    ids, lengths = torch.randint(2, 97, (3, 17)), torch.tensor([17, 8, 1])
    padding_mask = torch.arange(17) < lengths[:, None]
    ids[~padding_mask] = 1
    ours = network(ids, lengths)
    theirs = peer(input_ids=ids, attention_mask=padding_mask.long()).logits
    assert_same(network, peer, table, ours[padding_mask], theirs[padding_mask])
