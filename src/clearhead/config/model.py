"""Architecture settings: one typed config describes every supported Transformer, from the 2017 translator to Llama."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clearhead.config.settings import Settings, as_tuple

Family = Literal["encoder-decoder", "encoder", "decoder"]
AttentionPattern = Literal["full", "window", "strided", "fixed"]
Output = Literal["lm", "next-sentence", "classes", "tags", "span"]


class RopeScaling(Settings):
    """Llama 3's rotary frequency scaling for contexts longer than the pretraining context.

    Wavelengths above `original_positions / low_frequency_factor` are multiplied by `factor`, those below
    `original_positions / high_frequency_factor` are unchanged, and those between are interpolated.
    """

    factor: float = Field(ge=1, le=1024)
    low_frequency_factor: float = Field(default=1.0, gt=0, le=1024)
    high_frequency_factor: float = Field(default=4.0, gt=0, le=1024)
    original_positions: int = Field(default=8192, ge=1, le=1 << 24)  # context length of pretraining

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor ({self.low_frequency_factor}) must be below high_frequency_factor "
                f"({self.high_frequency_factor}); Llama 3 uses 1 and 4"
            )
        return self


class ModelConfig(Settings):
    """Architecture of one model; contradictory settings raise an error."""

    # Size
    family: Family
    encoder_layers: int = Field(default=0, ge=0, le=1024)
    decoder_layers: int = Field(default=0, ge=0, le=1024)
    dim: int = Field(ge=1, le=1 << 16)  # size of the hidden states
    vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)  # shared by source and target
    source_vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)  # these two: separate vocabularies
    target_vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)

    # Attention
    heads: int = Field(ge=1, le=1024)
    kv_heads: int = Field(default_factory=lambda known: known["heads"], ge=1, le=1024)  # fewer than heads: GQA; 1: MQA
    head_dim: int = Field(default_factory=lambda known: max(1, known["dim"] // known["heads"]), ge=1, le=1 << 13)
    # One pattern for all layers, or several that the layers cycle through
    attention: Annotated[
        tuple[AttentionPattern, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=1024)
    ] = ("full",)
    window: int | None = Field(default=None, ge=1, le=1 << 24)  # window: tokens to attend to
    stride: int | None = Field(default=None, ge=1, le=1 << 24)  # strided and fixed (Sparse Transformer): block length
    summary: int | None = Field(default=None, ge=1, le=1 << 24)  # fixed: summary tokens at the end of each block

    # Positions
    position: Literal["sinusoidal", "learned", "rotary", "none"] = "sinusoidal"
    max_positions: int = Field(default=1024, ge=1, le=1 << 24)  # longest sequence in tokens
    position_offset: int = Field(default=0, ge=0, le=1024)  # of the first position; RoBERTa, BART and M2M100: 2
    # Layout of sine and cosine: alternating as in the paper, or all sines first as in Marian and (fairseq) M2M100
    sinusoid: Literal["interleaved", "halves", "fairseq"] | None = Field(
        default_factory=lambda known: "interleaved" if known["position"] == "sinusoidal" else None
    )
    rope_theta: float | None = Field(
        default_factory=lambda known: 10_000.0 if known["position"] == "rotary" else None, gt=1, le=1e12
    )
    local_rope_theta: float | None = Field(default=None, gt=1, le=1e12)  # ModernBERT: of its layers with a window
    rope_scaling: RopeScaling | None = None

    # Feed-forward, norms, dropout
    ff_dim: int = Field(default_factory=lambda known: 4 * known["dim"], ge=1, le=1 << 20)
    # swiglu and geglu: gated, the activation is applied to the gate projection
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"] = "relu"
    norm: Literal["layer", "rms", "batch"] = "layer"
    norm_position: Literal["pre", "post"] = "pre"  # post: LayerNorm(x + Sublayer(x)), as in the paper
    norm_eps: float = Field(default=1e-5, gt=0, le=0.1)
    bias: bool = True  # in linear layers and LayerNorm
    qkv_bias: bool = Field(default_factory=lambda known: known["bias"])  # Qwen2: there, but in no other linear layer
    qk_norm: bool = False  # Qwen3: RMSNorm of each query and key head, before rotary positions
    dropout: float = Field(default=0.0, ge=0, lt=1)  # of embeddings and sublayer outputs
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)  # of attention weights

    # Embeddings and output heads
    tie: Literal["none", "output", "all"] = (
        "none"  # output: lm_head with its embedding; all: both embeddings and lm_head
    )
    scale_embedding: bool = False  # multiply embeddings by √dim, as in the paper
    segments: int = Field(default=0, ge=0, le=1024)  # BERT's token types; with 0 or 1, pairs have none
    embedding_norm: bool = False  # BERT's LayerNorm after the embeddings
    first_norm: bool = True  # false: layer 0 has no attention norm, as its input is normalized (ModernBERT)
    outputs: Annotated[tuple[Output, ...], BeforeValidator(as_tuple)] = ("lm",)
    output_bias: bool = False  # of lm_head
    # Input of the sequence heads: the first token (encoder) or the last (decoder), or the mean of all tokens
    pooling: Literal["cls", "mean"] = "cls"
    pooler: bool = False  # BERT's linear layer and tanh after pooling
    pooler_activation: Literal["tanh", "relu"] = "tanh"  # DistilBERT: relu
    labels: int = Field(default=0, ge=0, le=1 << 20)  # number of classes or tags

    # Weight initialization
    init: Literal["xavier", "truncated", "normal", "scaled"] = "normal"

    @property
    def source_vocab(self) -> int:
        """Size of the encoder's vocabulary."""
        return self.source_vocab_size or self.vocab_size or 0

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward layer has a gate projection."""
        return self.activation in ("swiglu", "geglu")

    @property
    def target_vocab(self) -> int:
        """Size of the decoder's vocabulary."""
        return self.target_vocab_size or self.vocab_size or 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks = (_check_layers, _check_vocab, _check_heads, _check_attention, _check_positions, _check_outputs)
        problems = [problem for check in checks if (problem := next(check(self), None))]  # others may be consequences
        if problems:
            raise ValueError("\n".join(problems))
        return self


