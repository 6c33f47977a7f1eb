"""Datasets without a length: windows cut from a stream, so that every rank sees the same windows and the same end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as _worker

from .data import NO_EPOCH, tell_epoch, unchanged
from .plan import Plan, Window, most_and_fewest
from .randomness import preserved, seed_for
from .workers import loader_options, started
from .world import World

Batches = tuple[Window, list[Any]]
"""A window, and this rank's micro-batches of it."""


def shards_itself(dataset: Any) -> bool:
    """Whether `dataset` is a stream of which each rank and worker reads its own part."""
    return isinstance(dataset, IterableDataset) and bool(getattr(dataset, "sharded", False))


def open_stream(
    dataset: IterableDataset[Any],
    options: Mapping[str, Any],
    plan: Plan,
    seed: int | None,
    purpose: int,
    world: World,
    order_seed: int | None = None,
) -> Stream | ShardedStream:
    """The windows of a stream, of whichever kind it is. `options`: the DataLoader's; `purpose`: see `randomness`.

    Without a `seed` several readers still have to draw the same order: with `order_seed`, or one that rank 0 draws. Called on
    every rank.
    """
    workers = options.get("num_workers", 0)
    shared = seed is None and world.size * max(1, workers) > 1
    if shared:
        seed = world.run_on_main(lambda: secrets.randbits(63)) if order_seed is None else order_seed
    apart = shared and not workers
    if shards_itself(dataset):
        return ShardedStream(dataset, options, plan, seed, purpose, world, apart)
    return Stream(dataset, options, plan, seed, purpose, apart)


