"""What a few steps spend their time on."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainer import Callback, DDPTrainer

_log = logging.getLogger("callbacks")


class Profiler(Callback):
    """Traces `steps` optimizer steps of rank 0, the one numbered `first` (from 1) and those after it.

    Writes ``steps-00000010-00000014.pt.trace.json`` into `folder`, which is made if need be: to be opened in ui.perfetto.dev or
    chrome://tracing, or with ``tensorboard --logdir folder`` and its plugin torch-tb-profiler. Each step stands in it as
    ``ProfilerStep#10``, from the fetch of its first batch to its update and report; an evaluation between two of them is in the
    trace as well. Operators on the CPU and, if there is a GPU, its kernels, which are warmed up during the step before.

    Outside those steps it does nothing. A run that ends among them writes what there is; one that ends, or is resumed, where the
    trace cannot begin, says so in one line of the log. Choose steps after the first few, which are slower than the others.

    Raises TypeError or ValueError for arguments out of range; at the first step traced RuntimeError if another profiler of torch
    is running.
    """

    def __init__(self, folder: str | os.PathLike[str], first: int = 10, steps: int = 5) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"folder must be the path of a folder; found {folder!r}")
        for name, value in (("first", first), ("steps", steps)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, a number of steps; found {value!r} ({type(value).__name__})")
            if value < 1:
                raise ValueError(f"{name} must be 1 or more; found {value}")
        self.folder = Path(folder)
        self._first, self._last = first, first + steps - 1
        self._profile: profile | None = None
        self._is_tracing = False
        self._marker: Any = None

    def before_fit(self, trainer: DDPTrainer) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"Profiler: {self.folder} is a file; give it a folder, to be made if need be")

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        if trainer.state.step >= self._first:
            _log.warning("Profiler: nothing is traced: the run goes on after step %d", trainer.state.step)
        self._advance(trainer)

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if self._is_tracing:
            self._end_step()
            if trainer.state.step == self._last:
                self._finish(self._last)

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        self._advance(trainer)

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        if self._is_tracing or self._profile is not None or trainer.state.step < self._first:
            _log.warning("Profiler: the run ended at step %d, before the last step to be traced", trainer.state.step)
        self._finish(trainer.state.step)

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        self._finish(trainer.state.step)

    def _advance(self, trainer: DDPTrainer) -> None:
        """Between two steps: warm up, begin to trace, or begin the next step of the trace."""
        step = trainer.state.step
        if trainer.finished or trainer.state.stop_reason is not None:
            return
        if self._profile is None and step in (self._first - 2, self._first - 1):
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            prepared = profile(activities=activities)
            prepared.prepare_trace()
            self._profile = prepared  # only now may it be ended: torch crashes otherwise
        if step == self._first - 1 and self._profile is not None and not self._is_tracing:
            self._profile.start_trace()
            self._is_tracing = True
        if self._is_tracing and self._marker is None:
            self._marker = record_function(f"ProfilerStep#{step + 1}")
            self._marker.__enter__()

    def _end_step(self) -> None:
        if self._marker is not None:
            self._marker.__exit__(None, None, None)
            self._marker = None

    def _finish(self, step: int) -> None:
        """Stop, and write what was traced, whole or not at all."""
        self._end_step()
        done, is_tracing = self._profile, self._is_tracing
        self._profile, self._is_tracing = None, False
        if done is None:
            return
        if not is_tracing:  # only warmed up, which has no end of its own
            done.start_trace()
        done.stop_trace()
        if not is_tracing:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"steps-{self._first:08d}-{max(step, self._first):08d}.pt.trace.json"
        unfinished = path.with_name(f"{path.name}.tmp")
        done.export_chrome_trace(str(unfinished))
        os.replace(unfinished, path)
