"""`clearhead import`, `export` and `pull`, as shown in the guide."""

import json
import re
import shlex
from pathlib import Path

import pytest

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.formats import export_model
from clearhead.cli import app
from clearhead.config import ModelConfig
from clearhead.config.load import preset
from clearhead.errors import UserError
from clearhead.model import build
from tests.checkpoint.small_models import tokenizer

GUIDE = Path(__file__).parents[2] / "docs" / "formats.md"
pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
pytest.importorskip("onnx", reason="onnx is not installed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a Hugging Face model in downloads/tiny-llama."""
    tokens = tokenizer()
    settings = preset("tiny-llama").model_dump() | {"vocab_size": len(tokens), "dim": 64, "decoder_layers": 2}
    settings |= {"heads": 4, "kv_heads": 2, "head_dim": 16, "ff_dim": 96, "max_positions": 64}
    save_model(tmp_path / "first", build(ModelConfig.build(settings)), tokens)
    export_model(load_model(tmp_path / "first"), tmp_path / "downloads" / "tiny-llama", "hf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def clearhead(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command in this process; return its stdout."""
    capsys.readouterr()
    app(shlex.split(command), standalone_mode=False)
    return capsys.readouterr().out


def test_every_command_of_the_guide_runs_and_a_round_trip_generates_the_same_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [block] = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), flags=re.M | re.S)
    commands = [line.partition("  #")[0].removeprefix("clearhead ") for line in block.splitlines()]
    assert len(commands) > 5
    outputs = {command: clearhead(command, capsys) for command in commands}
    [(command, text)] = [each for each in outputs.items() if each[0].startswith("generate")]
    assert text.startswith("the cat")
    assert text == clearhead(command.replace("models/mine", "first"), capsys)
    assert load_model(Path("models/again")).config == load_model(Path("models/mine")).config
    files = {path.name for path in Path("exported").rglob("*") if path.is_file()}
    assert {"model.safetensors", "model.gguf", "model.bin", "model.onnx"} <= files


def test_errors_name_the_argument(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, message in (
        ("import nowhere models/mine", "nowhere does not exist"),
        ("import first/tokenizer.json models/mine", "in an unknown format"),
        ("import first models/mine", "first is a Clearhead model folder already"),
        ("import downloads/tiny-llama models/mine --dtype int8", "--dtype: 'int8' is not allowed"),
        ("export first exported --to pickle", "--to: 'pickle' is not allowed; use hf, gguf"),
        ("export first downloads --to hf", "downloads already exists; give a new folder, or replace it with --force"),
        ("import downloads/tiny-llama first", "first already exists; give a new folder, or replace it with --force"),
        ("export nothing exported --to hf", "no model 'nothing'"),
        ("pull nothing", "no model 'nothing'; use minilm, smollm2"),
        ("generate smollm2 hello", "run: clearhead pull smollm2"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            clearhead(command, capsys)
    with pytest.raises(UserError, match="downloads already exists; delete it, or choose another folder"):
        export_model(load_model(Path("first")), Path("downloads"), "hf")
    assert not Path("models").exists()
    assert not Path("exported").exists()


def test_a_model_with_invalid_data_settings_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_model(Path("first"))
    save_model(Path("runs/odd/best"), loaded.network, loaded.tokenizers, {"data": 5})
    [row] = [row for row in json.loads(clearhead("models --json", capsys)) if row["name"] == "runs/odd"]
    assert row["description"] == ""
    assert "config.json: data: 5 is not a group of settings" in row["problem"]
