"""The order of an epoch: a permutation that every rank computes, or a user's sampler that every rank draws alike."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.helpers import Numbers, Ranks, ValueToy, mean_of_outputs, toy_trainer
from trainer import DDPTrainer, TrainerConfig, World
from trainer.order import BLOCK, Permutation

LENGTHS = [*range(1, 71), *range(BLOCK - 2, BLOCK + 4), 2 * BLOCK, 100_003, 1_000_000]


def whole(length: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return Permutation(length, seed, epoch)(range(length))


@pytest.mark.parametrize("lengths", [LENGTHS[:70], LENGTHS[70:]], ids=["short", "long"])
def test_the_order_holds_every_sample_once(lengths: Sequence[int]) -> None:
    for length in lengths:
        assert np.array_equal(np.sort(whole(length, seed=3, epoch=length % 5)), np.arange(length)), length


@pytest.mark.parametrize("length", [12, 1_000, BLOCK, BLOCK + 1, 100_003])
def test_the_order_is_a_function_of_seed_and_epoch(length: int) -> None:
    orders = [whole(length, seed, epoch) for seed in (0, 1, 2**40) for epoch in range(4)]
    assert orders == [whole(length, seed, epoch) for seed in (0, 1, 2**40) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert list(range(length)) not in orders


def test_every_order_of_four_samples_is_as_likely() -> None:
    """Chi-squared with 23 degrees of freedom: above 50 by chance in one of a thousand draws."""
    draws = 4_800
    counts = Counter(tuple(whole(4, seed, epoch)) for seed in range(draws // 8) for epoch in range(8))
    assert len(counts) == 24
    assert sum((count - draws / 24) ** 2 for count in counts.values()) / (draws / 24) < 50


@pytest.mark.parametrize("length", [1_000, BLOCK, BLOCK + 5, 200_003])
def test_the_order_looks_random(length: int) -> None:
    """Places and samples are uncorrelated, and so are neighbours in the order; bounds at 5 standard deviations."""
    for epoch in range(3):
        order = np.array(whole(length, 11, epoch))
        for left, right in ((np.arange(length), order), (order[:-1], order[1:])):
            assert abs(np.corrcoef(left, right)[0, 1]) < 5 / length**0.5
        assert np.count_nonzero(order == np.arange(length)) < 10  # one is to be expected
        assert np.count_nonzero(np.diff(order) == 1) < 10


@pytest.mark.parametrize("length", [7, 1_000, BLOCK + 1, 200_003])
def test_any_positions_can_be_asked_for(length: int) -> None:
    """Strided, across the borders of blocks, backwards and forwards."""
    wanted, order = whole(length, 5, 2), Permutation(length, 5, 2)
    borders = [number * BLOCK for number in range(length // BLOCK + 1)]
    asked = [range(0), range(length - 1, length), range(0, length, 3), range(length // 2, length)]
    for border in borders:
        for step in (1, 2, 3, 7, 128):
            asked.append(range(max(border - 5 * step - 1, 0), min(border + 9 * step, length), step))
    asked.append(range(2, length, 70_000))  # passes over whole blocks
    for positions in [*asked, *reversed(asked)]:
        assert order(positions) == [wanted[position] for position in positions]
    for border in borders:
        for position in range(max(border - 2, 0), min(border + 2, length)):
            assert order(range(position, position + 1)) == [wanted[position]]


@pytest.mark.parametrize("length", [10**9, 2**32 + 1, 10**12])
def test_an_order_of_any_length_needs_one_block_at_a_time(length: int) -> None:
    order = Permutation(length, 0, 0)
    for start in (0, length // 3, length - 1_000):
        samples = order(range(start, start + 1_000))
        assert len(set(samples)) == 1_000
        assert 0 <= min(samples) < length // 4
        assert length // 4 * 3 < max(samples) < length


class Watched(DDPTrainer):
    """Remembers the samples of each window, by epoch."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        self.seen.setdefault((self.state.epoch, self.epoch_step), []).extend(map(int, batch[0]))
        return super().training_step(model, batch)

    def fit(self, resume_from: Any = None) -> Any:
        self.seen: dict[tuple[int, int], list[int]] = {}
        return super().fit(resume_from)


