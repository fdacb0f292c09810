"""The learning rate as a function of the step."""

import math

from clearhead.config.train import ScheduleConfig


def lr_at_step(settings: ScheduleConfig, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 1; it peaks at step `warmup`, and `steps` is the last."""
    if settings.schedule == "inverse-sqrt":
        warmup = max(settings.warmup, 1)
        return settings.lr * min(step / warmup, math.sqrt(warmup / step))
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    start: float = settings.warmup
    if settings.schedule == "wsd":
        assert settings.decay_ratio is not None
        start = max(start, steps - settings.decay_ratio * steps)
    gone = 1.0 if step >= steps else max(step - start, 0) / (steps - start)  # the share of the way down
    left = (1 + math.cos(math.pi * gone)) / 2 if settings.schedule == "cosine" else 1 - gone
    assert settings.min_lr_ratio is not None
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)


def noam_lr(dim: int, warmup: int, scale: float = 1.0) -> float:
    """The peak that makes `inverse-sqrt` the formula of section 5.3, times a scale.

    width^-0.5 · min(step^-0.5, step · warmup^-1.5) is largest at step = warmup: (width · warmup)^-0.5.
    """
    return scale / math.sqrt(dim * warmup)
