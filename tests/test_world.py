"""`World`: who a process is, its device and its collectives; and how ranks find each other again and again."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers import Ranks, Recorder, Toy, toy_trainer
from trainer import DDPTrainer, World, launch, rendezvous
from trainer.launch import Launch
from trainer.rendezvous import agree_on_key
from trainer.transport import pack

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS")


# Collectives.


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_sum_is_elementwise_a_new_tensor_and_keeps_the_dtype(ranks: Ranks, world_size: int, dtype: torch.dtype) -> None:
    def run() -> tuple[list[list[float]], torch.dtype, list[float], list[float]]:
        world = World.from_env()
        values = torch.tensor([[world.rank, 1, 2], [3, 4, 5 + world.rank]]).to(dtype)
        total = world.sum(values.t())  # not contiguous
        total += 1
        with_graph = torch.full((), 2.0, requires_grad=True)
        scalar = world.sum(with_graph)
        assert not scalar.requires_grad
        assert scalar.shape == ()
        return total.tolist(), total.dtype, values.flatten().tolist(), [scalar.item(), world.sum(torch.empty(0)).numel()]

    n, ranks_summed = world_size, world_size * (world_size - 1) // 2
    expected = [[ranks_summed + 1, 3 * n + 1], [n + 1, 4 * n + 1], [2 * n + 1, 5 * n + ranks_summed + 1]]
    for rank, (total, kind, values, others) in enumerate(ranks(world_size, run)):
        assert (total, kind) == (expected, dtype)
        assert values == [rank, 1, 2, 3, 4, 5 + rank]
        assert others == [2.0 * n, 0]


def test_gather_takes_objects_of_any_size_in_rank_order(ranks: Ranks) -> None:
    def run() -> list[Any]:
        world = World.from_env()
        return [
            world.gather("x" * 10 ** (2 * world.rank)),
            world.gather(None if world.rank == 1 else {"rank": world.rank}),
            world.gather(torch.arange(world.rank + 1, dtype=torch.int16)),
            world.gather({"nested": [(torch.full((2,), 0.5, requires_grad=True) * world.rank, "name")]}),
        ]

    for texts, objects, tensors, nested in ranks(3, run):
        assert [len(text) for text in texts] == [1, 100, 10_000]
        assert objects == [{"rank": 0}, None, {"rank": 2}]
        assert [tensor.tolist() for tensor in tensors] == [[0], [0, 1], [0, 1, 2]]
        assert {tensor.dtype for tensor in tensors} == {torch.int16}
        assert [value["nested"][0][0].tolist() for value in nested] == [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
        assert not any(value["nested"][0][0].requires_grad for value in nested)


def test_one_process_gathers_a_copy_as_several_would(ranks: Ranks) -> None:
    def run() -> tuple[list[float], list[float]]:
        mine = torch.zeros(2)
        (gathered,), broadcast = World.from_env().gather(mine), World.from_env().broadcast(mine)
        gathered += 1
        broadcast += 2
        return mine.tolist(), (gathered + broadcast).tolist()

    assert ranks(1, run) == [([0.0, 0.0], [3.0, 3.0])]


def test_broadcast_gives_rank_0_s_value_and_ignores_what_the_others_pass(ranks: Ranks) -> None:
    def run() -> Any:
        world = World.from_env()
        return world.broadcast({"path": Path("runs/7"), "w": torch.tensor([1.5])} if world.is_main else lambda: "no pickle")

    for value in ranks(3, run):
        assert value["path"] == Path("runs/7")
        assert value["w"].tolist() == [1.5]


def test_barrier_waits_for_the_last_rank(ranks: Ranks) -> None:
    def run() -> tuple[float, float]:
        world = World.from_env()
        time.sleep(0.3 * (world.rank == 1))
        arrived = time.monotonic()
        world.barrier()
        return arrived, time.monotonic()

    results = ranks(3, run)
    assert min(left for _, left in results) >= max(arrived for arrived, _ in results)


# main_first.


def download(folder: Path) -> None:
    """Writes a line into the log if there is work to do, takes half a second, then the file is there."""
    if not (folder / "data").exists():
        with (folder / "log").open("a") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        (folder / "data").write_text("complete")


def test_one_rank_downloads_before_the_others_look(ranks: Ranks, tmp_path: Path) -> None:
    """Four ranks; before a trainer is built and after."""

    def run() -> list[str]:
        world = World.from_env()
        with world.main_first():
            download(tmp_path)
        first = (tmp_path / "data").read_text()
        trainer = toy_trainer(8)
        folder = tmp_path / "second"
        with trainer.world.main_first():
            folder.mkdir(exist_ok=True)
            download(folder)
        return [first, (folder / "data").read_text()]

    assert ranks(4, run) == [["complete", "complete"]] * 4
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert len((tmp_path / "second/log").read_text().splitlines()) == 1


@pytest.mark.parametrize(("per_node", "leading"), [(True, [0, 2]), (False, [0])])
def test_each_node_has_a_first_rank_unless_they_share_their_files(ranks: Ranks, per_node: bool, leading: list[int]) -> None:
    """Two nodes of two ranks: those who lead do not wait for each other, the others wait for all of them."""

    def run() -> tuple[float, float]:
        world = World.from_env()
        world.barrier()
        with world.main_first(per_node=per_node):
            started = time.monotonic()
            time.sleep(0.4)
            return started, time.monotonic()

    results = ranks(4, run, env=lambda rank: {"LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)})
    first_end = min(results[rank][1] for rank in leading)
    last_end = max(results[rank][1] for rank in leading)
    assert all((started < first_end) == (rank in leading) for rank, (started, _) in enumerate(results))
    assert all(started >= last_end for rank, (started, _) in enumerate(results) if rank not in leading)


class Unsendable(Exception):
    """Cannot be made anew from what pickle keeps of it."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"{host}:{port} does not answer")


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_a_first_rank_is_raised_on_every_rank(ranks: Ranks, failing: int) -> None:
    """On the first node and on the second; also an error that no pickle survives."""

    def run() -> tuple[list[str], list[int]]:
        world = World.from_env()
        raised: list[str] = []
        entered: list[int] = []
        errors: list[Exception] = [ConnectionError("the mirror is down"), Unsendable("mirror", 80)]
        for number, error in enumerate(errors):
            try:
                with world.main_first():
                    entered.append(number)
                    if world.rank == failing:
                        raise error
            except (ConnectionError, RuntimeError, Unsendable) as caught:
                raised.append(f"{type(caught).__name__}: {caught}")
        assert world.gather(world.rank) == [0, 1, 2, 3]  # all are still in step
        return raised, entered

    results = ranks(4, run, env=lambda rank: {"LOCAL_RANK": str(rank % 2)})
    text = "mirror:80 does not answer"
    for rank, (raised, entered) in enumerate(results):
        own = f"Unsendable: {text}" if rank == failing else f"RuntimeError: Unsendable: {text}"
        assert raised == ["ConnectionError: the mirror is down", own]
        assert entered == ([0, 1] if rank % 2 == 0 else [])  # those who come second do not run the block at all


