"""Model folders of format version 1 load to the same network, settings and logits as their version 2 twins."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead.checkpoint import (
    LoadedModel,
    average_weights,
    disk,
    load_model,
    model_folder,
    model_folder_info,
    save_model,
)
from clearhead.checkpoint.formats import export_model
from clearhead.config import ModelConfig
from clearhead.config.data import DataConfig
from clearhead.errors import UserError
from clearhead.model import build
from tests.checkpoint.small_models import contents, equal, tokenizer
from tests.strategies import logits, tokens
from tools.migrate_model import migrate

SIZES: dict[str, Any] = {"dim": 16, "heads": 2, "head_dim": 6, "ff_dim": 24, "vocab_size": 300, "max_positions": 64}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": SIZES | {"family": "decoder", "decoder_layers": 2, "output_bias": True, "position": "learned"},
    "tied decoder": SIZES | {"family": "decoder", "decoder_layers": 2, "tie": "output"},
    "translator": SIZES | {"family": "encoder-decoder", "encoder_layers": 2, "decoder_layers": 2, "tie": "all"},
    "untied translator": SIZES | {"family": "encoder-decoder", "encoder_layers": 1, "decoder_layers": 1},
    "bert": SIZES
    | {"family": "encoder", "encoder_layers": 2, "position": "learned", "segments": 2, "embedding_norm": True}
    | {"outputs": ["lm", "next-sentence"], "pooler": True, "output_bias": True, "tie": "output"}
    | {"head_dim": 8, "norm_position": "post", "activation": "gelu"},
    "classifier": SIZES
    | {"family": "encoder", "encoder_layers": 2, "outputs": ["classes", "tags", "span"], "labels": 3, "pooler": True},
    "mean pooling": SIZES
    | {"family": "encoder", "encoder_layers": 2, "outputs": ["classes"], "labels": 2, "pooling": "mean"},
}
DATA = {
    "task": "masked-language-model",
    "train": [
        {"format": "text", "files": ["a.txt"]},
        {"format": "symbols", "order": "reverse", "min_length": 2, "max_length": 9},
    ],
    "valid": [{"format": "text", "files": ["b.txt"]}],
    "source_url": "https://example.org/corpus",
    "normalize": "nfc",
    "min_length": 2,
    "max_length": 48,
    "max_length_ratio": 2.5,
    "isolate_documents": True,
    "mask_prob": 0.2,
    "whole_word_masking": True,
    "max_score": 5.0,
    "pooling": "cls",
    "batch_tokens": 512,
    "bucket_size": 64,
    "cache_dir": "cache",
}
EXTRA = {"task": "masked-language-model", "labels": [], "step": 7, "pooling": "cls", "max_length": 40}
EXTRA |= {"eos_ids": [2], "banned_ids": [[3, 4]]}

# Version 2 to version 1.
MODEL_KEYS = {"dim": "width", "head_dim": "head_width", "ff_dim": "ff_width"}
EXTRA_KEYS = {"max_length": "longest", "eos_ids": "ends", "banned_ids": "banned"}
LENGTH_KEYS = {"min_length": "shortest", "max_length": "longest"}
DATA_KEYS = LENGTH_KEYS | {
    "source_url": "published",
    "normalize": "normalise",
    "max_length_ratio": "ratio",
    "isolate_documents": "boundaries",
    "text_pairs": "second",
    "swap_pairs": "both_orders",
    "mask_prob": "masked",
    "whole_word_masking": "whole_words",
    "max_score": "highest",
    "batch_tokens": "tokens",
    "bucket_size": "pool",
    "cache_dir": "cache",
}
TENSORS = {
    "heads.lm_head.proj.": "heads.words.scores.",
    "heads.lm_head.transform.": "heads.words.transform.",
    "heads.classes.proj.": "heads.classes.scores.",
    "heads.tags.proj.": "heads.tags.scores.",
}


def renamed(data: dict[str, Any], keys: dict[str, str]) -> dict[str, Any]:
    pooling = {"pooling": "class"} if data.get("pooling") == "cls" else {}
    return {keys.get(key, key): value for key, value in (data | pooling).items()}


def old_name(name: str) -> str:
    for new, old in TENSORS.items():
        name = name.replace(new, old)
    return name


def downgrade(source: Path, folder: Path) -> None:
    """Write the version 1 twin of a model folder, with a valid manifest."""
    with disk.atomic_folder(folder) as temporary:
        for path in source.iterdir():
            if path.name not in ("manifest.json", "config.json"):
                shutil.copy(path, temporary)
        config = renamed(json.loads((source / "config.json").read_text()), EXTRA_KEYS)
        config |= {"version": 1, "model": renamed(config["model"], MODEL_KEYS)}
        config["model"]["outputs"] = ["words" if name == "lm" else name for name in config["model"]["outputs"]]
        if "data" in config:
            config["data"] = renamed(config["data"], DATA_KEYS)
            for split in ("train", "valid", "test"):
                config["data"][split] = [renamed(corpus, LENGTH_KEYS) for corpus in config["data"][split]]
        disk.write_json(temporary / "config.json", config)
        for file in temporary.glob("*.safetensors"):
            save_file({old_name(name): tensor.clone() for name, tensor in load_file(file).items()}, file)
        if (index := temporary / "model.safetensors.index.json").exists():
            data = json.loads(index.read_text())
            data["weight_map"] = {old_name(name): file for name, file in data["weight_map"].items()}
            index.write_text(json.dumps(data))


def twins(name: str, folder: Path, dtype: torch.dtype | None = None) -> tuple[Path, Path]:
    """A model of version 2 and its version 1 twin."""
    torch.manual_seed(3)
    extra = EXTRA | {"data": DataConfig.build(DATA, where="test").model_dump(mode="json")}
    save_model(folder / "new", build(ModelConfig.build(MODELS[name])), tokenizer(), extra, "# A model\n", dtype)
    downgrade(folder / "new", folder / "old")
    return folder / "new", folder / "old"


def outputs(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Logits of every head."""
    ids = tokens(2, 7)
    heads = loaded.network.heads
    if loaded.config.family != "encoder":
        return {"lm": logits(loaded.network, ids)}
    hidden = loaded.network.encode(ids)  # type: ignore[operator, union-attr]
    results = {"hidden": hidden}
    if heads.lm_head is not None:
        results["lm"] = heads.lm_head(hidden)
    for name in ("classes", "next_sentence"):
        if (head := getattr(heads, name)) is not None:
            results[name] = head(heads.pool(hidden))
    for name in ("tags", "span"):
        if (head := getattr(heads, name)) is not None:
            results[name] = head(hidden)
    return results


