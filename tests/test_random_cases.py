"""The laws on cases that nobody chose: random lengths, batches, numbers of ranks, item counts and streams."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from tests.helpers import Numbers, Ranks, Recorder, Toy, ValueToy
from trainer import DDPTrainer, Mean, TrainerConfig
from trainer.order import Permutation
from trainer.plan import Plan

TOLERANCE = 1e-12  # relative
LIMIT = 30  # seconds for an example, which needs one or less


def cases(max_examples: int) -> settings:
    """The same examples every time, each with ranks of its own. No shrinking: that would start hundreds of processes."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture],  # `ranks` keeps nothing from one example to the next
    )


def whole(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least, most)


class Shape(NamedTuple):
    """How many samples, and how they are split."""

    samples: int
    global_batch: int
    batch: int
    drop_last: bool
    epochs: int = 2

    @property
    def config(self) -> dict[str, Any]:
        return {
            **{"global_batch_size": self.global_batch, "batch_size": self.batch},
            **{"drop_last": self.drop_last, "epochs": self.epochs, "log_every": 1, "seed": 5},
        }

    @property
    def kept(self) -> int:
        """Samples of an epoch that are trained on."""
        return self.samples - self.samples % self.global_batch if self.drop_last else self.samples

    @property
    def windows(self) -> list[range]:
        """The positions of each window of an epoch."""
        return [range(first, min(first + self.global_batch, self.kept)) for first in range(0, self.kept, self.global_batch)]


@st.composite
def shapes(draw: st.DrawFn, samples: int = 50) -> Shape:
    shape = Shape(*(draw(whole(1, most)) for most in (samples, 20, 24)), drop_last=draw(st.booleans()))
    return shape._replace(drop_last=shape.drop_last and shape.samples >= shape.global_batch)


def points(samples: int) -> TensorDataset:
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(samples), dtype=torch.float64)
    return TensorDataset(inputs, inputs.prod(1, keepdim=True) + 1)


