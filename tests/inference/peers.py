"""Tiny transformers models with random weights and well separated logits, and ours with the same weights."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from clearhead.model import build
from tests.model.peers import copy, disturb, from_hugging_face

VOCAB, PADDING, POSITIONS = 61, 60, 64


class Pair(NamedTuple):
    """Our network, theirs, and the EOS id."""

    ours: Any
    theirs: Any
    end: int


def marian() -> Pair:
    """A translator; EOS has a bias, so that some outputs end before the limit and some at it."""
    peer = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=POSITIONS,
            activation_function="swish",
            scale_embedding=True,
            dropout=0.0,
            pad_token_id=PADDING,
            decoder_start_token_id=PADDING,
            eos_token_id=0,
            forced_eos_token_id=None,
        )
    )
    disturb(peer, 0.12)
    last = peer.model.decoder.layers[-1].final_layer_norm

    def logits() -> Tensor:
        source, target = torch.randint(VOCAB, (64, 9)), torch.randint(VOCAB, (64, 9))
        return peer(input_ids=source, decoder_input_ids=target).logits.flatten(0, 1)

    end = _scale_logits(peer, last, logits)
    peer.final_logits_bias[0, end] = 6.0
    return Pair(_ours(peer), peer, end)


def gpt2() -> Pair:
    """A decoder with learned positions and tied embeddings."""
    peer = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=POSITIONS,
            bos_token_id=None,
            eos_token_id=None,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    disturb(peer, 0.12)
    end = _scale_logits(peer, peer.transformer.ln_f, lambda: peer(torch.randint(VOCAB, (64, 9))).logits.flatten(0, 1))
    return Pair(_ours(peer), peer, end)


def llama() -> Pair:
    """A decoder with RoPE and two key-value heads for four heads."""
    peer = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    disturb(peer, 0.12)
    end = _scale_logits(peer, peer.model.norm, lambda: peer(torch.randint(VOCAB, (64, 9))).logits.flatten(0, 1))
    return Pair(_ours(peer), peer, end)


@torch.no_grad()
def _scale_logits(peer: Any, norm: nn.Module, random_logits: Any) -> int:
    """Scale the last norm until logits have a standard deviation of 3; return the most likely token, used as EOS."""
    peer.eval()
    for _ in range(3):  # not linear in the weight, because the norm has a bias too
        norm.weight.mul_(3 / random_logits().std(dim=-1).mean())
    logits = random_logits()
    assert 2.5 < logits.std(dim=-1).mean() < 3.5
    mean_probs = logits.softmax(dim=-1).mean(dim=0)
    mean_probs[PADDING] = 0
    return int(mean_probs.argmax())


def _ours(peer: Any) -> Any:
    config, table = from_hugging_face(peer)
    network = build(config)
    copy(network, peer, table)
    return network.eval()


def padded(rows: Sequence[Sequence[int]], left: bool) -> tuple[Tensor, Tensor]:
    """Return padded rows and their attention mask for transformers."""
    max_length = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        padding, before = max_length - len(row), (max_length - len(row)) * left
        ids.append([PADDING] * before + list(row) + [PADDING] * (padding - before))
        mask.append([0] * before + [1] * len(row) + [0] * (padding - before))
    return torch.tensor(ids), torch.tensor(mask)


def random_rows(count: int, max_length: int = 12, generator: torch.Generator | None = None) -> list[list[int]]:
    """Rows of 1 to `max_length` random tokens."""
    lengths = torch.randint(1, max_length + 1, (count,), generator=generator).tolist()
    return [torch.randint(PADDING, (length,), generator=generator).tolist() for length in lengths]
