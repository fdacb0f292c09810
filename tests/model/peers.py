"""Parity with other libraries: copy their weights into our network, and compare outputs and gradients.

Names are mapped by the tables of import and export; the table for torch.nn, which is no format, is here.
"""

from typing import Any

import torch
from torch import Tensor, nn

from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.huggingface import adapter_of, canonical_names
from clearhead.checkpoint.formats.name_table import SAME, Entry, NameTable, from_foreign, with_prefix
from clearhead.checkpoint.tensors import named_tensors
from clearhead.config import ModelConfig

# torch.nn


TORCH_ATTENTION: NameTable = {
    "query.*": Entry("in_proj_*", SAME, 0),
    "key.*": Entry("in_proj_*", SAME, 1),
    "value.*": Entry("in_proj_*", SAME, 2),
    "output.*": "out_proj.*",
}
TORCH_LAYER: NameTable = {
    **with_prefix("attention", "self_attn", TORCH_ATTENTION),
    "attention_norm.*": "norm1.*",
    "feed_forward.up.*": "linear1.*",
    "feed_forward.down.*": "linear2.*",
}
TORCH: NameTable = {
    **with_prefix("encoder.layers.*", "transformer.encoder.layers.*", TORCH_LAYER),
    "encoder.layers.*.feed_forward_norm.*": "transformer.encoder.layers.*.norm2.*",
    **with_prefix("decoder.layers.*", "transformer.decoder.layers.*", TORCH_LAYER),
    **with_prefix("decoder.layers.*.cross_attention", "transformer.decoder.layers.*.multihead_attn", TORCH_ATTENTION),
    "decoder.layers.*.cross_norm.*": "transformer.decoder.layers.*.norm2.*",
    "decoder.layers.*.feed_forward_norm.*": "transformer.decoder.layers.*.norm3.*",
    "*.norm.*": "transformer.*.norm.*",  # pre-norm only
    "*.embedding.tokens.weight": "tokens.*.weight",
    "*.embedding.positions.weight": "positions.*.weight",
    "heads.lm_head.proj.*": "output.*",
}


class TorchTranslator(nn.Module):
    """torch.nn.Transformer between learned embeddings and an output layer; post-norm without the final norms."""

    def __init__(
        self, dim: int, heads: int, layers: int, vocabulary: int, positions: int, activation: str, pre_norm: bool
    ):
        super().__init__()
        settings: dict[str, Any] = {"dim_feedforward": 3 * dim, "dropout": 0.0, "batch_first": True}
        settings |= {"activation": activation, "norm_first": pre_norm}
        # nn.Transformer always adds final norms; post-norm layers already end with one.
        final_norms = [nn.LayerNorm(dim) if pre_norm else None for _ in range(2)]
        encoder_layer = nn.TransformerEncoderLayer(dim, heads, **settings)
        decoder_layer = nn.TransformerDecoderLayer(dim, heads, **settings)
        self.transformer = nn.Transformer(
            dim,
            heads,
            custom_encoder=nn.TransformerEncoder(encoder_layer, layers, final_norms[0], enable_nested_tensor=False),
            custom_decoder=nn.TransformerDecoder(decoder_layer, layers, final_norms[1]),
            batch_first=True,
        )
        self.tokens = nn.ModuleDict({stack: nn.Embedding(vocabulary, dim) for stack in ("encoder", "decoder")})
        self.positions = nn.ModuleDict({stack: nn.Embedding(positions, dim) for stack in ("encoder", "decoder")})
        self.output = nn.Linear(dim, vocabulary)

    def forward(self, source: Tensor, target: Tensor, source_padding: Tensor, target_padding: Tensor) -> Tensor:
        """Ids (B, S) and (B, T), and masks that are True at padding, to logits (B, T, V)."""
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


def from_torch(peer: TorchTranslator) -> tuple[ModelConfig, NameTable]:
    """Return the config and table for torch.nn.Transformer."""
    layer, tokens = peer.transformer.decoder.layers[0], peer.tokens["decoder"]
    config = ModelConfig(
        family="encoder-decoder",
        encoder_layers=peer.transformer.encoder.num_layers,
        decoder_layers=peer.transformer.decoder.num_layers,
        dim=tokens.embedding_dim,
        heads=layer.self_attn.num_heads,
        ff_dim=layer.linear1.out_features,
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


def from_hugging_face(peer: Any) -> tuple[ModelConfig, NameTable]:
    """Return the config and table for a transformers model, as import reads it."""
    fields = Fields(peer.config.to_dict(), "peer")
    adapter = adapter_of(fields)
    config = adapter.from_hf(fields, peer.state_dict().keys())
    return config, adapter.table(config)


# Using a table


def to_our_names(network: nn.Module, peer: nn.Module, table: NameTable, gradients: bool = False) -> dict[str, Tensor]:
    """Return the peer's weights, or their gradients, by our names; assert that none is missing on either side."""
    theirs = dict(peer.state_dict(keep_vars=True))
    if hasattr(peer, "config"):
        fields = Fields(peer.config.to_dict(), "peer")
        adapter = adapter_of(fields)
        theirs = canonical_names(adapter, adapter.from_hf(fields, theirs.keys()), theirs)
    # Equal counts: no part of a fused tensor is missing, and the same tensors are tied.
    assert _count(named_tensors(network).values()) == _count(theirs.values())
    selected = {name: tensor.grad if gradients else tensor for name, tensor in theirs.items()}
    return from_foreign(table, network, selected, "peer")


def copy(network: nn.Module, peer: nn.Module, table: NameTable) -> None:
    """Copy the peer's weights into our network."""
    ours = named_tensors(network)
    with torch.no_grad():
        for name, tensor in to_our_names(network, peer, table).items():
            assert ours[name].shape == tensor.shape, name
            ours[name].copy_(tensor)


def _count(tensors: Any) -> int:
    """Return the number of elements, tied tensors counted once."""
    return sum({id(tensor): tensor.numel() for tensor in tensors}.values())


# Comparing


def disturb(peer: nn.Module, scale: float) -> None:
    """Add noise to every weight, so that no norm weight is 1, no bias 0 and no padding embedding zero."""
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.requires_grad:  # Marian's sinusoids are frozen parameters
                parameter.add_(torch.randn_like(parameter), alpha=scale)
    for module in peer.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # it would stop the gradient of the padding embedding, which ours has


def assert_same(network: nn.Module, peer: nn.Module, table: NameTable, ours: Tensor, theirs: Tensor) -> None:
    """Assert that outputs agree within 1e-5, and gradients within 1e-4 of the largest in each tensor."""
    assert theirs.std() > 0.1, "outputs this small would always agree"
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    weights = torch.randn_like(theirs)
    for output in (ours, theirs):
        ((output * weights).sum() / output.numel()).backward()
    ours_by_name, expected_by_name = named_tensors(network), to_our_names(network, peer, table, gradients=True)
    rotary = hasattr(network, "config") and network.config.position == "rotary"
    for name, expected in expected_by_name.items():
        scale = expected.abs().max().item()
        # Without rotary positions it shifts all scores of a query equally, so the softmax ignores it.
        if name.endswith("key.bias") and not rotary:
            scale = expected_by_name[name.replace("bias", "weight")].abs().max().item()
            assert expected.abs().max() < 1e-4 * scale, f"the gradient of {name} should be zero"
        assert scale > 1e-6, f"the gradient of {name} is too small to compare"
        torch.testing.assert_close(
            ours_by_name[name].grad, expected, atol=1e-4 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
