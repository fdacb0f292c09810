"""What other libraries call our parts: for each architecture, our config and a table of tensor names, ours to theirs.

In a table, `*` stands for one part of a dotted name, the same on both sides. Where the peer keeps a tensor in another
shape, the entry says how to see it as ours; the same view serves weights and gradients.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig

View = Callable[[Tensor], Tensor]
Table = dict[str, str | tuple[str, View]]


def as_it_is(theirs: Tensor) -> Tensor:
    """The same tensor."""
    return theirs


def transposed(theirs: Tensor) -> Tensor:
    """A weight stored as (in, out); a bias stays as it is."""
    return theirs.t()


def third(number: int, view: View = as_it_is) -> View:
    """Queries (0), keys (1) or values (2) of a tensor that holds all three."""
    return lambda theirs: view(theirs).chunk(3)[number]


def under(ours: str, theirs: str, table: Table) -> Table:
    """The table of a part, seen from the whole that calls this part `ours` and `theirs`."""
    whole: Table = {}
    for name, entry in table.items():
        other, view = entry if isinstance(entry, tuple) else (entry, as_it_is)
        whole[f"{ours}.{name}"] = f"{theirs}.{other}", view
    return whole


# torch.nn


TORCH_ATTENTION: Table = {
    "query.*": ("in_proj_*", third(0)),
    "key.*": ("in_proj_*", third(1)),
    "value.*": ("in_proj_*", third(2)),
    "output.*": "out_proj.*",
}
TORCH_LAYER: Table = {
    **under("attention", "self_attn", TORCH_ATTENTION),
    "attention_norm.*": "norm1.*",
    "feed_forward.up.*": "linear1.*",
    "feed_forward.down.*": "linear2.*",
}
TORCH: Table = {
    **under("encoder.layers.*", "transformer.encoder.layers.*", TORCH_LAYER),
    "encoder.layers.*.feed_forward_norm.*": "transformer.encoder.layers.*.norm2.*",
    **under("decoder.layers.*", "transformer.decoder.layers.*", TORCH_LAYER),
    **under("decoder.layers.*.cross_attention", "transformer.decoder.layers.*.multihead_attn", TORCH_ATTENTION),
    "decoder.layers.*.cross_norm.*": "transformer.decoder.layers.*.norm2.*",
    "decoder.layers.*.feed_forward_norm.*": "transformer.decoder.layers.*.norm3.*",
    "*.norm.*": "transformer.*.norm.*",  # pre-norm only
    "*.embedding.tokens.weight": "tokens.*.weight",
    "*.embedding.positions.weight": "positions.*.weight",
    "heads.words.scores.*": "output.*",
}


class TorchTranslator(nn.Module):
    """torch.nn.Transformer between learned embeddings and an output layer; post-norm without the closing norms."""

    def __init__(
        self, width: int, heads: int, layers: int, vocabulary: int, positions: int, activation: str, pre_norm: bool
    ):
        super().__init__()
        settings: dict[str, Any] = {"dim_feedforward": 3 * width, "dropout": 0.0, "batch_first": True}
        settings |= {"activation": activation, "norm_first": pre_norm}
        # nn.Transformer by itself puts a norm behind both stacks always; post-norm layers end with one already.
        closing = [nn.LayerNorm(width) if pre_norm else None for _ in range(2)]
        encoder_layer = nn.TransformerEncoderLayer(width, heads, **settings)
        decoder_layer = nn.TransformerDecoderLayer(width, heads, **settings)
        self.transformer = nn.Transformer(
            width,
            heads,
            custom_encoder=nn.TransformerEncoder(encoder_layer, layers, closing[0], enable_nested_tensor=False),
            custom_decoder=nn.TransformerDecoder(decoder_layer, layers, closing[1]),
            batch_first=True,
        )
        self.tokens = nn.ModuleDict({stack: nn.Embedding(vocabulary, width) for stack in ("encoder", "decoder")})
        self.positions = nn.ModuleDict({stack: nn.Embedding(positions, width) for stack in ("encoder", "decoder")})
        self.output = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor, source_padding: Tensor, target_padding: Tensor) -> Tensor:
        """Ids (B, S) and (B, T), padding True where a token is none, to scores (B, T, V)."""
        hidden = self.transformer(
            self._embed("encoder", source),
            self._embed("decoder", target),
            tgt_mask=torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1),
            src_key_padding_mask=source_padding,
            tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=source_padding,
        )
        return self.output(hidden)

    def _embed(self, stack: str, ids: Tensor) -> Tensor:
        return self.tokens[stack](ids) + self.positions[stack](torch.arange(ids.shape[1]))


def from_torch(peer: TorchTranslator) -> tuple[ModelConfig, Table]:
    """torch.nn.Transformer, post-norm or pre-norm."""
    layer, tokens = peer.transformer.decoder.layers[0], peer.tokens["decoder"]
    config = ModelConfig(
        family="encoder-decoder",
        encoder_layers=peer.transformer.encoder.num_layers,
        decoder_layers=peer.transformer.decoder.num_layers,
        width=tokens.embedding_dim,
        heads=layer.self_attn.num_heads,
        ff_width=layer.linear1.out_features,
        activation=layer.activation.__name__,
        norm_position="pre" if layer.norm_first else "post",
        norm_eps=layer.norm1.eps,
        dropout=layer.dropout.p,
        attention_dropout=layer.self_attn.dropout,
        position="learned",
        max_positions=peer.positions["decoder"].num_embeddings,
        vocab_size=tokens.num_embeddings,
        output_bias=True,
    )
    return config, TORCH


# Hugging Face


ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu", "swish": "silu"}

BERT: Table = {
    "encoder.embedding.tokens.weight": "bert.embeddings.word_embeddings.weight",
    "encoder.embedding.positions.weight": "bert.embeddings.position_embeddings.weight",
    "encoder.embedding.segments.weight": "bert.embeddings.token_type_embeddings.weight",
    "encoder.embedding.norm.*": "bert.embeddings.LayerNorm.*",
    "encoder.layers.*.attention.query.*": "bert.encoder.layer.*.attention.self.query.*",
    "encoder.layers.*.attention.key.*": "bert.encoder.layer.*.attention.self.key.*",
    "encoder.layers.*.attention.value.*": "bert.encoder.layer.*.attention.self.value.*",
    "encoder.layers.*.attention.output.*": "bert.encoder.layer.*.attention.output.dense.*",
    "encoder.layers.*.attention_norm.*": "bert.encoder.layer.*.attention.output.LayerNorm.*",
    "encoder.layers.*.feed_forward.up.*": "bert.encoder.layer.*.intermediate.dense.*",
    "encoder.layers.*.feed_forward.down.*": "bert.encoder.layer.*.output.dense.*",
    "encoder.layers.*.feed_forward_norm.*": "bert.encoder.layer.*.output.LayerNorm.*",
    "heads.pooler.linear.*": "bert.pooler.dense.*",
    "heads.words.transform.linear.*": "cls.predictions.transform.dense.*",
    "heads.words.transform.norm.*": "cls.predictions.transform.LayerNorm.*",
    "heads.words.scores.*": "cls.predictions.decoder.*",
    "heads.next_sentence.*": "cls.seq_relationship.*",
}


def from_bert(peer: Any) -> tuple[ModelConfig, Table]:
    """BertForPreTraining."""
    theirs = peer.config
    config = ModelConfig(
        family="encoder",
        encoder_layers=theirs.num_hidden_layers,
        width=theirs.hidden_size,
        heads=theirs.num_attention_heads,
        ff_width=theirs.intermediate_size,
        activation=ACTIVATIONS[theirs.hidden_act],
        norm_position="post",
        norm_eps=theirs.layer_norm_eps,
        dropout=theirs.hidden_dropout_prob,
        attention_dropout=theirs.attention_probs_dropout_prob,
        position="learned",
        max_positions=theirs.max_position_embeddings,
        vocab_size=theirs.vocab_size,
        segments=theirs.type_vocab_size,
        embedding_norm=True,
        tie="output",
        outputs=("words", "next-sentence"),
        output_bias=True,
        pooler=True,
    )
    return config, BERT


# GPT and GPT-2 differ in the names of the embeddings alone; their linear layers are stored transposed.
GPT_LAYER: Table = {
    "attention.query.*": ("attn.c_attn.*", third(0, transposed)),
    "attention.key.*": ("attn.c_attn.*", third(1, transposed)),
    "attention.value.*": ("attn.c_attn.*", third(2, transposed)),
    "attention.output.*": ("attn.c_proj.*", transposed),
    "attention_norm.*": "ln_1.*",
    "feed_forward.up.*": ("mlp.c_fc.*", transposed),
    "feed_forward.down.*": ("mlp.c_proj.*", transposed),
    "feed_forward_norm.*": "ln_2.*",
}
GPT1: Table = {
    "decoder.embedding.tokens.weight": "transformer.tokens_embed.weight",
    "decoder.embedding.positions.weight": "transformer.positions_embed.weight",
    **under("decoder.layers.*", "transformer.h.*", GPT_LAYER),
    "heads.words.scores.weight": "lm_head.weight",
}
GPT2: Table = {
    "decoder.embedding.tokens.weight": "transformer.wte.weight",
    "decoder.embedding.positions.weight": "transformer.wpe.weight",
    **under("decoder.layers.*", "transformer.h.*", GPT_LAYER),
    "decoder.norm.*": "transformer.ln_f.*",
    "heads.words.scores.weight": "lm_head.weight",
}


def _gpt(theirs: Any, **differs: Any) -> ModelConfig:
    return ModelConfig(
        family="decoder",
        decoder_layers=theirs.n_layer,
        width=theirs.n_embd,
        heads=theirs.n_head,
        norm_eps=theirs.layer_norm_epsilon,
        dropout=theirs.resid_pdrop,
        attention_dropout=theirs.attn_pdrop,
        position="learned",
        max_positions=theirs.n_positions,
        vocab_size=theirs.vocab_size,
        tie="output",
        **differs,
    )


def from_gpt1(peer: Any) -> tuple[ModelConfig, Table]:
    """OpenAIGPTLMHeadModel."""
    # What it calls gelu is the tanh approximation.
    activation = "gelu_tanh" if peer.config.afn == "gelu" else ACTIVATIONS[peer.config.afn]
    return _gpt(peer.config, norm_position="post", activation=activation), GPT1


def from_gpt2(peer: Any) -> tuple[ModelConfig, Table]:
    """GPT2LMHeadModel."""
    theirs = peer.config
    config = _gpt(
        theirs,
        norm_position="pre",
        activation=ACTIVATIONS[theirs.activation_function],
        ff_width=theirs.n_inner or 4 * theirs.n_embd,
    )
    return config, GPT2


LLAMA: Table = {
    "decoder.embedding.tokens.weight": "model.embed_tokens.weight",
    "decoder.layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "decoder.layers.*.attention.query.weight": "model.layers.*.self_attn.q_proj.weight",
    "decoder.layers.*.attention.key.weight": "model.layers.*.self_attn.k_proj.weight",
    "decoder.layers.*.attention.value.weight": "model.layers.*.self_attn.v_proj.weight",
    "decoder.layers.*.attention.output.weight": "model.layers.*.self_attn.o_proj.weight",
    "decoder.layers.*.feed_forward_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "decoder.layers.*.feed_forward.gate.weight": "model.layers.*.mlp.gate_proj.weight",
    "decoder.layers.*.feed_forward.up.weight": "model.layers.*.mlp.up_proj.weight",
    "decoder.layers.*.feed_forward.down.weight": "model.layers.*.mlp.down_proj.weight",
    "decoder.norm.weight": "model.norm.weight",
    "heads.words.scores.weight": "lm_head.weight",
}


def from_llama(peer: Any) -> tuple[ModelConfig, Table]:
    """LlamaForCausalLM; MistralForCausalLM, which may have a window."""
    theirs, rope = peer.config, peer.config.rope_parameters
    window = getattr(theirs, "sliding_window", None)
    scaling = {
        "factor": "factor",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "original_positions": "original_max_position_embeddings",
    }
    config = ModelConfig(
        family="decoder",
        decoder_layers=theirs.num_hidden_layers,
        width=theirs.hidden_size,
        heads=theirs.num_attention_heads,
        kv_heads=theirs.num_key_value_heads,
        head_width=theirs.head_dim,
        attention="window" if window else "full",
        window=window,
        ff_width=theirs.intermediate_size,
        activation="swiglu",
        norm="rms",
        norm_eps=theirs.rms_norm_eps,
        bias=False,
        attention_dropout=theirs.attention_dropout,
        position="rotary",
        max_positions=theirs.max_position_embeddings,
        rope_theta=rope["rope_theta"],
        rope_scaling={ours: rope[name] for ours, name in scaling.items()} if rope["rope_type"] == "llama3" else None,
        vocab_size=theirs.vocab_size,
        tie="output" if theirs.tie_word_embeddings else "none",
    )
    return config, LLAMA


MARIAN_ATTENTION: Table = {
    "query.*": "q_proj.*",
    "key.*": "k_proj.*",
    "value.*": "v_proj.*",
    "output.*": "out_proj.*",
}
MARIAN: Table = {
    "*.embedding.tokens.weight": "model.*.embed_tokens.weight",
    **under("*.layers.*.attention", "model.*.layers.*.self_attn", MARIAN_ATTENTION),
    "*.layers.*.attention_norm.*": "model.*.layers.*.self_attn_layer_norm.*",
    **under("*.layers.*.cross_attention", "model.*.layers.*.encoder_attn", MARIAN_ATTENTION),
    "*.layers.*.cross_norm.*": "model.*.layers.*.encoder_attn_layer_norm.*",
    "*.layers.*.feed_forward.up.*": "model.*.layers.*.fc1.*",
    "*.layers.*.feed_forward.down.*": "model.*.layers.*.fc2.*",
    "*.layers.*.feed_forward_norm.*": "model.*.layers.*.final_layer_norm.*",
    "heads.words.scores.weight": "lm_head.weight",
    "heads.words.scores.bias": ("final_logits_bias", lambda theirs: theirs[0]),  # (1, V)
}


def from_marian(peer: Any) -> tuple[ModelConfig, Table]:
    """MarianMTModel, with one vocabulary or two."""
    theirs = peer.config
    if theirs.share_encoder_decoder_embeddings:
        vocabulary: dict[str, Any] = {"vocab_size": theirs.vocab_size, "tie": "all"}
    else:
        sizes = {"source_vocab_size": theirs.vocab_size, "target_vocab_size": theirs.decoder_vocab_size}
        vocabulary = {**sizes, "tie": "output"}
    config = ModelConfig(
        family="encoder-decoder",
        encoder_layers=theirs.encoder_layers,
        decoder_layers=theirs.decoder_layers,
        width=theirs.d_model,
        heads=theirs.encoder_attention_heads,
        ff_width=theirs.encoder_ffn_dim,
        activation=ACTIVATIONS[theirs.activation_function],
        norm_position="post",
        norm_eps=1e-5,  # the default of torch.nn.LayerNorm; their config does not say
        dropout=theirs.dropout,
        attention_dropout=theirs.attention_dropout,
        position="sinusoidal",
        sinusoid="halves",
        max_positions=theirs.max_position_embeddings,
        scale_embedding=theirs.scale_embedding,
        output_bias=True,
        **vocabulary,
    )
    return config, MARIAN


# Computed by us, stored by them.
COMPUTED = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


# Using a table


class Pair(NamedTuple):
    """A tensor of ours, the peer's that holds it, and how that is seen as ours."""

    ours: Tensor
    theirs: Tensor
    view: View