class Wavy(nn.Module):
    """A curve, so that the loss depends on the weights in more than one way."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.outer = nn.Linear(inputs, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.outer(torch.tanh(self.inner(inputs)))
        return outputs


def momentum(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def assert_equal_weights(found: list[Tensor], wanted: list[Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() <= TOLERANCE * theirs.norm()


@cases(20)
@given(shape=shapes(), world_size=whole(1, 4))
@example(shape=Shape(1, 1, 1, True), world_size=4)
@example(shape=Shape(41, 20, 3, False), world_size=3)
def test_any_split_gives_the_weights_of_a_plain_loop(ranks: Ranks, shape: Shape, world_size: int) -> None:

    def run() -> tuple[list[float], list[Tensor]]:
        recorder, model = Recorder(), Wavy(3)
        config = TrainerConfig(**shape.config)
        data = points(shape.samples)
        DDPTrainer(model, momentum(model), data, loss_fn=nn.functional.mse_loss, config=config, callbacks=[recorder]).fit()
        return [call.metrics["loss"] for call in recorder.reports], weights(model)

    model, losses, data = Wavy(3), [], points(shape.samples)
    optimizer = momentum(model)
    for epoch in range(shape.epochs):
        order = Permutation(shape.samples, 5, epoch)(range(shape.samples))
        for window in shape.windows:
            inputs, targets = data[[order[position] for position in window]]
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().sum() / len(window)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    found = ranks(world_size, run, timeout=LIMIT)
    assert found[0][0] == pytest.approx(losses, rel=TOLERANCE)
    for _, values in found:
        assert_equal_weights(values, weights(model))


@cases(15)
@given(values=st.lists(st.floats(0.5, 100), min_size=1, max_size=40), batch=whole(1, 12), world_size=whole(1, 4))
@example(values=[1.0, 2.0, 4.0], batch=2, world_size=4)
def test_every_sample_is_evaluated_once(ranks: Ranks, values: list[float], batch: int, world_size: int) -> None:

    class Watching(DDPTrainer):
        def eval_step(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
            seen.extend(batch[0].tolist())
            outputs = model(batch[0])
            return {"loss": outputs.mean(), "square": Mean(outputs.square().sum(), len(outputs)), "whole": 1.0}

    seen: list[float] = []

    def run() -> tuple[dict[str, float], list[float]]:
        model = ValueToy()
        trainer = Watching(model, SGD(model.parameters(), lr=1.0), config=TrainerConfig(eval_batch_size=batch))
        return trainer.evaluate(Numbers(values)), seen

    found = ranks(world_size, run, timeout=LIMIT)
    for rank, (metrics, own) in enumerate(found):
        assert metrics == found[0][0]
        assert own == values[rank::world_size]
    mean, square = math.fsum(values) / len(values), math.fsum(value * value for value in values) / len(values)
    assert found[0][0] == pytest.approx({"loss": mean, "square": square, "whole": 1.0}, rel=TOLERANCE)


class Rows(Dataset[Tensor]):
    """Sample i is a row of ``counts[i]`` numbers."""

    def __init__(self, counts: list[int]) -> None:
        generator = torch.Generator().manual_seed(len(counts))
        self.rows = [torch.randn(count, generator=generator, dtype=torch.float64) for count in counts]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class OverItems(DDPTrainer):
    """The mean over all items."""

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        items = torch.cat(batch)
        loss = model(items.unsqueeze(1)).square().sum()
        return {"loss": Mean(loss, torch.tensor(len(items)) if len(batch) % 2 else len(items))}


@cases(20)
@given(
    counts=st.lists(st.one_of(st.just(0), whole(0, 50)), min_size=1, max_size=24),
    window=whole(1, 8),
    batch=whole(1, 9),
    clip=st.sampled_from([None, 0.05, 0.5]),
    world_size=whole(1, 4),
)
@example(counts=[0, 7, 0, 0, 0, 0, 3, 50, 1], window=2, batch=1, clip=None, world_size=3)
def test_losses_over_items_give_the_weights_of_whole_windows(
    ranks: Ranks, counts: list[int], window: int, batch: int, clip: float | None, world_size: int
) -> None:
    """For `Mean`; a window without items has zero gradients."""

    def run() -> list[Tensor]:
        model = Wavy(1)
        config = TrainerConfig(global_batch_size=window, batch_size=batch, max_grad_norm=clip, epochs=2, shuffle=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*had no item")
            OverItems(model, momentum(model), Rows(counts), loader_options={"collate_fn": list}, config=config).fit()
        return weights(model)

    model, rows = Wavy(1), Rows(counts).rows
    optimizer = momentum(model)
    for _ in range(2):
        for first in range(0, len(rows), window):
            items = torch.cat(rows[first : first + window])
            optimizer.zero_grad()
            (model(items.unsqueeze(1)).square().sum() / max(len(items), 1)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    for found in ranks(world_size, run, timeout=LIMIT):
        assert_equal_weights(found, weights(model))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(shape=shapes(samples=200), world_size=whole(1, 9), data=st.data())
def test_a_plan_deals_out_every_position_once_and_evenly(shape: Shape, world_size: int, data: st.DataObject) -> None:
    plans = [
        Plan(shape.samples, shape.global_batch, shape.batch, rank, world_size, shape.drop_last) for rank in range(world_size)
    ]
    by_rank = [list(plan.windows()) for plan in plans]
    for plan, windows in zip(plans, by_rank, strict=True):
        assert plan.epoch_samples == shape.kept
        assert plan.steps_per_epoch == len(windows) == len(shape.windows)
        assert plan.window_sizes == sorted({len(window) for window in shape.windows}, reverse=True)
        assert plan.total_steps(3, None) == 3 * len(windows)
        assert plan.total_steps(3, 2 * len(windows) + 1) == 2 * len(windows) + 1
        assert [window.last for window in windows] == [False] * (len(windows) - 1) + [True]
        start = data.draw(whole(0, len(windows) - 1))
        assert list(plan.windows(start * shape.global_batch)) == windows[start:]
    for positions, parts in zip(shape.windows, zip(*by_rank, strict=True), strict=True):
        shares = [[position for micro_batch in part.micro_batches for position in micro_batch] for part in parts]
        assert sorted(position for share in shares for position in share) == list(positions)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert {part.size for part in parts} == {len(positions)}
        for part in parts:
            sizes = [len(micro_batch) for micro_batch in part.micro_batches]
            assert sizes[:-1] == [shape.batch] * (len(sizes) - 1)
            assert 0 < min(sizes, default=1) <= max(sizes, default=1) <= shape.batch


Pair = tuple[Tensor, Tensor]


class Stream(IterableDataset[Pair]):
    """The numbers from 0 on, without a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Pair]:
        for number in range(self.length):
            yield torch.tensor(float(number), dtype=torch.float64), torch.tensor(0.0)


