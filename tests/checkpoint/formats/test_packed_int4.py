"""GPTQ and AWQ folders give the logits of their dequantized weights, which stay in int4 where the kernels have them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import import_model, read_foreign
from clearhead.errors import UserError
from clearhead.ops.linear.quantized_tensor import QuantizedTensor
from tests.checkpoint.formats import peers
from tests.checkpoint.formats.peers import WORDS, saved

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(integers: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Pack integers (M, 8 L) to int32 words (M, L): integer order[i] of each eight at bit 4 i."""
    parts = integers.long().unflatten(1, (-1, 8))
    packed = sum(parts[:, :, position] << 4 * number for number, position in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def quantize_folder(
    folder: Path, theirs: Any, method: str, group: int, shuffled: bool = False, **settings: Any
) -> None:
    """Quantize the linear layers of a saved model, and those of `theirs` to the same values."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.half() for name, tensor in load_file(file).items()}
    parameters = dict(theirs.named_parameters())
    rng = torch.Generator().manual_seed(0)
    for parameter in parameters.values():
        parameter.data = parameter.data.half().float()
    for name in [name for name in tensors if "proj.weight" in name]:
        weight, module = tensors.pop(name).float(), name.removesuffix(".weight")
        outputs, inputs = weight.shape
        index = torch.arange(inputs) // group
        index = index[torch.randperm(inputs, generator=rng)] if shuffled else index
        scales = torch.rand(inputs // group, outputs, generator=rng).mul(0.02).add(0.02).half()
        zeros = torch.randint(1, 16, scales.shape, generator=rng)
        integers = (weight.t() / scales.float()[index] + zeros[index]).round().clamp(0, 15)  # (K, N)
        parameters[name].data = ((integers - zeros[index]) * scales.float()[index]).t().contiguous()
        if method == "awq":
            parts = {"qweight": words(integers, AWQ_ORDER), "qzeros": words(zeros, AWQ_ORDER)}
        else:
            stored = zeros - int(settings.get("checkpoint_format") != "gptq_v2")
            parts = {"qweight": words(integers.t(), (*range(8),)).t().contiguous(), "g_idx": index.int()}
            parts |= {"qzeros": words(stored, (*range(8),)), "bias": torch.zeros(outputs).half()}
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in (parts | {"scales": scales}).items()}
    save_file(tensors, file)
    config = folder / "config.json"
    quantization = {"quant_method": method, "bits": 4, "group_size": group} | settings
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))


@pytest.mark.parametrize(
    ("name", "method", "group", "settings"),
    [
        ("llama2", "gptq", 32, {}),
        ("qwen3", "gptq", 16, {}),
        ("llama", "gptq", 16, {"shuffled": True}),
        ("mistral", "gptq", 16, {"checkpoint_format": "gptq_v2"}),
        ("llama2", "awq", 32, {"version": "GEMM"}),
        ("phi3", "awq", 16, {}),
    ],
)
@torch.no_grad()
def test_a_quantized_folder_gives_the_logits_of_its_weights(
    name: str, method: str, group: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    theirs = saved(name, tmp_path / "theirs") if group == 16 else saved_wide(name, tmp_path / "theirs")
    quantize_folder(tmp_path / "theirs", theirs, method, group, **settings)
    import_model(tmp_path / "theirs", tmp_path / "ours")
    network = load_model(tmp_path / "ours").network
    kept = [parameter for parameter in network.parameters() if isinstance(parameter, QuantizedTensor)]
    assert len(kept) == (7 * len(network.decoder.layers) if group == 32 else 0)  # type: ignore[union-attr]
    ids = torch.randint(2, WORDS, (2, 13))
    expected = theirs(ids).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(network(ids), expected, atol=1e-5, rtol=0)


def saved_wide(name: str, folder: Path) -> Any:
    """A model of which every layer has inputs in multiples of 32."""
    with pytest.MonkeyPatch.context() as patch:
        model, settings = peers.PEERS[name]
        patch.setitem(peers.PEERS, name, (model, {**settings, "intermediate_size": 96}))
        return saved(name, folder)


def test_other_methods_and_damaged_parts_are_refused(tmp_path: Path) -> None:
    theirs = saved("llama", tmp_path)
    quantize_folder(tmp_path, theirs, "gptq", 16)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    original, tensors = config.read_text(), load_file(file)
    for change, message in (
        ({"bits": 8}, r"the weights are quantized \(gptq\) other than by GPTQ or AWQ in 4 bits"),
        ({"quant_method": "fp8"}, r"the weights are quantized \(fp8\)"),
        ({"quant_method": "awq", "version": "gemv"}, r"quantized \(awq\) other than"),
    ):
        quantization = json.loads(original)["quantization_config"] | change
        config.write_text(json.dumps(json.loads(original) | {"quantization_config": quantization}))
        with pytest.raises(UserError, match=message):
            read_foreign(tmp_path)
    config.write_text(original)
    module = "model.layers.0.mlp.up_proj"
    for part, changed in (
        ("scales", tensors[f"{module}.scales"][:, :-8].contiguous()),
        ("qzeros", tensors[f"{module}.qzeros"][:-1].contiguous()),
        ("qweight", tensors[f"{module}.qweight"].float()),
        ("g_idx", tensors[f"{module}.g_idx"] + 99),
        ("g_idx", tensors[f"{module}.g_idx"][:-1].contiguous()),
    ):
        save_file(tensors | {f"{module}.{part}": changed}, file)
        with pytest.raises(UserError, match=rf"{module}\.qweight does not fit its scales and zeros"):
            read_foreign(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if name != f"{module}.scales"}, file)
    with pytest.raises(UserError, match="does not fit its scales and zeros"):
        read_foreign(tmp_path)
