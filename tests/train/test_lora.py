"""LoRA: the base stays as it is, a saved model has the updates in it, and the adapter gives its logits in peft."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from clearhead.checkpoint import load_model, save_model
from clearhead.checkpoint.formats import export_model
from clearhead.checkpoint.model_folder import build_with_weights
from clearhead.config.recipe import Recipe
from clearhead.config.train import LoraConfig
from clearhead.errors import ConfigError, UserError
from clearhead.train.lora import LoraLinear, apply_lora
from tests.train.tiny import TEXTS, TRAIN, recipe, run, tensors

LORA = {"rank": 4, "targets": ["attention", "feed_forward"]}
BASES = ("bert", "gpt", "llama")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders of a pretrained encoder and of two decoders."""
    folder = tmp_path_factory.mktemp("bases")
    for family in BASES:
        run(folder / family, recipe(family, steps=2))
    return {family: folder / family for family in BASES}


def tuned(base: Path, task: str, lora: dict[str, Any] = LORA, **train: Any) -> Recipe:
    """A recipe that fine-tunes a model with LoRA."""
    data = TEXTS | {"task": task, "workers": 0}
    settings = TRAIN | {"steps": 6, "lora": lora} | train
    return Recipe.build({"model": {"init_from": str(base)}, "data": data, "train": settings}, where="test")


@pytest.mark.parametrize(
    ("family", "task"),
    [("llama", "language-model"), ("gpt", "language-model"), ("bert", "classification"), ("gpt", "classification")],
)
def test_the_base_is_frozen_and_the_merged_model_computes_the_same(
    family: str, task: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    run(tmp_path / "run", tuned(bases[family], task))
    base, weights = load_model(bases[family] / "last"), weights_of(tmp_path / "run")
    before = base.network.state_dict()
    updated = [name for name in weights if name.endswith("lora_b")]
    assert len(updated) == sum(isinstance(m, torch.nn.Linear) for m in base.network.modules() if in_layer(base, m))
    assert all(weights[name].abs().max() > 0 for name in updated)
    for name, tensor in weights.items():
        if name in before and not name.startswith("heads.classes"):
            assert tensor.equal(before[name]), name
    merged = load_model(tmp_path / "run" / "last").network
    unmerged = build_with_weights(merged.config, {n: t for n, t in weights.items() if "lora" not in n})
    plain = hidden(unmerged)
    apply_lora(unmerged, LoraConfig.build(LORA), base, "base", ())
    unmerged.load_state_dict(weights, strict=False)  # a tied matrix has one name
    assert any(isinstance(module, LoraLinear) for module in unmerged.modules())
    torch.testing.assert_close(hidden(unmerged), hidden(merged), atol=1e-5, rtol=0)
    assert (hidden(merged) - plain).abs().max() > 1e-3, "the updates would not matter"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint."""
    kind = "weights "
    return {name.removeprefix(kind): tensor for name, tensor in tensors(folder).items() if name.startswith(kind)}


def in_layer(base: Any, module: Any) -> bool:
    return any(module is each for name, each in base.network.named_modules() if ".layers." in name)


@torch.no_grad()
def hidden(network: Any) -> torch.Tensor:
    ids = torch.arange(5, 21)[None]
    if network.config.family == "encoder":
        return network.eval().encode(ids)
    return network.eval().decode(ids)


@pytest.mark.parametrize(("family", "task"), [("llama", "language-model"), ("gpt", "language-model"),
                                              ("bert", "classification")])  # fmt: skip
def test_the_adapter_gives_the_same_logits_in_peft(
    family: str, task: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    run(tmp_path / "run", tuned(bases[family], task))
    export_model(load_model(bases[family] / "last"), tmp_path / "base", "hf")
    with torch.no_grad():
        compare(peft, tmp_path, task)


def test_the_adapter_of_fused_layers_gives_the_same_logits_in_peft(bases: dict[str, Path], tmp_path: Path) -> None:
    """A Llama is also a Phi-3, which has q, k and v, and gate and up, in one matrix."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    llama = load_model(bases["llama"] / "last")
    base = tmp_path / "phi3"
    save_model(base, llama.network, llama.tokenizers, llama.extra | {"imported": "Phi3ForCausalLM"})
    run(tmp_path / "run", tuned(base, "language-model"))
    export_model(load_model(base), tmp_path / "base", "hf")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "base").model_type == "phi3"
    with torch.no_grad():
        compare(peft, tmp_path, "language-model")


def compare(peft: Any, folder: Path, task: str) -> None:
    """Compare the logits of a merged model with those of its adapter in peft."""
    merged = load_model(folder / "run" / "last").network.eval()
    ids = torch.arange(5, 21)[None]
    if task == "classification":
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder / "base", num_labels=merged.config.labels
        )
        expected = merged.heads.classes(merged.heads.pool(merged.encode(ids)))
    else:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
        expected = merged(ids)
    before = theirs.eval()(ids).logits
    model = peft.PeftModel.from_pretrained(theirs, folder / "run" / "last-adapter").eval()
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert (logits - before).abs().max() > 1e-3


def test_a_run_with_lora_resumes_bit_exactly(bases: dict[str, Path], tmp_path: Path) -> None:
    settings = tuned(bases["llama"], "language-model", save_every=3)
    run(tmp_path / "run", settings)
    expected = tensors(tmp_path / "run")
    shutil.rmtree(max((tmp_path / "run" / "checkpoints").glob("step-*")))
    run(tmp_path / "run", settings, resume=True)
    resumed = tensors(tmp_path / "run")
    assert resumed.keys() == expected.keys()
    assert all(resumed[name].equal(expected[name]) for name in expected)


def test_what_lora_cannot_do_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.lora: updates the layers of a trained model; name one as"):
        recipe("gpt", lora=LORA)
    with pytest.raises(UserError, match=r"train\.lora\.rank: 100 is more than the 16 of the smallest layer"):
        run(tmp_path / "run", tuned(bases["gpt"], "language-model", {"rank": 100}))
    with pytest.raises(ConfigError, match=r"train\.lora\.targets\.0: 'embedding' is not allowed"):
        tuned(bases["gpt"], "language-model", {"targets": "embedding"})
