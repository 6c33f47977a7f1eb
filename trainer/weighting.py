"""What each micro-batch's loss counts in its window, so that the gradient is that of the mean over the whole window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .metrics import Mean, scalar, widest
from .plan import Window
from .world import World


class Weighting:
    """Samples or items: a loss that is a number is a mean over its samples, a `Mean` brings its own count.

    Samples of a window are known beforehand, so every loss gets its weight at once. Items (tokens, boxes) are not: their sums
    are scaled by a nominal count, the window's items are counted over the ranks in one small message, and the reduced
    gradients are divided by actual / nominal, on the device. The nominal count is a power of two, so the quotient is exact.
    """

    def __init__(self, world: World, uneven: bool = False) -> None:
        """`uneven`: some rank may get no sample even of a window with one for each (of a stream that shards itself)."""
        self._world = world
        self._uneven = uneven
        self._items = torch.zeros((), dtype=widest(world.device), device=world.device)
        self._empty_windows = torch.zeros_like(self._items)
        self._settled = False
        self.by_items: bool | None = None
        """Whether the losses are `Mean`; None before this rank has seen one."""

    def weigh(self, loss: Tensor | Mean, samples: int, window: Window) -> Tensor:
        """The loss to differentiate: summed over a window's micro-batches and averaged over the ranks it is the window's."""
        if self.by_items is None:
            self.by_items = isinstance(loss, Mean)
        if self.by_items is not isinstance(loss, Mean):
            raise ValueError("the loss is a Mean in some steps and a plain tensor in others: return the same kind every time")
        # DDP averages the ranks' gradients, which divides by world.size: undone here
        if not isinstance(loss, Mean):
            share = samples * self._world.size / window.size
            return loss if share == 1.0 else loss * share
        self._items += scalar(loss.count, "loss")
        return loss.total * (self._world.size / _nominal(window))

    def normalize(self, parameters: Sequence[nn.Parameter], window: Window) -> None:
        """After the window's reduction: the gradients of the mean over its items. Zero gradients where it had none.

        Called on every rank. Where a rank may have no share of a fit's first window, it learns from the others what is counted.
        """
        if not self._settled and (self._uneven or window.size < self._world.size):
            self.by_items = any(self._world.gather(self.by_items))
        self._settled = True
        if not self.by_items:
            return
        items = self._world.sum(self._items)
        self._items.zero_()
        self._empty_windows += items == 0
        quotient = torch.where(items == 0, math.inf, items / _nominal(window))  # what had no items gives zeros
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(quotient)

    def pop_empty_windows(self) -> Tensor:
        """How many windows had no item at all since the last call: 0-dim, the same on every rank."""
        if not self.by_items:
            return self._empty_windows
        taken = self._empty_windows.clone()
        self._empty_windows.zero_()
        return taken


def _nominal(window: Window) -> int:
    return 1 << window.size.bit_length()
