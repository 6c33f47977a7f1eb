"""What a run reports: one packed message carries the means, the fingerprint of the parameters and whether they are finite."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import checksum
from .config import TrainerConfig
from .metrics import Mean, WeightedSums, agree_on_keys, means
from .replica import Replica
from .state import TrainerState
from .world import World

_log = logging.getLogger("trainer")
_OWN = {"lr", "grad_norm", "samples_per_second"}
_MARKS = 4_096  # steps between two reports of which the first non-finite loss is known exactly


class Reporter:
    """Collects what the training steps return: the true means since the last report, and over the epoch.

    Until `reduce`, which every rank calls at reports and epoch ends, nothing here waits for the device.
    """

    def __init__(
        self, world: World, replica: Replica, config: TrainerConfig, optimizer: Optimizer, own_update: bool = False
    ) -> None:
        """`own_update`: whether the script has its own `optimizer_step`, which may forget the optimizer."""
        self._optimizer = optimizer
        self._watch = _UpdateWatch(optimizer, replica.parameters) if own_update else None
        self._world = world
        self._replica = replica
        self._sums = WeightedSums(world.device)
        self._keys: tuple[str, ...] | None = None
        self._since_report: list[float] = []
        self._since_epoch: list[float] = []
        self._trace = _LossTrace(min(config.log_every, _MARKS))
        self._config = config
        self._first_bad_loss = ""
        self._warned: set[str] = set()
        self._broken = self._drifted = False
        self._rates: list[float | Tensor | None] = []
        self.grad_norm: Tensor | None = None
        """Of the last step's gradient, before clipping; None without clipping."""
        self._samples = 0
        self._started = time.perf_counter()

    def add(self, values: Mapping[str, Tensor | float | Mean], samples: int) -> None:
        """One micro-batch of this rank's. Raises ValueError for a key that every report has anyway, or that others lack."""
        if self._keys is None and (clash := _own_keys(values)):
            raise ValueError(f"training_step returned the key {clash[0]!r}, under which the trainer reports its own: rename it")
        if self._keys is not None and not self._sums.keys:  # this rank had no sample when the keys were agreed on
            others = [self._keys] * self._world.size
            agree_on_keys([*others[: self._world.rank], tuple(values), *others[self._world.rank + 1 :]], "training_step")
        self._sums.add(values, samples)

    def end_step(self, step: int, samples: int) -> None:
        """The window of optimizer step `step`, over `samples` on all ranks."""
        self._samples += samples
        self._trace.record(step, self._sums.total("loss"))

    def note_rates(self) -> None:
        """The learning rates that the coming update uses (a copy: a scheduler writes the next rate into the same tensor)."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        self._rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def reduce(self, state: TrainerState, empty_windows: Tensor) -> None:
        """Sum over the ranks what was added since the last time; `empty_windows` had no item on any rank.

        Raises ValueError for keys that differ between ranks, on every rank. Warns once, on rank 0, of a loss that is not finite
        or had no item. What is wrong with the parameters is for `check_parameters`, once the numbers were reported.
        """
        if self._keys is None:
            self._keys = agree_on_keys(self._world.gather(self._sums.keys), "training_step")
            self._since_report = self._since_epoch = [0.0] * (2 * len(self._keys))
        parameters, size = self._replica.parameters, self._world.size
        parts = [_broken(self._replica.trainable).view(1), empty_windows.view(1), self._sums.pop(self._keys)]
        if size > 1:
            parts.append(checksum.words(parameters))
        # The only number that the host waits for, while losses are finite.
        broken, empty, *rest = self._world.sum(torch.cat(parts)).tolist()
        sums, words = rest[: 2 * len(self._keys)], rest[2 * len(self._keys) :]
        self._since_report = _added(self._since_report, sums)
        self._since_epoch = _added(self._since_epoch, sums)
        if not self._first_bad_loss and not math.isfinite(sums[self._keys.index("loss")]):
            self._find_bad_loss()
        self._trace.restart()
        if empty:
            self._warn("empty", f"a step up to step {state.step} had no item at all to train on: its gradients were zero")
        if self._watch is not None and self._watch.did_nothing() and self._world.is_main and not state.skipped_steps:
            _log.warning("no parameter has changed by step %d: does optimizer_step call super().optimizer_step()?", state.step)
        self._watch = None
        self._broken, self._drifted = broken != 0, size > 1 and not checksum.all_equal(words, size)

    def check_parameters(self, step: int) -> None:
        """Of the last `reduce`. Raises FloatingPointError for parameters that were not finite, RuntimeError for those that differ
        between the ranks; on every rank.
        """
        if self._broken:
            self._raise_broken(step)
        elif self._drifted:
            self._replica.raise_drift(step)

    def pop_report(self, by_items: bool) -> dict[str, float]:
        """The means since the last report; the learning rates and the gradient's norm of the last step; the speed."""
        taken, self._since_report = self._since_report, [0.0] * len(self._since_report)
        keys = self._keys or ()
        metrics = means(keys, taken)
        rates = {f"lr/{group}" if group else "lr": rate for group, rate in enumerate(self._rates)}
        metrics |= {key: float(rate) for key, rate in rates.items() if rate is not None}  # some optimizers find their own
        if self.grad_norm is not None:
            metrics["grad_norm"] = float(self.grad_norm)
        seconds = self._take_seconds()
        metrics["samples_per_second"] = self._samples / seconds
        self._samples = 0
        if by_items:
            metrics["items_per_second"] = taken[len(keys) + keys.index("loss")] / seconds
        return metrics

    def pop_epoch(self) -> dict[str, float]:
        """The means over the epoch."""
        taken, self._since_epoch = self._since_epoch, [0.0] * len(self._since_epoch)
        return means(self._keys or (), taken)

    def _take_seconds(self) -> float:
        """Seconds since the last call, without what ran under `pause`."""
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        return max(seconds, 1e-9)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time in this block does not count as training."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - before

    def _find_bad_loss(self) -> None:
        if where := self._trace.first_bad(self._world):
            self._first_bad_loss = f"the loss was not finite {where}"
            self._warn("loss", f"{self._first_bad_loss}. It is reported as it is")

    def _raise_broken(self, step: int) -> None:
        """The parameters are no longer finite: the same on every rank."""
        cause = self._first_bad_loss or "no loss before was: look at the learning rate and at what changes the parameters"
        message = f"the parameters are not finite at step {step}: {cause}"
        if self._config.on_nonfinite == "stop":
            raise FloatingPointError(
                f"{message}. Lower the learning rate, clip with max_grad_norm, or look at the data of that step"
            )
        self._warn("parameters", message)

    def _warn(self, subject: str, message: str) -> None:
        """Once per subject and `fit`, on rank 0."""
        if self._world.is_main and subject not in self._warned:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            self._warned.add(subject)


