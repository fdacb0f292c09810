"""The numbers of training: losses of a tiny run of every family, and ways to the same update that must not matter."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from clearhead.checkpoint import load_model
from clearhead.data import IGNORED, Loader, prepare
from clearhead.model import EncoderDecoder
from clearhead.train import objective
from clearhead.train.init_from import init_network, tokenizers_for
from clearhead.train.lr_schedule import lr_at_step
from tests.train.tiny import FAMILIES, distance, events, losses, recipe, run, tensors

# Of ten steps each without dropout (whose draws depend on the build of torch), and the loss on validation data after
# them; `pytest -s` prints what they are now.
STILL = ("model.dropout=0", "model.attention_dropout=0")
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
def test_losses_stay_what_they_were(family: str, tmp_path: Path) -> None:
    run(tmp_path, recipe(family, *STILL))
    event = events(tmp_path, "validation")[-1]
    found = [*losses(tmp_path), *(event[name] for name in ("loss", "next_sentence") if name in event)]
    print(family, found)
    assert found == pytest.approx(GOLDEN[family], rel=1e-4)


def test_smoothing_changes_what_is_learned_but_not_how_it_is_measured(tmp_path: Path) -> None:
    run(tmp_path, recipe("translator", *STILL, label_smoothing=0.3))
    found = losses(tmp_path)
    assert found[0] == pytest.approx(GOLDEN["translator"][0], rel=1e-4), "the logged loss is without smoothing"
    print(found[-1])
    assert found[-1] == pytest.approx(SMOOTHED, rel=1e-4)
    assert pytest.approx(GOLDEN["translator"][9], rel=1e-3) != SMOOTHED


def test_dropout_is_drawn_anew_for_every_step_by_the_seed_alone(tmp_path: Path) -> None:
    single = ("data.train.count=1", "model.dropout=0.3")  # one sample, and weights that do not change
    run(tmp_path / "a", recipe("translator", *single, lr=1e-30))
    run(tmp_path / "b", recipe("translator", *single, lr=1e-30))
    run(tmp_path / "other seed", recipe("translator", *single, lr=1e-30, seed=1))
    found = losses(tmp_path / "a")
    assert len(set(found)) == 10
    assert losses(tmp_path / "b") == found
    assert not set(losses(tmp_path / "other seed")) & set(found)


@pytest.mark.parametrize("family", ["translator", "gpt"])
def test_a_plain_loop_learns_the_same(family: str, tmp_path: Path) -> None:
    """Written out with torch alone: its cross entropy, its AdamW in the plainest form, its clipping."""
    made = recipe(family, *STILL, label_smoothing=0.1, grad_clip=0.5, weight_decay=0.2, precision="fp64")
    run(tmp_path, made)
    data = prepare(made.data, tokenizers_for(made))
    network = init_network(made, data).double().train()
    decays = [p for p in network.parameters() if p.dim() > 1]
    others = [p for p in network.parameters() if p.dim() == 1]
    groups = [{"params": decays, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, foreach=False, fused=False)
    found = []
    for step, item in zip(range(1, 11), Loader(data.train, tokens=made.data.batch_tokens, workers=0), strict=False):
        (batch,) = item.batches
        scores = network(
            *(batch[side] for side in ("source", "target", "source_lengths", "ids") if side in batch.tensors)
        )
        scores, labels = scores.flatten(0, 1), batch["labels"].flatten()
        words = scores.shape[-1]
        for group in adam.param_groups:
            group["lr"] = lr_at_step(made.train, step, 10)
        adam.zero_grad()
        F.cross_entropy(scores, labels, ignore_index=IGNORED, label_smoothing=0.1 * words / (words - 1)).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        adam.step()
        found.append(float(F.cross_entropy(scores.detach(), labels, ignore_index=IGNORED)))
    assert losses(tmp_path) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["translator", "bert", "gpt"])
def test_a_batch_in_parts_gives_the_update_of_the_whole(family: str, packed: bool, tmp_path: Path) -> None:
    still = (*STILL, f"data.packed={str(packed).lower()}")
    for parts in (1, 4):
        run(tmp_path / str(parts), recipe(family, *still, grad_accum=parts, precision="fp64", label_smoothing=0.1))
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "4"), rel=1e-9)
    assert 0 < distance(tensors(tmp_path / "1"), tensors(tmp_path / "4")) < 1e-9


def test_a_batch_of_more_parts_than_samples_is_no_different(tmp_path: Path) -> None:
    for parts in (1, 40):
        changes = ("model.dropout=0", "data.batch_tokens=100")
        run(tmp_path / str(parts), recipe("translator", *changes, grad_accum=parts, precision="fp64"))
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "40"), rel=1e-9)
    assert distance(tensors(tmp_path / "1"), tensors(tmp_path / "40")) < 1e-9


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "inverse-sqrt", "warmup": 4},
        {"schedule": "linear", "floor": 0.1},
        {"schedule": "cosine"},
        {"schedule": "wsd", "decay": 0.5},
        {"schedule": "constant", "warmup": 0},
    ],
    ids=lambda settings: settings["schedule"],
)
def test_the_rate_is_that_of_the_schedule(settings: dict[str, object], tmp_path: Path) -> None:
    made = recipe("gpt", steps=6, **settings)
    seen: list[float] = []
    inner = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *given: object) -> object:
        seen.append(self.param_groups[0]["lr"])
        assert {group["lr"] for group in self.param_groups} == {seen[-1]}
        return inner(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", watched)
        run(tmp_path, made)
    expected = [lr_at_step(made.train, step, 6) for step in range(1, 7)]
    assert seen == expected
    assert [event["rate"] for event in events(tmp_path, "step")] == expected


def test_scheduled_sampling_begins_when_its_probability_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "true words", recipe("translator", "model.dropout=0"))
    sampled = recipe(
        "translator",
        "model.dropout=0",
        "train.scheduled_sampling.decay_steps=20",
        "train.scheduled_sampling.decay=linear",
    )
    asked: list[tuple[object, ...]] = []

    def from_step_five(*given: object) -> float:
        asked.append(given)
        return 0.9 if len(asked) >= 5 else 0.0

    monkeypatch.setattr(objective, "probability", from_step_five)
    run(tmp_path / "sampled", sampled)
    plain, mixed = losses(tmp_path / "true words"), losses(tmp_path / "sampled")
    assert asked == [("linear", step, 20.0, 0.0) for step in range(1, 11)], "and never in validation"
    assert mixed[:4] == plain[:4]
    assert all(a != b for a, b in zip(mixed[4:], plain[4:], strict=True))


def test_recomputed_activations_change_nothing(tmp_path: Path) -> None:
    for recompute in (False, True):
        run(tmp_path / str(recompute), recipe("llama", activation_checkpointing=recompute))
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
    assert distance(tensors(tmp_path / "True"), tensors(tmp_path / "False")) == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_about_the_same(precision: str, tmp_path: Path) -> None:
    run(tmp_path / "whole", recipe("gpt", *STILL, eval_samples=0))
    run(tmp_path / precision, recipe("gpt", *STILL, precision=precision))
    half, whole = losses(tmp_path / precision), losses(tmp_path / "whole")
    assert half != whole
    assert half == pytest.approx(whole, rel=0.03)
    assert half[-1] < half[0] - 0.5
    norms = [[event["norm"] for event in events(tmp_path / name, "step")] for name in (precision, "whole")]
    assert norms[0] == pytest.approx(norms[1], rel=0.1), "of the gradient, not of the scaled one"
    kinds = {name: x.dtype for name, x in tensors(tmp_path / precision).items()}
    assert set(kinds.values()) == {torch.float32}, "weights and moments are whole"


def test_frozen_weights_stay_to_the_bit(tmp_path: Path) -> None:
    made = recipe("translator", "train.freeze=[encoder.*]", weight_decay=0.1)
    run(tmp_path / "short", made.model_copy(update={"train": made.train.model_copy(update={"steps": 1})}))
    run(tmp_path / "long", made)
    one, ten = tensors(tmp_path / "short"), tensors(tmp_path / "long")
    same = {name for name in one if name.startswith("weights ") and torch.equal(one[name], ten[name])}
    assert same == {name for name in one if name.startswith("weights encoder.")}
    assert len(same) > 5
    assert not any("encoder.layers" in name for name in ten if name.startswith("optimizer"))


@pytest.mark.parametrize("family", FAMILIES)
def test_validation_is_the_mean_over_every_token_one_sample_at_a_time(family: str, tmp_path: Path) -> None:
    made = recipe(family, label_smoothing=0.2, steps=4)
    run(tmp_path, made)
    data = prepare(made.data, tokenizers_for(made))
    assert data.valid is not None
    network = load_model(tmp_path / "last").network
    total, count, right = 0.0, 0, 0
    for sample in range(data.valid.size(0)):
        batch = data.valid.batch(torch.tensor([sample]).numpy(), 0, 0)
        with torch.no_grad():
            if isinstance(network, EncoderDecoder):
                scores = network(batch["source"], batch["target"])
            elif family == "bert":
                scores = network.heads.lm_head(network.encode(batch["ids"], segments=batch["segments"]))
            else:
                scores = network.heads.lm_head(network.decode(batch["ids"], documents=batch.documents.get("ids")))
        scores, labels = scores.flatten(0, 1), batch["labels"].flatten()
        total += float(F.cross_entropy(scores.double(), labels, ignore_index=IGNORED, reduction="sum"))
        count += int((labels != IGNORED).sum())
        right += int((scores.argmax(-1) == labels).sum())
    event = events(tmp_path, "validation")[-1]
    assert event["loss"] == pytest.approx(total / count, rel=1e-5)
    assert event["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4), "of the unsmoothed loss"
    assert event["accuracy"] == pytest.approx(right / count)


COMPILED = """
import sys, torch
from pathlib import Path
from tests.train.tiny import recipe, run
torch.set_num_threads(1)
still = ("model.dropout=0", "model.attention_dropout=0")
run(Path(sys.argv[1]), recipe("gpt", *still, compile=sys.argv[2], activation_checkpointing=bool(sys.argv[3:]), steps=3, eval_samples=0))
"""


@pytest.mark.skipif("CLEARHEAD_COMPILE" not in os.environ, reason="compiling takes a minute; `make torture` runs it")
@pytest.mark.parametrize("how", [["on"], ["whole"], ["on", "recomputed"]])
def test_compiled_blocks_learn_the_same(how: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "0"}
    subprocess.run([sys.executable, "-c", COMPILED, str(tmp_path / "compiled"), *how], check=True, env=environment)
    run(tmp_path / "eager", recipe("gpt", *STILL, steps=3, eval_samples=0))
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)
