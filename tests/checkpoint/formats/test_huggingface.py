"""Hugging Face folders: equal outputs after import and export, and bit-exact round trips."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from clearhead.checkpoint import load_model, model_folder, save_model
from clearhead.checkpoint.formats import export_model, import_model, read_foreign
from clearhead.config import ModelConfig
from clearhead.config.generation import GenerationConfig
from clearhead.config.load import preset
from clearhead.errors import UserError
from clearhead.inference import generate, translate
from clearhead.model import build
from tests.checkpoint.formats.peers import DECODERS, PEERS, TRANSLATORS, WORDS, ours, outputs, saved
from tests.checkpoint.small_models import tokenizer

every = pytest.mark.parametrize("name", PEERS)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of source and target; those below 2 are padding for some models."""
    return torch.randint(2, WORDS, (3, 17)), torch.randint(2, 83, (3, 11))


def assert_same(network: Any, theirs: Any) -> None:
    """Check that all outputs are equal, to 1e-5 in fp32."""
    ids, target = inputs()
    actual, other = ours(network, ids, target), outputs(theirs, ids, target)
    assert other
    for key, expected in other.items():
        assert expected.std() > 0.05, "outputs too small to compare"
        torch.testing.assert_close(actual[key], expected, atol=1e-5, rtol=0)


