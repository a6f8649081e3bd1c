"""The training loop, for every objective, in one process or several, resumable at any update."""

import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, send_to_device, set_seed
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lineardiff.bench import describe_machine
from lineardiff.data.sampling import EpochBatches
from lineardiff.device import ignore_interrupts, iterate
from lineardiff.runs.checkpoint import load_checkpoint
from lineardiff.runs.run import RunWriter
from lineardiff.train.interrupt import StopRequest, TrainingInterrupted, stop_on_signal
from lineardiff.train.logs import Progress, Throughput
from lineardiff.train.setup import (
    build_accelerator,
    build_optimizer,
    build_scheduler,
    enable_grad_checkpointing,
)
from lineardiff.train.task import Task

_logger = logging.getLogger("lineardiff")

Result = TypeVar("Result")


def train(
    task: Task, *, output: str | Path, resume: bool = True, accept_changed_data: bool = False
) -> dict[str, Any]:
    """Train `task.model` with `task.recipe`, or resume an earlier call with the same output.

    Runs on what Accelerate finds: the CPU, a GPU, or several processes under torchrun or `accelerate launch`, which
    must share a file system. Every random number is a function of (seed, step, rank), so a run that is killed at any
    moment and rerun produces the same train.csv and the same weights, bit for bit on the CPU, and on a GPU as far as
    its kernels are deterministic (`torch.use_deterministic_algorithms`).

    Args:
        task: What to train, and how: the loop reads the fields of `TrainingRecipe`, the task the others. Its model is
            moved to the device and trained in place.
        output: Folder of the run, see :mod:`lineardiff.runs.run`. In train.csv, loss is the mean since the previous
            row and grad_norm that of the update, before clipping. The result is the averaged weights if the recipe
            asks for an EMA.
        resume: Resume from the newest intact checkpoint in `output`; if False, refuse an output that holds one.
        accept_changed_data: Resume even if images were added, removed or replaced since.

    Returns:
        The content of summary.json, in every process. Its `images_per_second` is the median over the rows of
        train.csv, of all processes together, without the time of validating and saving.

    Raises:
        ValueError: The recipe cannot run here; the output holds a run of another recipe or of other data, or only
            damaged checkpoints; or another training is using it.
        FloatingPointError: The loss or the gradient is no longer finite.
        OSError: The disk is full; earlier checkpoints are intact.
        TrainingInterrupted: SIGINT or SIGTERM, after a checkpoint was written. One process stops after the current
            update, several at the next row of train.csv.
    """
    loop = _Loop(task, RunWriter(Path(output)))
    with loop.unlock:
        loop.restore(resume=resume, accept_changed_data=accept_changed_data)
        with stop_on_signal() as request:
            loop.run(request)
        return loop.finish()