def assert_twins(new: Path, old: Path) -> None:
    """Everything loaded is equal, bit for bit."""
    expected, found = load_model(new), load_model(old)
    assert found.config == expected.config
    assert found.extra == expected.extra
    assert DataConfig.build(found.extra["data"], where="config.json") == DataConfig.build(DATA, where="test")
    assert [len(each) for each in found.tokenizers] == [len(each) for each in expected.tokenizers]
    assert equal(found.network.state_dict(), expected.network.state_dict())
    torch.manual_seed(0)
    wanted = outputs(expected)
    torch.manual_seed(0)
    assert equal(outputs(found), wanted)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.int8], ids=["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_version_1_folder_loads_like_its_version_2_twin(name: str, dtype: Any, tmp_path: Path) -> None:
    assert_twins(*twins(name, tmp_path, dtype))


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=["fp32", "int8"])
@pytest.mark.parametrize("name", ["decoder", "bert", "translator"])
def test_a_sharded_version_1_folder_loads_like_its_version_2_twin(
    name: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "SHARD_BYTES", 1500)
    new, old = twins(name, tmp_path, dtype)
    assert len(list(old.glob("model-*.safetensors"))) > 3
    assert_twins(new, old)


def test_the_twin_has_version_1_names_only(tmp_path: Path) -> None:
    """The names are those of folders written before version 2."""
    _, old = twins("bert", tmp_path)
    config = json.loads((old / "config.json").read_text())
    assert (config["version"], config["longest"], config["pooling"]) == (1, 40, "class")
    assert (config["ends"], config["banned"]) == ([2], [[3, 4]])
    assert config["model"].keys() >= {"width", "head_width", "ff_width"}
    assert config["model"]["outputs"] == ["words", "next-sentence"]
    assert not config["model"].keys() & MODEL_KEYS.keys()
    assert not config["data"].keys() & DATA_KEYS.keys()
    assert config["data"]["train"][1]["longest"] == 9
    names = load_file(old / "model.safetensors").keys()
    assert {"heads.words.scores.bias", "heads.words.transform.linear.weight", "heads.pooler.linear.bias"} <= names
    assert not [name for name in names if "lm_head" in name or "proj" in name]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [None, torch.int8], ids=["fp32", "int8"])