def bits(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return dtype, shape and bytes of every tensor in a folder."""
    results = {}
    for file in folder.glob("*.safetensors"):
        results |= {
            name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
            for name, tensor in load_file(file).items()
        }
    return results


@every
def test_an_import_gives_the_outputs_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    assert_same(load_model(tmp_path / "ours").network, theirs)


@every
def test_an_export_gives_the_same_outputs_in_transformers(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    loaded = load_model(tmp_path / "ours")
    export_model(loaded, tmp_path / "back", "hf")
    model_class = getattr(transformers, PEERS[name][0])
    model, report = model_class.from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert_same(loaded.network, model.eval())


@every
def test_a_round_trip_is_bit_exact(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    export_model(load_model(tmp_path / "ours"), tmp_path / "back", "hf")
    import_model(tmp_path / "back", tmp_path / "again")
    assert bits(tmp_path / "theirs") == bits(tmp_path / "back")
    assert bits(tmp_path / "ours") == bits(tmp_path / "again")
    assert load_model(tmp_path / "ours").config == load_model(tmp_path / "again").config


@pytest.mark.parametrize("name", DECODERS)
def test_fifty_greedy_tokens_are_the_same(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    network = read_and_build(tmp_path / "theirs")
    prompt = torch.randint(WORDS, (1, 7))
    options = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": False, "pad_token_id": 0}
    attention_mask = torch.ones_like(prompt)  # else transformers takes a 0 in the prompt for padding
    expected = theirs.generate(prompt, attention_mask=attention_mask, **options)[0, 7:]
    results = generate(network, prompt.tolist(), GenerationConfig(max_new_tokens=50), eos_ids=[])
    assert results[0][0].ids == expected.tolist()


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("name", TRANSLATORS)
def test_fifty_tokens_of_a_translator_are_the_same(name: str, beam: int, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    network, padding = read_and_build(tmp_path / "theirs"), theirs.config.pad_token_id
    start = theirs.config.decoder_start_token_id
    source = torch.randint(2, 80, (1, 9))
    expected = theirs.generate(
        source, max_new_tokens=50, do_sample=False, num_beams=beam, eos_token_id=-1, bad_words_ids=[[padding]]
    )[0, 1:]
    config = GenerationConfig(max_new_tokens=50, beam=beam, banned_ids=((padding,),))
    results = translate(network, source.tolist(), config, bos_id=start, eos_ids=[])
    assert results[0][0].ids == expected.tolist()


def read_and_build(folder: Path) -> Any:
    results = read_foreign(folder)
    return model_folder.build_with_weights(results.config, results.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_preserved(dtype: torch.dtype, tmp_path: Path) -> None:
    saved("llama2", tmp_path / "fp32").to(dtype).save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    export_model(load_model(tmp_path / "ours"), tmp_path / "back", "hf")
    assert {model_class for model_class, _, _ in bits(tmp_path / "back").values()} == {dtype}
    assert bits(tmp_path / "theirs") == bits(tmp_path / "back")


def test_sharded_folders_are_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = saved("llama2", tmp_path / "theirs", max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    import_model(tmp_path / "theirs", tmp_path / "ours")
    monkeypatch.setattr(model_folder, "SHARD_BYTES", 60_000)
    export_model(load_model(tmp_path / "ours"), tmp_path / "back", "hf")
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert_same(load_model(tmp_path / "ours").network, theirs)
    assert_same(load_model(tmp_path / "ours").network, model.eval())


def test_older_names_are_read(tmp_path: Path) -> None:
    """Without prefixes, with stored masks, gamma and beta, and rope settings at the top level."""
    for name, change in (("gpt2", bare_gpt2), ("bert-pretraining", old_bert), ("llama3.2", old_llama)):
        theirs = saved(name, tmp_path / name)
        file, config = tmp_path / name / "model.safetensors", tmp_path / name / "config.json"
        tensors, settings = change(load_file(file), json.loads(config.read_text()))
        save_file(tensors, file)
        config.write_text(json.dumps(settings))
        assert_same(read_and_build(tmp_path / name), theirs)


def bare_gpt2(tensors: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    results = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    results |= {f"h.{n}.attn.bias": torch.ones(1, 1, 64, 64).tril() for n in range(3)}
    return results | {"lm_head.weight": results["wte.weight"].clone()}, settings


def old_bert(tensors: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    results = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    results["cls.predictions.decoder.bias"] = results["cls.predictions.bias"].clone()
    return results | {"bert.embeddings.position_ids": torch.arange(64)[None]}, settings


def old_llama(tensors: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    rope = settings.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    results = tensors | {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(8) for n in range(2)}
    return results, settings | {"rope_theta": theta, "rope_scaling": rope}


REFUSED = {
    "attention_bias": (True, "attention biases"),
    "hidden_act": ("relu", "this activation"),
    "rope_parameters": ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "scaling of type 'yarn'"),
    "quantization_config": ({"quant_method": "fp8"}, r"the weights are quantized \(fp8\) other than by GPTQ"),
    "auto_map": ({"AutoModel": "code.py"}, "custom code"),
    "model_type": ("mamba", "supported: bert"),
    "hidden_size": ("64", "is not an integer"),
    "num_hidden_layers": (1 << 40, "too large"),
    "vocab_size": (98, "97 × 64, but 98 × 64"),
    "tie_word_embeddings": (True, "differs from the tensor it is tied to"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_features_are_named(key: str, tmp_path: Path) -> None:
    saved("llama2", tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    value, message = REFUSED[key]
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    with pytest.raises(UserError, match=message):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_unknown_settings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved("llama2", tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"flux_capacitor": 1.21, "unset": None}))
    read_foreign(tmp_path / "theirs")
    assert "flux_capacitor: unknown settings" in caplog.text
    assert "unset" not in caplog.text


@every
def test_every_setting_that_transformers_writes_is_known(name: str, tmp_path: Path, caplog: Any) -> None:
    saved(name, tmp_path / "theirs")
    read_foreign(tmp_path / "theirs")
    assert "unknown settings" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_heads": 1}, "kv_heads is 1 in this model, but 4 there"),
        ({"tie": "none"}, "tie is none in this model, but output there"),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-06 in this model, but 1e-05 there"),
    ],
)
def test_differences_to_marian_are_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = preset("tiny-translator").model_dump() | {"norm_position": "post", "sinusoid": "halves"}
    base |= {"vocab_size": 300, "tie": "all"}
    network = build(ModelConfig.build(base | settings))
    save_model(tmp_path / "ours", network, tokenizer())
    with pytest.raises(UserError, match=message):
        export_model(load_model(tmp_path / "ours"), tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()


def test_pickles_and_missing_files_are_refused(tmp_path: Path) -> None:
    saved("llama2", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="is a pickle, which can run code"):
        read_foreign(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        read_foreign(tmp_path)


def test_unexpected_and_missing_tensors_are_named(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"transformer.h.0.extra.weight": torch.ones(2)}, file)
    with pytest.raises(UserError, match=r"transformer\.h\.0\.extra\.weight: unexpected tensors"):
        read_foreign(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if "h.1.attn.c_attn.w" not in name}, file)
    with pytest.raises(UserError, match=r"transformer\.h\.1\.attn\.c_attn\.weight is missing"):
        read_foreign(tmp_path)
    save_file(tensors | {"transformer.h.1.attn.c_attn.weight": torch.ones(48, 143)}, file)
    with pytest.raises(UserError, match=r"c_attn\.weight is \(48, 143\), but 144 rows are expected"):
        read_foreign(tmp_path)


def test_an_export_never_replaces_files(tmp_path: Path) -> None:
    saved("llama2", tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(UserError, match="already exists"):
        export_model(load_model(tmp_path / "ours"), tmp_path / "theirs", "hf")
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" in list(file.keys())


def test_mixed_dtypes_become_the_widest_and_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    theirs = saved("llama2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    mixed = {name: tensor.half() if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    save_file(mixed, file)
    assert {tensor.dtype for tensor in read_foreign(tmp_path).weights.values()} == {torch.float32}
    for parameter in theirs.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.half().float()
    assert_same(read_and_build(tmp_path), theirs)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)}, file)
    with pytest.raises(UserError, match=r"weights of dtype torch\.float8_e4m3fn are not supported"):
        read_foreign(tmp_path)
    save_file(tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, file)
    with pytest.raises(UserError, match=r"norm\.weight is torch\.int8"):
        import_model(tmp_path, tmp_path / "ours")


def test_a_tensor_in_two_shards_or_a_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    saved("llama2", tmp_path / "theirs", max_shard_size="60KB")
    first, second, *_ = sorted((tmp_path / "theirs").glob("model-*.safetensors"))
    original = second.read_bytes()
    save_file(load_file(second) | load_file(first), second)
    with pytest.raises(UserError, match="is in two files"):
        read_foreign(tmp_path / "theirs")
    second.write_bytes(original)
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    first.rename(tmp_path / "elsewhere.safetensors")
    index.write_text(index.read_text().replace(first.name, "../elsewhere.safetensors"))
    with pytest.raises(UserError, match="names files that are missing"):
        read_foreign(tmp_path / "theirs")


def test_files_that_are_no_model_get_their_own_sentence(tmp_path: Path) -> None:
    saved("llama2", tmp_path / "mlx")
    config = tmp_path / "mlx" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization": {"group_size": 64, "bits": 4}}))
    torch.save({"a": torch.zeros(1)}, tmp_path / "model.pt")
    torch.save({"a": torch.zeros(1)}, tmp_path / "model.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "checkpoint").mkdir()
    torch.save({"a": torch.zeros(1)}, tmp_path / "checkpoint" / "last.ckpt")
    (tmp_path / "notes.txt").write_text("PK")
    for name, message in {
        "mlx": "quantized by MLX; import the model they were made from, or dequantize them",
        "model.pt": "model.pt is a pickle, which can run code when it is read; convert it to safetensors first",
        "model.bin": "model.bin is a pickle",
        "checkpoint": "last.ckpt is a pickle",
        "mlx/model.safetensors": "is only the weights of a model; give its folder, with config.json",
        "notes.txt": "notes.txt is in an unknown format; supported:",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            read_foreign(tmp_path / name)
