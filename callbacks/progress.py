"""How far the run is."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from trainer import Callback, DDPTrainer

_SECONDS_BETWEEN_LINES = 10.0


class ProgressBar(Callback):
    """Shows progress on stderr, in steps (optimizer updates).

    On a terminal: one bar an epoch, with the numbers of the last report beside it, at the epoch's end the means over
    the epoch; each evaluation is a line above the bar. A resumed run starts where the epoch was left.

    Elsewhere (a file, a pipe): a plain line with the last numbers at most every 10 seconds, and one when `fit` ends.

    Only rank 0 shows anything.
    """

    def __init__(self) -> None:
        self._bar: Any = None  # tqdm carries no types
        self._on_terminal = False
        self._started = self._last_line = 0.0
        self._numbers: dict[str, float] = {}  # the last ones known, for plain lines

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._started = self._last_line = time.monotonic()
        self._numbers = {}
        self._open(trainer)

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if self._bar is not None:
            if metrics:  # never per step: it costs a hundred times what an update does
                self._bar.set_postfix(_texts(metrics), refresh=False)
            self._bar.update()
        elif metrics and not self._on_terminal:
            self._numbers.update(metrics)
            now = time.monotonic()
            if now - self._last_line >= _SECONDS_BETWEEN_LINES:
                self._last_line = now
                self._print_line(trainer)

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if self._on_terminal:
            tqdm.write(f"step {trainer.state.step}, evaluation: {_join(metrics)}", file=sys.stderr)
        else:
            self._numbers.update({f"eval {key}": value for key, value in metrics.items()})

    def on_epoch_end(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if self._bar is not None:
            self._bar.set_postfix(_texts(metrics), refresh=False)
            if self._bar.total is not None:
                self._bar.update(self._bar.total - self._bar.n)  # windows whose update was skipped are done, too
            self._close()

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        if self._bar is None:
            self._open(trainer)

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        self._close()
        if not self._on_terminal:
            self._print_line(trainer)
        if trainer.state.stop_reason is not None:
            _print(f"stopped: {trainer.state.stop_reason}")

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        self._close()

    def _open(self, trainer: DDPTrainer) -> None:
        """A bar for the epoch that begins or goes on, unless the run is over."""
        if not self._on_terminal or _is_over(trainer):
            return
        state, total, done = trainer.state, trainer.steps_per_epoch, trainer.epoch_step
        if total is not None and trainer.total_steps is not None:  # max_steps may end the run before the epoch
            total = min(total, done + trainer.total_steps - state.step)
        self._bar = tqdm(
            desc=f"epoch {state.epoch + 1}{_of(_epochs(trainer))}",
            total=total,
            initial=done,
            unit="step",
            file=sys.stderr,
            dynamic_ncols=True,
        )

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _print_line(self, trainer: DDPTrainer) -> None:
        state = trainer.state
        epoch = state.epoch + (state.epoch_samples > 0)
        seconds = tqdm.format_interval(time.monotonic() - self._started)
        position = f"step {state.step}{_of(trainer.total_steps)}, epoch {epoch}{_of(_epochs(trainer))}, {seconds}"
        _print(f"{position}: {_join(self._numbers)}" if self._numbers else position)


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _is_over(trainer: DDPTrainer) -> bool:
    return trainer.state.stop_reason is not None or trainer.finished


def _epochs(trainer: DDPTrainer) -> int | None:
    """Epochs that the run will see, the last one perhaps not to its end; None if that is unknown."""
    if trainer.total_steps is not None and trainer.steps_per_epoch is not None:
        return math.ceil(trainer.total_steps / trainer.steps_per_epoch)
    return trainer.config.last_epoch


def _of(total: int | None) -> str:
    return "" if total is None else f"/{total}"


def _texts(metrics: Mapping[str, float]) -> dict[str, str]:
    return {key: f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}" for key, value in metrics.items()}


def _join(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {text}" for key, text in _texts(metrics).items())
