"""The learning rate as a function of the step."""

import math

from clearhead.config.train import ScheduleConfig


def lr_at_step(settings: ScheduleConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 1; the peak is at step `warmup`, the last step is `steps`."""
    if settings.schedule == "inverse-sqrt":
        warmup = max(settings.warmup, 1)
        return settings.lr * min(step / warmup, math.sqrt(warmup / step))
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    decay_start: float = settings.warmup
    if settings.schedule == "wsd":
        assert settings.decay_ratio is not None
        decay_start = max(decay_start, steps - settings.decay_ratio * steps)
    progress = 1.0 if step >= steps else max(step - decay_start, 0) / (steps - decay_start)
    factor = (1 + math.cos(math.pi * progress)) / 2 if settings.schedule == "cosine" else 1 - progress
    assert settings.min_lr_ratio is not None
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * factor)
