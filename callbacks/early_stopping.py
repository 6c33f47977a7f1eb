"""Ends a run that no longer gets better."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from trainer import Callback, DDPTrainer

_log = logging.getLogger("callbacks")


class EarlyStopping(Callback):
    """Asks the trainer to stop at the `patience`-th evaluation in a row that brought no improvement.

    - `monitor`: a key of the evaluation; with several evaluation sets ``name/key``. An unknown one is a ValueError at
      the first evaluation.
    - `patience`: evaluations, 1 or more.
    - `mode`: "min" when smaller is better, "max" when larger is.
    - `min_delta`: only a value better than the best so far by more than this is an improvement; in the metric's unit,
      0 or more.

    A tie is no improvement, and neither is NaN, of which one RuntimeWarning is given. The best value and the count are
    part of a checkpoint: a run that is resumed after such an end trains on until the next evaluation. The weights stay
    those of the last step: the best ones are in `Checkpoint`'s ``best.pt``.

    Raises TypeError and ValueError for unusable arguments, and ValueError at the start of `fit` without eval_data.
    """

    best: float
    """The best value so far."""
    count: int
    """Evaluations in a row without improvement."""

    def __init__(self, monitor: str, patience: int, mode: Literal["min", "max"] = "min", min_delta: float = 0.0) -> None:
        if not isinstance(monitor, str):
            raise TypeError(f"monitor must be a key of the evaluation; found {monitor!r}")
        if isinstance(patience, bool) or not isinstance(patience, int):
            raise TypeError(f"patience must be an int, a number of evaluations; found {patience!r}")
        if patience < 1:
            raise ValueError(f"patience must be 1 or more; found {patience}")
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max'; found {mode!r}")
        if isinstance(min_delta, bool) or not isinstance(min_delta, (int, float)):
            raise TypeError(f"min_delta must be a number; found {min_delta!r}")
        if not 0 <= min_delta < math.inf:
            raise ValueError(f"min_delta must be finite and 0 or more; found {min_delta}")
        self.monitor = monitor
        self.patience = patience
        self.mode = mode
        self.min_delta = float(min_delta)
        self._forget()
        self._warned = False
        self._has_evaluated = False

    def _forget(self) -> None:
        self.best = math.inf if self.mode == "min" else -math.inf
        self.count = 0

    def before_fit(self, trainer: DDPTrainer) -> None:
        if not trainer.eval_sets:
            raise ValueError(f"EarlyStopping monitors {self.monitor!r} of an evaluation: pass eval_data to the trainer")

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        if trainer.state.samples == 0:  # it may have watched another run before
            self._forget()
        self._has_evaluated = trainer.finished  # then no evaluation is to come

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        if not self._has_evaluated and trainer.state.stop_reason is None:
            _log.warning("EarlyStopping: the run ended without an evaluation, so nothing was watched; look at eval_every")

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if self.monitor not in metrics:
            raise ValueError(
                f"EarlyStopping monitors {self.monitor!r}, which is no key of the evaluation: it has "
                f"{', '.join(map(repr, metrics))}"
            )
        self._has_evaluated = True
        value = metrics[self.monitor]
        if self._improves(value):
            self.best, self.count = value, 0
            return
        if math.isnan(value) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.monitor} is NaN in the evaluation at step {trainer.state.step}; EarlyStopping counts that as "
                "no improvement",
                RuntimeWarning,
                stacklevel=2,
            )
        self.count += 1
        if self.count >= self.patience:
            trainer.stop(f"{self.monitor} has not improved on {self.best:g} in {self.count} evaluations")

    def _improves(self, value: float) -> bool:
        # False for NaN: every comparison with it is.
        if self.mode == "min":
            return value < self.best - self.min_delta
        return value > self.best + self.min_delta

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "mode": self.mode, "best": self.best, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._forget()  # the best of another metric is not this one's
        if (state.get("monitor", self.monitor), state.get("mode", self.mode)) == (self.monitor, self.mode):
            self.best, self.count = float(state["best"]), int(state["count"])
