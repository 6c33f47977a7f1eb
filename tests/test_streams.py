"""Datasets without a length: every item once, the same windows and the same end on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import ConcatDataset, IterableDataset, Subset, get_worker_info

from callbacks import Checkpoint
from tests.helpers import Numbers, Recorder, Toy, mean_of_outputs
from tests.ranks import Ranks
from trainer import DDPTrainer, TrainerConfig, World

Pair = tuple[Tensor, Tensor]


def pair(value: float) -> Pair:
    return torch.tensor(float(value), dtype=torch.float64), torch.tensor(0.0)


class Stream(IterableDataset[Pair]):
    """The numbers from 0 on; with `noisy`, plus random numbers of all three generators."""

    def __init__(self, length: int, noisy: bool = False) -> None:
        self.length = length
        self.noisy = noisy

    def __iter__(self) -> Iterator[Pair]:
        for number in range(self.length):
            noise = torch.rand(()).item() + np.random.rand() + random.random() if self.noisy else 0.0
            yield pair(number + noise)


class Shuffled(IterableDataset[Pair]):
    """A stream with a shuffle buffer that draws from Python's generator."""

    def __iter__(self) -> Iterator[Pair]:
        buffer: list[int] = []
        for number in range(40):
            buffer.append(number)
            if len(buffer) == 7:
                yield pair(buffer.pop(random.randrange(7)))
        yield from map(pair, buffer)


class Keeper(DDPTrainer):
    """Remembers the numbers that this rank has trained on."""

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self.__dict__.setdefault("seen", []).extend(batch[0].tolist())
        return mean_of_outputs(model(batch[0]), batch[1])

    def eval_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return mean_of_outputs(model(batch[0]), batch[1])


def keeper(data: Any, workers: int = 0, callbacks: Any = (), eval_data: Any = None, **settings: Any) -> Keeper:
    model = Toy()
    options = {"num_workers": workers} | ({"persistent_workers": True} if settings.pop("persistent", False) else {})
    return Keeper(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        data,
        eval_data,
        loader_options=options,
        config=TrainerConfig(**{"log_every": 1} | settings),
        callbacks=callbacks,
    )


def trained(data: Any, **settings: Any) -> Callable[[], tuple[list[float], float, tuple[int, int, int, int]]]:
    def run() -> tuple[list[float], float, tuple[int, int, int, int]]:
        trainer = keeper(data, **settings)
        state = trainer.fit()
        counts = (state.step, state.epoch, state.samples, state.epoch_samples)
        return vars(trainer)["seen"], trainer.model.w.item(), counts  # type: ignore[operator]

    return run


@pytest.mark.parametrize(("world_size", "length", "w"), [(1, 10, -15.5), (2, 20, -32.5)])
def test_tail_of_a_stream_is_a_step_like_that_of_a_sized_dataset(ranks: Ranks, world_size: int, length: int, w: float) -> None:
    """Five micro-batches, two a window."""
    for data in (Stream(length), Numbers(length)):
        run = trained(data, batch_size=2, accumulation_steps=2, shuffle=False)
        for _, weight, counts in ranks(world_size, run):
            assert (weight, counts) == (w, (3, 1, length, 0))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_every_item_is_trained_on_once_whatever_ranks_and_workers(ranks: Ranks, world_size: int, workers: int) -> None:
    """The windows are the same too: w is."""
    found = ranks(world_size, trained(Stream(12), workers=workers, batch_size=2, global_batch_size=5, epochs=2), timeout=60)
    assert sorted(number for seen, *_ in found for number in seen) == sorted([*range(12), *range(12)])
    assert {counts for *_, counts in found} == {(6, 2, 24, 0)}
    assert found[0][1] == pytest.approx(-2 * (2.0 + 7.0 + 10.5), rel=1e-12)


def test_an_item_looks_the_same_in_every_rank_and_worker_and_differs_between_epochs(ranks: Ranks) -> None:
    def noises(world_size: int, workers: int, persistent: bool) -> list[float]:
        run = trained(Stream(9, noisy=True), workers=workers, batch_size=2, epochs=2, persistent=persistent)
        return sorted(number for seen, *_ in ranks(world_size, run, timeout=60) for number in seen)

    alone = noises(1, 0, False)
    assert len(set(alone)) == 18
    assert noises(2, 0, False) == alone
    assert noises(3, 2, True) == alone


