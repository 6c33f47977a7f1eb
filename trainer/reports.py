"""What a run reports: one packed message carries the means, the fingerprint of the parameters and the first bad step."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from . import checksum
from .metrics import Mean, WeightedSums, agree_on_keys, means
from .replica import Replica
from .world import World

_OWN = {"lr", "grad_norm", "samples_per_second"}
_MARKS = 4_096  # steps between two reports of which the first non-finite loss is known exactly


class Reporter:
    """Collects what the training steps return: the true means since the last report, and over the epoch.

    Until `reduce`, which every rank calls at reports and epoch ends, nothing here waits for the device.
    """

    def __init__(self, world: World, replica: Replica, log_every: int) -> None:
        self._world = world
        self._replica = replica
        self._sums = WeightedSums(world.device)
        self._keys: tuple[str, ...] | None = None
        self._since_report: list[float] = []
        self._since_epoch: list[float] = []
        self._marks = torch.zeros(min(log_every, _MARKS), dtype=torch.float64, device=world.device)
        self._slots = self._marks.unbind()
        self._marked = 0
        self._warned = False
        self.rates: list[float | Tensor] = []
        """The learning rate that the last step used, by parameter group."""
        self.grad_norm: Tensor | None = None
        """Of the last step's gradient, before clipping; None without clipping."""
        self._samples = 0
        self._started = time.perf_counter()

    def add(self, values: Mapping[str, Tensor | float | Mean], samples: int) -> None:
        """One micro-batch of this rank's. Raises ValueError for a key that every report has anyway, or that others lack."""
        if self._keys is None and (clash := [key for key in values if key in _OWN or str(key).startswith("lr/")]):
            raise ValueError(f"training_step returned the key {clash[0]!r}, under which the trainer reports its own: rename it")
        if self._keys is not None and not self._sums.keys:  # this rank had no sample when the keys were agreed on
            agree_on_keys([self._keys, *[()] * (self._world.rank - 1), tuple(values)], "training_step")
        self._sums.add(values, samples)

    def end_step(self, samples: int) -> None:
        """One optimizer step, over `samples` on all ranks."""
        self._samples += samples
        if self._marked < len(self._slots) and self._sums.keys:
            self._slots[self._marked].copy_(self._sums.total("loss"))
        self._marked += 1

    def reduce(self, step: int) -> None:
        """Sum over the ranks what was added since the last time; `step` is the last one taken.

        Raises ValueError for keys that differ between ranks and RuntimeError for parameters that do, on every rank.
        Warns once, on rank 0, of a loss that is not finite.
        """
        if self._keys is None:
            self._keys = agree_on_keys(self._world.gather(self._sums.keys), "training_step")
            self._since_report = self._since_epoch = [0.0] * (2 * len(self._keys))
        width, ranks = 2 * len(self._keys), self._world.size
        bad = torch.zeros(ranks, dtype=torch.float64, device=self._world.device)
        bad[self._world.rank] = self._first_bad()
        fingerprint = checksum.words(self._replica.parameters) if ranks > 1 else bad[:0]
        message = torch.cat([self._sums.take(self._keys), bad, fingerprint])
        summed = self._world.sum(message).tolist()
        self._since_report = _added(self._since_report, summed[:width])
        self._since_epoch = _added(self._since_epoch, summed[:width])
        self._warn_of_bad(summed[width : width + ranks], step - self._marked + 1)
        self._marked = 0
        if ranks > 1 and not checksum.all_equal(summed[width + ranks :], ranks):
            self._replica.raise_drift(step)

    def take_report(self) -> dict[str, float]:
        """The means since the last report; the learning rates and the gradient's norm of the last step; the speed."""
        taken, self._since_report = self._since_report, [0.0] * len(self._since_report)
        metrics = means(self._keys or (), taken)
        metrics |= {f"lr/{group}" if group else "lr": float(rate) for group, rate in enumerate(self.rates)}
        if self.grad_norm is not None:
            metrics["grad_norm"] = float(self.grad_norm)
        metrics["samples_per_second"] = self._take_speed()
        return metrics

    def take_epoch(self) -> dict[str, float]:
        """The means over the epoch."""
        taken, self._since_epoch = self._since_epoch, [0.0] * len(self._since_epoch)
        return means(self._keys or (), taken)

    def _take_speed(self) -> float:
        """Samples per second on all ranks since the last call, without what ran under `pause`."""
        now = time.perf_counter()
        speed = self._samples / max(now - self._started, 1e-9)
        self._samples, self._started = 0, now
        return speed

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time in this block does not count as training."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - before

    def _first_bad(self) -> Tensor:
        """The first marked step (1, 2, ...) at which this rank's running loss was not finite; 0 if there was none."""
        wrong = ~self._marks[: self._marked].isfinite()
        if not len(wrong):
            return self._marks.new_zeros(())
        return torch.where(wrong.any(), wrong.int().argmax() + 1, 0)

    def _warn_of_bad(self, first_bad: list[float], first_step: int) -> None:
        bad = {rank: first_step + int(place) - 1 for rank, place in enumerate(first_bad) if place}
        if bad and self._world.is_main and not self._warned:
            step = min(bad.values())
            ranks = ", ".join(str(rank) for rank in bad if bad[rank] == step)
            warnings.warn(
                f"the loss was not finite at step {step} on rank {ranks}. It is reported as it is; training goes on",
                RuntimeWarning,
                stacklevel=2,
            )
            self._warned = True


def _added(left: list[float], right: list[float]) -> list[float]:
    return [a + b for a, b in zip(left, right, strict=True)]