# Cross-checks. Each yields `key: what is wrong; how to fix it`.


def _check_layers(c: ModelConfig) -> Iterator[str]:
    needs = {"encoder-decoder": (True, True), "encoder": (True, False), "decoder": (False, True)}[c.family]
    for key, layers, needed in zip(
        ("encoder_layers", "decoder_layers"), (c.encoder_layers, c.decoder_layers), needs, strict=True
    ):
        if needed and not layers:
            yield f"{key}: 0 layers, but family is {c.family}; set {key} to 1 or more"
        if layers and not needed:
            yield f"{key}: {layers}, but family {c.family} has none; set {key} to 0 or change family"


def _check_vocab(c: ModelConfig) -> Iterator[str]:
    if c.family != "encoder-decoder" and (c.source_vocab_size or c.target_vocab_size):
        key = "source_vocab_size" if c.source_vocab_size else "target_vocab_size"
        yield f"{key}: family {c.family} has one vocabulary; use vocab_size"
    if c.vocab_size and (c.source_vocab_size or c.target_vocab_size):
        yield (
            "vocab_size: given together with source_vocab_size or target_vocab_size; "
            "keep vocab_size for a shared vocabulary, or the other two for separate ones"
        )
    if bool(c.source_vocab_size) != bool(c.target_vocab_size):
        other = "target" if c.source_vocab_size else "source"
        yield f"{other}_vocab_size: missing; give both, or vocab_size for a shared vocabulary"
    if not c.source_vocab:
        yield "vocab_size: missing; give the number of tokens, like vocab_size=8000"
    if c.tie == "all" and c.family != "encoder-decoder":
        yield f"tie: all ties encoder, decoder and output, but family is {c.family}; use output or none"
    if c.tie == "all" and c.source_vocab_size:
        yield "tie: all needs one shared vocabulary; give vocab_size instead of source_vocab_size and target_vocab_size"


def _check_heads(c: ModelConfig) -> Iterator[str]:
    if "head_dim" not in c.model_fields_set and c.dim % c.heads:
        yield f"heads: {c.heads} does not divide dim {c.dim}; use a divisor of {c.dim}, or set head_dim"
    if c.heads % c.kv_heads:
        yield f"kv_heads: {c.kv_heads} does not divide heads {c.heads}; use a divisor of {c.heads}"


