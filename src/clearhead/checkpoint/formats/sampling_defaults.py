"""Sampling defaults of a generation_config.json, in both directions."""

import logging
from collections.abc import Mapping
from typing import Any

from clearhead.config import GenerationConfig
from clearhead.errors import ConfigError

KEYS = ("temperature", "top_k", "top_p", "min_p")
log = logging.getLogger("clearhead")


def read_sampling(generation: Mapping[str, Any], where: object) -> dict[str, float]:
    """Return our settings; without do_sample only the repetition penalty counts, as in transformers."""
    keys = ("repetition_penalty", *(KEYS if generation.get("do_sample") is True else ()))
    found = {key: value for key in keys if type(value := generation.get(key)) in (int, float)}
    try:
        checked = GenerationConfig.build(found, where=str(where))
    except ConfigError as error:
        log.warning("%s; ignored", str(error).splitlines()[0])
        return {}
    defaults = GenerationConfig()
    return {key: value for key in keys if (value := getattr(checked, key)) != getattr(defaults, key)}


def write_sampling(defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys for generation_config.json."""
    if not defaults:
        return {}
    return {"do_sample": True, **defaults} if set(defaults) & set(KEYS) else dict(defaults)