def seen(samples: int, sampler: Sampler[int] | None = None, loader_options: Any = None, **config: Any) -> list[list[list[int]]]:
    """This rank's samples: by epoch, then by window."""
    World.from_env()
    model = ValueToy()
    trainer = Watched(
        model,
        SGD(model.parameters(), lr=1.0),
        Numbers(samples),
        loss_fn=mean_of_outputs,
        sampler=sampler,
        loader_options=loader_options,
        config=TrainerConfig(**{"epochs": 3, **config}),
    )
    trainer.fit()
    steps = range(trainer.steps_per_epoch or 0)
    return [[trainer.seen.get((epoch, window), []) for window in steps] for epoch in range(trainer.state.epoch)]


def joined(by_rank: list[list[list[list[int]]]]) -> list[list[int]]:
    """The global order of each epoch: inside a window, rank r has every W-th position from the r-th on."""
    return [
        [sample for shares in zip(*epoch, strict=True) for turn in zip_longest(*shares) for sample in turn if sample is not None]
        for epoch in zip(*by_rank, strict=True)
    ]


def test_every_epoch_has_an_order_of_its_own(ranks: Ranks) -> None:
    """Each epoch all ids once, over both ranks; pairwise different; the same again with the same seed alone."""
    runs = [ranks(2, seen, 10, batch_size=1, seed=seed) for seed in (0, 0, 1)]
    first, again, other = map(joined, runs)
    for order in first:
        assert sorted(order) == list(range(10))
    assert len({tuple(order) for order in [*first, *other]}) == 6
    assert runs[0] == runs[1]
    assert first == again == [whole(10, 0, epoch) for epoch in range(3)]


def test_the_order_does_not_depend_on_ranks_workers_or_batches(ranks: Ranks) -> None:
    def run() -> list[Any]:
        return [
            seen(23, global_batch_size=6, batch_size=2),
            seen(23, global_batch_size=6, batch_size=4),
            seen(23, None, {"num_workers": 1}, global_batch_size=6, batch_size=2),
            seen(23, None, {"num_workers": 2, "persistent_workers": True}, global_batch_size=6, batch_size=1),
        ]

    wanted = [whole(23, 0, epoch) for epoch in range(3)]
    for world_size in (1, 3):
        for by_rank in zip(*ranks(world_size, run), strict=True):
            assert joined(list(by_rank)) == wanted


def test_without_shuffle_the_order_is_the_datasets(ranks: Ranks) -> None:
    assert joined(ranks(2, seen, 7, batch_size=2, shuffle=False)) == [list(range(7))] * 3


def test_without_a_seed_the_ranks_still_share_one_order(ranks: Ranks) -> None:
    """Rank 0 draws it once per run."""

    def run() -> list[Any]:
        torch.manual_seed(int(World.from_env().rank))
        return [seen(30, batch_size=2, seed=None) for _ in range(2)]

    first, second = (joined(list(by_rank)) for by_rank in zip(*ranks(2, run), strict=True))
    for order in [*first, *second]:
        assert sorted(order) == list(range(30))
    assert len({tuple(order) for order in [*first, *second]}) == 6


def test_a_dataset_smaller_than_the_world_is_trained_on(ranks: Ranks) -> None:
    """One step on the one sample there is; the ranks without one take part with nothing."""

    def run() -> tuple[int, float]:
        trainer = toy_trainer([5], batch_size=1)
        trainer.fit()
        return trainer.state.step, trainer.model.w.item()

    assert ranks(4, run) == [(1, -5.0)] * 4


@pytest.mark.parametrize(
    ("world_size", "samples", "config", "numbers"),
    [
        (4, 3, {"batch_size": 1}, ("3 samples", "world size 4", "batch_size 1", "4")),
        (2, 5, {"batch_size": 8}, ("5 samples", "world size 2", "batch_size 8", "16")),
        (1, 5, {"batch_size": 2, "accumulation_steps": 3}, ("5 samples", "world size 1", "batch_size 2", "6")),
        (3, 9, {"global_batch_size": 10}, ("9 samples", "world size 3", "10")),
    ],
)
def test_drop_last_that_leaves_nothing_is_an_error_on_every_rank(
    ranks: Ranks, world_size: int, samples: int, config: dict[str, int], numbers: tuple[str, ...]
) -> None:
    """Before training, naming the numbers."""

    def run() -> None:
        toy_trainer(samples, drop_last=True, **config)

    for outcome in ranks.outcomes(world_size, run, timeout=30):
        assert outcome.error == "ValueError"
        assert outcome.exit_code != 0
        assert all(part in outcome.message for part in ("drop_last=True", *numbers)), outcome.message


