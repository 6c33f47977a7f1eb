"""What a run is, before it; what came of it, after."""

from __future__ import annotations

import copy
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from tqdm import tqdm

from trainer import Callback, DDPTrainer, TrainerState


class Summary(Callback):
    """Shows on stderr, from rank 0, a few lines when `fit` starts and when it ends; after an error none at its end.

    At the start: processes and device, and whether the run starts afresh or resumes; the global batch and what makes it, the
    steps; the parameters, and precision and compilation that are not the default; where those callbacks write that have an
    attribute ``folder`` or ``path``.

    At the end: steps and epochs of this `fit` and of the whole run, the time this `fit` took and the samples it trained on per
    second of that time, evaluations and saves included; the most memory that rank 0 has held, of its GPU or else of its process;
    if there were evaluations, the best value of `monitor` and the last.

    - `monitor`: a key of the evaluation; with several evaluation sets ``name/key``. An unknown one is a ValueError at the
      first evaluation. None: the first key of the first evaluation.
    - `mode`: "min" when smaller is better, "max" when larger is.

    A tie is not better, and NaN never is. The best value and the last are part of a checkpoint.

    Raises TypeError and ValueError for unusable arguments.
    """

    def __init__(self, monitor: str | None = None, mode: Literal["min", "max"] = "min") -> None:
        if monitor is not None and not isinstance(monitor, str):
            raise TypeError(f"monitor must be a key of the evaluation, or None for its first; found {monitor!r}")
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max'; found {mode!r}")
        self.monitor = monitor
        self._first_key: str | None = None  # which is followed where `monitor` is None
        self.mode = mode
        self.best: float | None = None
        """The best value so far; None before there is one."""
        self.best_step: int | None = None
        """The step that reached it."""
        self.last: float | None = None
        """The value of the last evaluation."""
        self._begun = TrainerState()
        self._started = 0.0

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        if trainer.state.window == 0:  # another run's values may be left of a callback that is used again
            self._forget()
        self._begun = copy.copy(trainer.state)
        self._started = time.monotonic()
        _print(f"{_processes(trainer)}, {_beginning(trainer)}")
        _print(f"{_global_batch(trainer)}; {_steps(trainer)}")
        _print(", ".join([_parameters(trainer), *_options(trainer)]))
        if files := list(_files(trainer)):
            _print(f"files: {', '.join(files)}")

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if self.monitor is None and metrics and self._first_key not in metrics:  # no longer: a resumed run may evaluate others
            self._forget()
            self._first_key = next(iter(metrics))
        if (key := self._key) is None:
            return
        if key not in metrics:
            raise ValueError(
                f"Summary monitors {key!r}, which is no key of the evaluation: it has {', '.join(map(repr, metrics))}"
            )
        self.last = float(metrics[key])
        if self._is_best(self.last):
            self.best, self.best_step = self.last, trainer.state.step

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        state, begun, seconds = trainer.state, self._begun, time.monotonic() - self._started
        fit = f"{_count(state.step - begun.step, 'step')} and {_count(state.epoch - begun.epoch, 'epoch')}"
        samples = state.samples - begun.samples
        speed = f", {_speed(samples / seconds)} samples per second" if samples and seconds else ""
        in_all = f"{_count(state.step, 'step')} and {_count(state.epoch, 'epoch')} in all"
        _print(f"{fit} in {_clock(seconds)}{speed}; {in_all}; {_memory(trainer.world.device)}")
        if self.best is not None:
            _print(f"best {self._key} {self.best:g} at step {self.best_step}, last {self.last:g}")
        elif self.last is not None:
            _print(f"{self._key} was NaN in every evaluation")

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self._key} | {name: getattr(self, name) for name in ("mode", "best", "best_step", "last")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first_key = state["monitor"]
        if (state["monitor"], state["mode"]) == (self._key, self.mode):
            self.best, self.best_step, self.last = state["best"], state["best_step"], state["last"]
        else:  # the best of another metric is not this one's
            self.best = self.best_step = self.last = None

    @property
    def _key(self) -> str | None:
        return self._first_key if self.monitor is None else self.monitor

    def _forget(self) -> None:
        self._first_key = None
        self.best = self.best_step = self.last = None

    def _is_best(self, value: float) -> bool:
        if self.best is None:
            return not math.isnan(value)
        return value < self.best if self.mode == "min" else value > self.best


def _print(line: str) -> None:
    tqdm.write(line, file=sys.stderr)  # above a bar that is open


def _processes(trainer: DDPTrainer) -> str:
    device = trainer.world.device
    gpu = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"{_count(trainer.world.size, 'process')} on {device.type}{gpu}"


def _beginning(trainer: DDPTrainer) -> str:
    if trainer.state.window == 0:
        return "a fresh start"
    of_all = "" if trainer.total_steps is None else f" of {trainer.total_steps}"
    return f"resumes from step {trainer.state.step}{of_all}"


def _global_batch(trainer: DDPTrainer) -> str:
    ranks, window = trainer.world.size, trainer.config.window_size(trainer.world.size)
    share = -(-window // ranks)
    most = min(trainer.config.batch_size, share)
    accumulation = -(-share // most)
    processes = _count(ranks, "process")
    if ranks * most * accumulation != window:
        return f"global batch {window} over {processes}, at most {_count(most, 'sample')} at once"
    return f"global batch {window} = {processes} x batch {most} x accumulation {accumulation}"


def _steps(trainer: DDPTrainer) -> str:
    each, total = ("unknown" if steps is None else f"{steps:,}" for steps in (trainer.steps_per_epoch, trainer.total_steps))
    return f"steps: {each} per epoch, {total} in all"


def _parameters(trainer: DDPTrainer) -> str:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in trainer.model.parameters()]
    every, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    return f"{_count(every, 'parameter')}, {'all' if trained == every else f'{trained:,} of them'} trained"


def _options(trainer: DDPTrainer) -> list[str]:
    config = trainer.config
    return [f"precision {config.precision}"] * (config.precision != "fp32") + ["compiled"] * config.compile


def _files(trainer: DDPTrainer) -> Iterator[str]:
    """Name and path of every callback that says where it writes."""
    for callback in trainer.callbacks:
        places = (getattr(callback, name, None) for name in ("folder", "path"))
        place = next((place for place in places if isinstance(place, (str, os.PathLike))), None)
        if place is not None:
            yield f"{callback.name} in {os.fspath(place)}"


def _count(number: int, word: str) -> str:
    ending = "" if number == 1 else "es" if word.endswith("s") else "s"
    return f"{number:,} {word}{ending}"


def _memory(device: torch.device) -> str:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"peak memory {peak / 1e9:.2f} GB"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _speed(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
