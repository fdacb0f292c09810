"""What can be set: typed and bounded settings, strict loading, presets."""

from clearhead.config.generation import EngineConfig, GenerationConfig
from clearhead.config.load import preset, preset_names
from clearhead.config.model import ModelConfig, RopeScaling

__all__ = ["EngineConfig", "GenerationConfig", "ModelConfig", "RopeScaling", "preset", "preset_names"]
