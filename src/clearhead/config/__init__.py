"""Typed settings, presets and recipes, loaded strictly from YAML."""

from clearhead.config.generation import EngineConfig, GenerationConfig
from clearhead.config.load import preset, preset_names
from clearhead.config.model import ModelConfig, RopeScaling

__all__ = ["EngineConfig", "GenerationConfig", "ModelConfig", "RopeScaling", "preset", "preset_names"]
