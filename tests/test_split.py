"""The updates depend on seed, data and global batch alone, and every position is trained on once per epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.helpers import Numbers, Ranks, Recorder, ValueToy, mean_of_outputs
from trainer import DDPTrainer, TrainerConfig, World
from trainer.order import Permutation

SAMPLES, EPOCHS, SEED = 1_003, 3, 7
TOLERANCE = 1e-12  # relative


class Recipe(NamedTuple):
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    max_grad_norm: float | None = None


RECIPES = {
    "momentum": Recipe(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)),
    "adamw": Recipe(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)),
}
CLIPPED = Recipe(lambda parameters: torch.optim.SGD(parameters, lr=0.1), max_grad_norm=0.25)

# By world size: how 32 samples a step are computed.
SPLITS: dict[int, list[dict[str, Any]]] = {
    1: [
        {"batch_size": 32},
        {"accumulation_steps": 2, "batch_size": 16},
        {"accumulation_steps": 4, "batch_size": 8},
        {"global_batch_size": 32, "batch_size": 7},
    ],
    2: [{"accumulation_steps": 1, "batch_size": 16}, {"global_batch_size": 32, "batch_size": 5}],
    3: [{"global_batch_size": 32, "batch_size": 6}, {"global_batch_size": 32, "batch_size": 100}],
    4: [{"accumulation_steps": 2, "batch_size": 4}, {"global_batch_size": 32, "batch_size": 3}],
}


class Curve(NamedTuple):
    losses: list[float]
    weights: list[Tensor]

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        return (
            isinstance(other, Curve)
            and self.losses == other.losses
            and all(torch.equal(*pair) for pair in zip(self.weights, other.weights, strict=True))
        )


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise to each sample whenever it is fetched."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.data[index]
        return inputs + 0.1 * torch.randn(inputs.shape, dtype=inputs.dtype), target


@cache
def points(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.prod(1, keepdim=True) + inputs[:, :1])


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def plain_loop(recipe: Recipe, data: TensorDataset, global_batch: int) -> Curve:
    """What is to be computed, as one would write it for one process."""
    model, losses = network(), []
    optimizer = recipe.optimizer(model.parameters())
    for epoch in range(EPOCHS):
        order = Permutation(len(data), SEED, epoch)(range(len(data)))
        for first in range(0, len(data), global_batch):
            inputs, targets = data[order[first : first + global_batch]]
            loss = squared_error(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            if recipe.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
            optimizer.step()
            losses.append(loss.item())
    return Curve(losses, [parameter.detach() for parameter in model.parameters()])


def trained(recipe: Recipe, data: Dataset[Any], loader_options: Mapping[str, Any] | None = None, **config: Any) -> Curve:
    """The same by the trainer; the losses on rank 0 only."""
    model, recorder = network(), Recorder()
    trainer = DDPTrainer(
        model,
        recipe.optimizer(model.parameters()),
        data,
        loss_fn=squared_error,
        loader_options=loader_options,
        config=TrainerConfig(epochs=EPOCHS, log_every=1, seed=SEED, max_grad_norm=recipe.max_grad_norm, **config),
        callbacks=[recorder],
    )
    trainer.fit()
    return Curve([call.metrics["loss"] for call in recorder.reports], [parameter.detach() for parameter in model.parameters()])


def trained_all(recipe: Recipe, data: Dataset[Any], splits: list[dict[str, Any]]) -> list[Curve]:
    World.from_env()  # one group for all of them
    return [trained(recipe, data, **split) for split in splits]


def assert_close(found: Curve, wanted: Curve) -> None:
    """Losses one by one, weight tensors by their norm."""
    assert found.losses == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0.0)
    for ours, theirs in zip(found.weights, wanted.weights, strict=True):
        assert (ours - theirs).norm() <= TOLERANCE * theirs.norm()


@pytest.mark.parametrize("world_size", SPLITS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_split_of_a_global_batch_gives_the_updates_of_a_plain_loop(ranks: Ranks, name: str, world_size: int) -> None:
    """With a last window of 11 samples."""
    recipe, splits = RECIPES[name], SPLITS[world_size]
    by_rank = ranks(world_size, trained_all, recipe, points(), splits)
    wanted = plain_loop(recipe, points(), 32)
    assert len(wanted.losses) == EPOCHS * 32
    for curve in by_rank[0]:
        assert_close(curve, wanted)
    for curves in by_rank:  # replicas are equal bit for bit
        for curve, first in zip(curves, by_rank[0], strict=True):
            assert curve == Curve(curve.losses, first.weights)


def test_clipping_is_of_the_whole_windows_gradient(ranks: Ranks) -> None:
    """With a norm that clips about every second step."""
    for curve in ranks(3, trained_all, CLIPPED, points(203), SPLITS[3])[0]:
        assert_close(curve, plain_loop(CLIPPED, points(203), 32))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_window_with_fewer_samples_than_ranks_changes_nothing(ranks: Ranks, world_size: int) -> None:
    """With a last window of one sample, and with windows that never reach all ranks."""
    recipe = RECIPES["adamw"]
    tail, narrow = ranks(world_size, trained_twice, recipe)[0]
    assert_close(tail, plain_loop(recipe, points(101), 25))
    assert_close(narrow, plain_loop(recipe, points(31), 2))


def trained_twice(recipe: Recipe) -> tuple[Curve, Curve]:
    World.from_env()  # one group for all of them
    tail = trained(recipe, points(101), global_batch_size=25, batch_size=4)
    return tail, trained(recipe, points(31), global_batch_size=2, batch_size=4)


def test_neither_workers_nor_ranks_change_a_run_with_augmentation(ranks: Ranks) -> None:
    """Bitwise over the number of workers, as every law over the number of ranks."""

    def run(workers: tuple[int, ...]) -> list[Curve]:
        World.from_env()  # one group for all of them
        return [
            trained(
                RECIPES["momentum"],
                Noisy(points(101)),
                {"num_workers": number, "persistent_workers": number == 1},
                global_batch_size=12,
                batch_size=5,
            )
            for number in workers
        ]

    single = ranks(1, run, (0, 1, 2))[0]
    assert single[0] == single[1] == single[2]
    double = ranks(2, run, (0, 2))[0]
    assert double[0] == double[1]
    triple = ranks(3, run, (0,))[0]
    for curve in (double[0], triple[0]):
        assert_close(curve, single[0])


class Watched(DDPTrainer):
    """Remembers the samples of each micro-batch it trained on: by epoch, then by window."""

    def fit_and_tell(self) -> list[list[list[int]]]:
        self.seen: dict[tuple[int, int], list[int]] = {}
        self.fit()
        return [
            [self.seen.get((epoch, window), []) for window in range(self.steps_per_epoch or 0)]
            for epoch in range(self.state.epoch)
        ]

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        place = (self.state.epoch, self.epoch_step)
        self.seen.setdefault(place, []).extend(map(int, batch[0]))
        assert len(batch[0]) <= self.config.batch_size
        loss = super().training_step(model, batch)
        assert isinstance(loss, Tensor)
        return loss


def watched(samples: int, **config: Any) -> list[list[list[int]]]:
    model = ValueToy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = TrainerConfig(**{"epochs": 2, "seed": SEED, **config})
    return Watched(model, optimizer, Numbers(samples), loss_fn=mean_of_outputs, config=settings).fit_and_tell()


# samples, batch_size, accumulation_steps or -global_batch_size
SHAPES = [(1, 1, 1), (2, 3, 1), (5, 2, 3), (7, 1, 2), (10, 2, 2), (12, 2, 1), (23, 3, 2), (24, 1, 3), (29, 2, -5), (30, 4, -10)]


def settings(batch_size: int, accumulation: int) -> dict[str, Any]:
    key = "accumulation_steps" if accumulation > 0 else "global_batch_size"
    return {"batch_size": batch_size, key: abs(accumulation)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_position_is_trained_on_once_per_epoch(ranks: Ranks, world_size: int) -> None:
    """Window t holds positions [t G, (t + 1) G) of the order, dealt out to the ranks one by one; nothing is left over."""

    def run() -> list[list[list[list[int]]]]:
        World.from_env()  # one group for all of them
        return [watched(samples, **settings(*shape)) for samples, *shape in SHAPES]

    by_rank = ranks(world_size, run)
    for place, (samples, batch_size, accumulation) in enumerate(SHAPES):
        size = -accumulation if accumulation < 0 else world_size * batch_size * accumulation
        for epoch in range(2):
            order = Permutation(samples, SEED, epoch)(range(samples))
            windows = [order[first : first + size] for first in range(0, samples, size)]
            assert joined([seen[place][epoch] for seen in by_rank]) == windows


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drop_last_leaves_out_only_a_last_window_shorter_than_the_global_batch(ranks: Ranks, world_size: int) -> None:
    sizes = [12, 13, 17, 18, 23]

    def run() -> list[list[list[list[int]]]]:
        World.from_env()  # one group for all of them
        return [watched(samples, global_batch_size=6, batch_size=2, drop_last=True) for samples in sizes]

    by_rank = ranks(world_size, run)
    for place, samples in enumerate(sizes):
        for epoch in range(2):
            kept = Permutation(samples, SEED, epoch)(range(samples))[: samples // 6 * 6]
            windows = [kept[first : first + 6] for first in range(0, len(kept), 6)]
            assert joined([seen[place][epoch] for seen in by_rank]) == windows


def joined(by_rank: list[list[list[int]]]) -> list[list[int]]:
    """The samples of each window in order, from those of the ranks: rank r has every W-th from the r-th on."""
    windows = zip(*by_rank, strict=True)
    return [[sample for turn in zip_longest(*shares) for sample in turn if sample is not None] for shares in windows]