def test_a_shuffle_buffer_in_the_dataset_is_the_same_everywhere(ranks: Ranks) -> None:
    for workers in (0, 2):
        found = ranks(2, trained(Shuffled(), workers=workers, batch_size=3), timeout=60)
        assert sorted(number for seen, *_ in found for number in seen) == list(range(40))


def test_a_dataset_that_splits_itself_by_worker_still_gives_every_item(ranks: Ranks) -> None:
    class Split(Stream):
        def __iter__(self) -> Iterator[Pair]:
            info = get_worker_info()
            first, step = (info.id, info.num_workers) if info else (0, 1)
            return map(pair, range(first, self.length, step))

    found = ranks(2, trained(Split(11), workers=2, batch_size=2), timeout=60)
    assert sorted(number for seen, *_ in found for number in seen) == list(range(11))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shards_itself_is_left_alone_and_uneven_ends_are_agreed_on(ranks: Ranks, workers: int) -> None:
    """Rank 0 has three items, rank 1 two, of value rank + 1: steps of 1.5, 1.5 and 1."""

    class Sharded(Stream):
        sharded = True

        def __iter__(self) -> Iterator[Pair]:
            import os

            rank, info = int(os.environ["RANK"]), get_worker_info()
            items = [rank + 1.0] * (3 - rank)
            return map(pair, items[info.id :: info.num_workers] if info else items)

    found = ranks(2, trained(Sharded(0), workers=workers, batch_size=1), timeout=60)
    assert [(seen, w, counts) for seen, w, counts in found] == [
        ([1.0, 1.0, 1.0], -4.0, (3, 1, 5, 0)),
        ([2.0, 2.0], -4.0, (3, 1, 5, 0)),
    ]


def test_drop_last_leaves_out_the_short_window_and_ends_the_epoch_before_it(ranks: Ranks) -> None:
    for workers in (0, 2):
        run = trained(Stream(22), workers=workers, batch_size=2, global_batch_size=8, drop_last=True, epochs=2)
        found = ranks(3, run, timeout=60)
        assert sorted(number for seen, *_ in found for number in seen) == sorted([*range(16), *range(16)])
        assert {counts for *_, counts in found} == {(4, 2, 32, 0)}


def test_max_steps_ends_a_stream_and_makes_the_total_known(ranks: Ranks) -> None:
    def run() -> tuple[int | None, list[Any]]:
        rates: list[Any] = []
        model = Toy()
        trainer = Keeper(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            Stream(7),
            scheduler=lambda optimizer, total: rates.append(total) or torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),  # type: ignore[func-returns-value]
            config=TrainerConfig(batch_size=2, max_steps=6),
        )
        state = trainer.fit()
        return trainer.total_steps, [*rates, state.step, state.epoch, state.epoch_samples]

    assert ranks(1, run) == [(6, [6, 6, 1, 4])]
    assert ranks(2, run) == [(6, [6, 6, 3, 0])] * 2


def test_a_scheduler_that_needs_the_total_is_refused_without_one() -> None:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="total number of steps"):
        Keeper(model, optimizer, Stream(5), scheduler=lambda o, n: torch.optim.lr_scheduler.ConstantLR(o, 1.0))


