"""A rank that hangs, is slow or was killed ends every other one at the limit, with an error that says who, where and when."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trainer.world
from tests.helpers import Numbers, Outcome, Ranks, Toy, mean_of_outputs
from trainer import Callback, DDPTrainer, TrainerConfig, World, failure
from trainer.rendezvous import TIMED_OUT

LIMIT = 3.0  # seconds that a collective waits
LEAVING = 5.0  # seconds more after which a rank that waited is gone
UNRECORDED = {"TORCHELASTIC_ERROR_FILE": None}  # who waited leaves two seconds earlier when torchrun need not be told


class Acting(DDPTrainer):
    """Does `action` at each place that it passes: the rank, the place and the updates so far are handed to it."""

    action: Callable[[int, str, int], None]

    def before_epoch(self) -> None:
        self.pass_by("before_epoch")

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        self.pass_by("training_step")
        return mean_of_outputs(model(batch[0]), batch[1])

    def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
        self.pass_by("eval_step")
        return mean_of_outputs(model(batch[0]), batch[1])

    def optimizer_step(self) -> None:
        self.pass_by("optimizer_step")
        super().optimizer_step()

    def pass_by(self, place: str) -> None:
        self.action(self.world.rank, place, self.state.step)


class ActingData(Numbers):
    """Sample i is fetched with the place "dataset" and i in place of a step."""

    def __init__(self, numbers: int, rank: int, action: Callable[[int, str, int], None]) -> None:
        super().__init__(numbers)
        self.rank, self.action = rank, action

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.action(self.rank, "dataset", index)
        return super().__getitem__(index)


class ActingHooks(Callback):
    def __init__(self, action: Callable[[int, str, int], None]) -> None:
        self.action = action

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        self.action(0, "on_fit_start", trainer.state.step)

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.action(0, "on_step", trainer.state.step)

    def on_epoch_end(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.action(0, "on_epoch_end", trainer.state.step)


def fit(action: Callable[[int, str, int], None], seconds: float | None = LIMIT, workers: int = 0) -> int:
    """Six steps of two samples a rank, with an evaluation after every second one."""
    world = World.from_env(timeout=None if seconds is None else timedelta(seconds=seconds))
    model = Toy()
    training = Acting(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        ActingData(12 * world.size, world.rank, action),
        Numbers(4),
        loader_options={"num_workers": workers},
        config=TrainerConfig(batch_size=2, shuffle=False, log_every=1, eval_every=2),
        callbacks=[ActingHooks(action)],
    )
    training.action = action
    return training.fit().step


class Hang:
    """The action of a rank that hangs, at one place, until every other rank has left its `fit`."""

    def __init__(self, folder: Path, rank: int, place: str, step: int, world_size: int = 2) -> None:
        self.folder, self.world_size = folder, world_size
        self.where = (rank, place, step)

    def __call__(self, *where: Any) -> None:
        if where == self.where:
            self.hang()

    def hang(self) -> NoReturn:
        began = time.monotonic()
        (self.folder / "began").write_text(str(began))
        while len(list(self.folder.glob("left-*"))) < self.world_size - 1 and time.monotonic() < began + 20:
            time.sleep(0.02)
        os._exit(9)

    def fit(self, seconds: float | None = LIMIT, workers: int = 0) -> None:
        try:
            fit(self, seconds, workers)
        finally:
            (self.folder / f"left-{os.environ['RANK']}").touch()

    def seconds_until(self, moment: float) -> float:
        return moment - float((self.folder / "began").read_text())


def waiting(outcomes: list[Outcome], gone: int) -> list[Outcome]:
    """The ranks other than `gone`, which have ended with an error of a collective, and not at the limit of the test."""
    others = [outcome for outcome in outcomes if outcome.rank != gone]
    for outcome in others:
        assert not outcome.ok
        assert not outcome.timed_out, outcome.traceback
        assert "gloo" in outcome.message
    return others


PLACES = {  # rank, place and step at which it hangs; what the other rank was doing then, and after which step
    "training_step": (1, "training_step", 2, "in a training step, after step 2"),
    "eval_step": (1, "eval_step", 4, "in an evaluation, after step 4"),
    "dataset": (1, "dataset", 9, "in a training step, after step 2"),
    "worker": (1, "dataset", 9, "in a training step, after step 2"),
    "optimizer_step": (1, "optimizer_step", 2, "in a report, after step 3"),
    "before_epoch": (1, "before_epoch", 0, "to set up the model's wrapper, after step 0"),
    "a hook at the start": (0, "on_fit_start", 0, "for rank 0, which reads a checkpoint or runs a hook, after step 0"),
    "a hook": (0, "on_step", 3, "to agree on stopping, after step 3"),
}


@pytest.mark.parametrize("name", PLACES)
def test_who_waits_for_a_rank_that_hangs_says_what_it_was_doing_and_for_whom(ranks: Ranks, tmp_path: Path, name: str) -> None:
    rank, place, step, words = PLACES[name]
    hang = Hang(tmp_path, rank, place, step)
    launched = time.monotonic()
    outcomes = ranks.outcomes(2, hang.fit, LIMIT, int(name == "worker"), env=UNRECORDED, timeout=30)
    (other,) = waiting(outcomes, rank)
    assert f"rank {other.rank} was waiting {words}; rank {rank} did not answer: it hangs" in other.message
    assert LIMIT - 0.5 < hang.seconds_until(launched + other.seconds) < LIMIT + LEAVING


def test_every_other_rank_ends_in_time_and_names_the_one_that_hangs(ranks: Ranks, tmp_path: Path) -> None:
    """Under torchrun they hold back for two seconds, so that the agent sees the cause before its consequences."""
    hang = Hang(tmp_path, 1, "training_step", 2, world_size=3)
    launched = time.monotonic()
    for other in waiting(ranks.outcomes(3, hang.fit, timeout=30), 1):
        words = f"rank {other.rank} was waiting in a training step, after step 2; rank 1 did not answer: it hangs"
        assert words in other.message
        assert words in str(other.recorded)
        assert hang.seconds_until(launched + other.seconds) < LIMIT + LEAVING


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_that_is_killed_is_named_by_the_others(ranks: Ranks, world_size: int) -> None:
    """Long before the time limit. From four ranks on some only wait for ranks that know it already."""

    def action(*where: Any) -> None:
        if where == (1, "training_step", 2):
            os.kill(os.getpid(), signal.SIGKILL)

    outcomes = ranks.outcomes(world_size, fit, action, 60.0, timeout=40)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for other in waiting(outcomes, 1):
        assert f"rank {other.rank} was waiting in a training step, after step 2; " in other.message
        alone = "rank 1 did not answer: it hangs, is slow, or was killed"
        several = r"rank [\d, ]*\b1\b[\d, ]* did not answer: one hangs, is slow, or was killed; others may wait for it"
        assert re.search(several, other.message) if world_size > 3 and alone not in other.message else alone in other.message
        assert other.seconds < 20


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_that_failed_by_itself_is_named_as_the_cause(ranks: Ranks, world_size: int) -> None:
    def action(*where: Any) -> None:
        if where == (1, "training_step", 2):
            raise ArithmeticError("boom")

    outcomes = ranks.outcomes(world_size, fit, action, 60.0, timeout=40)
    assert (outcomes[1].error, outcomes[1].message) == ("ArithmeticError", "boom")
    for other in waiting(outcomes, 1):
        assert other.message.endswith(
            f"rank {other.rank} was waiting in a training step, after step 2; rank 1 failed with an error of its own"
        )
        assert other.seconds < 20


@pytest.mark.parametrize(("seconds", "fine"), [(2.0, False), (20.0, True)])
def test_work_on_rank_0_may_take_as_long_as_the_others_were_told_to_wait(ranks: Ranks, seconds: float, fine: bool) -> None:
    """Five seconds in `on_epoch_end`."""

    def action(rank: int, place: str, step: int) -> None:
        if place == "on_epoch_end":
            time.sleep(5)

    slow, other = ranks.outcomes(2, fit, action, seconds, timeout=40)
    if fine:
        assert (slow.value, other.value) == (6, 6)
        return
    assert not slow.ok
    assert "rank 1 had waited for longer than the time limit, and gave up: this rank came late" in slow.message
    assert other.message.endswith(
        "rank 1 was waiting to agree on stopping, after step 6; rank 0 did not answer: it hangs, is slow, or was killed"
    )
    assert "imed out" in other.message
    assert max(slow.seconds, other.seconds) < 20


def test_a_rank_that_hangs_is_named_though_another_gave_up_before() -> None:
    """To a rank that began to wait later, and sees the other one's end before its own time is over."""
    roll_call = SimpleNamespace(ask=lambda timed_out: ({TIMED_OUT: [1]}, [0]))
    world = SimpleNamespace(roll_call=roll_call, is_main=False, rank=2)
    waiting: Any = SimpleNamespace(world=world, state=SimpleNamespace(step=2))
    text = failure._explain_lost_ranks(RuntimeError("gloo: Connection closed by peer"), waiting)
    assert text.endswith("rank 0 did not answer: it hangs, is slow, or was killed")


