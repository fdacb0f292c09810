"""Hugging Face folders with features that would silently give wrong outputs: refused, or read as transformers does."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.export_advice import setting
from clearhead.checkpoint.formats import export_model, huggingface, import_model, read_foreign
from clearhead.checkpoint.formats.gguf_architectures import ARCHITECTURES
from clearhead.checkpoint.formats.unsupported import FEATURES
from clearhead.config import ModelConfig
from clearhead.config.load import preset
from clearhead.errors import UserError
from clearhead.model import build
from tests.checkpoint.formats.peers import saved
from tests.checkpoint.formats.test_huggingface import assert_same
from tests.checkpoint.small_models import tokenizer

ROPE = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"type": "linear", "factor": 2.0}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "string instead of group": ("llama2", {"rope_scaling": "yarn"}, "rope_scaling: 'yarn' is not a group of settings"),
    "older key first": ("llama2", {"rope_scaling": LINEAR}, "rope_scaling: rope_type: scaling of type 'linear'"),
    "per layer type": (
        "llama2",
        {"rope_parameters": {"full_attention": ROPE}},
        "full_attention: this type",
    ),
    "partial rotary": (
        "llama2",
        {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        "a partial rotary embedding",
    ),
    "interleaved": ("llama2", {"rope_interleaved": True}, "interleaved rotary pairs"),
    "Llama with window": ("llama2", {"sliding_window": 3}, "sliding_window: 3: no support for a window in a Llama"),
    "multi-label": ("bert-classes", {"problem_type": "multi_label_classification"}, "multi-label classification"),
    "untied BERT": ("bert-lm", {"tie_word_embeddings": False}, "an untied output matrix"),
}


def change_config(folder: Path, settings: dict[str, Any]) -> None:
    config = folder / "config.json"
    data = json.loads(config.read_text()) | settings
    config.write_text(json.dumps({key: value for key, value in data.items() if value != "absent"}))


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_features_are_named(case: str, tmp_path: Path) -> None:
    name, settings, message = REFUSED[case]
    saved(name, tmp_path)
    change_config(tmp_path, settings)
    with pytest.raises(UserError, match=message):
        read_foreign(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "feature"),
    [
        ("gemma2", "soft caps of logits"),
        ("mixtral", "mixtures of experts"),
        ("t5", "relative position biases"),
        ("gpt_neox", "parallel residuals"),
        ("olmo2", "norms after attention and feed-forward"),
        ("smollm3", "layers without positions"),
    ],
)
def test_a_known_architecture_is_refused_by_the_feature_that_it_needs(
    model_type: str, feature: str, tmp_path: Path
) -> None:
    saved("llama2", tmp_path)
    change_config(tmp_path, {"model_type": model_type})
    with pytest.raises(UserError, match=rf"{model_type}' needs {feature}, not supported; supported: bert, roberta"):
        read_foreign(tmp_path)


def test_no_supported_architecture_is_listed_as_unsupported() -> None:
    known = {name for names in FEATURES.values() for name in names}
    assert not known & {*huggingface.MODEL_TYPES, *ARCHITECTURES}
    assert known & {*transformers.CONFIG_MAPPING} >= {"gemma2", "mixtral", "t5", "gpt_neox", "olmo2", "smollm3"}


def test_a_mistral_without_window_setting_has_the_default_of_transformers(tmp_path: Path) -> None:
    saved("mistral", tmp_path)
    for value, expected in (("absent", 4096), (None, None), (5, 5)):
        change_config(tmp_path, {"sliding_window": value})
        assert read_foreign(tmp_path).config.window == expected
        assert transformers.AutoConfig.from_pretrained(tmp_path).sliding_window == expected


def test_a_peft_adapter_is_refused(tmp_path: Path) -> None:
    saved("llama2", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_config\.json: adapters are not supported"):
        read_foreign(tmp_path)


def test_what_is_missing_in_a_folder_is_named(tmp_path: Path) -> None:
    saved("llama3.2", tmp_path / "tied")
    change_config(tmp_path / "tied", {"tie_word_embeddings": "absent"})
    saved("qwen3", tmp_path / "shard", max_shard_size="40KB")
    sorted((tmp_path / "shard").glob("model-*.safetensors"))[1].unlink()
    for name in ("bare", "adapter", "pointer", "resized"):
        saved("llama2", tmp_path / name)
    for name in ("bare", "adapter"):
        (tmp_path / name / "config.json").unlink()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "pointer" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    change_config(tmp_path / "resized", {"vocab_size": 105})
    for name, message in {
        "tied": r'lm_head\.weight is missing; if it is the matrix of embeddings, add "tie_word_embeddings": true',
        "shard": r"names files that are missing \(model-00002-of-\d+\.safetensors\)",
        "bare": r"config\.json is missing; copy or fetch it",
        "adapter": r"adapter_config\.json: adapters are not supported; merge them",
        "pointer": r"model\.safetensors is a pointer of Git LFS instead of the file; run `git lfs pull`",
        "resized": r"model\.embed_tokens\.weight is 97 × 64, but 105 × 64 in the model",
    }.items():
        with pytest.raises(UserError, match=message):
            read_foreign(tmp_path / name)


def test_stored_positions_must_be_the_sinusoids(tmp_path: Path) -> None:
    theirs = saved("marian", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.encoder.embed_positions.weight"
    tensors, table = load_file(file), theirs.model.encoder.embed_positions.weight.detach()
    save_file(tensors | {name: table.half().float()}, file)
    read_foreign(tmp_path)
    for other in (table.flip(0), table[:, :40].contiguous(), table[0].clone(), table.mean()):
        save_file(tensors | {name: other}, file)
        with pytest.raises(UserError, match="positions other than sinusoids"):
            read_foreign(tmp_path)


def test_a_bias_with_two_rows_is_refused(tmp_path: Path) -> None:
    saved("marian", tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    save_file(load_file(file) | {"final_logits_bias": torch.randn(2, 97)}, file)
    with pytest.raises(UserError, match="2 × 97, but 97 in the model"):
        import_model(tmp_path / "theirs", tmp_path / "ours")


def test_a_bert_with_one_label_is_a_regression_model(tmp_path: Path) -> None:
    saved("bert-classes", tmp_path)
    change_config(tmp_path, {"id2label": {"0": "similarity"}, "label2id": {"similarity": 0}})
    file = tmp_path / "model.safetensors"
    save_file({name: t[:1] if name.startswith("classifier") else t for name, t in load_file(file).items()}, file)
    assert read_foreign(tmp_path).extra["task"] == "regression"


def exported(settings: dict[str, Any], folder: Path) -> Any:
    torch.manual_seed(0)
    network = build(ModelConfig.build(settings)).eval()
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    save_model(folder / "ours", network, tokenizer())
    export_model(load_model(folder / "ours"), folder / "hf", "hf")
    return network


@pytest.mark.parametrize("outputs", [["classes"], ["tags"], ["span"], ["lm"], ["lm", "next-sentence"], []])
def test_a_bert_with_any_head_or_none_is_exported(outputs: list[str], tmp_path: Path) -> None:
    settings = preset("bert-tiny").model_dump() | {"vocab_size": 300, "max_positions": 32, "outputs": outputs}
    settings |= {"labels": 3} if {"classes", "tags"} & {*outputs} else {}
    network = exported(settings | {"pooler": outputs not in (["tags"], ["span"], ["lm"])}, tmp_path)
    [name] = json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"]
    assert_same(network, getattr(transformers, name).from_pretrained(tmp_path / "hf").eval())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tie": "none"}, "an untied output matrix"),
        ({"segments": 0}, "segments is 0 in this model, but at least 1"),
        ({"outputs": ["lm", "span"]}, "no Hugging Face class has outputs: lm, span"),
        ({"pooling": "mean"}, "pooling is mean in this model, but cls"),
    ],
)
def test_a_bert_without_hugging_face_class_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        exported(preset("bert-tiny").model_dump() | {"vocab_size": 300, "outputs": ["lm"]} | settings, tmp_path)


def test_a_classifier_on_a_decoder_is_refused_without_advice(tmp_path: Path) -> None:
    settings = preset("tiny-llama").model_dump() | {"vocab_size": 300, "outputs": ["classes"], "labels": 2}
    message = "^export: a decoder with outputs: classes cannot be exported to hf; only one with lm can$"
    with pytest.raises(UserError, match=message):
        exported(settings, tmp_path)


def test_a_setting_of_zero_is_a_number() -> None:
    assert setting("labels", 0) == "model.labels=0"
    assert setting("bias", False) == "model.bias=false"
    assert setting("window", None) == "model.window=null"


def test_a_translator_with_untied_embeddings_of_one_vocabulary_is_exported(tmp_path: Path) -> None:
    settings = preset("tiny-translator").model_dump() | {"vocab_size": 300, "tie": "output", "sinusoid": "halves"}
    network = exported(settings | {"dim": 32, "head_dim": 8, "ff_dim": 48}, tmp_path)
    assert_same(network, transformers.MarianMTModel.from_pretrained(tmp_path / "hf").eval())


def test_import_never_replaces_files(tmp_path: Path) -> None:
    saved("llama2", tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    before = (tmp_path / "ours" / "manifest.json").read_bytes()
    for folder in ("ours", "theirs", "theirs/config.json"):
        with pytest.raises(UserError, match="already exists"):
            import_model(tmp_path / "theirs", tmp_path / folder)
    assert (tmp_path / "ours" / "manifest.json").read_bytes() == before


def test_a_file_without_read_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"model\.gguf cannot be read \(Permission denied\)"):
        read_foreign(path)


@pytest.mark.parametrize("value", [{}, [], 7, None, "../model.safetensors"])
def test_an_index_with_invalid_file_names_is_refused(value: Any, tmp_path: Path) -> None:
    saved("llama2", tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"] |= {"model.norm.weight": value}
    index.write_text(json.dumps(data))
    with pytest.raises(UserError, match="names files that are missing"):
        read_foreign(tmp_path)