def test_an_empty_stream_is_an_error_on_every_rank(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(2, trained(Stream(0))):
        assert outcome.error == "ValueError"
        assert "gave nothing to train on" in outcome.message


def test_evaluation_of_a_stream_counts_every_sample_once(ranks: Ranks) -> None:
    def run() -> dict[str, float]:
        trainer = keeper(Numbers(3), workers=2)
        nn.init.ones_(trainer.model.w)  # type: ignore[arg-type]
        return trainer.evaluate({"a": Stream(1), "b": Stream(7), "c": Stream(64)})

    for world_size in (1, 3):
        for metrics in ranks(world_size, run, timeout=60):
            assert metrics == {"a/loss": 0.0, "b/loss": 3.0, "c/loss": 31.5}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_resumes_bitwise_after_any_step_at_one_and_two_processes(ranks: Ranks, tmp_path: Path, workers: int) -> None:
    """With noise from all three generators, in the middle of an epoch too."""

    def weights(world_size: int) -> list[float]:
        found = []
        for stop in (None, 1, 2, 3, 4):
            folder = tmp_path / f"{world_size}-{workers}-{stop}"
            for _ in range(2 if stop else 1):
                limit = stop if stop and not folder.exists() else 5
                data = Stream(9, noisy=True)
                trainer = keeper(data, workers, [Checkpoint(folder)], batch_size=2, global_batch_size=4, max_steps=limit)
                trainer.fit(resume_from=folder)
            found.append(trainer.model.w.item())  # type: ignore[operator]
        return found

    for world_size in (1, 2):
        for found in ranks(world_size, weights, world_size, timeout=90):
            assert len(set(found)) == 1


def test_a_dataset_with_set_epoch_is_told_the_epoch_in_living_workers_too(ranks: Ranks) -> None:
    """For streams and for map-style datasets."""

    class Epochs(IterableDataset[Pair]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Pair]:
            return iter([pair(self.epoch)] * 4)

    class Map(Numbers):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> Pair:
            return pair(self.epoch)

    def run() -> list[list[float]]:
        found = []
        halves = ConcatDataset([Subset(Map(4), [0, 1]), Subset(Map(4), [2, 3])])
        for data in (Epochs(), Map(4), Subset(Map(8), range(4)), halves):
            for workers, persistent in ((0, False), (1, False), (1, True)):
                trainer = keeper(data, workers, [Recorder()], eval_data=data, batch_size=4, epochs=3, persistent=persistent)
                trainer.fit()
                found.append(vars(trainer)["seen"])
        return found

    for seen in ranks(1, run, timeout=90)[0]:
        assert seen == [0.0] * 4 + [1.0] * 4 + [2.0] * 4


class Sharded(IterableDataset[Pair]):
    """Shards itself over the ranks, unevenly, and over the workers."""

    sharded = True

    def __init__(self, lengths: list[int], rank: int) -> None:
        self.items = range(100 * rank, 100 * rank + lengths[rank])

    def __iter__(self) -> Iterator[Pair]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from map(pair, self.items[first::step])


@pytest.mark.parametrize(
    ("world_size", "lengths", "workers", "config"),
    [
        (1, [15], 2, {"batch_size": 3}),
        (2, [20, 5], 0, {"batch_size": 2}),
        (2, [9, 8], 0, {"batch_size": 2, "global_batch_size": 5}),
        (3, [7, 0, 3], 0, {"batch_size": 2, "accumulation_steps": 2}),
    ],
)
def test_a_stream_that_shards_itself_is_resumed_after_short_windows(
    ranks: Ranks, tmp_path: Path, world_size: int, lengths: list[int], workers: int, config: dict[str, int]
) -> None:
    def train(folder: Path, after: int | None) -> tuple[list[float], int, int, float]:
        world, model = World.from_env(), Toy()
        data = Sharded(lengths, world.rank)
        options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        trainer = Keeper(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            data,
            loader_options=options,
            config=TrainerConfig(epochs=2, log_every=1, **config),
            callbacks=[Checkpoint(folder, every_steps=1, keep_last=99)],
        )
        trainer.fit(resume_from=None if after is None else tmp_path / "whole" / f"step-{after:08d}.pt")
        return trainer.__dict__.get("seen", []), trainer.state.step, trainer.state.samples, float(model.w.detach())

    whole = ranks(world_size, train, tmp_path / "whole", None)
    steps = whole[0][1]
    for after in range(1, steps):
        resumed = ranks(world_size, train, tmp_path / str(after), after)
        for rank, (seen, *others) in enumerate(resumed):
            assert others == list(whole[rank][1:])
            assert seen == whole[rank][0][len(whole[rank][0]) - len(seen) :]


@pytest.mark.parametrize(("world_size", "workers", "refused"), [(1, 0, True), (2, 2, True), (2, 1, False)])
def test_a_stream_that_shards_itself_goes_on_in_the_shards_it_was_begun_in(
    ranks: Ranks, tmp_path: Path, world_size: int, workers: int, refused: bool
) -> None:
    """Others would repeat some of its items and leave out others; between two epochs any will do. One worker reads as none."""

    def train(workers: int, after: int | None, sharded: bool = True) -> tuple[str, int]:
        options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        model, files = Toy(), Checkpoint(tmp_path, every_steps=1, keep_last=99)
        trainer = Keeper(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            Sharded([8] * 2, World.from_env().rank) if sharded else Stream(16),
            loader_options=options,
            config=TrainerConfig(epochs=2, global_batch_size=4, batch_size=2),
            callbacks=[files] if after is None else [],
        )
        before = float(model.w.detach())
        try:
            trainer.fit(None if after is None else tmp_path / f"step-{after:08d}.pt")
        except ValueError as error:
            assert (float(model.w.detach()), trainer.state.step) == (before, 0)
            return str(error), 0
        return "", trainer.state.step

    assert ranks(2, train, 0, None) == [("", 8)] * 2
    told = "a stream that shards itself over 2 ranks, 1 readers each, and is to be continued with "
    for message, _ in ranks(world_size, train, workers, 2, timeout=60):
        turns = " of micro-batches of 2" * (workers > 1)
        other = f"a stream that shards itself over {world_size} ranks, {max(1, workers)} readers{turns} each"
        assert told + other in message if refused else message == ""
    assert all(told + "data that is shared out" in message for message, _ in ranks(2, train, 0, 2, sharded=False))
    assert all(message == "" for message, _ in ranks(world_size, train, workers, 4, timeout=60))


def test_gradients_of_a_stream_travel_once_a_step(ranks: Ranks) -> None:
    """Seven items in windows of four, two micro-batches each on two ranks; and those that only one rank has."""

    def run() -> tuple[int, int]:
        reductions = []

        class Counted(Keeper):
            def fit(self, resume_from: Any = None) -> Any:
                wrap = self.world.wrap

                def counting(model: nn.Module, **options: Any) -> Any:
                    wrapped: Any = wrap(model, **options)

                    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
                        reductions.append(bucket.index())
                        return allreduce_hook(state, bucket)

                    wrapped.register_comm_hook(None, hook)
                    return wrapped

                self.world.wrap = counting  # type: ignore[method-assign]
                return super().fit(resume_from)

        model = Toy()
        config = TrainerConfig(batch_size=1, accumulation_steps=2)
        state = Counted(model, torch.optim.SGD(model.parameters(), lr=1.0), Stream(9), config=config).fit()
        return state.step, len(reductions)

    assert ranks(2, run) == [(3, 3)] * 2


@pytest.mark.parametrize(
    ("world_size", "workers", "size", "batch"), [(3, 0, 10, 2), (2, 0, 5, 2), (1, 2, 5, 2), (2, 2, 7, 3), (4, 0, 10, 9)]
)
def test_a_window_of_a_stream_that_shards_itself_is_the_global_batch(
    ranks: Ranks, world_size: int, workers: int, size: int, batch: int
) -> None:
    """As long as every reader has items; and each of them is trained on once."""
    length = 4 * size

    def run() -> tuple[list[float], list[int]]:
        sizes = []

        class Sizes(Keeper):
            def optimizer_step(self) -> None:
                sizes.append(self.state.samples)
                super().optimizer_step()

        model = Toy()
        options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        trainer = Sizes(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            Sharded([length] * world_size, World.from_env().rank),
            loader_options=options,
            config=TrainerConfig(global_batch_size=size, batch_size=batch),
        )
        trainer.fit()
        return vars(trainer)["seen"], sizes

    found = ranks(world_size, run, timeout=60)
    assert sorted(number for seen, _ in found for number in seen) == sorted(
        100.0 * rank + place for rank in range(world_size) for place in range(length)
    )
    for _, sizes in found:
        assert sizes[:5] == [0, size, 2 * size, 3 * size, 4 * size][: len(sizes)]


def test_a_window_too_small_for_every_shard_is_refused(ranks: Ranks) -> None:
    def run() -> None:
        keeper(Sharded([4] * 3, World.from_env().rank), global_batch_size=2, batch_size=1).fit()

    for outcome in ranks.outcomes(3, run, timeout=30):
        assert "at least one sample for each process; found 2 for 3 processes: set global_batch_size to 3" in outcome.message


def test_a_window_that_was_interrupted_is_trained_on_by_the_next_fit() -> None:
    """Of a stream that shards itself, whose place no counter tells."""

    class Breaks(Keeper):
        broken = 0

        def training_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
            if self.state.step == 2 and self.broken < 2:
                self.broken += 1
                raise KeyboardInterrupt
            return super().training_step(model, batch)

    class Data(Sharded):
        breaks = False

        def __iter__(self) -> Iterator[Pair]:
            for place, item in enumerate(super().__iter__()):
                if self.breaks and place == 3:
                    self.breaks = False
                    raise KeyboardInterrupt
                yield item

    model = Toy()
    data = Data([10], 0)
    trainer = Breaks(model, torch.optim.SGD(model.parameters(), lr=0.01), data, config=TrainerConfig(batch_size=2))
    for breaks in (False, True, False):  # also while it passes over what was trained on
        data.breaks = breaks
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
        assert trainer.state_dict()["epoch_windows"] == 2
    trainer.fit()
    assert vars(trainer)["seen"] == list(map(float, range(10)))


class NoisyShards(IterableDataset[Pair]):
    """An order that is drawn, and then shared out; each item with random numbers of all generators added, below 0.01."""

    sharded = True

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Pair]:
        world, info = World.from_env(), get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        order = torch.randperm(self.length).tolist()
        random.shuffle(order)
        for number in order[world.rank * workers + worker :: world.size * workers]:
            yield pair(number + (torch.rand(()).item() + np.random.rand() + random.random()) / 300)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_stream_draws_that_shards_itself_follows_from_rank_worker_and_place(
    ranks: Ranks, tmp_path: Path, workers: int
) -> None:
    """An order is the same in all readers, another in each epoch; from the second item on no two readers draw alike. A resumed
    run draws what the whole one does. So does an evaluation.
    """

    def train(folder: Path, after: int | None) -> tuple[list[float], dict[str, float]]:
        options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        torch.manual_seed(after or 0)
        World.from_env()
        model = Toy()
        trainer = Keeper(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            NoisyShards(17),
            NoisyShards(9),
            loader_options=options,
            config=TrainerConfig(epochs=2, global_batch_size=4, batch_size=1, eval_every=1_000),
            callbacks=[Checkpoint(folder, every_steps=1, keep_last=99)],
        )
        trainer.fit(resume_from=None if after is None else tmp_path / "whole" / f"step-{after:08d}.pt")
        seen = vars(trainer).get("seen", [])
        return list(seen), trainer.evaluate()

    whole = ranks(2, train, tmp_path / "whole", None, timeout=60)
    assert sorted(int(number) for seen, _ in whole for number in seen) == sorted([*range(17), *range(17)])
    noise = [round(number % 1, 9) for seen, _ in whole for number in seen]
    readers = 2 * max(1, workers)
    assert len(set(noise)) == 2 * (17 - (readers - 1))
    for after in (1, 3, 6):
        for (seen, metrics), (wanted, wanted_metrics) in zip(
            ranks(2, train, tmp_path / str(after), after, timeout=60), whole, strict=True
        ):
            assert seen == wanted[len(wanted) - len(seen) :]
            assert 0 < len(seen) < len(wanted)
            assert metrics == wanted_metrics


