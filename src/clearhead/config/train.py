"""Training settings: learning rate schedule, optimizer, and everything else that describes a run."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clearhead.config.dtypes import ALIASES
from clearhead.config.settings import Settings, as_tuple, on_off

Weight = Annotated[float, Field(ge=0, le=1e6)]
DECAYING = ("linear", "cosine", "wsd")  # the schedules that end at min_lr_ratio


def precision_name(value: Any) -> Any:
    """The short name of a dtype (`float32` → `fp32`); quantized dtypes are refused."""
    if value in ("int8", "int4"):
        raise ValueError(f"{value} is for inference only; train with fp32, bf16, fp16 or fp64 and quantize afterwards")
    return ALIASES.get(value, value) if isinstance(value, str) else value


class ScheduleConfig(Settings):
    """Learning rate schedule: linear warmup to `lr`, then:

    inverse-sqrt   lr · √(warmup / step), the paper's (section 5.3)
    linear         linear decay to min_lr_ratio · lr at the last step
    cosine         cosine decay to min_lr_ratio · lr at the last step
    wsd            warmup, stable, decay: constant, then linear to min_lr_ratio · lr over the last decay_ratio of steps
    constant       constant
    """

    schedule: Literal["inverse-sqrt", "linear", "cosine", "wsd", "constant"] = "cosine"
    lr: float = Field(default=3e-4, gt=0, le=100)
    warmup: int = Field(default=0, ge=0, le=1 << 40)
    min_lr_ratio: float | None = Field(
        default_factory=lambda known: 0.0 if known["schedule"] in DECAYING else None, ge=0, le=1
    )  # final learning rate as a fraction of `lr`
    decay_ratio: float | None = Field(
        default_factory=lambda known: 0.2 if known["schedule"] == "wsd" else None, ge=1e-6, le=1
    )  # fraction of all steps spent in decay

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        problems = []
        for key, owners in (("min_lr_ratio", DECAYING), ("decay_ratio", ("wsd",))):
            value, used = getattr(self, key), self.schedule in owners
            if value is not None and not used:
                problems.append(
                    f"{key}: {value:g}, but schedule {self.schedule} has none; "
                    f"remove {key} or use schedule={' or '.join(owners)}"
                )
            if value is None and used:
                problems.append(
                    f"{key}: null, but schedule {self.schedule} needs it; remove the line to use the default"
                )
        if problems:
            raise ValueError("\n".join(problems))
        return self


class OptimizerConfig(Settings):
    """The optimizer: AdamW, or Adam with the hyperparameters of the paper (section 5.3)."""

    optimizer: Literal["adamw", "adam"] = "adamw"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default_factory=lambda known: 0.98 if known["optimizer"] == "adam" else 0.999, ge=0, lt=1)
    eps: float = Field(default_factory=lambda known: 1e-9 if known["optimizer"] == "adam" else 1e-8, gt=0, le=0.1)
    weight_decay: float = Field(
        default_factory=lambda known: 0.0 if known["optimizer"] == "adam" else 0.01, ge=0, le=10
    )  # on matrices only
    grad_clip: float | None = Field(default=1.0, gt=0, le=1e6)  # maximum global gradient norm; null: no clipping

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer == "adam" and self.weight_decay:
            raise ValueError(f"weight_decay: {self.weight_decay:g}, but adam has none; set it to 0, or optimizer=adamw")
        return self


class ScheduledSamplingConfig(Settings):
    """Scheduled sampling: the probability of feeding a ground-truth token decays to `min_prob` over training."""

    decay: Literal["linear", "exponential", "inverse-sigmoid"] = "inverse-sigmoid"
    decay_steps: float = Field(gt=0, le=1e12)  # time scale of the decay, in steps
    min_prob: float = Field(default=0.0, ge=0, le=1)


class LoraConfig(Settings):
    """LoRA: train low-rank updates of the layers instead of their weights (Hu et al. 2021)."""

    rank: int = Field(default=16, ge=1, le=4096)
    alpha: float = Field(default_factory=lambda known: 2.0 * known["rank"], gt=0, le=1e6)  # updates times alpha / rank
    dropout: float = Field(default=0.0, ge=0, lt=1)  # of the input of an update
    targets: Annotated[
        tuple[Literal["attention", "feed_forward"], ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=2)
    ] = ("attention", "feed_forward")


class TrainConfig(ScheduleConfig, OptimizerConfig):
    """One training run. `steps` is the total, also for a resumed run."""

    steps: int = Field(ge=1, le=1 << 40)
    seed: int = Field(default=0, ge=0, le=1 << 62)
    grad_accum: int = Field(default=1, ge=1, le=1 << 20)  # micro-batches per process and step
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    scheduled_sampling: ScheduledSamplingConfig | None = None
    lora: LoraConfig | None = None  # with model.init_from
    freeze: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()  # patterns of parameter names
    # Loss weight per class, like {spam: 5}, default 1; balanced: inversely proportional to class frequency.
    class_weights: Literal["balanced"] | dict[str, Weight] | None = None

    # Logging, validation and checkpoints
    # Default: 500, or a tenth of all steps if that is less
    validate_every: int = Field(default_factory=lambda known: max(1, min(500, known["steps"] // 10)), ge=1, le=1 << 40)
    save_every: int = Field(default=500, ge=1, le=1 << 40)
    log_every: int = Field(default=10, ge=1, le=1 << 40)
    keep_checkpoints: int = Field(default=3, ge=1, le=1000)
    metric: Literal["loss", "bleu", "chrf", "accuracy", "exact", "f1", "matthews", "pearson", "spearman"] = "loss"
    patience: int | None = Field(default=None, ge=1, le=1 << 20)  # stop after this many validations without improvement
    eval_samples: int = Field(default=200, ge=0, le=1 << 20)  # validation samples decoded for BLEU and chrF
    average_checkpoints: int = Field(default=1, ge=1, le=1000)  # `last` is the mean of this many checkpoints

    # Hardware
    device: str = "auto"
    # auto: bf16 on a GPU that supports it, else fp32; float32, bfloat16, float16 and float64 are accepted too
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16", "fp64"], BeforeValidator(precision_name)] = "auto"
    # auto: on for GPUs, per layer; whole: encoder and decoder as one graph each, slower to compile, 1-2% faster
    compile: Annotated[Literal["auto", "on", "whole", "off"], BeforeValidator(on_off)] = "auto"
    activation_checkpointing: bool = False  # recompute activations in backward: less memory, a third more compute
    parallel: Literal["ddp", "fsdp"] = "ddp"  # with several processes (torchrun)

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        if self.average_checkpoints > self.keep_checkpoints:
            raise ValueError(
                f"average_checkpoints: {self.average_checkpoints} checkpoints, but only {self.keep_checkpoints} are "
                "kept; raise keep_checkpoints"
            )
        return self