@pytest.mark.parametrize("opened", ["a group", "a world"])
def test_a_limit_is_kept_in_what_was_open_already(ranks: Ranks, opened: str) -> None:
    """And the error says what is not known: of a group of one's own nobody keeps a roll."""

    def fit_late() -> int:
        if opened == "a group":
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        else:
            World.from_env()
        World.from_env(timeout=timedelta(seconds=2))
        return fit(lambda rank, place, step: time.sleep(6) if place == "on_epoch_end" and rank == 0 else None, seconds=None)

    slow, other = ranks.outcomes(2, fit_late, timeout=40)
    assert not slow.ok
    assert "imed out" in other.message
    ending = "rank 0 did not answer: it hangs, is slow, or was killed"
    if opened == "a group":
        ending = "another rank failed, hangs, or came later than the time limit"
        assert slow.message.endswith(ending)
    assert other.message.endswith(ending)


# Unless told otherwise.


def set_limits(first: float, then: float) -> None:
    trainer.world.FIRST_TIMEOUT, trainer.world.TIMEOUT = timedelta(seconds=first), timedelta(seconds=then)


def late(seconds: float, *places: tuple[str, int]) -> Callable[[int, str, int], None]:
    """Rank 1 is late by so many seconds at each of `places`."""

    def action(rank: int, place: str, step: int) -> None:
        if rank == 1 and (place, step) in places:
            time.sleep(seconds)

    return action