def test_the_summary_of_a_version_1_folder_is_that_of_its_twin(name: str, dtype: Any, tmp_path: Path) -> None:
    expected, found = (model_folder_info(folder) for folder in twins(name, tmp_path, dtype))
    for field in ("config", "extra", "card", "stored_as"):
        assert getattr(found, field) == getattr(expected, field)


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=["fp32", "int8"])
def test_version_1_folders_are_averaged_with_those_of_version_2(dtype: Any, tmp_path: Path) -> None:
    new, old = twins("bert", tmp_path, dtype)
    weights = load_model(new).network.state_dict()
    expected = average_weights([new, new])
    assert equal(expected, {name: weights[name] for name in expected})
    assert equal(average_weights([old]), expected)
    assert equal(average_weights([old, new]), expected)


def test_a_version_1_folder_is_exported_like_its_twin(tmp_path: Path) -> None:
    for name in ("bert", "translator"):
        new, old = twins(name, tmp_path / name)
        for folder in (new, old):
            loaded = load_model(folder)
            if name == "translator":
                pytest.importorskip("onnx", reason="onnx is not installed")
                export_model(loaded, folder.with_name(f"{folder.name}-out"), "onnx")
            else:
                export_model(loaded, folder.with_name(f"{folder.name}-out"), "hf")
        exported = [contents(folder.with_name(f"{folder.name}-out")) for folder in (new, old)]
        assert exported[0] == exported[1]


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=["fp32", "int8"])
def test_a_folder_is_rewritten_in_version_2_with_the_same_bits(dtype: Any, tmp_path: Path) -> None:
    new, old = twins("bert", tmp_path, dtype)
    (old / "README.md").write_text("# A model\n\n## Licence\n\nMIT\n")
    migrate(old)
    assert_twins(new, old)
    files, expected = contents(old), contents(new)
    assert files.pop("README.md") == b"# A model\n\n## License\n\nMIT\n"
    expected.pop("README.md")
    assert json.loads(files.pop("config.json")) == json.loads(expected.pop("config.json"))
    assert equal(load_file(old / "model.safetensors"), load_file(new / "model.safetensors"))
    assert files["tokenizer.json"] == expected["tokenizer.json"]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (3, r"config\.json: format version 3 is newer than this Clearhead reads \(1 to 2\); update Clearhead"),
        (10**400, r"config\.json: format version 1000000.* is newer than this Clearhead reads"),
        (0, "version 0 is unknown; this Clearhead reads 1 to 2"),
        (True, "version True is unknown"),
        ("2", "version '2' is unknown"),
        (None, "version None is unknown"),
    ],
)
def test_other_versions_are_refused(version: Any, message: str, tmp_path: Path) -> None:
    new, _ = twins("decoder", tmp_path)
    config = json.loads((new / "config.json").read_text()) | {"version": version}
    (new / "config.json").write_text(json.dumps(config))
    for read in (lambda: load_model(new, verify=False), lambda: model_folder_info(new)):
        with pytest.raises(UserError, match=message):
            read()