def pairs(network: nn.Module, peer: nn.Module, table: Table) -> dict[str, Pair]:
    """Every tensor of ours with its counterpart, by our name; that none is missing on either side is checked."""
    theirs = peer.state_dict(keep_vars=True)
    theirs = {name: tensor for name, tensor in theirs.items() if name not in COMPUTED}
    found = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        other, view = _look_up(name, table)
        assert other in theirs, f"{name} should be {other}, which the peer has not"
        found[name] = Pair(tensor, theirs[other], view)
        assert tensor.shape == view(theirs[other]).shape, name
    used = {id(pair.theirs) for pair in found.values()}  # tied tensors have several names and one identity
    left_over = [name for name, tensor in theirs.items() if id(tensor) not in used]
    assert not left_over, f"of the peer, nothing of ours holds {left_over}"
    # As many numbers on both sides: no part of a fused tensor is left out, and what is tied there is tied here.
    assert _numbers(pair.ours for pair in found.values()) == _numbers(theirs.values())
    return found


def copy(network: nn.Module, peer: nn.Module, table: Table) -> None:
    """Give our network the peer's weights."""
    with torch.no_grad():
        for pair in pairs(network, peer, table).values():
            pair.ours.copy_(pair.view(pair.theirs))


def _look_up(name: str, table: Table) -> tuple[str, View]:
    """The peer's name for a tensor of ours, and the view."""
    for pattern, entry in table.items():
        if match := re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name):
            other, view = entry if isinstance(entry, tuple) else (entry, as_it_is)
            parts = iter(match.groups())
            return re.sub(r"\*", lambda _, parts=parts: next(parts), other), view
    raise AssertionError(f"the table has no entry for {name}")


