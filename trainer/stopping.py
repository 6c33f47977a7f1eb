"""Stopping together: any rank may wish it, all ranks leave after the same step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from . import checkpoint
from .signals import Signals
from .world import World

_PERIOD = 2.0  # seconds within which a wish is heard, where reports are further apart
_SLACK, _LATEST = 5.0, 25.0  # seconds; torchrun kills what has not left 30 s after its signal
_AT_ONCE = 0.2


class StopAgreement:
    """Carries a rank's wish to stop to all ranks, at steps that all ranks know in advance.

    A message is due at step 1 and wherever the loop settles something anyway (reports, evaluations, epoch ends); where those
    are far apart, each message also fixes after how many steps the next one comes: about two seconds by rank 0's clock,
    because the ranks' own clocks differ. In a world of one process there is no message.
    """

    def __init__(self, world: World, log_every: int, max_minutes: float | None) -> None:
        self._world = world
        self._log_every = log_every
        self._max_minutes = max_minutes
        self._signals = Signals(self.ask, self._seconds_to_leave)
        self._is_open = False

    def open(self, step: int) -> None:
        """Start listening to wishes, and to signals, after `step` steps, skipped updates among them."""
        self._is_open = True
        self._wish: str | None = None
        self._last_step, self._last_time = step, time.monotonic()
        self._next_step = step + 1
        self._started = self._last_time
        self._deadline = _Deadline(self._world.is_main)
        self._signals = Signals(self.ask, self._seconds_to_leave)  # a handler of the script's may still call the one before
        self._signals.open()

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        self._signals.close()
        self._is_open = False

    def ask(self, reason: str) -> None:
        """This rank wishes to stop; the first reason stays. Ignored unless open. TypeError or ValueError for no reason."""
        if not isinstance(reason, str):
            raise TypeError(f"stop needs a reason, a text; found {reason!r} ({type(reason).__name__})")
        if not reason:
            raise ValueError("stop needs a reason; found an empty text")
        if self._is_open:
            self._wish = self._wish or reason

    def settle(self, step: int, due: bool, finished: bool) -> str | None:
        """Called on every rank after each step: the reason to stop now, the same on all ranks; of several the lowest rank's.

        `finished`: whether this was the last step in any case.
        """
        self._deadline.end_step()
        reason = self._agreed(step, due)
        self._deadline.is_leaving = finished or reason is not None
        return reason

    def _agreed(self, step: int, due: bool) -> str | None:
        minutes = (time.monotonic() - self._started) / 60
        if self._max_minutes is not None and self._world.is_main and minutes >= self._max_minutes:
            self.ask(f"max_minutes={self._max_minutes:g} have passed")
        if self._world.size == 1:
            return self._wish
        if not due and step < self._next_step:
            return None
        wishes, interval, self._deadline.saving = self._world.sum(self._message(step)).tolist()
        self._last_step, self._last_time = step, time.monotonic()
        self._next_step = step + int(interval)
        self._world.shorten_timeout()
        if not wishes:
            return None
        return next(reason for reason in self._world.gather(self._wish) if reason is not None)

    def evaluating(self) -> AbstractContextManager[None]:
        """Around an evaluation in `fit`."""
        return self._deadline.evaluating()

    def obey(self) -> None:
        """After `close`, on a rank that only waits for others: a signal that has come ends this process."""
        self._signals.resend()

    def _seconds_to_leave(self) -> float:
        return self._deadline.seconds()

    def _message(self, step: int) -> torch.Tensor:
        """How many ranks wish to stop; from rank 0 alone, the steps to the next message and how long its last save took."""
        pace = (time.monotonic() - self._last_time) / max(step - self._last_step, 1)
        interval = max(1, min(self._log_every, int(_PERIOD / max(pace, 1e-9))))
        from_main = [float(interval), checkpoint.Writes.last_seconds] if self._world.is_main else [0.0, 0.0]
        return torch.tensor([float(self._wish is not None), *from_main], dtype=torch.float64, device=self._world.device)


class _Deadline:
    """How long this process may take to leave once a signal has asked it to, from what its steps have taken so far."""

    def __init__(self, is_main: bool) -> None:
        self.saving = 0.0
        """Seconds that rank 0's last save took, as another rank has heard."""
        self.is_leaving = False
        """Whether the last step is over, and only the run's last file is still to come."""
        self._is_main = is_main
        self._settled = time.monotonic()
        self._steps = self._evaluations = 0
        self._longest = 0.0  # step, with the evaluation and the hooks in it
        self._is_evaluating = False

    def end_step(self) -> None:
        now = time.monotonic()
        if self._steps:  # the first takes longer than the others: compilation, cold files
            self._longest = max(self._longest, now - self._settled)
        self._steps, self._settled = self._steps + 1, now

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """How long the first evaluation takes is not known, and no step has shown it."""
        self._is_evaluating = True
        try:
            yield
        finally:
            self._is_evaluating = False
        self._evaluations += 1

    def seconds(self) -> float:
        """The longest step, a save, and some slack.

        A step that has taken longer than that by now is not expected to end. A file that is on its way gets all the time there
        is, and so does rank 0's last one.
        """
        if self.is_leaving or checkpoint.Writes.under_way:
            return _LATEST
        saving = checkpoint.Writes.last_seconds if self._is_main else self.saving
        allowed = min(self._longest + saving + _SLACK, _LATEST)
        if self._is_evaluating and self._evaluations == 0:
            allowed = _LATEST
        return allowed if time.monotonic() - self._settled < allowed else _AT_ONCE
