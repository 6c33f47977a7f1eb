"""Pure arithmetic: which positions of an epoch's order each rank trains on, in which window and micro-batch.

Window t of an epoch is positions [t*G, (t+1)*G) of the order, G the global batch; the last may be shorter. Inside a window
rank r takes every W-th position from the r-th on (W the world size), in micro-batches of at most B positions. So what a
window holds depends on G alone, and shares of ranks differ by one position at most.

    G = 10, W = 2, B = 2            rank 0: [0 2] [4 6] [8]        rank 1: [1 3] [5 7] [9]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Window(NamedTuple):  # made in every step, in a quarter of a frozen dataclass' time
    """The samples of one optimizer step, as one rank sees it."""

    size: int
    """Positions in the window, all ranks together."""
    micro_batches: tuple[range, ...]
    """This rank's positions, micro-batch by micro-batch. Empty where the ranks before take all there are."""
    last: bool
    """Whether the epoch ends with this window."""
    spread: tuple[int, int] | None = None
    """Most and fewest micro-batches of any rank, where the plan does not tell them."""


@dataclass(frozen=True)
class Plan:
    """The windows of an epoch of `samples` positions, as rank `rank` of `world_size` sees them.

    Of a stream, whose end nobody knows beforehand (`samples` is 0), it tells how each window is shared out.
    """

    samples: int
    window_size: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool = False

    @property
    def epoch_samples(self) -> int:
        """Positions trained on per epoch."""
        return self.samples - self.samples % self.window_size if self.drop_last else self.samples

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.epoch_samples // self.window_size)

    @property
    def window_sizes(self) -> list[int]:
        """The sizes that windows have: the global batch where the epoch is that long, and the last one's if it is shorter."""
        whole, rest = divmod(self.epoch_samples, self.window_size)
        return [self.window_size] * (whole > 0) + [rest] * (rest > 0)

    def windows(self, start: int = 0) -> Iterator[Window]:
        """The windows from position `start` (a multiple of the window size) to the epoch's end."""
        end = self.epoch_samples
        for first in range(start, end, self.window_size):
            stop = min(first + self.window_size, end)
            yield Window(stop - first, self.share(first, stop), last=stop == end)

    def share(self, first: int, stop: int) -> tuple[range, ...]:
        """This rank's micro-batches of the window from position `first` up to `stop`."""
        return tuple(chunks(range(first + self.rank, stop, self.world_size), self.batch_size))

    def total_steps(self, last_epoch: int | None, max_steps: int | None) -> int | None:
        """Optimizer steps of a whole run: `last_epoch` passes or `max_steps`, whichever comes first."""
        limits = [max_steps, None if last_epoch is None else last_epoch * self.steps_per_epoch]
        return min((limit for limit in limits if limit is not None), default=None)


def most_and_fewest(size: int, batch_size: int, world_size: int) -> tuple[int, int]:
    """The micro-batches of rank 0, which has most, and of the last rank, in a window of `size` positions."""
    return -(-size // world_size // batch_size), -(-(size // world_size) // batch_size)


def chunks(share: range, size: int) -> Iterator[range]:
    """`share` cut into pieces of `size`; the last may be shorter."""
    for first in range(0, len(share), size):
        yield share[first : first + size]
