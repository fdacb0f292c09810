"""ONNX out: one full forward pass as a graph of standard operators, any number of rows and tokens.

encoder      ids, lengths, segments (if it has them) → hidden, and an output for each head
decoder      ids → words; rows may be padded at their end, which no earlier position sees
translator   source, source_lengths, target → words

B rows · T tokens · S source tokens · D width · H heads · G key-value heads · E head width
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.checkpoint.folder import Loaded, write_tokenizers
from clearhead.checkpoint.formats.extras import library
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.model.positions import rope_cos_sin, sinusoidal_positions

OPSET, FILE = 20, "model.onnx"
APART = 1_500_000_000  # bytes from which weights lie in a file of their own; a graph may have 2 GB
HIDDEN = -1e30  # the score of what may not be seen


def write(loaded: Loaded, draft: Path) -> None:
    """model.onnx, with our tokenizers beside it."""
    config = loaded.config
    if not set(config.attention) <= {"full", "window"}:
        raise UserError(f"export: ONNX has no place for attention: {', '.join(config.attention)}; full and window can")
    onnx = library("onnx")
    graph = Graph({name: tensor.float() for name, tensor in loaded.network.state_dict().items()}, config)
    {"encoder": _encoder, "decoder": _decoder, "encoder-decoder": _translator}[config.family](graph)
    model = graph.model(onnx)
    size = sum(tensor.nbytes for tensor in graph.held.values())
    onnx.save(model, str(draft / FILE), save_as_external_data=size > APART, location="model.data")
    write_tokenizers(draft, [tokenizer.engine for tokenizer in loaded.tokenizers])


class Graph:
    """Operators in the order they run; every value has a name."""

    def __init__(self, tensors: dict[str, Tensor], config: ModelConfig):
        self.tensors, self.config = tensors, config
        self.nodes: list[tuple[str, list[str], str, dict[str, Any]]] = []
        self.held: dict[str, np.ndarray[Any, Any]] = {}
        self.inputs: dict[str, list[str]] = {}
        self.outputs: dict[str, list[str]] = {}

    def input(self, name: str, *axes: str) -> str:
        """Whole numbers that come from outside."""
        self.inputs[name] = list(axes)
        return name

    def output(self, name: str, value: str, *axes: str) -> None:
        """A result, under a name of its own."""
        self.nodes.append(("Identity", [value], name, {}))
        self.outputs[name] = list(axes)

    def do(self, kind: str, *values: str, **options: Any) -> str:
        """One operator; returns the name of what it gives."""
        name = f"{kind}.{len(self.nodes)}"
        self.nodes.append((kind, list(values), name, options))
        return name

    def hold(self, value: Any, name: str = "") -> str:
        """A constant."""
        array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
        name = name or f"constant.{array.dtype}.{array.tobytes().hex()}.{array.shape}"
        self.held[name] = array
        return name

    def weight(self, name: str) -> str:
        """A tensor of the network."""
        return self.hold(self.tensors[name].contiguous(), name)

    def model(self, onnx: Any) -> Any:
        """The whole as ONNX."""
        make, kinds = onnx.helper, onnx.TensorProto
        nodes = [
            make.make_node(kind, values, [name], name=name, **options) for kind, values, name, options in self.nodes
        ]
        inputs = [make.make_tensor_value_info(name, kinds.INT64, axes) for name, axes in self.inputs.items()]
        outputs = [make.make_tensor_value_info(name, kinds.FLOAT, axes) for name, axes in self.outputs.items()]
        held = [onnx.numpy_helper.from_array(array, name) for name, array in self.held.items()]
        graph = make.make_graph(nodes, "clearhead", inputs, outputs, held)
        model = make.make_model(graph, opset_imports=[make.make_opsetid("", OPSET)], producer_name="clearhead")
        model.ir_version = min(model.ir_version, 10)  # what runtimes of the last years read
        return model

    # Parts of a network

    def linear(self, x: str, name: str) -> str:
        """x Wᵀ + b"""
        turned = self.hold(self.tensors[f"{name}.weight"].t().contiguous(), f"{name}.weight.turned")
        x = self.do("MatMul", x, turned)
        return self.do("Add", x, self.weight(f"{name}.bias")) if f"{name}.bias" in self.tensors else x

    def norm(self, x: str, name: str, kind: str = "") -> str:
        """LayerNorm, RMSNorm, or BatchNorm by its running statistics."""
        weight, eps = self.tensors[f"{name}.weight"], self.config.norm_eps
        bias = self.tensors.get(f"{name}.bias", torch.zeros_like(weight))
        match kind or self.config.norm:
            case "layer":
                held = self.weight(f"{name}.weight"), self.hold(bias, f"{name}.bias")
                return self.do("LayerNormalization", x, *held, axis=-1, epsilon=eps)
            case "rms":
                square = self.do("ReduceMean", self.do("Mul", x, x), self.hold([-1]), keepdims=1)
                root = self.do("Sqrt", self.do("Add", square, self.hold(np.float32(eps))))
                return self.do("Mul", self.do("Div", x, root), self.weight(f"{name}.weight"))
        scale = weight * torch.rsqrt(self.tensors[f"{name}.variance"] + eps)
        shifted = self.hold(bias - self.tensors[f"{name}.mean"] * scale, f"{name}.shift")
        return self.do("Add", self.do("Mul", x, self.hold(scale, f"{name}.scale")), shifted)

    def activation(self, x: str) -> str:
        """The non-linearity of the feed-forward layer."""
        match self.config.activation:
            case "relu":
                return self.do("Relu", x)
            case "gelu":
                return self.do("Gelu", x)
            case "gelu_tanh":
                return self.do("Gelu", x, approximate="tanh")
        return self.do("Mul", x, self.do("Sigmoid", x))

    def feed_forward(self, x: str, name: str) -> str:
        """down(activation(up(x))), or with a gate."""
        if self.config.activation == "swiglu":
            hidden = self.do("Mul", self.activation(self.linear(x, f"{name}.gate")), self.linear(x, f"{name}.up"))
        else:
            hidden = self.activation(self.linear(x, f"{name}.up"))
        return self.linear(hidden, f"{name}.down")

    def split(self, x: str, heads: int, rotation: tuple[str, str] | None = None) -> str:
        """(B, T, H·E) to (B, H, T, E), turned by its positions."""
        x = self.do("Reshape", x, self.hold([0, 0, heads, self.config.head_dim]))
        if rotation is not None:
            half = self.config.head_dim // 2
            a, b = (self._cut(x, start, start + half) for start in (0, half))
            cos, sin = rotation
            left = self.do("Sub", self.do("Mul", a, cos), self.do("Mul", b, sin))
            right = self.do("Add", self.do("Mul", b, cos), self.do("Mul", a, sin))
            x = self.do("Concat", left, right, axis=-1)
        return self.do("Transpose", x, perm=[0, 2, 1, 3])

    def attention(
        self,
        x: str,
        name: str,
        allowed: str | None,
        rotation: tuple[str, str] | None,
        encoder_output: str | None = None,
    ) -> str:
        """Queries of x (B, T, D) over its own keys and values, or those of memory (B, S, D)."""
        config, encoder_output = self.config, encoder_output or x
        q = self.split(self.linear(x, f"{name}.query"), config.heads, rotation)
        k = self.split(self.linear(encoder_output, f"{name}.key"), config.kv_heads, rotation)
        v = self.split(self.linear(encoder_output, f"{name}.value"), config.kv_heads)
        if config.kv_heads < config.heads:  # each key-value head serves several
            serving = self.hold(np.repeat(np.arange(config.kv_heads), config.heads // config.kv_heads))
            k, v = (self.do("Gather", each, serving, axis=1) for each in (k, v))
        scores = self.do("MatMul", q, self.do("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.do("Mul", scores, self.hold(np.float32(1 / math.sqrt(config.head_dim))))
        if allowed is not None:
            scores = self.do("Where", allowed, scores, self.hold(np.float32(HIDDEN)))
        seen = self.do("MatMul", self.do("Softmax", scores, axis=-1), v)
        joined = self.do("Transpose", seen, perm=[0, 2, 1, 3])
        inner = config.heads * config.head_dim
        return self.linear(self.do("Reshape", joined, self.hold([0, 0, inner])), f"{name}.output")

    def _cut(self, x: str, start: int, end: int) -> str:
        return self.do("Slice", x, self.hold([start]), self.hold([end]), self.hold([3]))

    def positions(self, ids: str) -> str:
        """0, 1, 2 … as many as there are tokens: (T,)"""
        count = self.do("Squeeze", self.do("Shape", ids, start=1, end=2), self.hold([0]))
        return self.do("Range", self.hold(np.int64(0)), count, self.hold(np.int64(1)))

    def real(self, positions: str, lengths: str) -> str:
        """Which keys are no padding: (B, 1, 1, S)"""
        return self.do("Less", positions, self.do("Unsqueeze", lengths, self.hold([1, 2, 3])))

    def near(self, positions: str, causal: bool, window: int | None) -> str | None:
        """Which keys a query may see by where they are: (T, S)"""
        query, key = (self.do("Unsqueeze", positions, self.hold([axis])) for axis in (1, 0))
        distance = self.do("Sub", query, key)
        found = [self.do("GreaterOrEqual", distance, self.hold(np.int64(0)))] if causal else []
        if window is not None:
            distance = distance if causal else self.do("Abs", distance)
            found.append(self.do("Less", distance, self.hold(np.int64(window))))
        return found[0] if len(found) == 1 else self.do("And", *found) if found else None

    def stack(
        self,
        ids: str,
        name: str,
        keys: str | None = None,
        encoder_output: tuple[str, str] | None = None,
        segments: str | None = None,
    ) -> str:
        """Ids (B, T) to hidden states (B, T, D); `keys` says which are real, `memory` is a source and which of it."""
        config, causal = self.config, name == "decoder"
        positions = self.positions(ids)
        x = self._embedded(ids, positions, name, segments)
        rotation = None
        if config.position == "rotary":
            tables = rope_cos_sin(config, torch.arange(config.max_positions)[None])  # (1, P, 1, E/2)
            both = zip(("cosines", "sines"), tables, strict=True)
            cos, sin = (self.do("Gather", self.hold(t[0].contiguous(), what), positions, axis=0) for what, t in both)
            rotation = cos, sin
        masks: dict[str, str | None] = {}
        for kind in set(config.attention):
            near = self.near(positions, causal, config.window if kind == "window" else None)
            masks[kind] = self.do("And", near, keys) if near and keys else near or keys
        for number in range(config.decoder_layers if causal else config.encoder_layers):
            allowed = masks[config.attention[number % len(config.attention)]]
            layer = f"{name}.layers.{number}"
            x = self._add(x, f"{layer}.attention_norm", self.attention, f"{layer}.attention", allowed, rotation)
            if encoder_output is not None:
                source, real = encoder_output
                cross = f"{layer}.cross_attention"
                x = self._add(x, f"{layer}.cross_norm", self.attention, cross, real, None, source)
            x = self._add(x, f"{layer}.feed_forward_norm", self.feed_forward, f"{layer}.feed_forward")
        return self.norm(x, f"{name}.norm") if config.norm_position == "pre" else x

    def _add(self, x: str, norm: str, sublayer: Callable[..., str], *its: Any) -> str:
        if self.config.norm_position == "pre":
            return self.do("Add", x, sublayer(self.norm(x, norm), *its))
        return self.norm(self.do("Add", x, sublayer(x, *its)), norm)

    def _embedded(self, ids: str, positions: str, name: str, segments: str | None) -> str:
        config, place = self.config, f"{name}.embedding"
        x = self.do("Gather", self.weight(f"{place}.tokens.weight"), ids)
        if config.scale_embedding:
            x = self.do("Mul", x, self.hold(np.float32(math.sqrt(config.dim))))
        if config.position == "learned":
            x = self.do("Add", x, self.do("Gather", self.weight(f"{place}.positions.weight"), positions))
        if config.position == "sinusoidal":
            table = sinusoidal_positions(torch.arange(config.max_positions), config.dim, config.sinusoid)
            x = self.do("Add", x, self.do("Gather", self.hold(table, "sinusoids"), positions))
        if segments is not None:
            x = self.do("Add", x, self.do("Gather", self.weight(f"{place}.segments.weight"), segments))
        return self.norm(x, f"{place}.norm") if config.embedding_norm else x


def _decoder(graph: Graph) -> None:
    ids = graph.input("ids", "rows", "tokens")
    _heads(graph, graph.stack(ids, "decoder"), "tokens")


def _translator(graph: Graph) -> None:
    source, lengths = graph.input("source", "rows", "source_tokens"), graph.input("source_lengths", "rows")
    target = graph.input("target", "rows", "tokens")
    real = graph.real(graph.positions(source), lengths)
    encoder_output = graph.stack(source, "encoder", real)
    _heads(graph, graph.stack(target, "decoder", encoder_output=(encoder_output, real)), "tokens")


def _encoder(graph: Graph) -> None:
    ids, lengths = graph.input("ids", "rows", "tokens"), graph.input("lengths", "rows")
    segments = graph.input("segments", "rows", "tokens") if graph.config.segments else None
    hidden = graph.stack(ids, "encoder", graph.real(graph.positions(ids), lengths), segments=segments)
    graph.output("hidden", hidden, "rows", "tokens", "width")
    _heads(graph, hidden, "tokens")


def _heads(graph: Graph, hidden: str, tokens: str) -> None:
    """An output for every head; what reads a whole row reads an encoder's first token."""
    config = graph.config
    rowwise = {"next-sentence", "classes"} & set(config.outputs)
    if rowwise and config.family != "encoder":
        raise UserError(f"export: ONNX has no place for outputs: {', '.join(sorted(rowwise))} of a decoder")
    if (rowwise or config.pooler) and config.pooling != "cls":
        raise UserError(f"export: ONNX has no place for pooling: {config.pooling}; only for that of the first token")
    pooled = ""
    if config.family == "encoder":
        pooled = graph.do("Gather", hidden, graph.hold(np.int64(0)), axis=1)
        if config.pooler:
            pooled = graph.do("Tanh", graph.linear(pooled, "heads.pooler.linear"))
            graph.output("pooled", pooled, "rows", "width")
    for output in config.outputs:
        match output:
            case "lm":
                x = hidden
                if config.family == "encoder":
                    x = graph.activation(graph.linear(x, "heads.lm_head.transform.linear"))
                    x = graph.norm(x, "heads.lm_head.transform.norm", "layer" if config.norm == "batch" else "")
                graph.output("words", graph.linear(x, "heads.lm_head.proj"), "rows", tokens, "words_known")
            case "next-sentence":
                graph.output(output, graph.linear(pooled, "heads.next_sentence"), "rows", "answers")
            case "classes":
                graph.output(output, graph.linear(pooled, "heads.classes.proj"), "rows", "labels")
            case "tags":
                graph.output(output, graph.linear(hidden, "heads.tags.proj"), "rows", tokens, "labels")
            case "span":
                graph.output(output, graph.linear(hidden, "heads.span"), "rows", tokens, "ends")