class Stream:
    """The windows of an IterableDataset, in order.

    Every rank, and every worker of it, reads the whole stream and keeps its own positions: rank r takes every W-th of a
    window, worker k of n every n-th window. So all ranks know each window's size and the end without a message, and each
    item is trained on once. The dataset sees neither ranks nor workers meanwhile (`get_worker_info` is None). Random numbers
    of an item follow from (seed, epoch, position), the same in every reader, so a shuffle buffer in the dataset is the same
    everywhere.

    A dataset with the attribute ``sharded = True`` shards itself over ranks and workers, and is left alone: see `ShardedStream`.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        options: Mapping[str, Any],
        plan: Plan,
        seed: int | None,
        purpose: int,
        apart: bool = False,
    ) -> None:
        """`apart`: leave the generators as they are, for what else this process draws."""
        self._apart = apart
        options = loader_options(options, seed)
        collate = options.pop("collate_fn", None) or default_collate
        self._source = _Reader(dataset, collate, plan, seed, purpose)
        self._loader: DataLoader[Any] = DataLoader(self._source, batch_size=None, collate_fn=unchanged, **options)

    def windows(self, epoch: int, start: int, passed: int = 0) -> Iterator[Batches]:
        """The windows from position `start` of an epoch on; what lies before is read and passed over."""
        self._source.start[:] = torch.tensor([epoch, start])
        return _started(self._loader, self._apart)


class _Reader(IterableDataset[Batches]):
    """Reads the whole stream in one worker and yields that worker's windows."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        collate: Callable[[list[Any]], Any],
        plan: Plan,
        seed: int | None,
        purpose: int,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._plan = plan
        self._seed = seed
        self._purpose = purpose
        self.start = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # epoch, position: living workers see them

    def __iter__(self) -> Iterator[Batches]:
        epoch, start = self.start.tolist()
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        _worker._worker_info = None  # the dataset must not split itself among the workers: they are given whole windows
        try:
            yield from self._windows(epoch, start, worker, workers)
        finally:
            _worker._worker_info = info

    def _windows(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[Batches]:
        size = self._plan.window_size
        ahead = size if self._plan.drop_last else 1  # how far to read on before it is known whether a window is the last
        pending: dict[int, list[Any]] = {}  # this worker's windows, first position -> this rank's items
        read = 0
        for position, item in self._items(epoch):
            read = position + 1
            first = position - position % size
            if position >= start and (first - start) // size % workers == worker:
                items = pending.setdefault(first, [])
                if (position - first) % self._plan.world_size == self._plan.rank:
                    items.append(item)
            for complete in [first for first in pending if first + size + ahead <= read]:
                yield self._window(complete, size, pending.pop(complete), last=False)
        end = read - read % size if self._plan.drop_last else read
        for first, items in pending.items():
            if first < end:
                yield self._window(first, min(size, end - first), items, last=first + size >= end)

    def _items(self, epoch: int) -> Iterator[tuple[int, Any]]:
        if epoch != NO_EPOCH:
            tell_epoch(self._dataset, epoch, self._seed)
        seed_for(self._purpose, self._seed, epoch, 0)
        for position, item in enumerate(self._dataset):
            yield position, item
            seed_for(self._purpose, self._seed, epoch, position + 1)

    def _window(self, first: int, size: int, items: list[Any], last: bool) -> Batches:
        parts = self._plan.share(first, first + size)
        remaining = iter(items)
        batches = [self._collate(list(islice(remaining, len(part)))) for part in parts]
        return Window(size, parts, last), batches


class ShardedStream:
    """The windows of an IterableDataset that shards itself over ranks and workers.

    Random numbers of an item follow from (seed, epoch, rank, worker, position in that reader). Until its first item every reader
    draws the same, so that an order drawn there can be shared out.

    Each rank takes its share of a window from its own stream, as long as that lasts. How many items there are on all ranks, and
    whether any has more, is one small message per window.

    Raises ValueError where a window is too small for every rank to have a share: some would never be read.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        options: Mapping[str, Any],
        plan: Plan,
        seed: int | None,
        purpose: int,
        world: World,
        apart: bool = False,
    ) -> None:
        self._apart = apart  # as of `Stream`
        options = loader_options(options, seed)
        collate = options.pop("collate_fn", None) or default_collate
        self._world = world
        if plan.window_size < plan.world_size:
            raise ValueError(
                f"a stream that shards itself needs a global batch of at least one sample for each process; found "
                f"{plan.window_size} for {plan.world_size} processes: set global_batch_size to {plan.world_size} or more"
            )
        parts = [len(part) for part in plan.share(0, plan.window_size)]
        self._most, _ = most_and_fewest(plan.window_size, plan.batch_size, plan.world_size)
        # Workers take turns: where micro-batches differ in size, each gives whole shares.
        self._turns, turn = (len(parts), parts[:1]) if len(set(parts)) == 1 else (1, parts)
        self._source = _Shard(dataset, collate, turn, plan.rank, seed, purpose)
        self._loader: DataLoader[Any] = DataLoader(self._source, batch_size=None, collate_fn=unchanged, **options)

    def windows(self, epoch: int, start: int, passed: int = 0) -> Iterator[Batches]:
        """As `Stream.windows`; `passed`: the windows before `start`, which may have been short."""
        self._source.epoch.fill_(epoch)
        own = islice(_started(self._loader, self._apart), passed * self._turns, None)
        ahead = list(islice(own, 1))
        while True:
            mine = list(chain.from_iterable(islice(chain(ahead, own), self._turns)))
            ahead = list(islice(own, 1))
            samples = sum(size for size, _ in mine)
            has = [number < len(mine) for number in range(self._most)]
            total, more, *having = self._world.sum(torch.tensor([samples, len(ahead), *has], dtype=torch.int64)).tolist()
            if total == 0:
                return
            spread = sum(ranks > 0 for ranks in having), having.count(self._world.size)
            micro_batches = tuple(range(size) for size, _ in mine)
            yield Window(total, micro_batches, more == 0, spread), [batch for _, batch in mine]
            if more == 0:
                return


class _Shard(IterableDataset[list[tuple[int, Any]]]):
    """One worker's part of a stream that shards itself: turn by turn, its micro-batches with their sizes."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        collate: Callable[[list[Any]], Any],
        parts: list[int],
        rank: int,
        seed: int | None,
        purpose: int,
    ) -> None:
        self.user_dataset = dataset
        self._collate = collate
        self._parts = parts
        self._rank = rank
        self._seed = seed
        self._purpose = purpose
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        items = self._items(int(self.epoch))
        while turn := [batch for part in self._parts if (batch := list(islice(items, part)))]:
            yield [(len(batch), self._collate(batch)) for batch in turn]

    def _items(self, epoch: int) -> Iterator[Any]:
        if epoch != NO_EPOCH:
            tell_epoch(self.user_dataset, epoch, self._seed)
        info = get_worker_info()
        worker = 0 if info is None else info.id
        seed_for(self._purpose, self._seed, epoch)  # alike in every reader until its first item
        for position, item in enumerate(self.user_dataset, 1):
            yield item
            seed_for(self._purpose, self._seed, epoch, self._rank, worker, position)


def _started(loader: DataLoader[Any], apart: bool) -> Iterator[Any]:
    """The loader's batches; `apart`: each is read with the generators put back afterwards."""
    batches = started(loader)
    while apart:
        with preserved(torch.device("cpu")):
            found = list(islice(batches, 1))
        if not found:
            return
        yield found.pop()
    yield from batches