class ShardedStream(Stream):
    """Of ``lengths[rank]`` numbers on each rank, all different; left alone by the trainer."""

    sharded = True

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Pair]:
        for number in shards(self.lengths)[int(os.environ.get("RANK", 0))]:
            yield torch.tensor(float(number), dtype=torch.float64), torch.tensor(0.0)


def shards(lengths: list[int]) -> list[range]:
    return [range(sum(lengths[:rank]), sum(lengths[: rank + 1])) for rank in range(len(lengths))]


Watched = tuple[list[float], float, tuple[int, int, int]]


def watched(data: Stream, workers: int, config: dict[str, Any]) -> Callable[[], Watched]:
    """The numbers that a rank has trained on, the weight and the counts of a toy in the end."""

    def run() -> Watched:
        class Watching(DDPTrainer):
            def training_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
                seen.extend(batch[0].tolist())
                loss: Tensor = model(batch[0]).mean()
                return loss

        seen: list[float] = []
        model = Toy()
        options = {"num_workers": workers}
        trainer = Watching(model, SGD(model.parameters(), lr=1.0), data, loader_options=options, config=TrainerConfig(**config))
        state = trainer.fit()
        return seen, model.w.item(), (state.step, state.epoch, state.samples)

    return run


@cases(14)
@given(shape=shapes(), world_size=whole(1, 4), workers=st.sampled_from([0, 0, 1, 2]))
@example(shape=Shape(3, 2, 1, False), world_size=4, workers=2)
@example(shape=Shape(23, 5, 2, True), world_size=3, workers=1)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
def test_every_item_of_a_stream_is_trained_on_once(ranks: Ranks, shape: Shape, world_size: int, workers: int) -> None:
    found = ranks(world_size, watched(Stream(shape.samples), workers, shape.config), timeout=LIMIT)
    counted = Counter(number for seen, *_ in found for number in seen)
    assert counted == dict.fromkeys(range(shape.kept), shape.epochs)
    steps = len(shape.windows) * shape.epochs
    wanted = -shape.epochs * math.fsum(sum(window) / len(window) for window in shape.windows)
    for _, weight, counts in found:
        assert counts == (steps, shape.epochs, shape.kept * shape.epochs)
        assert weight == pytest.approx(wanted, rel=TOLERANCE)


@cases(10)
@given(lengths=st.lists(whole(0, 13), min_size=1, max_size=4), batch=whole(1, 4), accumulation=whole(1, 3))
@example(lengths=[0, 0, 9], batch=2, accumulation=2)
def test_every_item_of_a_stream_that_shards_itself_is_trained_on_once(
    ranks: Ranks, lengths: list[int], batch: int, accumulation: int
) -> None:
    """Until the longest ends; the shorter ones take part with nothing."""
    assume(sum(lengths) > 0)
    share = batch * accumulation
    config = {"batch_size": batch, "accumulation_steps": accumulation, "epochs": 2, "log_every": 1}
    found = ranks(len(lengths), watched(ShardedStream(lengths), 0, config), timeout=LIMIT)
    steps = -(-max(lengths) // share)
    windows = [
        [number for shard in shards(lengths) for number in shard[step * share : (step + 1) * share]] for step in range(steps)
    ]
    wanted = -2 * math.fsum(sum(window) / len(window) for window in windows)
    for shard, (seen, weight, counts) in zip(shards(lengths), found, strict=True):
        assert seen == [*shard, *shard]
        assert counts == (2 * steps, 2, 2 * sum(lengths))
        assert weight == pytest.approx(wanted, rel=TOLERANCE)