def test_batches_larger_than_a_ranks_share_are_no_error(ranks: Ranks) -> None:
    """Without drop_last: one step, on what there is."""
    assert joined(ranks(2, seen, 5, batch_size=8, shuffle=False, epochs=1)) == [[0, 1, 2, 3, 4]]


class Rotated(Sampler[int]):
    """Depends on set_epoch alone; remembers what it was told."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter([(place + 3 * self.epochs[-1]) % self.length for place in range(self.length)])


class Drawing(Sampler[int]):
    """Draws from every generator there is."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        draws = (lambda: int(torch.randint(8, ())), lambda: int(np.random.randint(8)), lambda: random.randrange(8))
        return iter([draws[place % 3]() for place in range(9)])


def unseeded() -> torch.Generator:
    """A generator in another state on each rank."""
    return torch.Generator().manual_seed(100 + World.from_env().rank)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "subset": lambda: SubsetRandomSampler([0, 1, 2, 3]),
    "odd subset": lambda: SubsetRandomSampler([1, 3, 4, 6, 7]),
    "subset with a generator": lambda: SubsetRandomSampler([0, 1, 2, 3], generator=unseeded()),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 0.5, 1.0, 0, 0, 0, 0], 13),
    "weighted with a generator": lambda: WeightedRandomSampler([1.0, 2.0, 0.5, 1.0, 0, 0, 0, 0], 13, generator=unseeded()),
    "random": lambda: RandomSampler(range(8)),
    "replacing": lambda: RandomSampler(range(8), replacement=True, num_samples=11),
    "sequential": lambda: SequentialSampler(range(8)),
    "told the epoch": lambda: Rotated(8),
    "of all generators": Drawing,
}


@pytest.fixture(scope="module")
def sampled() -> dict[int, dict[str, list[list[int]]]]:
    """The orders that samplers over 8 samples gave, for three epochs: by world size, then by sampler."""

    def run() -> list[Any]:
        torch.manual_seed(World.from_env().rank)  # what the ranks had before must not matter
        return [seen(8, make(), batch_size=2, seed=1) for make in SAMPLERS.values()]

    return {
        world_size: dict(
            zip(SAMPLERS, [joined(list(by_rank)) for by_rank in zip(*Ranks()(world_size, run), strict=True)], strict=True)
        )
        for world_size in (1, 2, 3)
    }


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_one_global_order_split_over_the_ranks(sampled: dict[int, dict[str, Any]], name: str) -> None:
    """Whatever the number of ranks."""
    alone = sampled[1][name]
    assert sampled[2][name] == sampled[3][name] == alone
    assert len(alone) == 3
    if name != "sequential":
        assert len({tuple(order) for order in alone}) == 3


def test_a_subset_sampler_gives_its_samples_once_and_no_others(sampled: dict[int, dict[str, Any]]) -> None:
    for name, samples in (("subset", [0, 1, 2, 3]), ("odd subset", [1, 3, 4, 6, 7]), ("random", list(range(8)))):
        assert [sorted(order) for order in sampled[2][name]] == [samples] * 3


def test_a_weighted_sampler_gives_no_sample_of_weight_zero(sampled: dict[int, dict[str, Any]]) -> None:
    for order in sampled[2]["weighted"]:
        assert len(order) == 13
        assert max(order) < 4


def test_a_sampler_is_told_the_epoch(sampled: dict[int, dict[str, Any]], ranks: Ranks) -> None:
    assert sampled[2]["told the epoch"] == [[(place + 3 * epoch) % 8 for place in range(8)] for epoch in range(3)]

    def run() -> list[int]:
        sampler = Rotated(6)
        seen(8, sampler, batch_size=2)
        return sampler.epochs

    assert ranks(2, run) == [[0, 1, 2]] * 2


