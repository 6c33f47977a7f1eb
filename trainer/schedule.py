"""When the learning-rate scheduler moves."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .config import TrainerConfig
from .method_checks import misfit
from .world import World

LENGTHS = ("T_max", "total_iters", "total_steps")
"""What torch's schedulers call the number of steps that they were made for."""


class Schedule:
    """The scheduler, if there is one, moved after every step, epoch or evaluation as ``config.schedule`` says.

    Every rank moves its own; they stay equal, because all that they follow is equal.

    Raises TypeError or ValueError for a scheduler that could not follow; warns on rank 0 of one that would not reach its end.
    """

    def __init__(
        self,
        scheduler: LRScheduler | Callable[[Optimizer, int], LRScheduler] | None,
        optimizer: Optimizer,
        config: TrainerConfig,
        total_steps: int | None,
        has_eval_data: bool,
        world: World,
    ) -> None:
        self._unit = config.schedule
        self._monitor = config.monitor
        if scheduler is not None and not isinstance(scheduler, LRScheduler) and callable(scheduler):
            _check_class(scheduler)
            if total_steps is None:
                raise ValueError(
                    "scheduler: a callable needs the total number of steps, which is unknown without train_data: pass that too, "
                    "or leave the scheduler out (for a stream the number is known only with max_steps and without epochs)"
                )
            if signature := misfit(scheduler, 2):
                found = ", ".join(signature.parameters)
                raise TypeError(f"scheduler: a callable must take (optimizer, total_steps); found it with ({found})")
            scheduler = scheduler(optimizer, total_steps)
            if not isinstance(scheduler, LRScheduler):
                raise TypeError(
                    "scheduler: the callable (optimizer, total_steps) must return an LRScheduler; it returned "
                    f"{'None' if scheduler is None else type(scheduler).__name__}"
                )
            if world.is_main:
                _warn_of_length(scheduler, config, total_steps)
        self.scheduler: LRScheduler | None = scheduler
        if scheduler is not None:
            self._check(scheduler, optimizer, has_eval_data)

    def after(self, unit: str) -> None:
        """A "step" or an "epoch"."""
        if self.scheduler is not None and self._unit == unit:
            self.scheduler.step()

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Raises ValueError listing the keys when the monitored one is not among them."""
        if self.scheduler is None or self._unit != "eval":
            return
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        elif self._monitor in metrics:
            self.scheduler.step(metrics[self._monitor])
        else:
            raise ValueError(
                f"schedule='eval': monitor={self._monitor!r} is not a key of the evaluation; set it to one of "
                f"{', '.join(map(repr, sorted(metrics)))}"
            )

    def _check(self, scheduler: Any, optimizer: Optimizer, has_eval_data: bool) -> None:
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                "scheduler must be an LRScheduler, or a callable (optimizer, total_steps) that returns one; found "
                f"{type(scheduler).__name__}"
            )
        if scheduler.optimizer is not optimizer:
            raise ValueError(
                "the scheduler was built on another optimizer than the one passed to the trainer: build it on that one, or pass "
                "a callable (optimizer, total_steps) that does"
            )
        if isinstance(scheduler, ReduceLROnPlateau) and self._unit != "eval":
            raise ValueError(f"ReduceLROnPlateau follows an evaluation: set schedule='eval'; found schedule={self._unit!r}")
        if self._unit == "eval" and not has_eval_data:
            raise ValueError("schedule='eval' needs eval_data, which is None: the scheduler moves after each evaluation")


def _check_class(scheduler: Any) -> None:
    """TypeError for a class with torch's own __init__ whose second argument is no number of steps: it would be given one."""
    made: Any = getattr(scheduler, "__init__", None)
    if isinstance(scheduler, type) and str(getattr(made, "__module__", "")).startswith("torch."):
        second = list(inspect.signature(scheduler).parameters)[1]
        if second not in LENGTHS:
            raise TypeError(
                f"scheduler: found the class {scheduler.__name__} itself, whose second argument is {second}: pass an instance, "
                "or a callable (optimizer, total_steps) that makes one"
            )


def _warn_of_length(scheduler: LRScheduler, config: TrainerConfig, total_steps: int) -> None:
    """Of one that was made for the run's steps, and moves more rarely."""
    if config.schedule == "epoch":
        moves, words = config.last_epoch, f"once per epoch, {config.last_epoch} times"
    elif config.schedule == "eval":
        moves = config.last_epoch if config.eval_every is None else total_steps // config.eval_every
        words = "after each evaluation"
    else:
        return
    for name in LENGTHS:
        if getattr(scheduler, name, None) == total_steps != moves:
            warnings.warn(
                f"{type(scheduler).__name__} was made for {name}={total_steps}, the run's steps, but "
                f"schedule={config.schedule!r} moves it {words}: set schedule='step', or make it for as many moves as there are",
                UserWarning,
                stacklevel=4,
            )
