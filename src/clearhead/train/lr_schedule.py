"""The learning rate as a function of the step."""

import math

from clearhead.config.train import ScheduleConfig


def rate(settings: ScheduleConfig, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 1; it peaks at step `warmup`, and `steps` is the last."""
    if settings.schedule == "inverse-sqrt":
        warmup = max(settings.warmup, 1)
        return settings.rate * min(step / warmup, math.sqrt(warmup / step))
    if step <= settings.warmup:
        return settings.rate * step / settings.warmup
    if settings.schedule == "constant":
        return settings.rate
    start: float = settings.warmup
    if settings.schedule == "wsd":
        assert settings.decay is not None
        start = max(start, steps - settings.decay * steps)
    gone = 1.0 if step >= steps else max(step - start, 0) / (steps - start)  # the share of the way down
    left = (1 + math.cos(math.pi * gone)) / 2 if settings.schedule == "cosine" else 1 - gone
    assert settings.floor is not None
    return settings.rate * (settings.floor + (1 - settings.floor) * left)


def paper_rate(width: int, warmup: int, scale: float = 1.0) -> float:
    """The peak that makes `inverse-sqrt` the formula of section 5.3, times a scale.

    width^-0.5 · min(step^-0.5, step · warmup^-1.5) is largest at step = warmup: (width · warmup)^-0.5.
    """
    return scale / math.sqrt(width * warmup)