def cut_up(worker: int) -> None:
    """As torch's documentation shows it, for a stream that is read in parts."""
    info: Any = get_worker_info()
    info.dataset.length = info.dataset.length // info.num_workers


def test_a_stream_that_is_read_whole_is_not_cut_up_by_its_workers_in_silence() -> None:
    """It would be cut twice, and most of it never be read."""
    model = Toy()
    options = {"num_workers": 2, "worker_init_fn": cut_up}
    config = TrainerConfig(batch_size=2, epochs=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = DDPTrainer(model, optimizer, Stream(8), loss_fn=mean_of_outputs, loader_options=options, config=config)
    with pytest.raises(AttributeError, match="no attribute 'length'"):
        trainer.fit()


class Dealt(IterableDataset[Pair]):
    """Draws an order for each epoch, and deals it out over ranks and workers."""

    sharded = True

    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(24).tolist()

    def __iter__(self) -> Iterator[Pair]:
        world, info = World.from_env(), get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return map(pair, self.order[world.rank * workers + worker :: world.size * workers])


@pytest.mark.parametrize(("world_size", "workers"), [(2, 0), (1, 2), (2, 2)])
def test_an_order_that_a_stream_draws_for_an_epoch_can_be_dealt_out(ranks: Ranks, world_size: int, workers: int) -> None:
    def run() -> list[float]:
        torch.manual_seed(World.from_env().rank)
        trainer = keeper(Dealt(), workers, batch_size=4, epochs=1)
        trainer.fit()
        seen: list[float] = vars(trainer)["seen"]
        return seen

    found = ranks(world_size, run)
    assert sorted(value for seen in found for value in seen) == [float(number) for number in range(24)]


def test_a_stream_shorter_than_a_window_that_must_be_whole_says_so() -> None:
    with pytest.raises(ValueError, match="shorter than one global batch, with drop_last=True"):
        keeper(Stream(5), batch_size=8, drop_last=True).fit()


READERS = [(1, 2), (2, 0), (2, 2)]


@pytest.mark.parametrize(("world_size", "workers"), READERS)
@pytest.mark.parametrize("make", [Shuffled, partial(NoisyShards, 40)], ids=["whole", "sharded"])
def test_without_a_seed_all_readers_of_a_stream_still_draw_the_same_order(
    ranks: Ranks, world_size: int, workers: int, make: Callable[[], Any]
) -> None:
    """Rank 0 draws what they draw with, anew in each run. Else items would be trained on twice, and others never."""

    def run() -> tuple[list[float], dict[str, float]]:
        torch.manual_seed(World.from_env().rank)
        trainer = keeper(make(), workers, eval_data=make(), batch_size=4, epochs=2, seed=None)
        trainer.fit()
        return vars(trainer)["seen"], trainer.evaluate()

    orders = []
    for _ in range(2):
        found = ranks(world_size, run, timeout=60)
        assert sorted(int(number) for seen, _ in found for number in seen) == sorted([*range(40)] * 2)
        assert len({metrics["loss"] for _, metrics in found}) == 1
        orders.append([seen for seen, _ in found])
    assert orders[0] != orders[1]


@pytest.mark.parametrize(("world_size", "workers"), READERS)
def test_without_a_seed_an_interrupted_epoch_of_a_stream_goes_on_in_its_order(
    ranks: Ranks, tmp_path: Path, world_size: int, workers: int
) -> None:
    def run(max_steps: int | None, resume_from: Path | None) -> list[float]:
        settings: dict[str, Any] = {"max_steps": max_steps} if max_steps else {}
        trainer = keeper(
            Shuffled(), workers, [Checkpoint(tmp_path, every_steps=1)], batch_size=4, seed=None, epochs=1, **settings
        )
        trainer.fit(resume_from)
        seen: list[float] = vars(trainer)["seen"]
        return seen

    first, second = ranks(world_size, run, 2, None, timeout=60), ranks(world_size, run, None, tmp_path, timeout=60)
    assert sorted(number for seen in (*first, *second) for number in seen) == list(range(40))


class Drawing(Keeper):
    def training_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        self.__dict__.setdefault("drawn", []).append(drawn)
        return super().training_step(model, batch)


def test_without_a_seed_what_a_stream_draws_leaves_the_generators_of_the_steps_alone(ranks: Ranks) -> None:
    def run() -> tuple[Any, Any]:
        rank = World.from_env().rank

        def begin() -> None:
            torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)

        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = Drawing(model, optimizer, Shuffled(), config=TrainerConfig(batch_size=4, seed=None))
        begin()
        trainer.fit()
        begin()
        return vars(trainer)["drawn"], [[torch.rand(()).item(), random.random(), float(np.random.rand())] for _ in range(5)]

    for drawn, wanted in ranks(2, run):
        assert drawn == wanted