def test_the_totals_are_those_of_the_sampler(ranks: Ranks) -> None:
    def run() -> tuple[Any, ...]:
        model = ValueToy()
        trainer = DDPTrainer(
            model,
            SGD(model.parameters(), lr=1.0),
            Numbers(100),
            loss_fn=mean_of_outputs,
            sampler=SubsetRandomSampler(range(7)),
            config=TrainerConfig(batch_size=2, epochs=2, shuffle=False),
        )
        trainer.fit()
        return trainer.steps_per_epoch, trainer.total_steps, trainer.state.samples

    assert ranks(1, run) == [(4, 8, 14)]


def test_without_a_seed_a_sampler_is_drawn_on_rank_0(ranks: Ranks) -> None:
    def run() -> Any:
        torch.manual_seed(World.from_env().rank)
        return seen(8, SubsetRandomSampler([0, 2, 4, 6, 7]), batch_size=1, seed=None)

    for order in joined(ranks(2, run)):
        assert sorted(order) == [0, 2, 4, 6, 7]


@pytest.mark.parametrize("sampled", [False, True])
def test_without_a_seed_an_epoch_that_was_left_is_gone_on_with_in_its_order(ranks: Ranks, sampled: bool) -> None:
    def run() -> list[int]:
        class Stops(Watched):
            kept: ClassVar[list[int]] = []

            def training_step(self, model: nn.Module, batch: Any) -> Any:
                if self.state.step in (2, 5):
                    self.stop("for now")
                self.kept.extend(map(int, batch[0]))
                return super().training_step(model, batch)

        World.from_env()
        model = ValueToy()
        config = TrainerConfig(batch_size=1, seed=None, log_every=1)
        optimizer = SGD(model.parameters(), lr=1.0)
        sampler = RandomSampler(range(16)) if sampled else None
        trainer = Stops(model, optimizer, Numbers(16), loss_fn=mean_of_outputs, sampler=sampler, config=config)
        for _ in range(3):
            trainer.fit()
        return Stops.kept

    found = ranks(2, run)
    assert sorted(found[0] + found[1]) == list(range(16))


def test_a_sampler_that_no_seed_reaches_is_one_order_on_all_ranks_too(ranks: Ranks) -> None:
    """Indices of another shuffle on each rank, and a generator of numpy's own."""

    class Own(Rotated):
        def __iter__(self) -> Iterator[int]:
            return iter(np.random.default_rng(World.from_env().rank).permutation(8).tolist())

    def run(own: bool) -> Any:
        generator = torch.Generator().manual_seed(World.from_env().rank)
        return seen(8, Own(8) if own else SubsetRandomSampler(torch.randperm(8, generator=generator).tolist()), batch_size=1)

    for own in (False, True):
        for order in joined(ranks(2, run, own)):
            assert sorted(order) == list(range(8))


class Short(Rotated):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length - 1))


class Lengthless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Batches(Sampler[Any]):
    """A batch sampler of one's own, of batches that differ in size."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]])


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        (Batches(), "TypeError", "the sampler must give indices of single samples, ints; found [0, 1, 2] (list)"),
        (DistributedSampler(range(8), num_replicas=2, rank=0), "ValueError", "leave it out, the trainer splits exactly"),
        (BatchSampler(SequentialSampler(range(8)), 2, False), "ValueError", "pass its inner sampler"),
        (SubsetRandomSampler([]), "ValueError", "sampler is empty"),
        (Lengthless(), "TypeError", "must have a length"),
        (3, "TypeError", "must be a torch.utils.data.Sampler with a length; found int"),
        (Short(5), "ValueError", "announced 5 samples with len(), but gave 4"),
    ],
)
def test_a_sampler_that_gives_no_global_order_is_an_error(ranks: Ranks, sampler: Any, error: str, message: str) -> None:
    """Nothing is replaced, and no batch composed otherwise, without a word."""
    (outcome,) = ranks.outcomes(1, seen, 8, sampler)
    assert outcome.error == error
    assert message in outcome.message
