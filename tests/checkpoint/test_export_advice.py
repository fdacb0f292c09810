"""Models that cannot be exported: the error names the settings of one that can."""

import re
from pathlib import Path

import pytest

from clearhead.checkpoint import LoadedModel
from clearhead.checkpoint.formats import export_model
from clearhead.config import preset
from clearhead.errors import UserError
from clearhead.model import build
from tests.checkpoint.small_models import tokenizer

CASES = [
    ("tiny-translator", ["kv_heads=1"], "hf"),
    ("tiny-translator", ["norm_eps=1e-6"], "hf"),
    ("tiny-llama", ["attention=[window]", "window=8"], "gguf"),
    ("tiny-translator", ["attention=[window]", "window=8"], "ctranslate2"),
    ("tiny-translator", ["position=rotary"], "ctranslate2"),
    ("tiny-translator", ["kv_heads=1"], "ctranslate2"),
    ("tiny-gpt", ["attention=[strided]", "stride=4"], "onnx"),
]


def export(name: str, settings: list[str], folder: Path, to: str) -> None:
    tokens = tokenizer()
    network = build(preset(name, [*settings, f"vocab_size={len(tokens)}"]))
    export_model(LoadedModel(network, network.config, (tokens,), {}), folder, to)


@pytest.mark.parametrize(("name", "settings", "to"), CASES)
def test_a_model_with_the_settings_of_the_error_can_be_exported(
    name: str, settings: list[str], to: str, tmp_path: Path
) -> None:
    pytest.importorskip({"hf": "safetensors"}.get(to, to), reason=f"{to} is not installed")
    with pytest.raises(UserError, match=r"; a model trained with .* can be exported$") as refused:
        export(name, settings, tmp_path / "out", to)
    changes = re.findall(r"model\.(\S+=\S+)", str(refused.value))
    replaced = {change.partition("=")[0] for change in changes}
    if "attention" in replaced:
        replaced |= {"window", "stride"}
    kept = [setting for setting in settings if setting.partition("=")[0] not in replaced]
    export(name, [*kept, *changes], tmp_path / "out", to)


def test_gpt2_has_no_gguf_export_and_says_so_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^export: GPT-2 has no GGUF export here; export it to hf or ctranslate2$"):
        export("tiny-gpt", [], tmp_path / "out", "gguf")
