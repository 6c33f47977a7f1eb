"""Checkpoints: every so many steps or epochs, the last few, and the best."""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainer import Callback, CheckpointFolder, DDPTrainer

_log = logging.getLogger("callbacks")


class Checkpoint(Callback):
    """Writes ``step-00000042.pt`` into `folder` on rank 0, whole or not at all; `fit(resume_from=folder)` continues from it.

    A file is due every `every_steps` optimizer steps, every `every_epochs` epochs, once `every_minutes` have passed since the
    last one (the conditions add up; None switches one off), and always after the last step of a run. The newest `keep_last`
    files stay; an older one goes only after the new one is safe.

    With `monitor`, a key of the evaluation, the best one so far is kept as ``best.pt`` besides, written after the evaluation that
    reached it. `mode`: "min" or "max". Ties and NaN are not better. Trained parameters that are not finite are never saved.

    With `async_write` training waits only for a copy of the state in host memory, as large as the file; a thread writes it, one
    at a time, and `fit` returns when the last one is safe. A write that failed (OSError) is raised at the next step;
    with ``on_error="warn"`` it is logged, and the run goes on to the next save.

    While `fit` runs, the folder is locked against other jobs.

    Several may serve one run, each with a folder and a name of its own: say, the last few and every thousandth step.

    Raises TypeError or ValueError for arguments out of range, and TypeError after the first step for a state that could not be
    saved; at the start of `fit`, before any callback has written anything, FileExistsError when the folder already holds
    checkpoints of another run, and ValueError for a `monitor` without eval_data; CheckpointError when another job still holds the
    folder after 30 s.
    """

    def __init__(
        self,
        folder: str | Path,
        every_steps: int | None = None,
        every_epochs: int | None = 1,
        every_minutes: float | None = None,
        keep_last: int = 3,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        async_write: bool = True,
        on_error: Literal["stop", "warn"] = "stop",
    ) -> None:
        _check_counts(every_steps=every_steps, every_epochs=every_epochs, keep_last=keep_last)
        _check_others(folder, every_minutes, monitor, mode, async_write, on_error)
        self._files = CheckpointFolder(folder)
        self._async_write = async_write
        self._on_error = on_error
        self._written_for: weakref.ref[DDPTrainer] | None = None
        self._every_steps = every_steps
        self._every_epochs = every_epochs
        self._every_seconds = math.inf if every_minutes is None else 60 * every_minutes
        self._saved_at = 0.0
        self._keep_last = keep_last
        self._monitor = monitor
        self._mode = mode
        self._sign = 1.0 if mode == "min" else -1.0
        # Times the sign, so that less is better: the best so far, what best.pt holds, and what is to be written as that next.
        self._best = self._best_on_disk = self._new_best = math.inf
        self._monitored_another = False
        self._warned = False
        self._has_evaluated = self._made_folder = self._is_checked = False
        self._run = ""  # where several serve one run: by which the files of that run are known

    @property
    def folder(self) -> Path:
        """Where the checkpoints are kept."""
        return self._files.folder

    @property
    def best_path(self) -> Path:
        """Where the best checkpoint is kept: ``best.pt`` in the folder. Once `fit` has started, rank 0's on every rank."""
        return self._files.folder / "best.pt"

    def before_fit(self, trainer: DDPTrainer) -> None:
        self._files.folder = self.folder.absolute()  # the script may go elsewhere, while a thread writes
        if self._monitor is not None and not trainer.eval_sets:
            raise ValueError(f"Checkpoint monitors {self._monitor!r} of an evaluation: pass eval_data to the trainer")
        if trainer.scheduler is not None:
            try:
                trainer.scheduler.state_dict()
            except Exception as error:  # LambdaLR takes any callable, but saves only what has a __dict__
                kind = type(trainer.scheduler).__name__
                raise TypeError(f"Checkpoint cannot save the scheduler: {kind}.state_dict() failed: {error}") from error
        self._check_folder(trainer)
        self._made_folder = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files.lock()  # here, before another callback touches what belongs to the job that holds it
        self._check_folder(trainer)  # again: another job may have written until now

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        self._files.sweep()
        fresh = trainer.state.samples == 0 and not self._has_written(trainer)  # and no step file is there
        if fresh:  # it may have watched another run before
            self._best = self._best_on_disk = math.inf
        if self._monitor is not None and self.best_path.exists():
            if fresh:
                self._move_best_aside("an earlier run, and this one starts afresh")
            elif self._monitored_another and not trainer.finished:
                self._move_best_aside("another metric")
        self._monitored_another = False
        self._saved_at = time.monotonic()
        self._new_best = math.inf
        self._has_evaluated = trainer.finished  # then no evaluation is to come
        self._is_checked = False

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if self._monitor is None:
            return
        if self._monitor not in metrics:
            raise ValueError(
                f"Checkpoint monitors {self._monitor!r}, which is no key of the evaluation: it has "
                f"{', '.join(map(repr, metrics))}"
            )
        value = self._sign * metrics[self._monitor]
        if math.isnan(value) and not self._warned:
            _log.warning("Checkpoint: %s is NaN at step %d, which is never the best", self._monitor, trainer.state.step)
            self._warned = True
        self._has_evaluated = True
        if value < self._best:
            self._best = self._new_best = value

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        self._tolerate(self._files.raise_error)
        state = trainer.state
        due = (
            state.stop_reason is not None
            or trainer.finished
            or (self._every_steps is not None and state.step % self._every_steps == 0)
            or (self._every_epochs is not None and state.epoch_samples == 0 and state.epoch % self._every_epochs == 0)
            or time.monotonic() - self._saved_at >= self._every_seconds
        )
        if not self._is_checked:  # after the first step, and not when the first file is due
            self._files.check(trainer.state_dict())
            self._is_checked = True
        is_best = self._new_best < math.inf
        if not due and not is_best:
            return
        # best.pt first: a step file that knows of a best evaluation must never be there without it
        names = ["best.pt"] * is_best + [f"step-{state.step:08d}.pt"] * due
        self._tolerate(lambda: self._save(names, trainer))
        if due:
            self._saved_at = time.monotonic()

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        self._end()
        if self._monitor is not None and not self._has_evaluated and trainer.state.stop_reason is None:
            _log.warning("Checkpoint: the run ended without an evaluation, so there is no new best.pt; look at eval_every")

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        self._end()
        if self._made_folder:
            with suppress(OSError):  # it is not empty, and stays
                self.folder.rmdir()

    def for_other_ranks(self) -> dict[str, Any]:
        return {"_files": CheckpointFolder(self.folder)}  # so that best_path is the same everywhere

    def _end(self) -> None:
        try:
            self._tolerate(self._files.wait)
        finally:
            self._files.unlock()

    def state_dict(self) -> dict[str, Any]:
        own = {"run": self._run} if self._run else {}
        return {"monitor": self._monitor, "mode": self._mode, "best": self._best} | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = (state.get("monitor", self._monitor), state.get("mode", self._mode))
        self._monitored_another = saved != (self._monitor, self._mode)  # whose best is not this one's
        self._best = self._best_on_disk = math.inf if self._monitored_another else state["best"]
        self._run = state.get("run", "")

    def _check_folder(self, trainer: DDPTrainer) -> None:
        """FileExistsError when the folder holds checkpoints of a run that this one does not continue."""
        found, step, begun = self._files.steps(), trainer.state.step, trainer.state.samples > 0
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"Checkpoint: {self.folder} is a file; give it a folder, to be made if need be")
        if not found and not self._has_written(trainer):
            several = sum(isinstance(callback, Checkpoint) for callback in trainer.callbacks) > 1
            self._run = uuid.uuid4().hex if several else ""  # of one alone a resume finds the file that it goes on from
        if not found or self._has_written(trainer) or (begun and (self._is_own() or self._files.holds(step, trainer.model))):
            return
        words = f"a run that goes on from step {step} of another folder" if begun else "a new run"
        raise FileExistsError(
            f"{self._files.folder} already holds checkpoints of a run (up to step {max(found)}), and this is {words}: continue "
            f"that one with fit(resume_from={str(self._files.folder)!r}), or give this one another folder"
        )

    def _is_own(self) -> bool:
        """Whether the folder's files are of the run that is resumed, perhaps from a file that another `Checkpoint` wrote."""
        own = self._files.callback_states().get(self.name)
        return bool(self._run) and isinstance(own, Mapping) and own.get("run") == self._run

    def _has_written(self, trainer: DDPTrainer) -> bool:
        return self._written_for is not None and self._written_for() is trainer

    def _move_best_aside(self, whose: str) -> None:
        """A kill may have left it before the run's first step file; or it is all that was kept of another run, or metric."""
        number = 1
        while (aside := self.folder / f"best-{number}.pt").exists():
            number += 1
        self.best_path.rename(aside)
        _log.warning("%s is of %s; moved it to %s", self.best_path, whose, aside)

    def _save(self, names: list[str], trainer: DDPTrainer) -> None:
        if self._async_write:
            self._tolerate(self._files.wait)  # for the file before; if that failed, this one is written all the same
        step, best = trainer.state.step, self._best
        self._new_best = math.inf  # if this one fails, it is forgotten
        parameters = [key for key, value in self._files.parameters(trainer.model).items() if value.requires_grad]

        def write(content: Mapping[str, Any]) -> None:
            if not _all_finite([content["model"][name] for name in parameters if name in content["model"]]):
                _log.error("Checkpoint: nothing is saved at step %d, where parameters are not finite", step)
                return
            for name in names:
                self._files.write(name, content)
                if name == "best.pt":
                    self._best_on_disk = best
            self._retire(step)

        self._written_for = weakref.ref(trainer)
        if self._async_write:
            self._files.write_behind(trainer.state_dict(), write)
        else:
            write(trainer.state_dict())

    def _retire(self, newest: int) -> None:
        """Remove what is older than the last few, and what a run that was abandoned for this one had written beyond it."""
        steps = self._files.steps()
        current = [step for step in steps if step <= newest]
        for step in set(steps) - set(current[-self._keep_last :]):
            steps[step].unlink(missing_ok=True)

    def _tolerate(self, action: Callable[[], None]) -> None:
        """Run what may find that a file could not be written; that ends the run, or is logged."""
        try:
            action()
        except OSError as error:
            if self._on_error == "stop":
                raise
            self._best = min(self._best_on_disk, self._new_best)  # so that the next better one is written
            _log.warning("Checkpoint: the run goes on without a file that could not be written: %s", error)