def _numbers(tensors: Any) -> int:
    """How many numbers there are, tied tensors counted once."""
    return sum({id(tensor): tensor.numel() for tensor in tensors}.values())


# Comparing


def disturb(peer: nn.Module, scale: float) -> None:
    """Add noise to every weight, so that no norm is 1, no bias 0 and no row of padding empty."""
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.requires_grad:  # Marian's sinusoids are frozen parameters
                parameter.add_(torch.randn_like(parameter), alpha=scale)
    for module in peer.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # it stops the gradient of looking padding up; we make no such exception


def assert_same(network: nn.Module, peer: nn.Module, table: Table, ours: Tensor, theirs: Tensor) -> None:
    """Outputs agree within 1e-5; gradients of a random function of them within 1e-4 of the largest in each tensor."""
    assert theirs.std() > 0.1, "outputs so small that anything would agree"
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    weights = torch.randn_like(theirs)
    for output in (ours, theirs):
        ((output * weights).sum() / output.numel()).backward()
    found = pairs(network, peer, table)
    for name, pair in found.items():
        expected = pair.view(pair.theirs.grad)
        scale = expected.abs().max().item()
        if name.endswith("key.bias"):  # adds the same to all scores of a query, so that the softmax hides it
            of_weight = found[name.replace("bias", "weight")]
            scale = of_weight.view(of_weight.theirs.grad).abs().max().item()
            assert expected.abs().max() < 1e-4 * scale, f"the gradient of {name} should vanish"
        assert scale > 1e-6, f"the gradient of {name} is too small to tell"
        torch.testing.assert_close(
            pair.ours.grad, expected, atol=1e-4 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
