"""Golden losses of a tiny run of every family, and equivalent ways to compute the same update."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from clearhead.checkpoint import load_model
from clearhead.data import IGNORED, Loader
from clearhead.model import EncoderDecoder
from clearhead.train import objective
from clearhead.train.lr_schedule import lr_at_step
from tests.train.tiny import FAMILIES, distance, events, losses, prepared, recipe, run, tensors

# Losses of ten steps without dropout (whose random stream depends on the torch build), then the validation loss;
# `pytest -s` prints the current values.
NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0")
# fmt: off
GOLDEN = {
    "translator": [
        3.288425, 3.173404, 3.017742, 2.569251, 2.488479, 2.302562, 2.310914, 2.297664, 2.193845, 2.243555,
        2.244767,
    ],
    "bert": [
        4.771186, 4.776884, 4.762518, 4.752590, 4.700466, 4.711084, 4.607499, 4.581419, 4.714376, 4.589233,
        4.638575, 0.691383,
    ],
    "gpt": [
        5.635148, 5.555151, 5.396574, 5.197025, 5.032599, 4.868618, 4.754840, 4.678763, 4.661402, 4.631546,
        4.609628,
    ],
    "llama": [
        5.636897, 5.594531, 5.497545, 5.277584, 5.149229, 4.977388, 4.881605, 4.816816, 4.791544, 4.763120,
        4.748641,
    ],
}
# fmt: on
SMOOTHED = 2.303772


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_equal_the_golden_losses(family: str, tmp_path: Path) -> None:
    run(tmp_path, recipe(family, *NO_DROPOUT))
    event = events(tmp_path, "validation")[-1]
    values = [*losses(tmp_path), *(event[name] for name in ("loss", "next_sentence") if name in event)]
    print(family, values)
    assert values == pytest.approx(GOLDEN[family], rel=1e-4)


def test_label_smoothing_changes_training_but_not_the_logged_loss(tmp_path: Path) -> None:
    run(tmp_path, recipe("translator", *NO_DROPOUT, label_smoothing=0.3))
    logged = losses(tmp_path)
    assert logged[0] == pytest.approx(GOLDEN["translator"][0], rel=1e-4), "the logged loss is unsmoothed"
    print(logged[-1])
    assert logged[-1] == pytest.approx(SMOOTHED, rel=1e-4)
    assert pytest.approx(GOLDEN["translator"][9], rel=1e-3) != SMOOTHED


def test_dropout_depends_on_seed_and_step_only(tmp_path: Path) -> None:
    single = ("data.train.count=1", "model.dropout=0.3")  # one sample, constant weights
    run(tmp_path / "a", recipe("translator", *single, lr=1e-30))
    run(tmp_path / "b", recipe("translator", *single, lr=1e-30))
    run(tmp_path / "other seed", recipe("translator", *single, lr=1e-30, seed=1))
    logged = losses(tmp_path / "a")
    assert len(set(logged)) == 10
    assert losses(tmp_path / "b") == logged
    assert not set(losses(tmp_path / "other seed")) & set(logged)


@pytest.mark.parametrize("family", ["translator", "gpt"])
def test_a_plain_torch_loop_gives_the_same_losses(family: str, tmp_path: Path) -> None:
    """The reference: torch's cross-entropy, unfused AdamW and gradient clipping."""
    made = recipe(family, *NO_DROPOUT, label_smoothing=0.1, grad_clip=0.5, weight_decay=0.2, precision="fp64")
    run(tmp_path, made)
    data, network = prepared(made)
    network = network.double().train()
    matrices = [p for p in network.parameters() if p.dim() > 1]
    vectors = [p for p in network.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, foreach=False, fused=False)
    expected = []
    for step, item in zip(
        range(1, 11), Loader(data.train, batch_tokens=made.data.batch_tokens, workers=0), strict=False
    ):
        (batch,) = item.batches
        logits = network(
            *(batch[side] for side in ("source", "target", "source_lengths", "ids") if side in batch.tensors)
        )
        logits, labels = logits.flatten(0, 1), batch["labels"].flatten()
        vocab = logits.shape[-1]
        for group in adam.param_groups:
            group["lr"] = lr_at_step(made.train, step, 10)
        adam.zero_grad()
        F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=0.1 * vocab / (vocab - 1)).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        adam.step()
        expected.append(float(F.cross_entropy(logits.detach(), labels, ignore_index=IGNORED)))
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["translator", "bert", "gpt"])
def test_gradient_accumulation_gives_the_update_of_the_full_batch(family: str, packed: bool, tmp_path: Path) -> None:
    no_dropout = (*NO_DROPOUT, f"data.packed={str(packed).lower()}")
    for count in (1, 4):
        run(tmp_path / str(count), recipe(family, *no_dropout, grad_accum=count, precision="fp64", label_smoothing=0.1))
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "4"), rel=1e-9)
    assert 0 < distance(tensors(tmp_path / "1"), tensors(tmp_path / "4")) < 1e-9


