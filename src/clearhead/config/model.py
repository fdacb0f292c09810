"""What a model is: every architectural choice as one typed, bounded field. A family is a value of this, not a class."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clearhead.config.settings import Settings, several

Family = Literal["encoder-decoder", "encoder", "decoder"]
Attends = Literal["full", "window", "strided", "fixed"]
Output = Literal["lm", "next-sentence", "classes", "tags", "span"]


class RopeScaling(Settings):
    """Llama 3's rule for contexts longer than the rotary frequencies were trained for.

    Wavelengths longer than `original_positions / low_frequency_factor` are stretched by `factor`, those shorter than
    `original_positions / high_frequency_factor` stay, and between the two the stretch fades in linearly.
    """

    factor: float = Field(ge=1, le=1024)
    low_frequency_factor: float = Field(default=1.0, gt=0, le=1024)
    high_frequency_factor: float = Field(default=4.0, gt=0, le=1024)
    original_positions: int = Field(default=8192, ge=1, le=1 << 24)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor ({self.low_frequency_factor}) must be below high_frequency_factor "
                f"({self.high_frequency_factor}); Llama 3 uses 1 and 4"
            )
        return self


class ModelConfig(Settings):
    """Every choice that makes one Transformer differ from another; two that contradict each other are an error."""

    # Size
    family: Family
    encoder_layers: int = Field(default=0, ge=0, le=1024)
    decoder_layers: int = Field(default=0, ge=0, le=1024)
    dim: int = Field(ge=1, le=1 << 16)
    vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)
    source_vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)
    target_vocab_size: int | None = Field(default=None, ge=1, le=1 << 24)

    # Attention
    heads: int = Field(ge=1, le=1024)
    kv_heads: int = Field(default_factory=lambda known: known["heads"], ge=1, le=1024)
    head_dim: int = Field(default_factory=lambda known: max(1, known["dim"] // known["heads"]), ge=1, le=1 << 13)
    attention: Annotated[tuple[Attends, ...], BeforeValidator(several), Field(min_length=1, max_length=1024)] = (
        "full",
    )
    window: int | None = Field(default=None, ge=1, le=1 << 24)
    stride: int | None = Field(default=None, ge=1, le=1 << 24)
    summary: int | None = Field(default=None, ge=1, le=1 << 24)

    # Positions
    position: Literal["sinusoidal", "learned", "rotary", "none"] = "sinusoidal"
    max_positions: int = Field(default=1024, ge=1, le=1 << 24)
    sinusoid: Literal["interleaved", "halves"] | None = Field(
        default_factory=lambda known: "interleaved" if known["position"] == "sinusoidal" else None
    )
    rope_theta: float | None = Field(
        default_factory=lambda known: 10_000.0 if known["position"] == "rotary" else None, gt=1, le=1e12
    )
    rope_scaling: RopeScaling | None = None

    # Feed-forward, norms, dropout
    ff_dim: int = Field(default_factory=lambda known: 4 * known["dim"], ge=1, le=1 << 20)
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu"] = "relu"
    norm: Literal["layer", "rms", "batch"] = "layer"
    norm_position: Literal["pre", "post"] = "pre"
    norm_eps: float = Field(default=1e-5, gt=0, le=0.1)
    bias: bool = True
    dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)

    # Embeddings and what is read off the hidden states
    tie: Literal["none", "output", "all"] = "none"
    scale_embedding: bool = False
    segments: int = Field(default=0, ge=0, le=1024)
    embedding_norm: bool = False
    outputs: Annotated[tuple[Output, ...], BeforeValidator(several)] = ("lm",)
    output_bias: bool = False
    pooling: Literal["cls", "mean"] = "cls"  # what sums up a row: the token that has seen all of it, or all of them
    pooler: bool = False
    labels: int = Field(default=0, ge=0, le=1 << 20)

    # How weights begin
    init: Literal["xavier", "truncated", "normal", "scaled"] = "normal"

    @property
    def source_vocab(self) -> int:
        """Number of tokens that the encoder reads."""
        return self.source_vocab_size or self.vocab_size or 0

    @property
    def target_vocab(self) -> int:
        """Number of tokens that the decoder reads and that can come out."""
        return self.target_vocab_size or self.vocab_size or 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks = (_layers, _vocabulary, _heads, _patterns, _positions, _outputs)
        problems = [problem for check in checks if (problem := next(check(self), None))]  # later ones may only follow
        if problems:
            raise ValueError("\n".join(problems))
        return self


# Cross-checks: each yields a sentence that names the keys and says what to change.


def _layers(c: ModelConfig) -> Iterator[str]:
    needs = {"encoder-decoder": (True, True), "encoder": (True, False), "decoder": (False, True)}[c.family]
    for key, layers, needed in zip(
        ("encoder_layers", "decoder_layers"), (c.encoder_layers, c.decoder_layers), needs, strict=True
    ):
        if needed and not layers:
            yield f"{key}: 0 layers, but family is {c.family}; set {key} to 1 or more"
        if layers and not needed:
            yield f"{key}: {layers}, but family {c.family} has none; set {key} to 0 or change family"


def _vocabulary(c: ModelConfig) -> Iterator[str]:
    if c.family != "encoder-decoder" and (c.source_vocab_size or c.target_vocab_size):
        key = "source_vocab_size" if c.source_vocab_size else "target_vocab_size"
        yield f"{key}: family {c.family} has one vocabulary; use vocab_size"
    if c.vocab_size and (c.source_vocab_size or c.target_vocab_size):
        yield (
            "vocab_size: given together with source_vocab_size or target_vocab_size; "
            "keep vocab_size for a shared vocabulary, or the other two for separate ones"
        )
    if bool(c.source_vocab_size) != bool(c.target_vocab_size):
        key, other = ("source", "target") if c.source_vocab_size else ("target", "source")
        yield f"{other}_vocab_size: missing beside {key}_vocab_size; give both, or vocab_size for a shared vocabulary"
    if not c.source_vocab:
        yield "vocab_size: missing; give the number of tokens, like vocab_size=8000"
    if c.tie == "all" and c.family != "encoder-decoder":
        yield f"tie: all ties encoder, decoder and output, but family is {c.family}; use output or none"
    if c.tie == "all" and c.source_vocab_size:
        yield "tie: all needs one shared vocabulary; give vocab_size instead of source_vocab_size and target_vocab_size"


def _heads(c: ModelConfig) -> Iterator[str]:
    if "head_dim" not in c.model_fields_set and c.dim % c.heads:
        yield f"heads: {c.heads} does not divide width {c.dim}; use a divisor of {c.dim}, or set head_dim"
    if c.heads % c.kv_heads:
        yield f"kv_heads: {c.kv_heads} does not divide heads {c.heads}; use a divisor of {c.heads}"


def _patterns(c: ModelConfig) -> Iterator[str]:
    uses = set(c.attention)
    users = {"window": {"window"}, "stride": {"strided", "fixed"}, "summary": {"fixed"}}
    for key, patterns in users.items():
        value, wanted = getattr(c, key), uses & patterns
        if wanted and value is None:
            example = {"window": 256, "stride": 128, "summary": 8}[key]
            yield f"{key}: missing, but attention has {wanted.pop()}; set it, like {key}={example}"
        if value is not None and not wanted:
            yield f"{key}: {value}, but attention has no {' or '.join(sorted(patterns))} layer; remove {key}"
    if c.summary and c.stride and c.summary > c.stride:
        yield f"summary: {c.summary} is more than the stride {c.stride}; use at most {c.stride}"
    layers = max(c.encoder_layers, c.decoder_layers)
    if len(c.attention) > max(1, layers):
        yield f"attention: {len(c.attention)} patterns for {layers} layers; give at most one for each layer"


def _positions(c: ModelConfig) -> Iterator[str]:
    if c.position == "rotary" and c.head_dim % 2:
        yield f"head_dim: {c.head_dim} is odd, but rotary positions turn pairs; use an even head_dim"
    if c.position == "sinusoidal" and c.dim % 2:
        yield f"width: {c.dim} is odd, but sinusoidal positions come in pairs; use an even width"
    for key, owner in (("sinusoid", "sinusoidal"), ("rope_theta", "rotary"), ("rope_scaling", "rotary")):
        if getattr(c, key) is not None and c.position != owner:
            yield f"{key}: set, but position is {c.position}; remove {key} or use position={owner}"
        if key != "rope_scaling" and getattr(c, key) is None and c.position == owner:
            yield f"{key}: null, but position is {owner}; remove the line to use the default"


def _outputs(c: ModelConfig) -> Iterator[str]:
    if len(set(c.outputs)) < len(c.outputs):
        yield "outputs: a name stands twice; name each output once"
    if c.family == "encoder-decoder" and c.outputs != ("lm",):
        yield "outputs: a translator gives words; use outputs=lm, or another family"
    if c.family == "encoder-decoder" and c.pooling != "cls":
        yield f"pooling: {c.pooling}, but a translator sums nothing up; leave it out"
    if c.family != "encoder" and c.segments:
        yield f"segments: {c.segments}, but family is {c.family}; only an encoder has segments, set it to 0"
    if c.family != "encoder" and c.pooler:
        yield f"pooler: true, but family is {c.family}; only an encoder has one, set it to false"
    if "next-sentence" in c.outputs and not c.pooler:
        yield "outputs: next-sentence reads the pooled row; set pooler=true (family encoder)"
    labeled = {"classes", "tags"} & set(c.outputs)
    if labeled and not c.labels:
        yield f"labels: missing, but outputs has {labeled.pop()}; set the number of labels, like labels=2"
    if c.labels and not labeled:
        yield f"labels: {c.labels}, but outputs has neither classes nor tags; set labels to 0"


def supported_commands(config: ModelConfig) -> list[str]:
    """The verbs that a model of this kind answers to."""
    if config.family == "encoder-decoder":
        return ["translate", "evaluate"]
    if config.family == "decoder" and "lm" in config.outputs:
        return ["generate", "chat", "evaluate"]
    verbs = {"lm": "fill", "classes": "classify", "tags": "tag", "span": "answer"}
    return [*(verb for output, verb in verbs.items() if output in config.outputs), "embed", "evaluate"]