def limit_of(message: str) -> int:
    """The milliseconds that gloo says it has waited."""
    found = re.search(r"imed out waiting (\d+)ms", message)
    assert found, message
    return int(found[1])


def test_the_first_step_has_a_longer_limit_and_the_others_a_shorter_one(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 is late in the first step, and hangs in the third."""
    hang = Hang(tmp_path, 1, "training_step", 2)
    slow = late(4, ("training_step", 0))

    def run() -> None:
        set_limits(30, 2)
        try:
            fit(lambda *where: (slow(*where), hang(*where))[1], seconds=None)
        finally:
            (tmp_path / f"left-{os.environ['RANK']}").touch()

    (other,) = waiting(ranks.outcomes(2, run, env=UNRECORDED, timeout=40), 1)
    assert "rank 0 was waiting in a training step, after step 2; rank 1 did not answer" in other.message
    assert limit_of(other.message) == 2000


def test_a_rank_that_hangs_in_the_first_step_is_found_at_the_longer_limit(ranks: Ranks, tmp_path: Path) -> None:
    hang = Hang(tmp_path, 1, "training_step", 0)

    def run() -> None:
        set_limits(3, 60)
        hang.fit(None)

    (other,) = waiting(ranks.outcomes(2, run, env=UNRECORDED, timeout=40), 1)
    assert "rank 0 was waiting in a training step, after step 0; rank 1 did not answer" in other.message
    assert limit_of(other.message) == 3000


def test_a_limit_that_was_given_stays(ranks: Ranks) -> None:
    def run() -> int:
        set_limits(1, 1)
        return fit(late(2.5, ("training_step", 0), ("training_step", 3)), 20.0)

    assert ranks(2, run) == [6, 6]


def test_who_waits_for_a_samplers_order_says_so(ranks: Ranks) -> None:
    """Whatever names the script has for its own methods."""

    class Slow(torch.utils.data.SequentialSampler):
        def __iter__(self) -> Any:
            if World.from_env().rank == 0:
                time.sleep(30)
            return super().__iter__()

    def fit() -> None:
        model = Toy()
        world = World.from_env(timeout=timedelta(seconds=3))
        optimizer, data = torch.optim.SGD(model.parameters(), lr=1.0), Numbers(8)
        DDPTrainer(model, optimizer, data, loss_fn=mean_of_outputs, sampler=Slow(data), world=world).fit()

    _, waiting = ranks.outcomes(2, fit, timeout=20)
    assert "rank 1 was waiting for rank 0, which draws the sampler's order" in waiting.message