class _LossTrace:
    """This rank's running loss after each step since the last report: shows when it stopped being finite."""

    def __init__(self, steps: int) -> None:
        """`steps`: how many are told apart; those that follow share the last place."""
        self._most = steps
        self._losses: list[Tensor | float] = []
        self._steps: list[int] = []
        self._is_full = False

    def record(self, step: int, loss: Tensor | float) -> None:
        """The running loss after `step`; 0 before this rank has had a sample. The same steps on every rank."""
        if len(self._steps) == self._most:
            self._steps.pop()
            self._losses.pop()
            self._is_full = True
        self._steps.append(step)
        self._losses.append(loss.clone() if isinstance(loss, Tensor) else loss)

    def first_bad(self, world: World) -> str:
        """The first step, and its ranks, after which the running loss was not finite; it never is again. On every rank."""
        good = world.gather(sum(math.isfinite(loss) for loss in self._losses))
        bad = {rank: self._steps[count] for rank, count in enumerate(good) if count < len(self._steps)}
        if not bad:
            return ""
        step = min(bad.values())
        ranks = ", ".join(str(rank) for rank in bad if bad[rank] == step)
        return f"{'by' if self._is_full and step == self._steps[-1] else 'at'} step {step} on rank {ranks}"

    def restart(self) -> None:
        self._losses, self._steps, self._is_full = [], [], False


class _UpdateWatch:
    """Whether an `optimizer_step` of a script's own updates anything, seen over the first steps of a `fit`."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._before = self._norms()
        self._was_called = False
        self._hook = optimizer.register_step_post_hook(self._note)

    def did_nothing(self) -> bool:
        """Whether the optimizer was left alone and no parameter has changed otherwise. Asked once: ends the watch."""
        self._hook.remove()
        return not self._was_called and torch.equal(self._before, self._norms())

    def _norms(self) -> Tensor:
        """Which any update changes, and which need no memory to compute."""
        return torch.stack(
            [torch.linalg.vector_norm(parameter.detach()).double() for parameter in self._parameters] or [torch.zeros(())]
        )

    def _note(self, *_: Any) -> None:
        self._was_called = True


def _own_keys(values: Mapping[str, Tensor | float | Mean]) -> list[str]:
    """Of the keys, those under which the trainer reports its own."""
    own = _OWN | {"items_per_second"} if isinstance(values["loss"], Mean) else _OWN
    return [key for key in values if key in own or str(key).startswith("lr/")]


def _broken(parameters: list[nn.Parameter]) -> Tensor:
    """0 if every number in them is finite, otherwise NaN: 0-dim, of their type."""
    numbers = [torch.view_as_real(item) if item.is_complex() else item for item in parameters]
    floating = [item.detach() for item in numbers if item.is_floating_point() and item.numel()]
    extremes = [extreme for item in floating for extreme in item.aminmax()]  # in a quarter of a norm's time
    greatest: Tensor = torch.linalg.vector_norm(torch.stack(extremes), math.inf)
    return greatest * 0


def _added(left: list[float], right: list[float]) -> list[float]:
    return [a + b for a, b in zip(left, right, strict=True)]