def test_an_error_of_a_later_rank_is_its_own(ranks: Ranks) -> None:
    def run() -> None:
        world = World.from_env()
        with world.main_first():
            if world.rank == 1:
                raise ValueError("cannot read the file")

    first, second = ranks.outcomes(2, run)
    assert first.ok
    assert (second.error, second.message) == ("ValueError", "cannot read the file")


# Opening and closing.


def test_from_env_returns_the_open_world_until_it_is_closed(ranks: Ranks) -> None:
    def run() -> list[bool]:
        first = World.from_env()
        same = [World.from_env() is first, World.from_env("cpu") is first, toy_trainer(4).world is first]
        assert World.is_open()
        first.close()
        first.close()
        second = World.from_env()
        trainer = toy_trainer(4)
        first.close()  # the old one has nothing to close any more
        return [*same, World.is_open(), second is not first, trainer.world is second, second.sum(torch.ones(())).item() == 2]

    assert ranks(2, run) == [[True] * 7] * 2


def test_an_open_world_of_another_device_is_refused(ranks: Ranks) -> None:
    def run() -> str:
        World.from_env("cpu")
        with pytest.raises(RuntimeError) as caught:
            World.from_env("cuda")
        return str(caught.value)

    assert ranks(1, run) == ["the open World computes on cpu, not on 'cuda': close it first"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_closes_the_world_only_if_it_opened_it(ranks: Ranks, world_size: int) -> None:
    def run() -> list[tuple[bool, bool]]:
        states = []
        with toy_trainer(4) as trainer:
            trainer.fit()
        states.append((World.is_open(), dist.is_initialized()))
        world = World.from_env()
        trainer = toy_trainer(4)
        trainer.fit()
        trainer.close()
        states.append((World.is_open(), dist.is_initialized()))
        world.close()
        states.append((World.is_open(), dist.is_initialized()))
        return states

    several = world_size > 1
    assert ranks(world_size, run) == [[(False, False), (True, several), (False, False)]] * world_size


def test_the_user_s_own_group_is_used_and_left_alone(ranks: Ranks) -> None:
    """Opened before the trainer, still there after it, and still of use."""

    def run() -> tuple[float, float, int, int]:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
        trainer = toy_trainer(8, batch_size=2)
        trainer.fit()
        rank, size = trainer.world.rank, trainer.world.size
        trainer.close()
        World.from_env().close()
        assert dist.group.WORLD is group
        value = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(value)
        dist.destroy_process_group()
        return float(trainer.model.w.detach()), value.item(), rank, size  # type: ignore[arg-type]

    assert ranks(2, run) == [(-(1.5 + 5.5), 3.0, 0, 2), (-(1.5 + 5.5), 3.0, 1, 2)]


def test_a_group_whose_backend_does_not_serve_the_device_is_refused(ranks: Ranks) -> None:
    """On every rank, before anything is sent."""

    def run() -> str:
        dist.init_process_group("cpu:gloo")
        try:
            World.from_env(device="cuda")
        except RuntimeError as error:
            return str(error)
        return "nothing was raised"

    for message in ranks(2, run):
        assert message.startswith("the open process group communicates over 'cpu:gloo', which does not serve 'cuda'")
        assert "backend 'gloo' for the CPU or 'nccl' for GPUs" in message


def test_a_group_for_gpus_alone_is_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(RuntimeError, match="over 'cuda:nccl', which does not serve 'cpu'"):
        World.from_env("cpu")
    assert not World.is_open()


# The environment.


def test_plain_python_gives_what_torchrun_with_one_process_gives(ranks: Ranks) -> None:
    """Training, evaluation and hooks."""

    def run() -> tuple[float, float, list[tuple[str, int]], int, str]:
        recorder = Recorder()
        with toy_trainer(10, eval_numbers=3, callbacks=[recorder], batch_size=2, accumulation_steps=2) as trainer:
            trainer.fit()
            loss = trainer.evaluate()["loss"]
            assert not dist.is_initialized()
        return float(trainer.model.w.detach()), loss, recorder.order, trainer.world.size, str(trainer.world.device)  # type: ignore[arg-type]

    plain, launched = ranks(1, run), ranks(1, run, launched=True)
    assert plain == launched
    assert plain[0][:2] == (-15.5, -15.5)  # then the mean of 0, 1, 2 times that


PARTIAL: list[tuple[dict[str, str], str]] = [
    ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT missing"),
    ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"),
    ({"LOCAL_RANK": "1"}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT missing"),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR missing"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "RANK missing"),
    ({"RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "WORLD_SIZE missing"),
]


@pytest.mark.parametrize(("variables", "message"), PARTIAL)
def test_a_partial_environment_is_an_error_that_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    """At once, no waiting for anybody."""
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"the environment is partial: {next(iter(variables))}.* set, but {message}"):
        open_with(monkeypatch, variables)
    assert time.monotonic() - started < 2
    assert not World.is_open()


def open_with(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], device: str | None = None) -> World:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return World.from_env(device)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK=2 is not within WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK=-1 is not within WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "1"}, "RANK must be a whole number; found 'one'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE must be a whole number; found ''"),
    ],
)
def test_a_rank_that_cannot_be_is_an_error(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_with(monkeypatch, variables)


def test_slurm_tasks_without_ranks_would_train_alone_each(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks that do not know of each other. One task, or torchrun's ranks, are fine."""

    def check() -> None:
        with pytest.raises(RuntimeError, match="SLURM_NTASKS=2, but RANK is missing: each Slurm task would train alone"):
            open_with(monkeypatch, {"SLURM_NTASKS": "2"})
        for fine in ({"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "2", "RANK": "0", "WORLD_SIZE": "1"}, {}):
            world = open_with(monkeypatch, fine)
            assert (world.rank, world.size, world.local_rank, world.is_main) == (0, 1, 0, True)
            world.close()

    ranks(1, check)


# Devices: a machine with four GPUs, pretended.


class Machine:
    """Stands in for torch.cuda and torch.distributed, and writes down what was asked of them, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int = 4) -> None:
        self.calls: list[tuple[Any, ...]] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", self.note("set_device"))
        monkeypatch.setattr(dist, "init_process_group", self.note("init_process_group"))
        monkeypatch.setattr(dist, "barrier", self.note("barrier"))
        monkeypatch.setattr("trainer.ddp_wrapper.DistributedDataParallel", self.wrap)

    def note(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        self.calls.append(("wrap", (), options))
        raise StopIteration  # what a pretended GPU cannot do any more

    def options(self, name: str) -> dict[str, Any]:
        return next(kwargs for call, _, kwargs in self.calls if call == name)


FIFTH_OF_EIGHT = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "1"}


def test_the_local_rank_is_the_gpu_and_it_is_current_before_the_group_is_opened(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Global rank 5, second of its node."""

    def check() -> None:
        machine = Machine(monkeypatch)
        world = open_with(monkeypatch, FIFTH_OF_EIGHT)
        assert [call[0] for call in machine.calls] == ["set_device", "init_process_group"]
        assert machine.calls[0][1] == (1,)
        _, backend, options = machine.calls[1]
        assert backend == ("nccl",)
        assert (options["rank"], options["world_size"]) == (5, 8)
        assert options["device_id"] == world.device == torch.device("cuda", 1)
        assert (world.rank, world.local_rank, world.size, world.is_main) == (5, 1, 8, False)
        world.barrier()
        assert machine.options("barrier") == {"device_ids": [1]}
        with pytest.raises(StopIteration):
            world.wrap(nn.Linear(1, 1), find_unused_parameters=True)
        assert machine.options("wrap") == {"device_ids": [1], "find_unused_parameters": True}
        world.close()

    ranks(1, check)


def test_on_the_cpu_nothing_is_said_about_gpus(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device_id and no device_ids over gloo, although the machine has GPUs."""

    def check() -> None:
        machine = Machine(monkeypatch)
        world = open_with(monkeypatch, FIFTH_OF_EIGHT, device="cpu")
        ((_, backend, options),) = machine.calls
        assert backend == ("gloo",)
        assert options["device_id"] is None
        assert world.device == torch.device("cpu")
        world.barrier()
        assert machine.options("barrier") == {"device_ids": None}
        with pytest.raises(StopIteration):
            world.wrap(nn.Linear(1, 1))
        assert machine.options("wrap") == {"device_ids": None}
        world.close()

    ranks(1, check)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"LOCAL_RANK": "4"}, r"number 4 on its node \(LOCAL_RANK\), but the node has 4 GPUs"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is missing: it says which GPU"),
    ],
)
def test_a_rank_without_a_gpu_of_its_own_is_an_error(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None], message: str
) -> None:
    """Never the GPU of another rank, and nothing is opened."""
    machine = Machine(monkeypatch)
    with pytest.raises(RuntimeError, match=message):
        open_with(monkeypatch, {name: value for name, value in (FIFTH_OF_EIGHT | change).items() if value is not None})
    assert machine.calls == []


def test_gpus_that_torch_does_not_see_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"^device='cuda', but torch sees no GPU here: python -m trainer\.doctor prints"):
        World.from_env("cuda")


@pytest.mark.parametrize("size", [1, 2])
def test_a_time_limit_that_is_a_number_is_an_error(ranks: Ranks, size: int) -> None:
    def run() -> None:
        with pytest.raises(TypeError, match=r"^timeout must be a datetime.timedelta such as timedelta\(minutes=5\); found 600$"):
            World.from_env(timeout=600)  # type: ignore[arg-type]
        assert not World.is_open()

    ranks(size, run)


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_closing_leaves_no_wrapper_and_nothing_that_cycles_hold_of_one(ranks: Ranks, in_a_cycle: bool) -> None:
    """Else the process may abort when Python ends."""

    class Part:
        pass

    def run() -> None:
        world = World.from_env()
        wrapped, part = world.wrap(nn.Linear(1, 1)), Part()
        known, left = weakref.ref(wrapped), weakref.ref(part)
        vars(part).update(itself=part, reducer=wrapped.reducer)  # it outlives the wrapper
        if in_a_cycle:
            wrapped.itself = [wrapped]
        del wrapped, part
        world.close()
        assert known() is None
        assert left() is None

    ranks(2, run)


def test_only_global_rank_0_is_main(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of the second node is not."""

    def check() -> None:
        Machine(monkeypatch, gpus=0)
        world = open_with(monkeypatch, FIFTH_OF_EIGHT | {"RANK": "4", "LOCAL_RANK": "0"})
        assert (world.is_main, world.local_rank) == (False, 0)
        world.close()

    ranks(1, check)


# Time limits.


def test_a_collective_waits_as_long_as_it_was_told(ranks: Ranks) -> None:
    """Rank 1 comes late: too late for a limit of 2 seconds, in time for one of 20."""

    def run(limit: float, late: float) -> float:
        world = World.from_env(timeout=timedelta(seconds=limit))
        world.barrier()
        time.sleep(late * (world.rank == 1))
        return world.sum(torch.ones(())).item()

    waiting, late = ranks.outcomes(2, run, limit=2, late=5)
    assert not waiting.ok
    assert not waiting.timed_out
    assert "imed out" in waiting.message
    assert waiting.seconds < 5
    assert not late.ok
    assert ranks(2, run, limit=20, late=2.5) == [2.0, 2.0]


def test_opening_waits_as_long_as_it_was_told_and_names_who_did_not_come(ranks: Ranks) -> None:
    def run() -> None:
        if os.environ["RANK"] != "1":
            World.from_env(timeout=timedelta(seconds=2))

    first, absent, third = ranks.outcomes(3, run)
    assert absent.ok
    assert (first.error, third.error) == ("TimeoutError", "TimeoutError")
    assert "rank 0 waited 0:00:02 for rank 1 to join the group" in first.message
    assert max(first.seconds, third.seconds) < 8


# The agreement on a key, with a store that remembers everything.


class FakeStore:
    def __init__(self, content: dict[str, str]) -> None:
        self.content = dict(content)
        self.history: list[tuple[str, str]] = []

    def set(self, key: str, value: str, /) -> None:
        self.content[key] = value
        self.history.append((key, value))

    def get(self, key: str, /) -> bytes:
        return self.content[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.content for key in keys)


def keys_of(store: FakeStore, size: int, first: int) -> list[str]:
    """What every rank takes for the key; rank `first` comes 10 ms before the others."""
    keys = [""] * size

    def join(rank: int) -> None:
        time.sleep(0.01 * (rank != first))
        keys[rank] = agree_on_key(store, rank, size, timedelta(seconds=10))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return keys


def attempts_that_died() -> Iterator[tuple[str, dict[str, str]]]:
    """What an attempt of three ranks leaves behind, cut off after each of its messages; and its key."""
    store = FakeStore({})
    key = keys_of(store, 3, first=0)[0]
    for length in range(len(store.history) + 1):
        yield key, dict(store.history[:length])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("first", [0, 1])
def test_ranks_agree_on_a_new_key_whatever_a_dead_attempt_has_left(size: int, first: int) -> None:
    """Rank 0 must not take a dead rank's hello for a living one's, nor a rank a dead offer for its own."""
    for old_key, left_behind in attempts_that_died():
        keys = keys_of(FakeStore(left_behind), size, first)
        assert len(set(keys)) == 1
        assert keys[0] not in ("", old_key)


def test_every_opening_has_a_key_of_its_own() -> None:
    """The same ranks, the same store, one group after another."""
    store = FakeStore({})
    keys = [keys_of(store, 2, first=number % 2) for number in range(10)]
    assert all(one == other for one, other in keys)
    assert len({one for one, _ in keys}) == 10


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0:00:00.050000 for rank 1, 2 to join the group"):
        agree_on_key(FakeStore({"hello/1": "a dead rank's"}), 0, 3, timedelta(seconds=0.05))
    with pytest.raises(TimeoutError, match=r"rank 2 waited 0:00:00.050000 for rank 0 to join the group"):
        agree_on_key(FakeStore({"offer/2": "a dead rank's offer"}), 2, 3, timedelta(seconds=0.05))


def test_a_launch_knows_its_place() -> None:
    variables = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    assert Launch.from_environment(variables) == Launch(5, 8, 1)
    del variables["LOCAL_RANK"]
    assert Launch.from_environment(variables) == Launch(5, 8, None)


def test_a_forked_process_does_not_take_its_parents_world_for_its_own(ranks: Ranks) -> None:
    parent = World.from_env()
    try:
        sizes = ranks(2, lambda: (World.is_open(), World.from_env().size))
    finally:
        parent.close()
    assert sizes == [(False, 2)] * 2


def test_a_rank_that_keeps_another_waiting_is_named_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.02)
    with pytest.raises(TimeoutError):
        agree_on_key(FakeStore({}), 0, 3, timedelta(seconds=0.1))
    (record,) = caplog.records
    assert record.getMessage().startswith("rank 0 has been waiting for rank 1, 2 to join the group for 0 s. Every rank must")


BYTES = (torch.uint8, torch.int16, torch.int32, torch.int64)
NEW_TYPES = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, *NEW_TYPES])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_type_travel(ranks: Ranks, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    sent = numbers.to(torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    plain = BYTES[sent.element_size().bit_length() - 1]

    def send() -> list[Any]:
        world = World.from_env()
        arrived = [item["a"] for item in [*world.gather({"a": sent}), world.broadcast({"a": sent})]]
        return [(tensor.dtype, tensor.shape, torch.equal(tensor.view(plain), sent.view(plain))) for tensor in arrived]

    for own in ranks(1, send) + ranks(2, send):
        assert own == [(dtype, shape, True)] * len(own)


def test_a_copy_of_a_world_is_that_world(ranks: Ranks) -> None:
    def copies() -> bool:
        world = World.from_env()
        sent = world.gather({"world": world, "rank": world.rank})
        return copy.deepcopy([world])[0] is world and all(item["world"] is world for item in sent)

    assert ranks(2, copies) == [True, True]


def test_a_view_travels_without_the_rest_of_its_storage(ranks: Ranks) -> None:
    def run() -> tuple[int, float]:
        large = torch.arange(1_000_000.0)
        return len(pack([large[:3], large[999_999:]])), World.from_env().gather(large[7:9])[0].sum().item()

    for length, total in ranks(2, run):
        assert length < 5_000
        assert total == 15.0


def test_an_error_on_rank_0_is_its_own_though_nobody_is_there_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the others' time limit was over before."""
    world = World.from_env()

    def lost(*_: Any) -> Any:
        raise RuntimeError("gloo: connection closed by peer")

    monkeypatch.setattr(world, "_broadcast", lost)
    with pytest.raises(FileNotFoundError) as raised:
        world.run_on_main(lambda: Path("/nowhere").stat())
    assert "gloo" in str(raised.value.__cause__)
    with pytest.raises(RuntimeError, match="gloo"):
        world.run_on_main(lambda: 1)


def test_what_nccl_left_in_the_store_of_a_failed_attempt_is_removed(ranks: Ranks) -> None:
    """It looks for that key beyond every prefix, and would end the next attempt minutes after its start."""

    def open_world() -> bool:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        if os.environ["RANK"] == "0":
            store.set("exception_dump", "of a dead rank")
        World.from_env()
        return store.check(["exception_dump"])

    assert ranks(2, open_world) == [False, False]


def test_ranks_on_different_devices_are_told_so_at_once() -> None:
    """A node whose driver is broken: its ranks would wait over gloo, the others over NCCL."""
    store, said = FakeStore({}), dict[int, str]()

    def join(rank: int) -> None:
        try:
            agree_on_key(store, rank, 3, timedelta(seconds=10), "cpu" if rank == 2 else "cuda")
        except RuntimeError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == [0, 1, 2]
    assert set(said.values()) == {said[0]}
    assert said[0].startswith("the ranks compute on different devices: rank 0 on cuda, rank 2 on cpu. Does torch see the GPUs")


@pytest.mark.parametrize(
    ("text", "is_consequence"),
    [
        (
            "NCCL error in: x.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.",
            False,
        ),
        ("NCCL error in: x.cpp:1, invalid usage\nncclInvalidUsage: This usually reflects invalid usage of NCCL library", False),
        ("NCCL error in: x.cpp:1, remote process exited or there was a network error\nncclRemoteError: A call failed", True),
        ("NCCL error in: x.cpp:1, unhandled system error\nncclSystemError: System call (e.g. socket, malloc) failed", True),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5) ran for 600000 milliseconds before timing out.", True),
    ],
)
def test_an_error_of_nccl_s_is_a_rank_s_own_where_it_is_about_its_gpu(text: str, is_consequence: bool) -> None:
    assert World.is_consequence(dist.DistBackendError(text)) is is_consequence


GROUP_OF_NCCL = {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(
    ("bound", "local_rank", "backends", "index"),
    [
        (torch.device("cuda", 3), 1, GROUP_OF_NCCL, 3),  # opened with device_id
        (torch.device("cuda", 3), None, {"cuda": "nccl2"}, 3),
        (None, 1, GROUP_OF_NCCL, 1),
        (None, None, GROUP_OF_NCCL, 2),  # opened by mpirun or spawn, after torch.cuda.set_device
    ],
)
def test_a_group_that_is_open_already_says_which_gpu(
    monkeypatch: pytest.MonkeyPatch, bound: torch.device | None, local_rank: int | None, backends: dict[str, str], index: int
) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert launch.device_of_group(None, bound, local_rank, backends) == torch.device("cuda", index)
    assert machine.calls == [("set_device", (index,), {})]


def test_after_an_error_that_every_rank_has_caught_the_next_trainer_has_all_of_the_world(ranks: Ranks, tmp_path: Path) -> None:
    """A resume that is refused, and a fresh start: with names in errors, and a group that is closed in the end."""

    def run() -> list[Any]:
        with pytest.raises(FileNotFoundError), toy_trainer(4, batch_size=1, epochs=1) as trainer:
            trainer.fit(resume_from=tmp_path / "missing.pt")
        first = trainer.world
        assert first.failed
        with toy_trainer(4, batch_size=1, epochs=1) as trainer:
            trainer.fit()
            world, roll_call = trainer.world, trainer.world.roll_call
            assert roll_call is not None
            said = roll_call.ask(timed_out=False)
        return [world is first, world.failed, said[0]["cause"], dist.is_initialized(), World.is_open()]

    assert ranks(2, run) == [[True, False, [], False, False]] * 2


def test_a_world_of_the_script_s_own_goes_on_after_an_error_that_every_rank_has_caught(ranks: Ranks, tmp_path: Path) -> None:
    def run() -> tuple[bool, bool]:
        world = World.from_env()
        trainer = toy_trainer(4, batch_size=1, epochs=1)
        with pytest.raises(FileNotFoundError):
            trainer.fit(resume_from=tmp_path / "missing.pt")
        trainer.fit()
        failed = world.failed
        world.close()
        return failed, dist.is_initialized()

    assert ranks(2, run) == [(False, False)] * 2


def test_the_next_error_after_one_that_was_caught_is_the_one_that_torchrun_is_told(ranks: Ranks, tmp_path: Path) -> None:
    """Also before any other call; and what came to a good end has told nothing."""

    def run(fails: bool) -> str | None:
        file = tmp_path / f"error-{fails}-{os.environ['RANK']}.json"
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(file)
        with pytest.raises(FileNotFoundError), toy_trainer(4, batch_size=1, epochs=1) as trainer:
            trainer.fit(resume_from=tmp_path / "missing.pt")
        with pytest.raises(ZeroDivisionError) if fails else nullcontext(), toy_trainer(4, batch_size=1, epochs=1):
            assert 1 / (1 - fails)
        return json.loads(file.read_text())["message"]["message"].split(":")[0] if file.exists() else None

    assert ranks(2, run, True) == ["ZeroDivisionError"] * 2
    assert ranks(2, run, False) == [None] * 2


def test_a_world_that_is_kept_after_an_error_keeps_no_model(ranks: Ranks, tmp_path: Path) -> None:
    def run() -> bool:
        model = Toy()
        known = weakref.ref(model)

        def fail(model: nn.Module) -> None:
            with suppress(FileNotFoundError), toy_trainer(4, model, batch_size=1, epochs=1) as trainer:
                trainer.fit(resume_from=tmp_path / "missing.pt")

        fail(model)
        del model
        gc.collect()
        return known() is None

    assert ranks(2, run) == [True, True]


def test_an_error_that_one_rank_has_caught_does_not_count_on_any_once_all_go_on(ranks: Ranks) -> None:
    def run() -> Any:
        world = World.from_env()
        with suppress(ValueError), toy_trainer(4, batch_size=1, epochs=1) as trainer:
            trainer.fit()
            if world.is_main:
                raise ValueError("in rank 0's own code")
        toy_trainer(4, batch_size=1, epochs=1).fit()
        assert not world.failed
        assert world.roll_call is not None
        if world.rank == 1:
            world.record_failure(ValueError("rank 1's"))
        said, _ = world.roll_call.ask(timed_out=False)
        return said["cause"]

    assert ranks(3, run) == [[1]] * 3


def test_a_kept_world_waits_for_the_device_it_was_opened_for(ranks: Ranks, tmp_path: Path) -> None:
    def run() -> tuple[bool, bool]:
        with pytest.raises(FileNotFoundError), toy_trainer(4, batch_size=1, epochs=1) as trainer:
            trainer.fit(resume_from=tmp_path / "missing.pt")
        with pytest.raises(RuntimeError, match="computes on cpu, not on 'cuda'"):
            World.from_env("cuda")
        same = World.from_env() is trainer.world
        World.from_env().close()
        return same, dist.is_initialized()

    assert ranks(2, run) == [(True, False)] * 2


def test_a_group_that_the_script_has_opened_since_is_not_taken_for_a_kept_one(ranks: Ranks, tmp_path: Path) -> None:
    def run() -> tuple[bool, bool]:
        with pytest.raises(FileNotFoundError), toy_trainer(4, batch_size=1, epochs=1) as trainer:
            trainer.fit(resume_from=tmp_path / "missing.pt")
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=int(os.environ["RANK"]), world_size=2)
        world = World.from_env()
        world.close()
        found = world is trainer.world, dist.is_initialized()
        dist.destroy_process_group()
        return found

    assert ranks(2, run) == [(False, True)] * 2


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32])
def test_part_of_a_tensor_is_refused_by_torch_alone(ranks: Ranks, dtype: torch.dtype) -> None:
    """A slice with steps is sent where torch can."""

    def send() -> str:
        world, values = World.from_env(), torch.arange(6).to(dtype)[::2]
        try:
            world.broadcast_tensors([values])
        except RuntimeError as error:
            return "refused" if "scalar type" in str(error) else str(error)
        return str(values.tolist())

    assert ranks(2, send) == ["refused" if dtype == torch.int16 else "[0.0, 2.0, 4.0]"] * 2


def test_the_group_of_a_closed_world_is_gone_though_the_world_is_held(ranks: Ranks) -> None:
    """gloo's connections end with their last holder: a rank that has closed does not keep the others waiting."""

    def run() -> tuple[bool, float]:
        trainer = toy_trainer(4, eval_numbers=4, batch_size=1, epochs=1)
        trainer.fit()
        started = time.monotonic()
        if trainer.world.rank == 1:
            trainer.close()
            time.sleep(15)
            return True, 0.0
        time.sleep(1)
        with pytest.raises(RuntimeError, match="rank 1 has closed its world"):
            trainer.evaluate()
        return trainer.world.failed, time.monotonic() - started

    (_, seconds), _ = ranks(2, run)
    assert seconds < 8


def test_a_rank_that_goes_on_alone_after_its_error_keeps_that_as_the_cause(ranks: Ranks, tmp_path: Path) -> None:
    """It tries again, while the others have ended with the consequence."""

    class Failing(DDPTrainer):
        def before_epoch(self) -> None:
            if self.world.rank == 1:
                raise ZeroDivisionError("rank 1's own")

    def run() -> None:
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / f"error-{os.environ['RANK']}.json")
        if os.environ["RANK"] == "1":
            with suppress(ZeroDivisionError), toy_trainer(4, kind=Failing, batch_size=1, epochs=1) as trainer:
                trainer.fit()
        toy_trainer(4, kind=Failing, batch_size=1, epochs=1).fit()

    outcomes = ranks.outcomes(2, run, timeout=40)
    assert all(outcome.error is not None for outcome in outcomes)
    assert "rank 1's own" in json.loads((tmp_path / "error-1.json").read_text())["message"]["message"]
