"""Tiny models of Hugging Face with random weights whose words are far apart, ours with the same weights beside them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from clearhead.model import build
from tests.model.peers import copy, disturb, from_hugging_face

WORDS, PADDING, POSITIONS = 61, 60, 64


class Pair(NamedTuple):
    """Our network, theirs, and the token that ends a text."""

    ours: Any
    theirs: Any
    end: int


def marian() -> Pair:
    """A translator; its end has a bias, so that texts end before the limit and at it."""
    peer = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=WORDS,
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

    def scores() -> Tensor:
        source, target = torch.randint(WORDS, (64, 9)), torch.randint(WORDS, (64, 9))
        return peer(input_ids=source, decoder_input_ids=target).logits.flatten(0, 1)

    end = _spread(peer, last, scores)
    peer.final_logits_bias[0, end] = 6.0
    return Pair(_ours(peer), peer, end)


def gpt2() -> Pair:
    """Learned positions, tied words."""
    peer = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS,
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
    end = _spread(peer, peer.transformer.ln_f, lambda: peer(torch.randint(WORDS, (64, 9))).logits.flatten(0, 1))
    return Pair(_ours(peer), peer, end)


def llama() -> Pair:
    """Rotary positions, two key-value heads for four."""
    peer = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
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
    end = _spread(peer, peer.model.norm, lambda: peer(torch.randint(WORDS, (64, 9))).logits.flatten(0, 1))
    return Pair(_ours(peer), peer, end)


@torch.no_grad()
def _spread(peer: Any, norm: nn.Module, scores: Any) -> int:
    """Scale the last norm until the scores of a position have a spread of 3; the likeliest word is to be the end."""
    peer.eval()
    for _ in range(3):  # a bias beside the weight makes it not quite linear
        norm.weight.mul_(3 / scores().std(dim=-1).mean())
    found = scores()
    assert 2.5 < found.std(dim=-1).mean() < 3.5
    share = found.softmax(dim=-1).mean(dim=0)
    share[PADDING] = 0
    return int(share.argmax())


def _ours(peer: Any) -> Any:
    config, table = from_hugging_face(peer)
    network = build(config)
    copy(network, peer, table)
    return network.eval()


def padded(rows: Sequence[Sequence[int]], left: bool) -> tuple[Tensor, Tensor]:
    """Rows and their attention mask, as transformers wants them."""
    max_length = max(map(len, rows))
    ids, real = [], []
    for row in rows:
        fill, before = max_length - len(row), (max_length - len(row)) * left
        ids.append([PADDING] * before + list(row) + [PADDING] * (fill - before))
        real.append([0] * before + [1] * len(row) + [0] * (fill - before))
    return torch.tensor(ids), torch.tensor(real)


def random_rows(count: int, max_length: int = 12, generator: torch.Generator | None = None) -> list[list[int]]:
    """Rows of 1 to `longest` random words."""
    sizes = torch.randint(1, max_length + 1, (count,), generator=generator).tolist()
    return [torch.randint(PADDING, (size,), generator=generator).tolist() for size in sizes]