class _Loop:
    def __init__(self, task: Task, folder: RunWriter) -> None:
        recipe = task.recipe
        self.recipe, self.task, self.folder = recipe, task, folder
        self.started = time.monotonic()
        self.unlock = ExitStack()
        self.accelerator = build_accelerator(recipe)
        self.main = self.accelerator.is_main_process
        self.network = task.model.to(self.accelerator.device)
        self.averaged = ModelEmaV3(self.network, decay=recipe.ema_decay) if recipe.ema_decay else None
        if recipe.grad_checkpointing:
            enable_grad_checkpointing(recipe, self.network)
        optimizer = build_optimizer(recipe, self.network)
        self.model, self.optimizer = self.accelerator.prepare(self.network, optimizer)

        self.batches = partial(
            EpochBatches,
            len(task.train_data),  # type: ignore[arg-type]
            batch_size=recipe.batch_size,
            seed=recipe.seed,
            repeats=task.repeats,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )
        self.steps_per_epoch = self.batches(total_steps=0).steps_per_epoch
        self.total_steps = recipe.total_steps(self.steps_per_epoch)
        self.scheduler = build_scheduler(recipe, optimizer, steps_per_epoch=self.steps_per_epoch)

        self.step = 0  # updates done
        self.recent: list[Tensor] = []  # (loss, norm of the gradient) of the updates since the last row
        self.seconds_before = 0.0
        self.throughput = Throughput()

    @property
    def loader(self) -> DataLoader[list[Any]]:
        """Batches from `step` on."""
        return DataLoader(
            self.task.train_data,
            batch_sampler=self.batches(start_step=self.step, total_steps=self.total_steps),
            collate_fn=partial(_collate_parts, self.task.collate, self.recipe.accumulate),
            num_workers=self.recipe.workers,
            worker_init_fn=ignore_interrupts,
            pin_memory=self.accelerator.device.type == "cuda",
        )

    def run(self, request: StopRequest) -> None:
        progress = Progress(
            step=self.step, total_steps=self.total_steps, shown=self.main, name=self.recipe.name
        )
        batches = self._batches(request)
        try:
            for parts in batches:
                self._update(parts)
                progress.update()
                last = self.step == self.total_steps
                if last or self.step % self.recipe.log_every == 0:
                    self._log(progress)
                with self.throughput.pause():
                    if last or self.step % (self.recipe.validate_every * self.steps_per_epoch) == 0:
                        self._validate(progress)
                    stop = not last and self._stop_agreed(request)
                    if last or stop or self.step % self.recipe.checkpoint_every == 0:
                        self._save()
                if stop:
                    raise self._interrupted()
            # Someone may have deleted a damaged table of a finished run.
            if self._on_main(lambda: not self.folder.validation.rows):
                self._validate(progress)
        except RuntimeError as error:
            if request.made and "DataLoader worker" in str(error):
                raise self._interrupted() from None
            raise
        finally:
            batches.close()
            progress.close()
            if self.main:
                self.folder.close()

    def _batches(self, request: StopRequest) -> Generator[list[Any], None, None]:
        """Yield the batches from `step` on; if the signal that asks to stop kills the loader, save before failing."""
        try:
            yield from iterate(self.loader)
        except RuntimeError:
            if (
                request.made and self.accelerator.num_processes == 1
            ):  # several cannot agree on a step any more
                self._save()
            raise

    def _interrupted(self) -> TrainingInterrupted:
        return TrainingInterrupted(
            f"stopped after step {self.step} of {self.total_steps}; rerun the command to resume {self.folder.path}"
        )

    def _update(self, parts: list[Any]) -> None:
        accelerator = self.accelerator
        set_seed(_seed_of(self.recipe.seed, self.step, accelerator.process_index))
        self.scheduler.step_update(self.step)
        self.model.train()
        loss = torch.zeros((), device=accelerator.device)
        for part in parts:
            batch = send_to_device(part, accelerator.device, non_blocking=True)
            with accelerator.accumulate(self.model):
                part_loss = self.task.loss(self.model, batch)
                accelerator.backward(part_loss)
                loss += part_loss.detach() / len(parts)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(
                        self.network.parameters(), self.recipe.clip_grad or math.inf
                    )
                self.optimizer.step()
                self.optimizer.zero_grad()
        # fp16 skips an update whose gradient overflowed; the average then has nothing to add.
        if self.averaged is not None and not self.optimizer.step_was_skipped:
            self.averaged.update(self.network)
        self.step += 1
        # Left on the device: reading a number waits for the device, and is done for all of them at once in
        # _read.
        self.recent.append(torch.stack([accelerator.reduce(loss, "mean"), norm]))

    def _read(self) -> list[list[float]]:
        """The (loss, gradient norm) of the recent updates as numbers, after checking that they are finite."""
        numbers = torch.stack(self.recent).tolist() if self.recent else []
        overflow_is_handled = self.accelerator.scaler is not None
        for step, (loss, norm) in enumerate(numbers, start=self.step - len(numbers) + 1):
            if not math.isfinite(loss) or not (math.isfinite(norm) or overflow_is_handled):
                raise FloatingPointError(
                    f"step {step}: the loss is {loss} and the norm of the gradient {norm}. Try a lower "
                    "learning_rate, a longer warmup_epochs, clip_grad=1.0 or another precision. The checkpoints in "
                    f"{self.folder.path} are from before."
                )
        return numbers

    def _log(self, progress: Progress) -> None:
        numbers = self._read()
        self.recent = []
        self.throughput.lap(len(numbers) * self.recipe.batch_size)
        if not self.main:
            return
        row = {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "learning_rate": max(group["lr"] for group in self.optimizer.param_groups),
            "loss": sum(loss for loss, _ in numbers) / len(numbers),
            "grad_norm": numbers[-1][1],
        }
        self.folder.train.append(row)
        speed = self.throughput.laps[-1]
        curves = {name: row[name] for name in ("learning_rate", "loss", "grad_norm")}
        self.folder.plot("train", {**curves, "images_per_second": speed}, step=self.step)
        progress.report(loss=row["loss"], images_per_second=speed)

    def _validate(self, progress: Progress) -> None:
        self._read()
        self.network.eval()
        metrics = self.task.validate(self.network)
        if self.averaged is not None:
            averaged = self.task.validate(self.averaged.module)
            metrics |= {f"ema_{name}": value for name, value in averaged.items()}
        if not self.main:
            return
        epoch = self.step / self.steps_per_epoch
        picture = self.task.picture(self._result())
        if picture is not None:
            self.folder.show(picture, step=self.step)
        self.folder.validation.append({"step": self.step, "epoch": epoch, **metrics})
        self.folder.plot("validation", metrics, step=self.step)
        progress.say(f"epoch {epoch:g}: " + ", ".join(f"{name} {v:.4g}" for name, v in metrics.items()))

    def _stop_agreed(self, request: StopRequest) -> bool:
        if self.accelerator.num_processes == 1:
            return request.made
        # All processes stop at the same step or none; asking waits for the device, so ask where _log waited
        # anyway.
        if self.step % self.recipe.log_every:
            return False
        asked = torch.tensor(float(request.made), device=self.accelerator.device)
        return self.accelerator.reduce(asked, "sum").item() > 0

    def _weights(self) -> dict[str, nn.Module]:
        return {"model": self.network} | ({"ema": self.averaged.module} if self.averaged is not None else {})

    def _result(self) -> nn.Module:
        return self.network if self.averaged is None else self.averaged.module

    def _save(self) -> None:
        self._read()
        if not self.main:
            return
        scaler = self.accelerator.scaler
        state = {
            "step": self.step,
            "processes": self.accelerator.num_processes,
            "optimizer": self.optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "recent": [row.cpu() for row in self.recent],
            "laps": self.throughput.laps,
            "seconds": self._seconds(),
        }
        self.folder.save_checkpoint(self.step, weights=self._weights(), state=state)

    def restore(self, *, resume: bool, accept_changed_data: bool) -> None:
        """Lock the folder and load the newest checkpoint, the same one in every process."""
        data: dict[str, Any] = {}

        def find() -> Path | None:
            self.unlock.enter_context(self.folder.lock())
            data.update(self.task.data_record())
            return self.folder.resume_point(
                self.recipe, data, resume=resume, accept_changed_data=accept_changed_data
            )

        checkpoint = self._on_main(find)
        if checkpoint is not None:
            if self.main:
                _logger.info("resuming the run in %s from %s", self.folder.path, checkpoint.name)
            state = load_checkpoint(checkpoint, weights=self._weights())
            try:
                self._load(state)
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise ValueError(
                    f"{checkpoint}/state.pt does not hold the state of this run ({error!r}). Restore it from a copy, "
                    "or choose another output folder."
                ) from error
        config = {**self.task.config(), "weights": self._kind()}
        self._on_main(lambda: self.folder.open(self.recipe, config=config, data=data, step=self.step))

    def _load(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.optimizer.load_state_dict(state["optimizer"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.recent = [row.to(self.accelerator.device) for row in state["recent"]]
        self.throughput = Throughput(state["laps"])
        self.seconds_before = state["seconds"]
        if state["processes"] != self.accelerator.num_processes:
            _logger.warning(
                "The run was started with %d processes and is resumed with %d: sums are rounded differently, Mixup "
                "draws other numbers, and the curve is not the same bit for bit.",
                state["processes"],
                self.accelerator.num_processes,
            )

    def _on_main(self, work: Callable[[], Result]) -> Result:
        """Return in every process what `work` returned in the main one; raise its error in all of them."""
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = work()
            except Exception as error:
                outcome[1] = error
        if self.accelerator.num_processes > 1:
            broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _kind(self) -> str:
        return "ema" if self.averaged is not None else "model"

    def finish(self) -> dict[str, Any]:
        """Write the result and return the summary."""

        def write() -> dict[str, Any]:
            last = self.folder.validation.rows[-1]
            summary = {
                "recipe": self.recipe.name,
                "model": self.recipe.model,
                **{name: float(value) for name, value in last.items() if name not in ("step", "epoch")},
                "weights": self._kind(),
                "parameters": sum(p.numel() for p in self.network.parameters()),
                "steps": self.step,
                "images_per_second": self.throughput.median(),
                "seconds": self._seconds(),
                "processes": self.accelerator.num_processes,
                "device": self.accelerator.device.type,
                "precision": self.recipe.precision,
                "machine": describe_machine(),
            }
            self.folder.write_result(self._result(), export=self.task.export, summary=summary)
            files = "model.safetensors, config.json, summary.json, train.csv, validation.csv and tensorboard/"
            _logger.info("%s holds %s.", self.folder.path, files)
            return summary

        return self._on_main(write)


def _collate_parts(collate: Callable[[list[Any]], Any], accumulate: int, samples: list[Any]) -> list[Any]:
    size = len(samples) // accumulate
    return [collate(samples[first : first + size]) for first in range(0, len(samples), size)]


def _seed_of(seed: int, step: int, rank: int) -> int:
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0])
