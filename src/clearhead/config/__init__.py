"""What can be set: typed and bounded settings, strict loading, presets."""

from clearhead.config.decode import DecodeConfig
from clearhead.config.load import preset, preset_names
from clearhead.config.model import ModelConfig, RopeScaling

__all__ = ["DecodeConfig", "ModelConfig", "RopeScaling", "preset", "preset_names"]
