"""Weights of quantized GGUF files stay quantized, on disk and in memory, and are the same in the native kernels."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead.checkpoint import disk, load_model
from clearhead.checkpoint.formats import export_model, import_model, read_foreign
from clearhead.config.recipe import Recipe
from clearhead.errors import UserError
from clearhead.inference.native_network import NativeNetwork
from clearhead.inference.native_step import NativeRunner
from clearhead.ops.linear.quantized_tensor import QuantizedTensor, has_quantized, pack_stored
from clearhead.ops.native.structs import step_library
from clearhead.predict import load
from tests.checkpoint.formats.test_gguf import K_QUANTS, peer, write_gguf
from tests.inference.test_reference_step import PagedRows
from tests.train.tiny import TEXTS, TRAIN, run

KINDS = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4", "Q4_K": "int4"}
needs_step = pytest.mark.skipif(step_library() is None, reason="the native step is not compiled")


@pytest.fixture(params=KINDS)
def folder(request: Any, tmp_path: Path) -> Path:
    """A model folder of each type that stays quantized."""
    write_gguf(peer(tie_word_embeddings=True), tmp_path / "model.gguf", request.param)
    import_model(tmp_path / "model.gguf", tmp_path / request.param)
    return tmp_path / request.param


def quantized_weights(network: Any) -> dict[str, QuantizedTensor]:
    return {name: each for name, each in network.named_parameters() if isinstance(each, QuantizedTensor)}


def test_matrices_keep_their_integers_on_disk_and_in_memory(folder: Path) -> None:
    network = load_model(folder).network
    weights = quantized_weights(network)
    assert {each.kind for each in weights.values()} == {KINDS[folder.name]}
    assert weights.keys() == {name for name, each in network.named_parameters() if each.dim() == 2}
    bits = {"Q8_0": 8.5, "Q4_0": 5, "Q4_1": 5, "Q4_K": 6}[folder.name]  # with scales and minima
    size, numbers = (folder / "model.safetensors").stat().st_size, sum(each.numel() for each in weights.values())
    assert size < numbers * bits / 8 + 20_000
    expected = read_foreign(folder.parent / "model.gguf").weights
    for name, weight in weights.items():
        assert weight.dequantized().equal(plain(expected[name])), name


def plain(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, QuantizedTensor)
    return tensor.dequantized()


def test_kernels_get_the_same_weights(folder: Path) -> None:
    for name, weight in quantized_weights(load_model(folder).network).items():
        packed, expected = pack_stored(weight, None, "fp32").dequantize(), weight.dequantized()
        # Q4_K's scales are products, which the kernels have in fp16.
        tolerance = float(expected.abs().max()) * 2**-9 if folder.name == "Q4_K" else 0
        torch.testing.assert_close(packed, expected, atol=tolerance, rtol=0, msg=name)


@needs_step
@torch.no_grad()
def test_generation_takes_the_integers_as_they_are(folder: Path) -> None:
    model = load(folder, device="cpu")
    packed = NativeNetwork(model.network)  # type: ignore[arg-type]
    layer: Any = model.network.decoder.layers[0]  # type: ignore[union-attr]
    parts = (layer.attention.query, layer.attention.key, layer.attention.value)
    weight = torch.cat([part.weight for part in parts])
    assert isinstance(weight, QuantizedTensor)
    found = [each for each in packed.tensors if getattr(each, "outputs", 0) == len(weight)]
    assert found[0].kind == KINDS[folder.name]
    assert found[0].dequantize().equal(pack_stored(weight, None, "fp32").dequantize())
    assert f"parameters, {KINDS[folder.name]} on cpu" in repr(model)
    whole = load(folder, device="cpu", dtype="fp32")
    assert not has_quantized(whole.network)
    prompt = "the cat sat"
    ids = torch.tensor([model.tokenizers[0].encode(prompt)])
    logits = model.logits(ids)
    torch.testing.assert_close(logits, whole.logits(ids), atol=1e-5, rtol=0)
    assert logits.std() > 0.02
    ours, theirs = (each.inspect(prompt) for each in (model, whole))
    torch.testing.assert_close(ours.decoder[-1].weights, theirs.decoder[-1].weights, atol=1e-6, rtol=0)
    assert has_quantized(model.network)
    rows = [([], ids[0].tolist())]
    paged = PagedRows(NativeRunner(NativeNetwork(model.network, None, torch.float32), 10, 1), rows, random.Random(1))  # type: ignore[arg-type]
    native = paged.runner.logits(paged.inputs({0: ids[0].tolist()}, {0: 0}))
    error = (native - logits[0]).abs() / logits.abs().max()
    assert error.median() < 0.01, "activations are in int8"
    assert error.max() < 0.05


@pytest.mark.parametrize("kind", sorted({*K_QUANTS, "Q5_0", "F16"} - KINDS.keys()))
def test_other_types_become_fp32(kind: str, tmp_path: Path) -> None:
    weights = read_foreign(write_gguf(peer(), tmp_path / "model.gguf", kind)).weights
    assert {type(each) for each in weights.values()} == {torch.Tensor}


def test_a_dtype_dequantizes(folder: Path, tmp_path: Path) -> None:
    import_model(folder.parent / "model.gguf", tmp_path / "bf16", torch.bfloat16)
    assert {each.dtype for each in load_file(tmp_path / "bf16" / "model.safetensors").values()} == {torch.bfloat16}
    assert not has_quantized(load_model(folder, dtype=torch.float32).network)
    kept = load_model(folder)
    expected = {name: each.dequantized() for name, each in quantized_weights(kept.network).items()}
    export_model(kept, tmp_path / "hf", "hf")
    import_model(tmp_path / "hf", tmp_path / "again")
    again = load_model(tmp_path / "again").network.state_dict()
    assert all(again[name].equal(each) for name, each in expected.items())


def test_training_starts_from_it_in_fp32(folder: Path, tmp_path: Path) -> None:
    data = TEXTS | {"task": "language-model", "workers": 0}
    settings = {"model": {"init_from": str(folder)}, "data": data, "train": TRAIN | {"steps": 2, "lora": {"rank": 4}}}
    run(tmp_path / "run", Recipe.build(settings, where="test"))
    tuned, base = load_model(tmp_path / "run" / "last").network, load_model(folder).network
    assert not has_quantized(tuned)
    name = "decoder.embedding.tokens.weight"
    assert tuned.state_dict()[name].equal(quantized_weights(base)[name].dequantized())


def test_without_kernels_it_is_dequantized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.inference.native_network.step_library", lambda: None)
    assert not has_quantized(load(folder, device="cpu").network)


def test_missing_or_infinite_scales_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".scale"))
    for damaged, message in (
        ({key: each for key, each in tensors.items() if key != name}, "scales .* are missing or too few"),
        (tensors | {name: tensors[name][:, :-1].contiguous()}, "scales .* are missing or too few"),
        (tensors | {name: torch.full_like(tensors[name], torch.inf)}, "contains NaN or infinity"),
    ):
        save_file(damaged, file)
        (folder / disk.MANIFEST).unlink()
        disk._write_manifest(folder)
        with pytest.raises(UserError, match=message):
            load(folder, device="cpu")
