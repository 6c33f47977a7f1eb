"""What travels between the ranks, when, and what is reported. Messages are seen where torch dispatches them."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile, record_function

from tests.helpers import BatchNormToy, Numbers, Ranks, Recorder, Toy, ValueToy, mean_of_outputs, rank_pairs, toy_trainer
from trainer import DDPTrainer, Mean, TrainerConfig, World, stopping

BEGIN, END, MICRO_BATCH, UPDATE, EVALUATION = MARKS = ("begin", "end", "micro-batch", "update", "evaluation")
# Messages by the names of torch. An object is gathered, and broadcast, in two: its size, then its bytes.
OBJECT_GATHERED, OBJECT_BROADCAST = ["allgather"] * 2, ["broadcast"] * 2
REBUILT = ["broadcast"] * 2  # set-up: DDP's buckets, at the first forward after the settling pass
PACKED, AGREEMENT = ["allreduce"], ["allreduce"]


class Marked(DDPTrainer):
    """Puts marks between the messages, and moves its own clock."""

    seconds_per_step = 0.0

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        if model.training:
            mark(MICRO_BATCH)
        return super().training_step(model, batch)

    def optimizer_step(self) -> None:
        mark(UPDATE)
        super().optimizer_step()
        stopping.time.now += self.seconds_per_step

    def evaluate(self, data: Any = None) -> dict[str, float]:
        mark(EVALUATION)
        return super().evaluate(data)


def mark(name: str) -> None:
    with record_function(name):
        pass


class Clock(SimpleNamespace):
    """Stands still unless it is moved."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Layers(nn.Module):
    """Four parameters of 800 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.full((100,), 0.001 * number, dtype=torch.float64) for number in (1, 2, 3, 4)])

    def forward(self, x: Tensor) -> Tensor:
        outputs = x
        for layer in self.layers:
            outputs = outputs * layer.sum()
        return outputs


def trace(
    numbers: Sequence[float],
    make: Callable[[], nn.Module] = Toy,
    seconds_per_step: float = 0.0,
    evaluates: bool = False,
    **config: Any,
) -> list[str]:
    """This rank's marks and messages, from the first window to the end of `fit`."""
    World.from_env()
    stopping.time = Clock()  # type: ignore[assignment]
    model = make()
    trainer = Marked(
        model,
        SGD(model.parameters(), lr=0.0),
        Numbers(numbers),
        Numbers(3) if evaluates else None,
        loss_fn=mean_of_outputs,
        config=TrainerConfig(shuffle=False, **config),
    )
    trainer.seconds_per_step = seconds_per_step
    with after_wrapping(trainer.world, lambda wrapped: mark(BEGIN)), profile(activities=[ProfilerActivity.CPU]) as profiled:
        trainer.fit()
        mark(END)
    events = sorted((event.time_range.start, event.name) for event in profiled.events())
    names = [name for _, name in events if name in MARKS or name.startswith("c10d::")]
    # From torch 2.15 on objects are gathered by "_allgather_base_".
    names = [name.removeprefix("c10d::").strip("_").removesuffix("_base") for name in names]
    return names[names.index(BEGIN) + 1 : names.index(END)]


class after_wrapping:  # noqa: N801
    """A context in which `call` gets each DDP wrapper that `world` makes."""

    def __init__(self, world: World, call: Callable[[Any], Any]) -> None:
        self.world, self.call, self.wrap = world, call, world.wrap

    def __enter__(self) -> None:
        def wrap(model: nn.Module, **options: Any) -> nn.Module:
            wrapped = self.wrap(model, **options)
            self.call(wrapped)
            return wrapped

        self.world.wrap = wrap  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self.world.wrap = self.wrap  # type: ignore[method-assign]


def expected(
    micro_batches: Sequence[int],
    steps_per_epoch: int,
    log_every: int,
    buffers: int = 0,
    buckets: int = 1,
    agreements: Sequence[int] = (1,),
    evaluates: bool = False,
) -> list[str]:
    """What is promised of a rank with so many micro-batches in each window, `agreements` being steps besides the reports'."""
    messages: list[str] = []
    reported = False
    for step, micros in enumerate(micro_batches, 1):
        messages += ["broadcast"] * buffers + [MICRO_BATCH] * micros
        messages += REBUILT * (step == 1) + ["allreduce"] * buckets + [UPDATE]
        epoch_over = step % steps_per_epoch == 0
        if step % log_every == 0 or epoch_over or step == len(micro_batches):
            messages += OBJECT_GATHERED * (not reported) + PACKED  # the keys, once
            reported = True
            if evaluates and epoch_over:
                messages += [EVALUATION, *["broadcast"] * buffers, *OBJECT_GATHERED]
            messages += AGREEMENT
        elif step in agreements:
            messages += AGREEMENT
    return messages + OBJECT_BROADCAST  # that rank 0's on_fit_end has finished