class Evaluating(Keeper):
    def training_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self.evaluate()
        return super().training_step(model, batch)


@pytest.mark.parametrize(("lengths", "micro_batch"), [([6, 4], 2), ([5, 1], 1), ([4, 0], 1)])
def test_evaluate_inside_a_step_that_some_shard_has_not_is_an_error(ranks: Ranks, lengths: list[int], micro_batch: int) -> None:
    """By its number of samples alone the window might have been shared out evenly."""

    def run() -> None:
        model = Toy()
        data = Sharded(lengths, World.from_env().rank)
        config = TrainerConfig(batch_size=1, accumulation_steps=4)
        Evaluating(model, torch.optim.SGD(model.parameters(), lr=1.0), data, Numbers(3), config=config).fit()

    outcomes = ranks.outcomes(2, run, timeout=30)
    assert all(outcome.error == "RuntimeError" and not outcome.timed_out for outcome in outcomes)
    fewest = lengths[1] % 4
    assert f"of which some ranks have only {fewest}: they would never come" in outcomes[0].message


@pytest.mark.parametrize(("lengths", "steps"), [([8, 8], 2), ([6, 6], 2), ([8, 6], None), ([5, 3], None)])
def test_layers_that_meet_refuse_uneven_shards_on_every_rank(ranks: Ranks, lengths: list[int], steps: int | None) -> None:
    def run() -> int:
        trainer = keeper(Sharded(lengths, World.from_env().rank), batch_size=1, accumulation_steps=4)
        trainer._replica._synchronized = True  # as with SyncBatchNorm on GPUs
        return trainer.fit().step

    outcomes = ranks.outcomes(2, run, timeout=30)
    if steps is not None:
        assert [outcome.value for outcome in outcomes] == [steps, steps]
        return
    assert all(outcome.error == "ValueError" and not outcome.timed_out for outcome in outcomes)
    assert "SyncBatchNorm needs as many micro-batches on every rank" in outcomes[0].message
