"""ONNX export: one forward pass as a graph of standard operators, with dynamic batch size and lengths.

encoder           input_ids, lengths, token_type_ids (if it has segments) → last_hidden_state, and logits of each head
decoder           input_ids → logits; rows may be right-padded, as the causal mask hides padding from earlier positions
encoder-decoder   input_ids, lengths, decoder_input_ids → logits

B batch · T tokens · S source tokens · D model dim · H heads · E head dim
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.checkpoint.export_advice import train_with
from clearhead.checkpoint.formats.optional_import import import_optional
from clearhead.checkpoint.model_folder import LoadedModel, write_tokenizers
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model.positions import rope_cos_sin, sinusoidal_positions

OPSET, FILE = 20, "model.onnx"
MAX_INLINE_BYTES = 1_500_000_000  # larger weights are stored in a separate file; a graph may have 2 GB
MASKED_SCORE = -1e30


def write(loaded: LoadedModel, folder: Path) -> None:
    """Write model.onnx, with our tokenizers."""
    config = loaded.config
    if not set(config.attention) <= {"full", "window"}:
        raise UserError(
            f"export: ONNX does not support attention: {', '.join(config.attention)}; only full and window"
            + train_with(["model.attention=full"])
        )
    onnx = import_optional("onnx")
    graph = Graph({name: tensor.float() for name, tensor in loaded.network.state_dict().items()}, config)
    {"encoder": _add_encoder, "decoder": _add_decoder, "encoder-decoder": _add_encoder_decoder}[config.family](graph)
    model = graph.model(onnx)
    size = sum(tensor.nbytes for tensor in graph.constants.values())
    onnx.save(model, str(folder / FILE), save_as_external_data=size > MAX_INLINE_BYTES, location="model.data")
    write_tokenizers(folder, [tokenizer.engine for tokenizer in loaded.tokenizers])


class Graph:
    """Operators in execution order; every value is identified by its name."""

    def __init__(self, tensors: dict[str, Tensor], config: ModelConfig):
        self.tensors, self.config = tensors, config
        self.nodes: list[tuple[str, list[str], str, dict[str, Any]]] = []
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self.inputs: dict[str, list[str]] = {}
        self.outputs: dict[str, list[str]] = {}

    def input(self, name: str, *axes: str) -> str:
        """Add an integer input."""
        self.inputs[name] = list(axes)
        return name

    def output(self, name: str, value: str, *axes: str) -> None:
        """Add an output with its own name."""
        self.nodes.append(("Identity", [value], name, {}))
        self.outputs[name] = list(axes)

    def op(self, kind: str, *values: str, **options: Any) -> str:
        """Add an operator and return the name of its result."""
        name = f"{kind}.{len(self.nodes)}"
        self.nodes.append((kind, list(values), name, options))
        return name

    def constant(self, value: Any, name: str = "") -> str:
        """Add a constant and return its name."""
        array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
        name = name or f"constant.{array.dtype}.{array.tobytes().hex()}.{array.shape}"
        self.constants[name] = array
        return name

    def weight(self, name: str) -> str:
        """Add a tensor of the network and return its name."""
        return self.constant(self.tensors[name].contiguous(), name)

    def model(self, onnx: Any) -> Any:
        """Return the graph as an ONNX model."""
        make, kinds = onnx.helper, onnx.TensorProto
        nodes = [
            make.make_node(kind, values, [name], name=name, **options) for kind, values, name, options in self.nodes
        ]
        inputs = [make.make_tensor_value_info(name, kinds.INT64, axes) for name, axes in self.inputs.items()]
        outputs = [make.make_tensor_value_info(name, kinds.FLOAT, axes) for name, axes in self.outputs.items()]
        constants = [onnx.numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = make.make_graph(nodes, "clearhead", inputs, outputs, constants)
        model = make.make_model(graph, opset_imports=[make.make_opsetid("", OPSET)], producer_name="clearhead")
        model.ir_version = min(model.ir_version, 10)  # for compatibility with older runtimes
        return model

    def linear(self, x: str, name: str) -> str:
        """Linear layer: x Wᵀ + b."""
        transposed = self.constant(self.tensors[f"{name}.weight"].t().contiguous(), f"{name}.weight.transposed")
        x = self.op("MatMul", x, transposed)
        return self.op("Add", x, self.weight(f"{name}.bias")) if f"{name}.bias" in self.tensors else x

    def norm(self, x: str, name: str, kind: str = "") -> str:
        """LayerNorm, RMSNorm, or BatchNorm with running statistics."""
        weight, eps = self.tensors[f"{name}.weight"], self.config.norm_eps
        bias = self.tensors.get(f"{name}.bias", torch.zeros_like(weight))
        match kind or self.config.norm:
            case "layer":
                parameters = self.weight(f"{name}.weight"), self.constant(bias, f"{name}.bias")
                return self.op("LayerNormalization", x, *parameters, axis=-1, epsilon=eps)
            case "rms":
                square = self.op("ReduceMean", self.op("Mul", x, x), self.constant([-1]), keepdims=1)
                root = self.op("Sqrt", self.op("Add", square, self.constant(np.float32(eps))))
                return self.op("Mul", self.op("Div", x, root), self.weight(f"{name}.weight"))
        scale = weight * torch.rsqrt(self.tensors[f"{name}.variance"] + eps)
        shift = self.constant(bias - self.tensors[f"{name}.mean"] * scale, f"{name}.shift")
        return self.op("Add", self.op("Mul", x, self.constant(scale, f"{name}.scale")), shift)

    def activation(self, x: str) -> str:
        """Activation of the feed-forward layer."""
        match self.config.activation:
            case "relu":
                return self.op("Relu", x)
            case "gelu" | "geglu":
                return self.op("Gelu", x)
            case "gelu_tanh":
                return self.op("Gelu", x, approximate="tanh")
        return self.op("Mul", x, self.op("Sigmoid", x))

    def feed_forward(self, x: str, name: str) -> str:
        """Feed-forward layer: down(activation(up(x))), or gated."""
        if self.config.is_gated:
            hidden = self.op("Mul", self.activation(self.linear(x, f"{name}.gate")), self.linear(x, f"{name}.up"))
        else:
            hidden = self.activation(self.linear(x, f"{name}.up"))
        return self.linear(hidden, f"{name}.down")

    def split_heads(self, x: str, heads: int, norm: str = "", rotary: tuple[str, str] | None = None) -> str:
        """Split heads, (B, T, H·E) to (B, H, T, E), and apply their norm and the rotary embedding."""
        x = self.op("Reshape", x, self.constant([0, 0, heads, self.config.head_dim]))
        if f"{norm}.weight" in self.tensors:
            x = self.norm(x, norm, "rms")
        if rotary is not None:
            half = self.config.head_dim // 2
            a, b = (self._slice(x, start, start + half) for start in (0, half))
            cos, sin = rotary
            first = self.op("Sub", self.op("Mul", a, cos), self.op("Mul", b, sin))
            second = self.op("Add", self.op("Mul", b, cos), self.op("Mul", a, sin))
            x = self.op("Concat", first, second, axis=-1)
        return self.op("Transpose", x, perm=[0, 2, 1, 3])

    def attention(
        self,
        x: str,
        name: str,
        mask: str | None,
        rotary: tuple[str, str] | None,
        encoder_output: str | None = None,
    ) -> str:
        """Self-attention over x (B, T, D), or cross-attention over encoder_output (B, S, D)."""
        config, encoder_output = self.config, encoder_output or x
        q = self.split_heads(self.linear(x, f"{name}.query"), config.heads, f"{name}.query_norm", rotary)
        k = self.split_heads(self.linear(encoder_output, f"{name}.key"), config.kv_heads, f"{name}.key_norm", rotary)
        v = self.split_heads(self.linear(encoder_output, f"{name}.value"), config.kv_heads)
        if config.kv_heads < config.heads:  # repeat key-value heads (grouped-query attention)
            groups = self.constant(np.repeat(np.arange(config.kv_heads), config.heads // config.kv_heads))
            k, v = (self.op("Gather", each, groups, axis=1) for each in (k, v))
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.constant(np.float32(1 / math.sqrt(config.head_dim))))
        if mask is not None:
            scores = self.op("Where", mask, scores, self.constant(np.float32(MASKED_SCORE)))
        output = self.op("MatMul", self.op("Softmax", scores, axis=-1), v)
        merged = self.op("Transpose", output, perm=[0, 2, 1, 3])
        inner = config.heads * config.head_dim
        return self.linear(self.op("Reshape", merged, self.constant([0, 0, inner])), f"{name}.output")

    def _slice(self, x: str, start: int, end: int) -> str:
        return self.op("Slice", x, self.constant([start]), self.constant([end]), self.constant([3]))

    def positions(self, ids: str) -> str:
        """Positions 0 … T − 1: (T,)."""
        count = self.op("Squeeze", self.op("Shape", ids, start=1, end=2), self.constant([0]))
        return self.op("Range", self.constant(np.int64(0)), count, self.constant(np.int64(1)))

    def padding_mask(self, positions: str, lengths: str) -> str:
        """True where a key is not padding: (B, 1, 1, S)."""
        return self.op("Less", positions, self.op("Unsqueeze", lengths, self.constant([1, 2, 3])))

    def position_mask(self, positions: str, causal: bool, window: int | None) -> str | None:
        """Causal and window mask: (T, S)."""
        query, key = (self.op("Unsqueeze", positions, self.constant([axis])) for axis in (1, 0))
        distance = self.op("Sub", query, key)
        masks = [self.op("GreaterOrEqual", distance, self.constant(np.int64(0)))] if causal else []
        if window is not None:
            distance = distance if causal else self.op("Abs", distance)
            masks.append(self.op("Less", distance, self.constant(np.int64(window))))
        return masks[0] if len(masks) == 1 else self.op("And", *masks) if masks else None

    def stack(
        self,
        ids: str,
        name: str,
        padding_mask: str | None = None,
        encoder_output: tuple[str, str] | None = None,
        segments: str | None = None,
    ) -> str:
        """Ids (B, T) to hidden states (B, T, D); `encoder_output` comes with the padding mask of the source."""
        config, causal = self.config, name == "decoder"
        positions = self.positions(ids)
        x = self._embedding(ids, positions, name, segments)
        rotary: dict[str, tuple[str, str] | None] = {}
        masks: dict[str, str | None] = {}
        for kind in sorted(set(config.attention)):
            rotary[kind] = self.rotary(positions, config.local_rope_theta if kind == "window" else None)
            mask = self.position_mask(positions, causal, config.window if kind == "window" else None)
            masks[kind] = self.op("And", mask, padding_mask) if mask and padding_mask else mask or padding_mask
        for number in range(config.decoder_layers if causal else config.encoder_layers):
            kind, layer = config.attention[number % len(config.attention)], f"{name}.layers.{number}"
            self_attention = f"{layer}.attention", masks[kind], rotary[kind]
            x = self._sublayer(x, f"{layer}.attention_norm", self.attention, *self_attention)
            if encoder_output is not None:
                source, source_mask = encoder_output
                cross = f"{layer}.cross_attention"
                x = self._sublayer(x, f"{layer}.cross_norm", self.attention, cross, source_mask, None, source)
            x = self._sublayer(x, f"{layer}.feed_forward_norm", self.feed_forward, f"{layer}.feed_forward")
        return self.norm(x, f"{name}.norm") if config.norm_position == "pre" else x

    def rotary(self, positions: str, theta: float | None) -> tuple[str, str] | None:
        """Cosines and sines of rotary positions: (T, 1, E/2) each."""
        if self.config.position != "rotary":
            return None
        tables = rope_cos_sin(self.config, torch.arange(self.config.max_positions)[None], theta)  # (1, T, 1, E/2) each
        named = zip(("cosines", "sines"), tables, strict=True)
        suffix = "" if theta is None else "_local"
        cos, sin = (
            self.op("Gather", self.constant(table[0].contiguous(), name + suffix), positions, axis=0)
            for name, table in named
        )
        return cos, sin

    def _sublayer(self, x: str, norm: str, sublayer: Callable[..., str], *arguments: Any) -> str:
        if f"{norm}.weight" not in self.tensors:  # the input is normalized already
            return self.op("Add", x, sublayer(x, *arguments))
        if self.config.norm_position == "pre":
            return self.op("Add", x, sublayer(self.norm(x, norm), *arguments))
        return self.norm(self.op("Add", x, sublayer(x, *arguments)), norm)

    def _embedding(self, ids: str, positions: str, name: str, segments: str | None) -> str:
        config, embedding = self.config, f"{name}.embedding"
        x = self.op("Gather", self.weight(f"{embedding}.tokens.weight"), ids)
        if config.scale_embedding:
            x = self.op("Mul", x, self.constant(np.float32(math.sqrt(config.dim))))
        if config.position == "learned":
            rows = self.tensors[f"{embedding}.positions.weight"][config.position_offset :].contiguous()
            x = self.op("Add", x, self.op("Gather", self.constant(rows, f"{embedding}.positions.weight"), positions))
        if config.position == "sinusoidal":
            numbers = torch.arange(config.max_positions) + config.position_offset
            table = sinusoidal_positions(numbers, config.dim, config.sinusoid)
            x = self.op("Add", x, self.op("Gather", self.constant(table, "sinusoids"), positions))
        if segments is not None:
            x = self.op("Add", x, self.op("Gather", self.weight(f"{embedding}.segments.weight"), segments))
        return self.norm(x, f"{embedding}.norm") if config.embedding_norm else x


def _add_decoder(graph: Graph) -> None:
    ids = graph.input("input_ids", "batch", "sequence")
    _add_heads(graph, graph.stack(ids, "decoder"), "sequence")


def _add_encoder_decoder(graph: Graph) -> None:
    source, lengths = graph.input("input_ids", "batch", "sequence"), graph.input("lengths", "batch")
    target = graph.input("decoder_input_ids", "batch", "decoder_sequence")
    padding_mask = graph.padding_mask(graph.positions(source), lengths)
    encoder_output = graph.stack(source, "encoder", padding_mask)
    hidden = graph.stack(target, "decoder", encoder_output=(encoder_output, padding_mask))
    _add_heads(graph, hidden, "decoder_sequence")


def _add_encoder(graph: Graph) -> None:
    ids, lengths = graph.input("input_ids", "batch", "sequence"), graph.input("lengths", "batch")
    segments = graph.input("token_type_ids", "batch", "sequence") if graph.config.segments else None
    hidden = graph.stack(ids, "encoder", graph.padding_mask(graph.positions(ids), lengths), segments=segments)
    graph.output("last_hidden_state", hidden, "batch", "sequence", "dim")
    _add_heads(graph, hidden, "sequence")


def _add_heads(graph: Graph, hidden: str, sequence: str) -> None:
    """Add the logits of every head; heads for a whole text read an encoder's first token."""
    config = graph.config
    pooled_heads = {"next-sentence", "classes"} & set(config.outputs)
    if pooled_heads and config.family != "encoder":
        raise UserError(f"export: ONNX does not support outputs: {', '.join(sorted(pooled_heads))} of a decoder")
    if (pooled_heads or config.pooler) and config.pooling != "cls":
        raise UserError(
            f"export: ONNX does not support pooling: {config.pooling}; only cls" + train_with(["model.pooling=cls"])
        )
    pooled = ""
    if config.family == "encoder":
        pooled = graph.op("Gather", hidden, graph.constant(np.int64(0)), axis=1)
        if config.pooler:
            activation = {"tanh": "Tanh", "relu": "Relu"}[config.pooler_activation]
            pooled = graph.op(activation, graph.linear(pooled, "heads.pooler.linear"))
            graph.output("pooler_output", pooled, "batch", "dim")
    for output in config.outputs:
        match output:
            case "lm":
                x = hidden
                if config.family == "encoder":
                    x = graph.activation(graph.linear(x, "heads.lm_head.transform.linear"))
                    x = graph.norm(x, "heads.lm_head.transform.norm", "layer" if config.norm == "batch" else "")
                graph.output("logits", graph.linear(x, "heads.lm_head.proj"), "batch", sequence, "vocabulary")
            case "next-sentence":
                logits = graph.linear(pooled, "heads.next_sentence")
                graph.output("next_sentence_logits", logits, "batch", "is_next")
            case "classes":
                graph.output("class_logits", graph.linear(pooled, "heads.classes.proj"), "batch", "labels")
            case "tags":
                graph.output("tag_logits", graph.linear(hidden, "heads.tags.proj"), "batch", sequence, "labels")
            case "span":
                graph.output("span_logits", graph.linear(hidden, "heads.span"), "batch", sequence, "start_end")
