"""How weights are learned: the learning rate over the steps, the optimizer, and the run around them."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clearhead.config.settings import Settings, several, switch

Weight = Annotated[float, Field(ge=0, le=1e6)]
FALLING = ("linear", "cosine", "wsd")  # the schedules that end at a floor


class ScheduleConfig(Settings):
    """The learning rate: up to `rate` in a straight line over `warmup` steps, then as `schedule` says.

    inverse-sqrt   rate · √(warmup / step), the paper's (section 5.3)
    linear         in a straight line to floor · rate at the last step
    cosine         along half a cosine to floor · rate at the last step
    wsd            warm-up, stable, decay: flat, then straight to floor · rate over the last `decay` share of all steps
    constant       flat
    """

    schedule: Literal["inverse-sqrt", "linear", "cosine", "wsd", "constant"] = "cosine"
    lr: float = Field(default=3e-4, gt=0, le=100)
    warmup: int = Field(default=0, ge=0, le=1 << 40)
    min_lr_ratio: float | None = Field(
        default_factory=lambda known: 0.0 if known["schedule"] in FALLING else None, ge=0, le=1
    )  # a share of `rate`
    decay_ratio: float | None = Field(
        default_factory=lambda known: 0.2 if known["schedule"] == "wsd" else None, ge=1e-6, le=1
    )  # a share of all steps

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        problems = []
        for key, owners in (("min_lr_ratio", FALLING), ("decay_ratio", ("wsd",))):
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
    """How gradients become updates: AdamW, or Adam with the numbers of the paper (section 5.3)."""

    optimizer: Literal["adamw", "adam"] = "adamw"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default_factory=lambda known: 0.98 if known["optimizer"] == "adam" else 0.999, ge=0, lt=1)
    eps: float = Field(default_factory=lambda known: 1e-9 if known["optimizer"] == "adam" else 1e-8, gt=0, le=0.1)
    weight_decay: float = Field(
        default_factory=lambda known: 0.0 if known["optimizer"] == "adam" else 0.01, ge=0, le=10
    )  # on matrices only
    grad_clip: float | None = Field(default=1.0, gt=0, le=1e6)  # the longest that all gradients together may be

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer == "adam" and self.weight_decay:
            raise ValueError(f"weight_decay: {self.weight_decay:g}, but adam has none; set it to 0, or optimizer=adamw")
        return self


class ScheduledSamplingConfig(Settings):
    """Scheduled sampling: the share of true words that a translator reads falls to `floor` as the steps go by."""

    decay: Literal["linear", "exponential", "inverse-sigmoid"] = "inverse-sigmoid"
    decay_steps: float = Field(gt=0, le=1e12)  # steps; larger is slower
    min_prob: float = Field(default=0.0, ge=0, le=1)


class TrainConfig(ScheduleConfig, OptimizerConfig):
    """One run. `steps` is always the total, also when a run goes on."""

    steps: int = Field(ge=1, le=1 << 40)
    seed: int = Field(default=0, ge=0, le=1 << 62)
    grad_accum: int = Field(default=1, ge=1, le=1 << 20)  # parts that each process works through one after the other
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    scheduled_sampling: ScheduledSamplingConfig | None = None
    freeze: Annotated[tuple[str, ...], BeforeValidator(several)] = ()  # patterns of parameter names
    # Of a label's mistakes, like {spam: 5}; others weigh 1. balanced: rare labels weigh more, so that all count alike.
    class_weights: Literal["balanced"] | dict[str, Weight] | None = None

    # Watching
    validate_every: int = Field(default=500, ge=1, le=1 << 40)
    save_every: int = Field(default=500, ge=1, le=1 << 40)
    log_every: int = Field(default=10, ge=1, le=1 << 40)
    keep_checkpoints: int = Field(default=3, ge=1, le=1000)  # checkpoints
    metric: Literal["loss", "bleu", "chrf", "accuracy", "exact", "f1", "matthews", "pearson", "spearman"] = "loss"
    patience: int | None = Field(default=None, ge=1, le=1 << 20)  # validations without a better one, then stop
    eval_samples: int = Field(default=200, ge=0, le=1 << 20)  # validation samples that are decoded for BLEU and chrF
    average_checkpoints: int = Field(default=1, ge=1, le=1000)  # `last` is the mean of so many checkpoints

    # The machine
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"  # auto: bf16 on a GPU that has it, else fp32
    # auto: on, on a GPU; whole: encoder and decoder as one each, longer to compile, a per cent or two faster
    compile: Annotated[Literal["auto", "on", "whole", "off"], BeforeValidator(switch)] = "auto"
    activation_checkpointing: bool = False  # activation checkpointing: less memory, a third more work
    parallel: Literal["ddp", "fsdp"] = "ddp"  # with several processes (torchrun)

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        if self.average_checkpoints > self.keep_checkpoints:
            raise ValueError(
                f"average: {self.average_checkpoints} checkpoints, but only {self.keep_checkpoints} are kept; raise keep"
            )
        return self
