"""Everything one run holds, made from a recipe: data, network, optimizer, where it stands, and its folder."""

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
from clearhead.data import GlobalBatch, Loader, Position, prepare
from clearhead.errors import UserError
from clearhead.files import write_text
from clearhead.model import Network
from clearhead.model.cost import count_parameters
from clearhead.train import validate
from clearhead.train.cuda_graph import capture_steps
from clearhead.train.distributed import DistContext, apply_compile, precision, wrap_parallel
from clearhead.train.init_from import class_weights, init_network, tokenizers_for
from clearhead.train.lr_schedule import lr_at_step
from clearhead.train.objective import Objective
from clearhead.train.optimizer import build_optimizer, freeze
from clearhead.train.report import write_report
from clearhead.train.resume_check import comparable, differences, vocabulary
from clearhead.train.run_info import machine, mfu, model_card_of_run
from clearhead.train.run_log import RunLog, number, read_log
from clearhead.train.updater import Progress, Scaler, Updater

FINISHED = "finished"  # why a run ended that did all its steps
BROKEN_AT_MOST = 3  # updates in a row whose gradient was not finite, then training stops
Event = dict[str, Any]
Say = Callable[[str], None]
Watch = Callable[[Event], None]


class Run:
    """A run in its folder `out`; nothing is written there before the first step is done."""

    def __init__(self, recipe: Recipe, out: Path, place: DistContext, say: Say, watch: Watch):
        self.recipe, self.out, self.dist, self.watch = recipe, out, place, watch
        self.say: Say = say if place.is_main else lambda line: None
        settings = self.settings = recipe.train
        self.data = prepare(recipe.data, tokenizers_for(recipe), say=self.say)
        self.network = init_network(recipe, self.data)
        if settings.freeze:
            freeze(self.network, settings.freeze)
        dtype = precision(settings, place.device)
        self.network.to(place.device, torch.float64 if dtype == torch.float64 else torch.float32)
        weights = class_weights(recipe, self.data)
        self.objective = Objective(self.network, recipe.data, settings, weights).to(place.device).train()
        apply_compile(self.objective, settings, place)
        wrapped = wrap_parallel(self.objective, self.network, settings, place)
        scaler = Scaler() if dtype == torch.float16 else None
        adam = build_optimizer(self.network, settings)
        self.updater = Updater(self.objective, wrapped, adam, settings, place, dtype, scaler)
        self.update = capture_steps(self.updater).update
        self.step, self.position = 0, Position()
        self.best: float | None = None
        self.validations_since_best = 0  # validations since the best
        self.validation_pending = False  # it was due, and somebody asked to stop
        self.validation: Event = {}  # the newest
        self.saved = 0  # the step of the newest checkpoint
        self.extra_checkpoint: str | None = (
            None  # a checkpoint made by a stop, out of turn: it goes when the next one is there
        )
        self.grad_accum = settings.grad_accum
        self.nonfinite_steps = 0  # updates in a row that were left out
        self.progress = Progress()
        self.began = self.clock = time.perf_counter()
        self.item: GlobalBatch | None = None
        self.norm: Tensor | None = None
        self.unchecked: list[tuple[int, Tensor, GlobalBatch]] = []  # gradients that nobody has looked at yet
        self.run_log: RunLog | None = None
        self.folder, self.locked = contextlib.ExitStack(), False

    # Where the data stands

    def items(self) -> Iterator[GlobalBatch]:
        """This process's share of the global batches, from where the run stands."""
        data = self.recipe.data
        return iter(
            Loader(
                self.data.train,
                tokens=data.batch_tokens,
                seed=self.settings.seed,
                pool=data.bucket_size,
                position=self.position,
                rank=self.dist.rank,
                processes=self.dist.world_size,
                accumulation=self.grad_accum,
                workers=data.workers,
                pinned=self.dist.device.type == "cuda",
            )
        )

    @property
    def over(self) -> bool:
        """Whether nothing is left to learn: all steps are done, or patience is at its end."""
        patience = self.settings.patience
        return self.step >= self.settings.steps or (patience is not None and self.validations_since_best >= patience)

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return self.step % every == 0 or self.step == self.settings.steps

    # Learning

    def learn(self, item: GlobalBatch) -> bool:
        """One update; False when the memory did not suffice: then the same batch comes again in smaller parts."""
        try:
            norm = self.update(item.batches, self.step + 1, self.progress)
        except torch.OutOfMemoryError:
            self._smaller_parts(item)
            return False
        self.step, self.position, self.item, self.norm = self.step + 1, item.after, item, norm
        if self.run_log is None:
            self.begin(after=-1)
        # Asking a GPU means waiting for it, so there it is asked about a step when the next one is on its way.
        self.unchecked.append((self.step, norm, item))
        self.check_finite(behind=0 if self.dist.device.type == "cpu" else 1)
        return True

    def _smaller_parts(self, item: GlobalBatch) -> None:
        if self.dist.world_size > 1:
            raise UserError("out of memory; set train.grad_accum higher: several processes cannot change it midway")
        if len(item.plan.samples) <= self.grad_accum:
            raise UserError(
                "out of memory with one sample; lower data.max_length, or set train.activation_checkpointing=true"
            )
        self.updater.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.grad_accum *= 2
        text = f"out of memory: batches now come in {self.grad_accum} parts, which add up to the same update"
        self.note({"kind": "note", "step": self.step, "text": text})
        self.say(text)

    def check_finite(self, behind: int = 0) -> None:
        """Look at all gradients but the last few."""
        while len(self.unchecked) > behind:
            self._check_finite(*self.unchecked.pop(0))

    def _check_finite(self, step: int, norm: Tensor, item: GlobalBatch) -> None:
        """Nothing was learned where the gradient is not finite; too often in a row, there is no use in going on."""
        if self.updater.scaler is not None and self.updater.scaler.scale > 1:
            return  # fp16 overflows now and then, and its scale has been lowered
        if math.isfinite(float(norm)):
            self.nonfinite_steps = 0
            return
        self.nonfinite_steps += 1
        self.note({"kind": "note", "step": step, "text": "the gradient is not finite; this update was left out"})
        self.say(f"step {step}: the gradient is not finite; this update was left out")
        if self.nonfinite_steps >= BROKEN_AT_MOST:
            file = self.out / f"broken-step-{step}-rank-{self.dist.rank}.safetensors"
            tensors = {f"{n}.{name}": x for n, batch in enumerate(item.batches) for name, x in batch.tensors.items()}
            save_tensors(file, tensors)
            raise UserError(
                f"step {step}: the gradient was not finite {self.nonfinite_steps} times in a row; the batch is in {file}; "
                "lower train.lr, raise train.warmup, or set train.precision=fp32"
            )

    # Watching

    def note(self, event: Event) -> None:
        """Write an event to the log and show it."""
        if not self.dist.is_main:
            return
        if self.run_log is not None:
            self.run_log.write(**event)
        self.watch(event)

    def log(self) -> None:
        """What happened since the last line of the log."""
        assert self.item is not None
        assert self.norm is not None
        seconds = max(time.perf_counter() - self.clock, 1e-9)
        tokens = float(self.dist.sum(torch.tensor([float(self.progress.tokens)], dtype=torch.float64))[0]) / seconds
        event: Event = {
            "kind": "step",
            "step": self.step,
            "epoch": self.item.plan.epoch,
            **self.progress.means(self.dist),
            "lr": lr_at_step(self.settings, self.step, self.settings.steps),
            "norm": float(self.norm),
            "tokens_per_second": tokens,
            "seconds": time.perf_counter() - self.began,
        }
        if share := mfu(self.network, self.recipe.data.max_length, tokens, self.dist):
            event["mfu"] = share
        self.note(event)
        self.progress, self.clock = Progress(), time.perf_counter()

    def validate(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Losses and scores on held-out data; keeps the model if it is the best so far."""
        if self.data.valid is None:
            return
        began = time.perf_counter()
        numbers: Event = dict(
            validate.losses(self.objective, self.data.valid, self.recipe.data, self.dist, self.updater.dtype, stopped)
        )
        self.validation_pending = not numbers
        if self.validation_pending:
            return  # asked to stop
        samples: list[validate.Sample] = []
        whole = self._whole()
        if whole is not None:
            found, samples = validate.scores(whole, self.data, self.settings, self.dist, self.updater.dtype)
            numbers |= found
        self.clock += time.perf_counter() - began
        seconds = time.perf_counter() - self.began
        self.validation = {"kind": "validation", "step": self.step, **numbers, "samples": samples, "seconds": seconds}
        self.note(self.validation)
        metric = self.settings.metric
        value = numbers[metric] if self.dist.is_main else 0.0  # only the first process has written anything
        value = float(self.dist.sum(torch.tensor([value], dtype=torch.float64))[0])
        if validate.better(metric, value, self.best):
            self.best, self.validations_since_best = value, 0
            self.save_model("best")
        else:
            self.validations_since_best += 1

    def _whole(self) -> Network | None:
        """On the first process, a network that can be called piece by piece: sharded weights are put together."""
        if self.dist.world_size == 1 or self.settings.parallel == "ddp":
            return self.network if self.dist.is_main else None
        weights = gather_weights(self.network)
        return with_weights(self.network.config, weights).to(self.dist.device) if self.dist.is_main else None

    # Keeping

    def begin(self, after: int) -> None:
        """Say in the folder what it is for; called when there is something to keep, or to go on with.

        Lines of the log that are later than `after` are from a life that left no checkpoint behind.
        """
        self.run_log = RunLog(self.out)
        if not self.dist.is_main:
            return
        self._lock()
        self.run_log.rewind(after, self.validation_pending)
        write_text(self.out / "recipe.yaml", dump_recipe(self.recipe))
        facts = {"parameters": count_parameters(self.network), "steps": self.settings.steps, **machine(self.dist)}
        self.note({"kind": "start", "step": max(after, 0), **facts})

    def _lock(self) -> None:
        """Take the folder for this run alone, until `close`."""
        if self.dist.is_main and not self.locked:
            self.folder.enter_context(run_lock(self.out))
            self.locked = True

    def save(self) -> None:
        """A checkpoint of everything that the rest of the run depends on."""
        self.check_finite()
        weights, moments = gather(self.network, self.updater.optimizer)
        scaler, progress = self.updater.scaler, self.progress.totals(self.dist)
        if self.dist.is_main:
            numbers = {
                "position": list(self.position),
                "progress": {name: list(map(number, sums)) for name, sums in progress.items()},
                "best": self.best,
                "waited": self.validations_since_best,
                "validation_pending": self.validation_pending,
                "doubled": self.grad_accum // self.settings.grad_accum,
                "scaler": [scaler.scale, scaler.steps] if scaler else None,
                "recipe": comparable(self.recipe),
                "vocabulary": vocabulary(self.data),
                "stray": self.extra_checkpoint,
            }
            stray = self.out / "checkpoints" / (self.extra_checkpoint or "none")
            extra = stray.exists() + (not self.due(self.settings.save_every))  # keep as many as if none had stopped us
            save_state(self.out, self.step, weights, moments, numbers, self.settings.keep_checkpoints + extra)
            if stray.exists():
                discard_state(stray)
        self.dist.barrier()
        self.saved = self.step

    def save_model(self, name: str) -> None:
        """The network as a model folder in the run folder."""
        weights = gather_weights(self.network)
        if not self.dist.is_main:
            return
        whole = with_weights(self.network.config, weights)
        data = self.recipe.data.model_dump(mode="json")
        extra = {"task": self.recipe.data.task, "labels": list(self.data.labels), "step": self.step, "data": data}
        scores = self.validation if self.validation.get("step") == self.step else {}
        card = model_card_of_run(self.out.name, self.recipe, self.step, scores)
        save_model(self.out / name, whole, self.data.tokenizers, extra, card)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one; refuse where the recipe became another."""
        if not (self.out / "checkpoints").is_dir():
            return
        self._lock()
        self.dist.barrier()
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
        scatter(self.network, self.updater.optimizer, state.weights(), state.optimizer())
        self.step = self.saved = state.step
        self.position = Position(*state.numbers["position"])
        self.best, self.validations_since_best = state.numbers["best"], state.numbers["waited"]
        self.validation_pending = state.numbers["validation_pending"]
        self.extra_checkpoint = state.numbers["stray"] if self.due(self.settings.save_every) else state.folder.name
        self.grad_accum = self.settings.grad_accum * state.numbers["doubled"]
        if self.dist.is_main:
            for name, sums in state.numbers["progress"].items():
                known = [math.nan if each is None else each for each in sums]
                self.progress.sums[name] = torch.tensor(known, dtype=torch.float64, device=self.dist.device)
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
        if self.settings.average_checkpoints > 1 and not stopped:
            self._average()
        self.save_model("last")
        early = f"no better {self.settings.metric} for {self.validations_since_best} validations"
        reason = "stopped" if stopped else FINISHED if self.step >= self.settings.steps else early
        self.note({"kind": "end", "step": self.step, "best": self.best, "reason": reason})
        if self.dist.is_main:
            write_report(self.out)

    def _average(self) -> None:
        """Put the mean of the newest checkpoints into the network, and see how good that is."""
        found = sorted((self.out / "checkpoints").glob("step-*"))  # one that is newer was refused: it does not count
        paths = [path for path in found if path.name <= f"step-{self.step:08}"][-self.settings.average_checkpoints :]
        load_weights(self.network, average(paths))
        text = f"the last model is the mean of {len(paths)} checkpoints"
        self.note({"kind": "note", "step": self.step, "text": text, "average": len(paths)})
        self.validate()

    def close(self) -> None:
        """Let go of the folder, and of what the processes share."""
        if self.dist.world_size > 1:
            self.updater.parallel_objective = self.objective
            gc.collect()  # DDP that outlives the process group may wait for it forever
        if self.run_log is not None:
            self.run_log.close()
        self.folder.close()
