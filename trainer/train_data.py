"""The training data of a run: its plan, the order of each epoch, and the batches in that order."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from . import checks
from .config import TrainerConfig
from .data import Loader, requests
from .order import Order, Permutation, drawn, sequence
from .plan import Plan, Window
from .randomness import ORDER, SAMPLE, mix, seed_generators
from .state import TrainerState


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
        rank: int,
        world_size: int,
    ) -> None:
        self.options: Mapping[str, Any] = {} if options is None else options
        checks.check_loader_options(self.options)
        self._dataset: Any = None
        self._sampler: Any = None
        self._config = config
        samples = 0
        if dataset is not None:
            checks.check_dataset(dataset, "train_data")
            self._dataset = dataset
            samples = len(self._dataset)
        if sampler is not None:
            if dataset is None:
                raise ValueError("a sampler gives the order of train_data: pass train_data too")
            checks.check_sampler(sampler)
            self._sampler = sampler
            samples = len(self._sampler)
        window_size = config.window_size(world_size)
        self.plan = Plan(samples, window_size, config.batch_size, rank, world_size, config.drop_last)
        if dataset is not None:
            checks.check_plan(self.plan, config)

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self._dataset is None else self.plan.steps_per_epoch

    @property
    def total_steps(self) -> int | None:
        return None if self._dataset is None else self.plan.total_steps(self._config.epochs, self._config.max_steps)

    def require(self) -> None:
        """ValueError when there is nothing to train on."""
        if self._dataset is None:
            raise ValueError("nothing to train on: pass train_data to DDPTrainer")

    def open(self, run_on_main: Callable[[Callable[[], Any]], Any]) -> None:
        """Before the first batch of a `fit`; `run_on_main` gives every rank what rank 0 draws, where there is no seed."""
        self._run_on_main = run_on_main
        seed = self._config.seed
        self._order_seed: int = run_on_main(lambda: secrets.randbits(63)) if seed is None else seed
        self._loader = Loader(self._dataset, self.options, seed, SAMPLE)

    def windows(self, state: TrainerState) -> Iterator[Window]:
        """The windows that remain of the current epoch, up to the planned end of the run."""
        remaining = None if self.total_steps is None else self.total_steps - state.step
        return islice(self.plan.windows(state.epoch_samples), remaining)

    def batches(self, state: TrainerState) -> Iterator[Any]:
        """This rank's micro-batches in those windows, one after another."""
        shares = (share for window in self.windows(state) for share in window.micro_batches)
        return self._loader.batches(requests(state.epoch, shares, self._order(state.epoch)))

    def _order(self, epoch: int) -> Order:
        if self._sampler is not None:
            return drawn(self._draw_sampler(epoch), self.plan.samples, len(self._dataset))
        return Permutation(self.plan.samples, self._order_seed, epoch) if self._config.shuffle else sequence

    def _draw_sampler(self, epoch: int) -> list[int]:
        """The sampler's indices for an epoch, drawn alike on every rank."""
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)
        if self._config.seed is None:
            indices: list[int] = self._run_on_main(lambda: list(map(checks.check_index, self._sampler)))
            return indices
        seed_generators(seed := mix(ORDER, self._config.seed, epoch))
        if isinstance(generator := getattr(self._sampler, "generator", None), torch.Generator):
            generator.manual_seed(seed >> 1)
        return list(map(checks.check_index, self._sampler))