def _all_finite(parameters: list[Tensor]) -> bool:
    """Whether all their numbers are. A sum is ten times as fast as looking at each number, and hides none that is not."""
    if not parameters or torch.stack([parameter.detach().sum().isfinite() for parameter in parameters]).all():
        return True
    return all(bool(parameter.isfinite().all()) for parameter in parameters)  # a sum of finite numbers may overflow


def _check_counts(**counts: Any) -> None:
    """TypeError or ValueError for what is no count; None switches off what may be switched off."""
    for name, value in counts.items():
        if value is None and name != "keep_last":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int; found {value!r} ({type(value).__name__})")
        if value < 1:
            raise ValueError(f"{name} must be 1 or more; found {value}")


def _check_others(folder: Any, minutes: Any, monitor: Any, mode: Any, async_write: Any, on_error: Any) -> None:
    """TypeError or ValueError naming the first argument that cannot be."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"folder must be the path of a folder; found {folder!r}")
    if isinstance(minutes, bool) or not isinstance(minutes, float | int | None):
        raise TypeError(f"every_minutes must be a number; found {minutes!r} ({type(minutes).__name__})")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"every_minutes must be above 0; found {minutes}")
    if not isinstance(monitor, str | None):
        raise TypeError(f"monitor must be a key of the evaluation or None; found {monitor!r}")
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max'; found {mode!r}")
    if not isinstance(async_write, bool):
        raise TypeError(f"async_write must be True or False; found {async_write!r} ({type(async_write).__name__})")
    if on_error not in ("stop", "warn"):
        raise ValueError(f"on_error must be 'stop' or 'warn'; found {on_error!r}")
