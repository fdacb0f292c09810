"""Everything one run holds, made from a recipe: data, network, optimiser, where it stands, and its folder."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint import (
    average,
    discard_state,
    gather,
    gather_weights,
    load_weights,
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
from clearhead.model import Network
from clearhead.model.cost import parameters
from clearhead.train import validate
from clearhead.train.cuda_graph import recorded
from clearhead.train.distributed import Place, precision, speed_up, spread
from clearhead.train.init_from import class_weights, start_network, tokenizers_for
from clearhead.train.lr_schedule import rate
from clearhead.train.objective import Objective
from clearhead.train.optimizer import freeze, optimiser
from clearhead.train.report import write_report
from clearhead.train.resume_check import comparable, differences, vocabulary
from clearhead.train.run_info import machine, run_card, share_of_peak
from clearhead.train.run_log import Record, number, read_log
from clearhead.train.updater import Progress, Scaler, Updater

FINISHED = "finished"  # why a run ended that did all its steps
BROKEN_AT_MOST = 3  # updates in a row whose gradient was not finite, then training stops
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
        weights = class_weights(recipe, self.data)
        self.objective = Objective(self.network, recipe.data, settings, weights).to(place.device).train()
        speed_up(self.objective, settings, place)
        wrapped = spread(self.objective, self.network, settings, place)
        scaler = Scaler() if dtype == torch.float16 else None
        adam = optimiser(self.network, settings)
        self.updater = Updater(self.objective, wrapped, adam, settings, place, dtype, scaler)
        self.update = recorded(self.updater).update
        self.step, self.position = 0, Position()
        self.best: float | None = None
        self.waited = 0  # validations since the best
        self.owes_validation = False  # it was due, and somebody asked to stop
        self.validation: Event = {}  # the newest
        self.saved = 0  # the step of the newest checkpoint
        self.stray: str | None = None  # a checkpoint made by a stop, out of turn: it goes when the next one is there
        self.accumulation = settings.accumulation
        self.broken = 0  # updates in a row that were left out
        self.progress = Progress()
        self.began = self.clock = time.perf_counter()
        self.item: Step | None = None
        self.norm: Tensor | None = None
        self.unchecked: list[tuple[int, Tensor, Step]] = []  # gradients that nobody has looked at yet
        self.record: Record | None = None
        self.folder, self.locked = contextlib.ExitStack(), False

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

    @property
    def over(self) -> bool:
        """Whether nothing is left to learn: all steps are done, or patience is at its end."""
        patience = self.settings.patience
        return self.step >= self.settings.steps or (patience is not None and self.waited >= patience)

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return self.step % every == 0 or self.step == self.settings.steps

    # Learning

    def learn(self, item: Step) -> bool:
        """One update; False when the memory did not suffice: then the same batch comes again in smaller parts."""
        try:
            norm = self.update(item.batches, self.step + 1, self.progress)
        except torch.OutOfMemoryError:
            self._smaller_parts(item)
            return False
        self.step, self.position, self.item, self.norm = self.step + 1, item.after, item, norm
        if self.record is None:
            self.begin(after=-1)
        # Asking a GPU means waiting for it, so there it is asked about a step when the next one is on its way.
        self.unchecked.append((self.step, norm, item))
        self.check_finite(behind=0 if self.place.device.type == "cpu" else 1)
        return True

    def _smaller_parts(self, item: Step) -> None:
        if self.place.processes > 1:
            raise UserError("out of memory; set train.accumulation higher: several processes cannot change it midway")
        if len(item.draw.samples) <= self.accumulation:
            raise UserError("out of memory with one sample; lower data.longest, or set train.recompute=true")
        self.updater.optimiser.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.accumulation *= 2
        text = f"out of memory: batches now come in {self.accumulation} parts, which add up to the same update"
        self.note({"kind": "note", "step": self.step, "text": text})
        self.say(text)

    def check_finite(self, behind: int = 0) -> None:
        """Look at all gradients but the last few."""
        while len(self.unchecked) > behind:
            self._check_finite(*self.unchecked.pop(0))

    def _check_finite(self, step: int, norm: Tensor, item: Step) -> None:
        """Nothing was learnt where the gradient is not finite; too often in a row, there is no use in going on."""
        if self.updater.scaler is not None and self.updater.scaler.scale > 1:
            return  # fp16 overflows now and then, and its scale has been lowered
        if math.isfinite(float(norm)):
            self.broken = 0
            return
        self.broken += 1
        self.note({"kind": "note", "step": step, "text": "the gradient is not finite; this update was left out"})
        self.say(f"step {step}: the gradient is not finite; this update was left out")
        if self.broken >= BROKEN_AT_MOST:
            file = self.out / f"broken-step-{step}-rank-{self.place.rank}.safetensors"
            tensors = {f"{n}.{name}": x for n, batch in enumerate(item.batches) for name, x in batch.tensors.items()}
            save_tensors(file, tensors)
            raise UserError(
                f"step {step}: the gradient was not finite {self.broken} times in a row; the batch is in {file}; "
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
        seconds = max(time.perf_counter() - self.clock, 1e-9)
        tokens = float(self.place.sum(torch.tensor([float(self.progress.tokens)], dtype=torch.float64))[0]) / seconds
        event: Event = {
            "kind": "step",
            "step": self.step,
            "epoch": self.item.draw.epoch,
            **self.progress.means(self.place),
            "rate": rate(self.settings, self.step, self.settings.steps),
            "norm": float(self.norm),
            "tokens_per_second": tokens,
            "seconds": time.perf_counter() - self.began,
        }
        if share := share_of_peak(self.network, self.recipe.data.longest, tokens, self.place):
            event["share_of_peak"] = share
        self.note(event)
        self.progress, self.clock = Progress(), time.perf_counter()

    def validate(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Losses and scores on held-out data; keeps the model if it is the best so far."""
        if self.data.valid is None:
            return
        began = time.perf_counter()
        numbers: Event = dict(
            validate.losses(self.objective, self.data.valid, self.recipe.data, self.place, self.updater.dtype, stopped)
        )
        self.owes_validation = not numbers
        if self.owes_validation:
            return  # asked to stop
        samples: list[validate.Sample] = []
        whole = self._whole()
        if whole is not None:
            found, samples = validate.scores(whole, self.data, self.settings, self.place, self.updater.dtype)
            numbers |= found
        self.clock += time.perf_counter() - began
        seconds = time.perf_counter() - self.began
        self.validation = {"kind": "validation", "step": self.step, **numbers, "samples": samples, "seconds": seconds}
        self.note(self.validation)
        metric = self.settings.metric
        value = numbers[metric] if self.place.first else 0.0  # only the first process has written anything
        value = float(self.place.sum(torch.tensor([value], dtype=torch.float64))[0])
        if validate.better(metric, value, self.best):
            self.best, self.waited = value, 0
            self.save_model("best")
        else:
            self.waited += 1

    def _whole(self) -> Network | None:
        """On the first process, a network that can be called piece by piece: sharded weights are put together."""
        if self.place.processes == 1 or self.settings.parallel == "ddp":
            return self.network if self.place.first else None
        weights = gather_weights(self.network)
        return with_weights(self.network.config, weights).to(self.place.device) if self.place.first else None

    # Keeping

    def begin(self, after: int) -> None:
        """Say in the folder what it is for; called when there is something to keep, or to go on with.

        Lines of the log that are later than `after` are from a life that left no checkpoint behind.
        """
        self.record = Record(self.out)
        if not self.place.first:
            return
        self._lock()
        self.record.rewind(after, self.owes_validation)
        write_text(self.out / "recipe.yaml", dump_recipe(self.recipe))
        facts = {"parameters": parameters(self.network), "steps": self.settings.steps, **machine(self.place)}
        self.note({"kind": "start", "step": max(after, 0), **facts})

    def _lock(self) -> None:
        """Take the folder for this run alone, until `close`."""
        if self.place.first and not self.locked:
            self.folder.enter_context(run_lock(self.out))
            self.locked = True

    def save(self) -> None:
        """A checkpoint of everything that the rest of the run depends on."""
        self.check_finite()
        weights, moments = gather(self.network, self.updater.optimiser)
        scaler, progress = self.updater.scaler, self.progress.totals(self.place)
        if self.place.first:
            numbers = {
                "position": list(self.position),
                "progress": {name: list(map(number, sums)) for name, sums in progress.items()},
                "best": self.best,
                "waited": self.waited,
                "owes_validation": self.owes_validation,
                "doubled": self.accumulation // self.settings.accumulation,
                "scaler": [scaler.scale, scaler.steps] if scaler else None,
                "recipe": comparable(self.recipe),
                "vocabulary": vocabulary(self.data),
                "stray": self.stray,
            }
            stray = self.out / "checkpoints" / (self.stray or "none")
            extra = stray.exists() + (not self.due(self.settings.save_every))  # keep as many as if none had stopped us
            save_state(self.out, self.step, weights, moments, numbers, self.settings.keep + extra)
            if stray.exists():
                discard_state(stray)
        self.place.wait()
        self.saved = self.step

    def save_model(self, name: str) -> None:
        """The network as a model folder in the run folder."""
        weights = gather_weights(self.network)
        if not self.place.first:
            return
        whole = with_weights(self.network.config, weights)
        data = self.recipe.data.model_dump(mode="json")
        extra = {"task": self.recipe.data.task, "labels": list(self.data.labels), "step": self.step, "data": data}
        scores = self.validation if self.validation.get("step") == self.step else {}
        card = run_card(self.out.name, self.recipe, self.step, scores)
        save_model(self.out / name, whole, self.data.tokenizers, extra, card)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one; refuse where the recipe became another."""
        if not (self.out / "checkpoints").is_dir():
            return
        self._lock()
        self.place.wait()
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
        total = self.settings.steps
        if state.step > total or (state.step == total and self._ended()):
            raise UserError(f"train.steps: {total} is the total, and {self.out} is at {state.step}; ask for more")
        scatter(self.network, self.updater.optimiser, state.weights(), state.optimiser())
        self.step = self.saved = state.step
        self.position = Position(*state.numbers["position"])
        self.best, self.waited = state.numbers["best"], state.numbers["waited"]
        self.owes_validation = state.numbers["owes_validation"]
        self.stray = state.numbers["stray"] if self.due(self.settings.save_every) else state.folder.name
        self.accumulation = self.settings.accumulation * state.numbers["doubled"]
        if self.place.first:
            for name, sums in state.numbers["progress"].items():
                known = [math.nan if each is None else each for each in sums]
                self.progress.sums[name] = torch.tensor(known, dtype=torch.float64, device=self.place.device)
        if self.updater.scaler is not None and state.numbers["scaler"]:
            self.updater.scaler.scale, self.updater.scaler.steps = state.numbers["scaler"]
        self.say(f"going on from step {state.step} of {self.settings.steps}")
        self.begin(after=self.step)

    def _ended(self) -> bool:
        """Whether the run in the folder came to its end, its last model included."""
        path = self.out / "log.jsonl"
        lines = read_log(path) if path.exists() else []
        return bool(lines) and lines[-1].get("reason") == FINISHED

    def finish(self, stopped: bool) -> None:
        """The last checkpoint, the last model, the report; a run that was stopped will go on, so it is not averaged."""
        if not self.step:
            return
        if self.saved < self.step:
            self.save()
        if self.settings.average > 1 and not stopped:
            self._average()
        self.save_model("last")
        early = f"no better {self.settings.metric} for {self.waited} validations"
        reason = "stopped" if stopped else FINISHED if self.step >= self.settings.steps else early
        self.note({"kind": "end", "step": self.step, "best": self.best, "reason": reason})
        if self.place.first:
            write_report(self.out)

    def _average(self) -> None:
        """Put the mean of the newest checkpoints into the network, and see how good that is."""
        found = sorted((self.out / "checkpoints").glob("step-*"))  # one that is newer was refused: it does not count
        paths = [path for path in found if path.name <= f"step-{self.step:08}"][-self.settings.average :]
        load_weights(self.network, average(paths))
        text = f"the last model is the mean of {len(paths)} checkpoints"
        self.note({"kind": "note", "step": self.step, "text": text, "average": len(paths)})
        self.validate()

    def close(self) -> None:
        """Let go of the folder, and of what the processes share."""
        if self.place.processes > 1:
            self.updater.spread = self.objective
            gc.collect()  # DDP that outlives the process group may wait for it forever
        if self.record is not None:
            self.record.close()
        self.folder.close()