def shares(samples: int, global_batch: int, batch: int, world_size: int, epochs: int) -> list[list[int]]:
    """The micro-batches in each window of a run, by rank."""
    windows = [range(first, min(first + global_batch, samples)) for first in range(0, samples, global_batch)] * epochs
    return [[-(-len(window[rank::world_size]) // batch) for window in windows] for rank in range(world_size)]


@pytest.mark.parametrize("log_every", [1, 3, 50])
@pytest.mark.parametrize("world_size", [2, 3])
def test_between_reports_only_gradients_travel_and_a_report_is_two_messages(
    ranks: Ranks, world_size: int, log_every: int
) -> None:
    """With tails in which ranks have different numbers of micro-batches: 14 = 5 + 5 + 4, and 11 = 5 + 5 + 1."""

    def run() -> list[list[str]]:
        settings = {"batch_size": 1, "global_batch_size": 5, "log_every": log_every, "epochs": 2}
        return [trace(range(samples), **settings) for samples in (14, 11)]

    by_rank = ranks(world_size, run)
    for place, samples in enumerate((14, 11)):
        for rank, micro_batches in enumerate(shares(samples, 5, 1, world_size, 2)):
            assert by_rank[rank][place] == expected(micro_batches, 3, log_every)


@pytest.mark.parametrize("log_every", [2, 5])
def test_rank_0s_buffers_travel_once_per_window_and_nothing_else_does(ranks: Ranks, log_every: int) -> None:
    """Batch normalisation has buffers of two types, which is two messages, whatever the accumulation."""

    def run() -> list[str]:
        numbers = rank_pairs(2, 8).values.tolist()
        return trace(numbers, BatchNormToy, batch_size=2, accumulation_steps=2, log_every=log_every, evaluates=True)

    for found in ranks(2, run):
        assert found == expected([2] * 4, 4, log_every, buffers=2, evaluates=True)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
@pytest.mark.parametrize("option", ["broadcast_buffers", "forward_sync_buffers"])
def test_buffers_stay_at_home_when_ddp_is_told_so(ranks: Ranks, option: str) -> None:
    if option not in inspect.signature(nn.parallel.DistributedDataParallel).parameters:
        pytest.skip(f"this torch has no {option}")

    def run() -> list[str]:
        return trace(rank_pairs(2, 3).values.tolist(), BatchNormToy, batch_size=2, ddp_options={option: False})

    for found in ranks(2, run):
        assert found == expected([1] * 3, 3, 10)


def test_reports_far_apart_have_an_agreement_every_two_seconds(ranks: Ranks) -> None:
    """By rank 0's clock; the first after step 1, which sees how long a step takes."""

    def run() -> list[list[str]]:
        settings = {"batch_size": 1, "log_every": 20}
        return [trace(range(40), seconds_per_step=seconds, **settings) for seconds in (0.01, 0.5, 1.9, 30.0)]

    for found in ranks(2, run):
        for place, agreements in enumerate([[1], [1, 5, 9, 13, 17], range(1, 21), range(1, 21)]):
            assert found[place] == expected([1] * 20, 20, 20, agreements=agreements)


def test_one_process_sends_nothing(ranks: Ranks) -> None:
    for found in ranks(1, trace, range(9), batch_size=2, epochs=2, log_every=2, evaluates=True):
        assert set(found) == {MICRO_BATCH, UPDATE, EVALUATION}


def reductions(samples: int, global_batch: int, batch: int, bucket_cap_mb: float) -> tuple[list[Counter[int]], int]:
    """How often DDP reduced each bucket in each step, and how many buckets there are."""
    World.from_env()
    counts: list[Counter[int]] = [Counter()]
    last: set[int] = set()

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and knows no text
        counts[-1][bucket.index()] += 1
        if bucket.is_last():
            last.add(bucket.index())
        return allreduce_hook(None, bucket)

    class Stepping(DDPTrainer):
        def optimizer_step(self) -> None:
            super().optimizer_step()
            counts.append(Counter())

    model = Layers()
    settings = {"global_batch_size": global_batch, "batch_size": batch, "epochs": 2, "lr": 0.0}
    trainer = toy_trainer(samples, model, kind=Stepping, ddp_options={"bucket_cap_mb": bucket_cap_mb}, **settings)
    with after_wrapping(trainer.world, lambda wrapped: wrapped.register_comm_hook(None, hook)):
        trainer.fit()
    assert counts.pop() == Counter()  # nothing travels after the last update
    return counts, last.pop() + 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_bucket_travels_once_per_step_whatever_the_accumulation(ranks: Ranks, world_size: int) -> None:
    """Also in tail windows, and where a rank has no micro-batch at all."""
    shapes = [(16, 8, 1), (16, 8, 4), (19, 8, 1), (17, 8, 2), (7, 2, 1), (5, 1, 1)]

    def run() -> list[Any]:
        return [reductions(*shape, bucket_cap_mb=mb) for shape in shapes for mb in (0.001, 25)]

    for results in ranks(world_size, run):
        wanted_buckets = [number for _ in shapes for number in (2, 1)]
        for place, (counts, buckets) in enumerate(results):
            samples, global_batch, _ = shapes[place // 2]
            assert buckets == wanted_buckets[place]
            assert counts == [Counter(range(buckets))] * (2 * -(-samples // global_batch))


class Statistics(DDPTrainer):
    """The running mean that each micro-batch finds, by window, and the one left after the window."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        window = self.found.setdefault(self.state.step, [])
        window.append(self.model.norm.running_mean.item())  # type: ignore[union-attr, operator]
        return super().training_step(model, batch)

    def optimizer_step(self) -> None:
        self.left.append(self.model.norm.running_mean.item())  # type: ignore[union-attr, operator]

    def fit(self, resume_from: Any = None) -> Any:
        self.found: dict[int, list[float]] = {}
        self.left: list[float] = []
        return super().fit(resume_from)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_windows_first_micro_batch_finds_rank_0s_buffers(ranks: Ranks, world_size: int) -> None:
    """Rank r sees means of r + 1 alone; the second micro-batch finds what the rank's own first one has left."""

    def run() -> tuple[dict[int, list[float]], list[float]]:
        numbers = rank_pairs(world_size, 8).values.tolist()
        trainer = toy_trainer(numbers, BatchNormToy(), kind=Statistics, batch_size=2, accumulation_steps=2, lr=0.0)
        trainer.fit()
        return trainer.found, trainer.left

    by_rank = ranks(world_size, run)
    left_by_rank_0 = [0.0, *by_rank[0][1]]
    for rank, (found, left) in enumerate(by_rank):
        for window in range(4):
            start = left_by_rank_0[window]
            own = [start]
            for _ in range(2):
                own.append(0.9 * own[-1] + 0.1 * (rank + 1))
            assert found[window][0] == start
            assert [*found[window], left[window]] == pytest.approx(own)


class Several(DDPTrainer):
    """A loss, a number, a tensor, and a mean over the even samples alone; in the second epoch of numbers larger by 2."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        inputs = batch[0] + 2 * self.state.epoch
        even = inputs % 2 == 0
        return {
            "loss": model(inputs).mean(),
            "float32": inputs.float().mean(),
            "even": Mean(inputs[even].sum(), even.sum()),
            "counted": Mean(inputs[even].sum(), int(even.sum())),
            "constant": 0.125,
        }


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("log_every", [1, 2, 3, 100])
def test_a_report_is_the_mean_over_all_items_since_the_last(ranks: Ranks, world_size: int, log_every: int) -> None:
    """Over two epochs with tails and ragged micro-batches; epoch means span the epoch, whatever was reported in it."""
    numbers = [float((5 * place) % 17) for place in range(22)]

    def run() -> Any:
        recorder = Recorder()
        settings = {"global_batch_size": 5, "batch_size": 2, "epochs": 2, "log_every": log_every, "callbacks": [recorder]}
        toy_trainer(numbers, ValueToy(), kind=Several, **settings).fit()
        return [(call.step, call.metrics) for call in recorder.reports], [call.metrics for call in recorder.named("on_epoch_end")]

    by_rank = ranks(world_size, run)
    assert by_rank[1:] == [([], [])] * (world_size - 1)
    reports, epochs = by_rank[0]
    larger = [number + 2 for number in numbers]
    windows = [epoch[first : first + 5] for epoch in (numbers, larger) for first in range(0, 22, 5)]
    due = [step for step in range(1, 11) if step % log_every == 0 or step == 10]
    assert [step for step, _ in reports] == due
    for (step, metrics), first in zip(reports, [0, *due], strict=False):
        assert_means(metrics, [number for window in windows[first:step] for number in window])
        assert set(metrics) == {"loss", "float32", "even", "counted", "constant", "lr", "samples_per_second"}
    for metrics, epoch in zip(epochs, (numbers, larger), strict=True):
        assert_means(metrics, epoch)
        assert set(metrics) == {"loss", "float32", "even", "counted", "constant"}


def assert_means(metrics: Mapping[str, float], numbers: Sequence[float]) -> None:
    even = [number for number in numbers if number % 2 == 0]
    mean, mean_of_even = sum(numbers) / len(numbers), sum(even) / len(even) if even else math.nan
    wanted = {"loss": mean, "float32": mean, "even": mean_of_even, "counted": mean_of_even, "constant": 0.125}
    for key, value in wanted.items():
        assert metrics[key] == pytest.approx(value, rel=1e-6 if key == "float32" else 1e-12, nan_ok=True), key