def test_more_micro_batches_than_samples_give_the_same_update(tmp_path: Path) -> None:
    for count in (1, 40):
        changes = ("model.dropout=0", "data.batch_tokens=100")
        run(tmp_path / str(count), recipe("translator", *changes, grad_accum=count, precision="fp64"))
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "40"), rel=1e-9)
    assert distance(tensors(tmp_path / "1"), tensors(tmp_path / "40")) < 1e-9


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "inverse-sqrt", "warmup": 4},
        {"schedule": "linear", "min_lr_ratio": 0.1},
        {"schedule": "cosine"},
        {"schedule": "wsd", "decay_ratio": 0.5},
        {"schedule": "constant", "warmup": 0},
    ],
    ids=lambda settings: settings["schedule"],
)
def test_the_learning_rate_follows_the_schedule(settings: dict[str, object], tmp_path: Path) -> None:
    made = recipe("gpt", steps=6, **settings)
    seen: list[float] = []
    inner = torch.optim.AdamW.step

    def recorded(self: torch.optim.AdamW, *given: object) -> object:
        seen.append(self.param_groups[0]["lr"])
        assert {group["lr"] for group in self.param_groups} == {seen[-1]}
        return inner(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", recorded)
        run(tmp_path, made)
    expected = [lr_at_step(made.train, step, 6) for step in range(1, 7)]
    assert seen == expected
    assert [event["lr"] for event in events(tmp_path, "step")] == expected


def test_scheduled_sampling_starts_when_its_probability_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "teacher forced", recipe("translator", "model.dropout=0"))
    sampled = recipe(
        "translator",
        "model.dropout=0",
        "train.scheduled_sampling.decay_steps=20",
        "train.scheduled_sampling.decay=linear",
    )
    calls: list[tuple[object, ...]] = []

    def from_step_five(*args: object) -> float:
        calls.append(args)
        return 0.9 if len(calls) >= 5 else 0.0

    monkeypatch.setattr(objective, "sampling_prob", from_step_five)
    run(tmp_path / "sampled", sampled)
    plain, mixed = losses(tmp_path / "teacher forced"), losses(tmp_path / "sampled")
    assert calls == [("linear", step, 20.0, 0.0) for step in range(1, 11)], "never in validation"
    assert mixed[:4] == plain[:4]
    assert all(a != b for a, b in zip(mixed[4:], plain[4:], strict=True))


