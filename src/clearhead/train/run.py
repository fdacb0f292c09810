"""Everything one run holds, made from a recipe: data, network, optimiser, where it stands, and its folder."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint import (
    Score,
    average,
    gather,
    gather_weights,
    load_weights,
    model_card,
    newest_state,
    run_lock,
    save_model,
    save_state,
    save_tensors,
    scatter,
    with_weights,
)
from clearhead.config.recipe import Recipe, dump_recipe
from clearhead.data import Loader, Position, Step, prepare
from clearhead.errors import UserError
from clearhead.files import write_text
from clearhead.model.measure import flops_per_token, parameters
from clearhead.train import validate
from clearhead.train.objective import Objective
from clearhead.train.optimiser import freeze, optimiser
from clearhead.train.parallel import Place, precision, speed_up, spread
from clearhead.train.record import Record
from clearhead.train.report import write_report
from clearhead.train.same import comparable, differences, vocabulary
from clearhead.train.schedules import rate
from clearhead.train.start import start_network, tokenizers_for
from clearhead.train.step import Progress, Scaler, Updater

BROKEN_AT_MOST = 3  # updates in a row whose gradient was not finite, then training stops
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # dense bf16 FLOPs a second
Event = dict[str, Any]
Say = Callable[[str], None]
Watch = Callable[[Event], None]


class Run:
    """A run in its folder `out`; nothing is written there before the first step is done."""

    def __init__(self, recipe: Recipe, out: Path, place: Place, say: Say, watch: Watch):
        self.recipe, self.out, self.place, self.watch = recipe, out, place, watch
        self.say: Say = say if place.first else lambda line: None
        settings = self.settings = recipe.train
        self.data = prepare(recipe.data, tokenizers_for(recipe), say=self.say)
        self.network = start_network(recipe, self.data)
        if settings.freeze:
            freeze(self.network, settings.freeze)
        dtype = precision(settings, place.device)
        self.network.to(place.device, torch.float64 if dtype == torch.float64 else torch.float32)
        self.objective = Objective(self.network, recipe.data, settings).train()
        speed_up(self.objective, settings, place.device)
        wrapped = spread(self.objective, self.network, settings, place)
        scaler = Scaler() if dtype == torch.float16 else None
        adam = optimiser(self.network, settings)
        self.updater = Updater(self.objective, wrapped, adam, settings, place, dtype, scaler)
        self.step, self.position = 0, Position()
        self.best: float | None = None
        self.waited = 0  # validations since the best
        self.saved = 0  # the step of the newest checkpoint
        self.accumulation = settings.accumulation
        self.broken = 0
        self.progress = Progress()
        self.began = self.clock = time.perf_counter()
        self.item: Step | None = None
        self.norm: Tensor | None = None
        self.record: Record | None = None
        self.folder = contextlib.ExitStack()

    # Where the data stands

    def items(self) -> Iterator[Step]:
        """This process's share of the global batches, from where the run stands."""
        data = self.recipe.data
        return iter(
            Loader(
                self.data.train,
                tokens=data.tokens,
                seed=self.settings.seed,
                pool=data.pool,
                position=self.position,
                rank=self.place.rank,
                processes=self.place.processes,
                accumulation=self.accumulation,
                workers=data.workers,
                pinned=self.place.device.type == "cuda",
            )
        )

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return self.step % every == 0 or self.step == self.settings.steps

    # Learning

    def learn(self, item: Step) -> bool:
        """One update; False when the memory did not suffice: then the same batch comes again in smaller parts."""
        try:
            norm = self.updater.update(item.batches, self.step + 1, self.progress)
        except torch.OutOfMemoryError:
            self._smaller_parts(item)
            return False
        self.step, self.position, self.item, self.norm = self.step + 1, item.after, item, norm
        self._check_finite(norm, item)
        if self.record is None:
            self.begin()
        return True

    def _smaller_parts(self, item: Step) -> None:
        if self.place.processes > 1:
            raise UserError("out of memory; set train.accumulation higher: several processes cannot change it midway")
        if max(len(batch["labels"]) if "labels" in batch.tensors else 1 for batch in item.batches) < 2:
            raise UserError("out of memory with one sample; lower data.longest, or set train.recompute=true")
        self.updater.optimiser.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.accumulation *= 2
        self.progress = Progress()
        self.say(f"out of memory: the batch now comes in {self.accumulation} parts; what is learnt stays the same")

    def _check_finite(self, norm: Tensor, item: Step) -> None:
        """Nothing was learnt where the gradient is not finite; too often in a row, there is no use in going on."""
        if self.updater.scaler is not None and self.updater.scaler.scale > 1:
            return  # fp16 overflows now and then, and its scale has been lowered
        if math.isfinite(float(norm)):
            self.broken = 0
            return
        self.broken += 1
        self.note({"kind": "note", "step": self.step, "text": "the gradient is not finite; this update was left out"})
        self.say(f"step {self.step}: the gradient is not finite; this update was left out")
        if self.broken >= BROKEN_AT_MOST:
            file = self.out / f"broken-step-{self.step}-rank-{self.place.rank}.safetensors"
            self.out.mkdir(parents=True, exist_ok=True)
            tensors = {f"{n}.{name}": x for n, batch in enumerate(item.batches) for name, x in batch.tensors.items()}
            save_tensors(file, {name: tensor.contiguous() for name, tensor in tensors.items()})
            raise UserError(
                f"step {self.step}: the gradient was not finite {self.broken} times in a row; the batch is in {file}; "
                "lower train.rate, raise train.warmup, or set train.precision=fp32"
            )

    # Watching

    def note(self, event: Event) -> None:
        """Write an event to the log and show it."""
        if not self.place.first:
            return
        if self.record is not None:
            self.record.write(**event)
        self.watch(event)

    def log(self) -> None:
        """What happened since the last line of the log."""
        assert self.item is not None
        assert self.norm is not None
        means = self.progress.means(self.place)
        seconds = max(time.perf_counter() - self.clock, 1e-9)
        tokens = float(self.place.sum(torch.tensor([float(self.progress.tokens)], dtype=torch.float64))[0]) / seconds
        main = next(iter(means))
        event: Event = {
            "kind": "step",
            "step": self.step,
            "epoch": self.item.draw.epoch,
            "loss": means[main],
            "accuracy": means[f"{main}_accuracy"],
            "rate": rate(self.settings, self.step, self.settings.steps),
            "norm": float(self.norm),
            "tokens_per_second": tokens,
            "seconds": time.perf_counter() - self.began,
        }
        event |= {name: value for name, value in means.items() if not name.startswith(main)}
        if share := self._share_of_peak(tokens):
            event["share_of_peak"] = share
        self.note(event)
        self.progress, self.clock = Progress(), time.perf_counter()

    def _share_of_peak(self, tokens: float) -> float | None:
        """Of what the GPU could compute; forward and backward are three times the forward pass."""
        if self.place.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.place.device)
        peak = next((peak for known, peak in PEAK.items() if known in name), None)
        if peak is None:
            return None
        return 3 * flops_per_token(self.network, self.recipe.data.longest) * tokens / peak / self.place.processes

    def validate(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Losses and scores on held-out data; keeps the model if it is the best so far."""
        if self.data.valid is None:
            return
        began = time.perf_counter()
        numbers: Event = dict(
            validate.losses(self.objective, self.data.valid, self.recipe.data, self.place, self.updater.dtype, stopped)
        )
        if not numbers:
            return  # asked to stop
        found, samples = validate.scores(self.objective, self.data, self.settings, self.place, self.updater.dtype)
        numbers |= found
        spent = time.perf_counter() - began
        self.clock += spent
        event = {
            "kind": "validation",
            "step": self.step,
            **numbers,
            "samples": samples,
            "seconds": time.perf_counter() - self.began,
        }
        self.note(event)
        metric = self.settings.metric
        if metric not in numbers:
            raise UserError(f"train.metric: {metric} is not measured for this task; use one of {', '.join(numbers)}")
        if validate.better(metric, numbers[metric], self.best):
            self.best, self.waited = numbers[metric], 0
            self.save_model("best", event)
        else:
            self.waited += 1

    # Keeping

    def begin(self) -> None:
        """Take the folder, and say what it is for; called when there is something to keep."""
        self.record = Record(self.out)
        if not self.place.first:
            return
        self.folder.enter_context(run_lock(self.out))
        if not (self.out / "recipe.yaml").exists():
            write_text(self.out / "recipe.yaml", dump_recipe(self.recipe))
        facts = {"parameters": parameters(self.network), "steps": self.settings.steps, **_machine(self.place)}
        self.note({"kind": "start", "step": 0, **facts})

    def save(self) -> None:
        """A checkpoint of everything that the rest of the run depends on."""
        weights, moments = gather(self.network, self.updater.optimiser)
        scaler = self.updater.scaler
        if self.place.first:
            numbers = {
                "position": list(self.position),
                "best": self.best,
                "waited": self.waited,
                "scaler": [scaler.scale, scaler.steps] if scaler else None,
                "recipe": comparable(self.recipe),
                "vocabulary": vocabulary(self.data),
            }
            save_state(self.out, self.step, weights, moments, numbers, self.settings.keep)
        self.saved = self.step

    def save_model(self, name: str, event: Event | None = None) -> None:
        """The network as a model folder in the run folder."""
        weights = gather_weights(self.network)
        if not self.place.first:
            return
        whole = with_weights(self.network.config, weights)
        data = self.recipe.data.model_dump(mode="json")
        extra = {"task": self.recipe.data.task, "labels": list(self.data.labels), "step": self.step, "data": data}
        save_model(self.out / name, whole, self.data.tokenizers, extra, self._card(event))

    def _card(self, event: Event | None) -> str:
        """The model card: what it was made of, and how good it was when it was kept."""
        data, numbers = self.recipe.data, event or {}
        signatures = numbers.get("signature", {})
        scores = [
            Score(name, value, "validation data", signatures.get(name, ""))
            for name, value in numbers.items()
            if isinstance(value, float) and name != "seconds"
        ]
        made = [", ".join(corpus.files) or f"{corpus.format}, made by Clearhead itself" for corpus in data.train] + (
            [f"published at {data.published}"] if data.published else []
        )
        summary = f"A model for {data.task}, trained with Clearhead for {self.step:,} steps."
        return model_card(self.out.name, summary, made, dump_recipe(self.recipe), scores, "That of the data.")

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one; refuse where the recipe became another."""
        if not (self.out / "checkpoints").is_dir():
            return
        if self.place.first:
            self.folder.enter_context(run_lock(self.out))
        state, refused = newest_state(self.out)
        for line in refused:
            self.say(f"{line}; trying the one before it")
        if state is None:
            if refused:
                raise UserError(f"{self.out}: no checkpoint is whole; begin anew in another folder")
            return
        changed = differences(state.numbers["recipe"], comparable(self.recipe))
        if changed:
            raise UserError(
                f"{self.out}: this run was begun with other settings ({'; '.join(changed)}); give the same, or begin "
                "another run"
            )
        if state.numbers["vocabulary"] != vocabulary(self.data):
            raise UserError(f"{self.out}: the vocabulary is not the one this run began with; restore the data")
        if state.step >= self.settings.steps:
            total = self.settings.steps
            raise UserError(f"train.steps: {total} is the total, and {self.out} is at {state.step}; ask for more")
        scatter(self.network, self.updater.optimiser, state.weights(), state.optimiser())
        self.step = self.saved = state.step
        self.position = Position(*state.numbers["position"])
        self.best, self.waited = state.numbers["best"], state.numbers["waited"]
        if self.updater.scaler is not None and state.numbers["scaler"]:
            self.updater.scaler.scale, self.updater.scaler.steps = state.numbers["scaler"]
        self.say(f"going on from step {state.step} of {self.settings.steps}")
        self.record = Record(self.out)
        if self.place.first:
            self.record.rewind(self.step)

    def finish(self) -> None:
        """The last checkpoint, the last model, the report."""
        if not self.step:
            return
        if self.saved < self.step:
            self.save()
        if self.settings.average > 1:
            paths = sorted((self.out / "checkpoints").glob("step-*"))[-self.settings.average :]
            load_weights(self.network, average(paths))
            self.note({"kind": "note", "step": self.step, "text": f"the mean of the last {len(paths)} checkpoints"})
            self.validate()
        self.save_model("last")
        self.note({"kind": "end", "step": self.step, "best": self.best})
        if self.place.first:
            write_report(self.out)

    def close(self) -> None:
        """Let go of the folder."""
        if self.record is not None:
            self.record.close()
        self.folder.close()


def _machine(place: Place) -> dict[str, Any]:
    name = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "cpu"
    return {"device": name, "processes": place.processes, "torch": torch.__version__}
