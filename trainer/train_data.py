"""The training data of a run: its plan, the order of each epoch, and the batches in that order."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, tee
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

from . import data_checks
from .config import TrainerConfig
from .data import Loader, requests, tell_epoch
from .order import Order, Permutation, dataset_order, from_sampler
from .plan import Plan, Window
from .prefetch import Prefetcher
from .randomness import ORDER, SAMPLE, mix, seed_generators
from .state import TrainerState
from .stream import open_stream, shards_itself
from .world import World


class TrainData:
    """What every rank trains on, in which window; the dataset may be None for a trainer that only evaluates.

    Raises TypeError or ValueError for data, sampler or options that cannot work.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | None,
        sampler: Sampler[int] | None,
        options: Mapping[str, Any] | None,
        config: TrainerConfig,
        world: World,
    ) -> None:
        self.options: Mapping[str, Any] = {} if options is None else options
        data_checks.check_loader_options(self.options)
        self.window_size = config.window_size(world.size)
        self.samples: int | None = None
        """Positions in an epoch's order; None where that is unknown (a stream, or no dataset)."""
        self._dataset = cast(Any, dataset)
        self._sampler = cast(Any, sampler)
        self._config = config
        self._world = world
        self._is_stream = isinstance(dataset, IterableDataset)
        self._rows: int | None = None  # of the dataset
        self.shards_itself = shards_itself(dataset)
        """Whether the dataset is a stream of which each rank and worker reads its own part."""
        self._order_seed = config.seed
        self._drawn: tuple[int, Order] | None = None  # an epoch, and what the sampler gave for it
        self._window_begun = (0, 0)  # of a stream: the last window's number in its epoch, and the position it starts at
        if self._is_stream:
            data_checks.check_stream(dataset, sampler, config)
        elif dataset is not None:
            data_checks.check_dataset(dataset, "train_data")
            self.samples = self._rows = len(self._dataset)
        if sampler is not None:
            if dataset is None:
                raise ValueError("a sampler gives the order of train_data: pass train_data too")
            data_checks.check_sampler(sampler)
            self.samples = len(self._sampler)
        self._plan = Plan(self.samples or 0, self.window_size, config.batch_size, world.rank, world.size, config.drop_last)
        if self.samples is not None:
            data_checks.check_plan(self._plan, config)

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self.samples is None else self._plan.steps_per_epoch

    @property
    def total_steps(self) -> int | None:
        if self.samples is None:
            return self._config.max_steps if self._is_stream and self._config.last_epoch is None else None
        return self._plan.total_steps(self._config.last_epoch, self._config.max_steps)

    @property
    def window_sizes(self) -> list[int]:
        """The sizes that the windows of an epoch have; empty where that is unknown."""
        return self._plan.window_sizes if self.samples is not None else []

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same when a run is resumed: another order, or length, would repeat samples and leave out others."""
        sampler = self._sampler is not None
        return {"samples": self.samples, "rows": self._rows, "sampler": sampler, "global_batch": self.window_size}

    def open(self, own_transfer: bool) -> None:
        """Before the first batch of a `fit`. ValueError when there is nothing to train on.

        `own_transfer`: whether the script has its own way to bring batches to the device.
        """
        if self._dataset is None:
            raise ValueError("nothing to train on: pass train_data to DDPTrainer")
        seed, world = self._config.seed, self._world
        if self._order_seed is None:  # an epoch that was left is gone on with in the same order
            self._order_seed = world.run_on_main(lambda: secrets.randbits(63))
        if self._is_stream:
            self._stream = open_stream(self._dataset, self.options, self._plan, seed, SAMPLE, world, self._order_seed)
        else:
            on_gpu = _is_gpu(world.device)
            options = {"pin_memory": True, **self.options} if on_gpu and self.options.get("num_workers") else self.options
            self._loader = Loader(self._dataset, options, seed, SAMPLE, self._order_seed)
            self._prefetcher = Prefetcher(world.device, self._config.channels_last) if on_gpu and not own_transfer else None

    def windows(self, state: TrainerState) -> Iterator[tuple[Window, Iterable[Any]]]:
        """The windows that remain of the current epoch, each with this rank's batches."""
        epoch, start = state.epoch, state.epoch_samples
        if self.options.get("num_workers"):  # an evaluation's workers begin as copies of what is here
            tell_epoch(self._dataset, epoch, self._order_seed)
        if self._is_stream:
            window, passed = None, self._windows_passed(state)
            for number, (window, of_stream) in enumerate(self._stream.windows(epoch, start, passed), passed):
                self._window_begun = (number, state.epoch_samples)
                yield window, of_stream
            data_checks.check_some(window)
            return
        windows, ahead = tee(self._plan.windows(start))
        shares = (share for window in ahead for share in window.micro_batches)
        batches = self._loader.batches(requests(epoch, shares, self._order(epoch)))
        if self._prefetcher is not None:
            batches = self._prefetcher(batches)
        for window in windows:
            yield window, islice(batches, len(window.micro_batches))

    def state_dict(self, state: TrainerState) -> dict[str, Any]:
        """What a resume needs besides counters and seed: of a stream that shards itself the windows passed, any of which may have
        been short; without a seed the one that the order was drawn with."""
        saved: dict[str, Any] = {"order_seed": self._order_seed} if self._config.seed is None else {}
        if self.shards_itself:
            saved |= {"epoch_windows": self._windows_passed(state), "shards": self._shards}
        return saved

    def check_shards(self, state: Mapping[str, Any]) -> None:
        """ValueError where a stream that shards itself would be continued in other shards than it was begun in."""
        saved, own = state.get("shards"), self._shards if self.shards_itself else None
        if saved != own and state.get("state", {}).get("epoch_samples"):
            raise ValueError(
                f"the checkpoint was written within an epoch of {_readers(saved)}, and is to be continued with "
                f"{_readers(own)}, which would repeat some samples and leave out others: resume with the same, or from a "
                "checkpoint of an epoch's end"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._window_begun = (state.get("epoch_windows", 0), state["state"]["epoch_samples"])
        self._order_seed = state.get("order_seed", self._order_seed)

    def _windows_passed(self, state: TrainerState) -> int:
        """The windows of a stream's current epoch that were trained on; one that an error interrupted does not count."""
        number, position = self._window_begun
        return number + (state.epoch_samples != position) if state.epoch_samples else 0

    @property
    def _shards(self) -> list[int]:
        """How a stream that shards itself is read: ranks, readers of each, and samples in a reader's turn (0: no turns)."""
        readers = max(1, self.options.get("num_workers", 0))
        return [self._plan.world_size, readers, self._plan.batch_size if readers > 1 else 0]

    def _order(self, epoch: int) -> Order:
        if self._sampler is not None:
            if self._drawn is not None and self._drawn[0] == epoch:
                return self._drawn[1]
            order = from_sampler(self._draw_sampler(epoch), self._plan.samples, len(self._dataset))
            self._drawn = (epoch, order) if self._config.seed is None else None  # which a seed draws again
            return order
        return Permutation(self._plan.samples, cast(int, self._order_seed), epoch) if self._config.shuffle else dataset_order

    def _draw_sampler(self, epoch: int) -> list[int]:
        """The sampler's indices for an epoch: rank 0's, for a sampler may draw what no seed of the trainer's reaches."""
        tell_epoch(self._sampler, epoch, self._config.seed)
        if self._config.seed is not None:
            seed_generators(seed := mix(ORDER, self._config.seed, epoch))
            if isinstance(generator := getattr(self._sampler, "generator", None), torch.Generator):
                generator.manual_seed(seed >> 1)
        indices: Tensor = self._world.run_on_main(lambda: torch.tensor(list(map(data_checks.check_index, self._sampler))))
        return indices.tolist()


def _readers(shards: Sequence[int] | None) -> str:
    if shards is None:
        return "data that is shared out"
    turns = f" of micro-batches of {shards[2]}" if shards[2] else ""
    return f"a stream that shards itself over {shards[0]} ranks, {shards[1]} readers{turns} each"


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