def _check_attention(c: ModelConfig) -> Iterator[str]:
    uses = set(c.attention)
    users = {"window": {"window"}, "stride": {"strided", "fixed"}, "summary": {"fixed"}}
    for key, patterns in users.items():
        value, needed_by = getattr(c, key), uses & patterns
        if needed_by and value is None:
            example = {"window": 256, "stride": 128, "summary": 8}[key]
            yield f"{key}: missing, but attention has {needed_by.pop()}; set it, like {key}={example}"
        if value is not None and not needed_by:
            yield f"{key}: {value}, but attention has no {' or '.join(sorted(patterns))} layer; remove {key}"
    if c.summary and c.stride and c.summary > c.stride:
        yield f"summary: {c.summary} is more than the stride {c.stride}; use at most {c.stride}"
    layers = max(c.encoder_layers, c.decoder_layers)
    if len(c.attention) > max(1, layers):
        yield f"attention: {len(c.attention)} patterns for {layers} layers; give at most one for each layer"


def _check_positions(c: ModelConfig) -> Iterator[str]:
    if c.position == "rotary" and c.head_dim % 2:
        yield f"head_dim: {c.head_dim} is odd, but rotary positions rotate pairs; use an even head_dim"
    if c.position == "sinusoidal" and c.dim % 2:
        yield f"dim: {c.dim} is odd, but sinusoidal positions come in pairs; use an even dim"
    if c.position_offset and c.position not in ("learned", "sinusoidal"):
        yield f"position_offset: {c.position_offset}, but position is {c.position}; set it to 0"
    if c.position == "sinusoidal" and c.sinusoid == "fairseq" and c.dim < 4:
        yield f"sinusoid: fairseq needs a dim of 4 or more, not {c.dim}; use halves"
    if c.local_rope_theta is not None and (c.position, c.family) != ("rotary", "encoder"):
        yield f"local_rope_theta: set, but only an encoder with position=rotary has it, not {c.family}; remove it"
    if c.local_rope_theta is not None and "window" not in c.attention:
        yield "local_rope_theta: set, but attention has no window layer; remove it"
    if not c.first_norm and (c.norm_position, c.embedding_norm, c.family) != ("pre", True, "encoder"):
        yield "first_norm: false is for an encoder with norm_position=pre and embedding_norm=true; set it to true"
    for key, owner in (("sinusoid", "sinusoidal"), ("rope_theta", "rotary"), ("rope_scaling", "rotary")):
        if getattr(c, key) is not None and c.position != owner:
            yield f"{key}: set, but position is {c.position}; remove {key} or use position={owner}"
        if key != "rope_scaling" and getattr(c, key) is None and c.position == owner:
            yield f"{key}: null, but position is {owner}; remove the line to use the default"


def _check_outputs(c: ModelConfig) -> Iterator[str]:
    if len(set(c.outputs)) < len(c.outputs):
        yield "outputs: duplicate name; name each output once"
    if c.family == "encoder-decoder" and c.outputs != ("lm",):
        yield "outputs: family encoder-decoder has only lm; use outputs=lm, or another family"
    if c.family == "encoder-decoder" and c.pooling != "cls":
        yield f"pooling: {c.pooling}, but family {c.family} does not pool; remove pooling"
    if c.family != "encoder" and c.segments:
        yield f"segments: {c.segments}, but family is {c.family}; only an encoder has segments, set it to 0"
    if c.family != "encoder" and c.pooler:
        yield f"pooler: true, but family is {c.family}; only an encoder has one, set it to false"
    if "next-sentence" in c.outputs and not c.pooler:
        yield "outputs: next-sentence needs the pooler; set pooler=true (family encoder)"
    labeled = {"classes", "tags"} & set(c.outputs)
    if labeled and not c.labels:
        yield f"labels: missing, but outputs has {labeled.pop()}; set the number of labels, like labels=2"
    if c.labels and not labeled:
        yield f"labels: {c.labels}, but outputs has neither classes nor tags; set labels to 0"


def supported_commands(config: ModelConfig) -> list[str]:
    """List the commands that a model of this config supports."""
    if config.family == "encoder-decoder":
        return ["translate", "evaluate"]
    if config.family == "decoder" and "lm" in config.outputs:
        return ["generate", "chat", "evaluate"]
    commands = {"lm": "fill", "classes": "classify", "tags": "tag", "span": "answer"}
    return [*(command for output, command in commands.items() if output in config.outputs), "embed", "evaluate"]