def test_activation_checkpointing_changes_nothing(tmp_path: Path) -> None:
    for enabled in (False, True):
        run(tmp_path / str(enabled), recipe("llama", activation_checkpointing=enabled))
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
    assert distance(tensors(tmp_path / "True"), tensors(tmp_path / "False")) == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_losses_are_close_to_fp32(precision: str, tmp_path: Path) -> None:
    run(tmp_path / "fp32", recipe("gpt", *NO_DROPOUT, eval_samples=0))
    run(tmp_path / precision, recipe("gpt", *NO_DROPOUT, precision=precision))
    half, full = losses(tmp_path / precision), losses(tmp_path / "fp32")
    assert half != full
    assert half == pytest.approx(full, rel=0.03)
    assert half[-1] < half[0] - 0.5
    norms = [[event["grad_norm"] for event in events(tmp_path / name, "step")] for name in (precision, "fp32")]
    assert norms[0] == pytest.approx(norms[1], rel=0.1), "the norm is that of the unscaled gradient"
    dtypes = {name: x.dtype for name, x in tensors(tmp_path / precision).items()}
    assert set(dtypes.values()) == {torch.float32}, "weights and moments are fp32"


def test_frozen_weights_stay_bit_identical(tmp_path: Path) -> None:
    made = recipe("translator", "train.freeze=[encoder.*]", weight_decay=0.1)
    run(tmp_path / "short", made.model_copy(update={"train": made.train.model_copy(update={"steps": 1})}))
    run(tmp_path / "long", made)
    one, ten = tensors(tmp_path / "short"), tensors(tmp_path / "long")
    same = {name for name in one if name.startswith("weights ") and torch.equal(one[name], ten[name])}
    assert same == {name for name in one if name.startswith("weights encoder.")}
    assert len(same) > 5
    assert not any("encoder.layers" in name for name in ten if name.startswith("optimizer"))


@pytest.mark.parametrize("family", FAMILIES)
def test_validation_loss_is_the_mean_over_all_tokens_one_sample_at_a_time(family: str, tmp_path: Path) -> None:
    made = recipe(family, label_smoothing=0.2, steps=4)
    run(tmp_path, made)
    data, _ = prepared(made)
    assert data.valid is not None
    network = load_model(tmp_path / "last").network
    total, count, correct = 0.0, 0, 0
    for sample in range(data.valid.num_samples(0)):
        batch = data.valid.batch(torch.tensor([sample]).numpy(), 0, 0)
        with torch.no_grad():
            if isinstance(network, EncoderDecoder):
                logits = network(batch["source"], batch["target"])
            elif family == "bert":
                logits = network.heads.lm_head(network.encode(batch["ids"], segments=batch["segments"]))
            else:
                logits = network.heads.lm_head(network.decode(batch["ids"], documents=batch.documents.get("ids")))
        logits, labels = logits.flatten(0, 1), batch["labels"].flatten()
        total += float(F.cross_entropy(logits.double(), labels, ignore_index=IGNORED, reduction="sum"))
        count += int((labels != IGNORED).sum())
        correct += int((logits.argmax(-1) == labels).sum())
    event = events(tmp_path, "validation")[-1]
    assert event["loss"] == pytest.approx(total / count, rel=1e-5)
    assert event["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4), "of the unsmoothed loss"
    assert event["accuracy"] == pytest.approx(correct / count)


COMPILED = """
import sys, torch
from pathlib import Path
from tests.train.tiny import recipe, run
torch.set_num_threads(1)
no_dropout = ("model.dropout=0", "model.attention_dropout=0")
settings = {"compile": sys.argv[2], "activation_checkpointing": bool(sys.argv[3:]), "steps": 3, "eval_samples": 0}
run(Path(sys.argv[1]), recipe("gpt", *no_dropout, **settings))
"""


@pytest.mark.skipif("CLEARHEAD_COMPILE" not in os.environ, reason="compiling takes a minute; `make torture` runs it")
@pytest.mark.parametrize("mode", [["on"], ["whole"], ["on", "checkpointed"]])
def test_compiled_runs_give_the_eager_losses(mode: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "0"}
    subprocess.run([sys.executable, "-c", COMPILED, str(tmp_path / "compiled"), *mode], check=True, env=environment)
    run(tmp_path / "eager", recipe("gpt", *NO_DROPOUT, steps=3, eval_samples=0))
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)
