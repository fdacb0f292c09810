"""Load settings from YAML files, presets and `key=value` overrides; errors name file, line and key."""

import os
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from clearhead.config.model import ModelConfig
from clearhead.config.settings import nearest
from clearhead.errors import ConfigError
from clearhead.files import read_text
from clearhead.limits import MAX_YAML_CHARS

PRESETS = resources.files("clearhead.config") / "presets"


def preset_names() -> list[str]:
    """List the presets that come with the package."""
    return sorted(Path(entry.name).stem for entry in PRESETS.iterdir() if entry.name.endswith(".yaml"))


def preset(name: str | Path, overrides: str | Iterable[str] = ()) -> ModelConfig:
    """Return the config of preset `name` (or of a YAML file), with `key=value` overrides applied."""
    changes = [overrides] if isinstance(overrides, str) else overrides
    return ModelConfig.build(apply_overrides(preset_data(str(name)), changes, section="model"), where=str(name))


def preset_data(name: str) -> dict[str, Any]:
    """Return the raw settings of a preset or a YAML file, merged over the preset named by its `preset:` key."""
    where = name
    if name in preset_names():
        data = read_yaml((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")
    elif name.endswith((".yaml", ".yml")) or "/" in name or os.path.isfile(name):  # Path.is_file raises for long names
        data = read_yaml(read_text(Path(name)), name)
    else:
        raise ConfigError(f"preset: no preset {name!r:.60}{nearest(name, preset_names())}")
    if "preset" not in data:
        return data
    base = data.pop("preset")
    if not isinstance(base, str) or base not in preset_names() or base == name:
        raise ConfigError(f"{where}: preset: no preset {base!r}{nearest(str(base), preset_names())}")
    return preset_data(base) | data


def apply_overrides(data: dict[str, Any], overrides: Iterable[str], section: str = "") -> dict[str, Any]:
    """Return `data` with `key=value` and `group.key=value` overrides; a leading `section.` is optional."""
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip().removeprefix(f"{section}.") if section else key.strip()
        if not equals or not key:
            raise ConfigError(f"{override!r}: expected key=value, like dim=256")
        *groups, last = key.split(".")
        data = target = dict(data)
        for depth, group in enumerate(groups):
            value = target.get(group)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(
                    f"{key}: {'.'.join(groups[: depth + 1])} is {value!r}, not a group of settings; check the key"
                )
            target[group] = target = dict(value or {})
        target[last] = parse_yaml(text, key)
    return data


def read_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse a YAML mapping; `where` names it in errors."""
    data = parse_yaml(text, where)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected settings as `key: value` lines, found {type(data).__name__}")
    for key in data:
        if not isinstance(key, str):
            raise ConfigError(f"{where}: {key!r}: a key must be a name, like dim")
    return data


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; `where` names it in errors."""
    if len(text) > MAX_YAML_CHARS:
        raise ConfigError(f"{where}: more than {MAX_YAML_CHARS:,} characters, too many for settings; check the path")
    try:
        return yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark and "\n" in text else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ConfigError(f"{where}{line}: {problem}; check the spelling and the indentation") from None
    except (RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{where}: {reason}; check the spelling and the indentation") from None


class _Loader(yaml.SafeLoader):
    """Safe YAML without duplicate keys, tags or aliases (which can expand without bound); 1e-5 is a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not supported", mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.composer.ComposerError(None, None, "tags (!name) are not supported", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain name", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag.rpartition(":")[2] in ("null", "bool", "float")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}  # no dates, no merge keys, no octal numbers (010 is ambiguous)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
