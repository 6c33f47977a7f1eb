"""Leaving `fit` together: any rank may ask, all ranks leave after the same step, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

from tests.helpers import Ranks, Recorder, toy_trainer
from trainer import DDPTrainer, TrainerConfig, World


@dataclass
class Asking:
    """Rank `rank` asks to stop inside training_step, in step `step` (1, 2, ...), for a reason."""

    rank: int
    step: int
    reason: str


@pytest.fixture
def only_reports_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message before two "seconds" have passed, which never do: however slow the machine, the reports decide."""
    monkeypatch.setattr("trainer.stopping._PERIOD", 1e9)


class Trainer(DDPTrainer):
    """Asks as it is told to, counts the agreement's messages, and takes its time for a step."""

    asking: tuple[Asking, ...] = ()
    seconds = 0.0
    messages = 0

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self.seconds)
        for asking in self.asking:
            if (self.world.rank, self.state.step + 1) == (asking.rank, asking.step):
                self.stop(asking.reason)
        loss: Tensor = model(batch[0]).mean()
        return loss


@dataclass
class End:
    """How `fit` ended on one rank."""

    step: int
    reason: str | None
    weight: float
    order: list[tuple[str, int]]
    messages: int


def run(steps: int, *asking: Asking, seconds: float = 0.0, **config: Any) -> End:
    """One epoch of `steps` steps, each over one sample a rank and micro-batch."""
    recorder = Recorder()
    plan = TrainerConfig(**{"batch_size": 1, "log_every": 1, **config})
    samples = steps * plan.window_size(World.from_env().size)
    trainer = toy_trainer(samples, kind=Trainer, callbacks=[recorder], **{"batch_size": 1, **config})
    assert isinstance(trainer, Trainer)
    trainer.asking, trainer.seconds = asking, seconds
    send = trainer.world.sum

    def counting(values: Tensor) -> Tensor:
        trainer.messages += values.numel() == 3  # nothing else is that short
        return send(values)

    trainer.world.sum = counting  # type: ignore[method-assign]
    state = trainer.fit()
    trainer.world.close()
    weight = float(trainer.model.w.detach())  # type: ignore[arg-type]
    return End(state.step, state.stop_reason, weight, recorder.order, trainer.messages)


def test_a_wish_of_one_rank_stops_all_after_the_asking_step(ranks: Ranks) -> None:
    """Rank 1 alone asks, in training_step of step 3 of 10, K = 2."""
    first, second = ranks(2, run, 10, Asking(1, 3, "found a bug"), accumulation_steps=2)
    assert first.step == second.step == 3
    assert first.reason == second.reason == "found a bug"
    assert first.weight == second.weight == -(1.5 + 5.5 + 9.5)  # windows of four samples
    assert first.order[-3:] == [("on_step", 3), ("on_safe_point", 3), ("on_fit_end", 3)]
    assert second.order == []


@pytest.mark.parametrize(("world_size", "asking_rank"), [(1, 0), (2, 0), (4, 3)])
def test_whoever_asks_all_leave_after_the_same_step(ranks: Ranks, world_size: int, asking_rank: int) -> None:
    ends = ranks(world_size, run, 6, Asking(asking_rank, 2, "enough"))
    assert {(end.step, end.reason) for end in ends} == {(2, "enough")}
    assert len({end.weight for end in ends}) == 1


def test_one_process_leaves_after_the_asking_step_however_rare_reports_are(ranks: Ranks) -> None:
    (end,) = ranks(1, run, 50, Asking(0, 7, "enough"), log_every=1000)
    assert (end.step, end.reason, end.messages) == (7, "enough", 0)


def test_where_reports_are_rare_and_steps_slow_a_wish_is_heard_in_about_two_seconds(ranks: Ranks) -> None:
    """A step takes 50 ms, a report would come after 1,000: the message comes about every 40 steps, never at each."""
    first, second = ranks(2, run, 1000, Asking(1, 43, "enough"), seconds=0.05, log_every=1000)
    assert first.step == second.step
    assert 43 <= first.step <= 43 + 41
    assert first.reason == second.reason == "enough"
    assert 3 <= first.messages <= 6  # at step 1, then one every two seconds
    assert first.messages == second.messages


@pytest.mark.usefixtures("only_reports_settle")
def test_where_reports_are_frequent_the_wish_waits_for_the_next_one(ranks: Ranks) -> None:
    ends = ranks(2, run, 40, Asking(1, 7, "enough"), log_every=10)
    assert {(end.step, end.reason) for end in ends} == {(10, "enough")}


def test_the_first_step_always_settles(ranks: Ranks) -> None:
    ends = ranks(2, run, 40, Asking(1, 1, "enough"), log_every=10)
    assert {(end.step, end.reason) for end in ends} == {(1, "enough")}


@pytest.mark.usefixtures("only_reports_settle")
def test_of_several_reasons_the_lowest_rank_s_counts(ranks: Ranks) -> None:
    """Not the earliest: what counts is who wishes it when all meet. A rank's own first reason stays."""
    asked = [Asking(2, 4, "of rank 2"), Asking(1, 6, "of rank 1"), Asking(1, 7, "another of rank 1")]
    ends = ranks(3, run, 40, *asked, log_every=10)
    assert {(end.step, end.reason) for end in ends} == {(10, "of rank 1")}


class Asker(Recorder):
    """Asks to stop in one hook, the first time it is called at or after step `step`; keeps what on_safe_point saw."""

    def __init__(self, hook: str, step: int) -> None:
        super().__init__()
        self.hook, self.at = hook, step
        self.reasons: list[str | None] = []

    def _record(self, name: str, trainer: DDPTrainer, metrics: Mapping[str, float] | None = None) -> None:
        super()._record(name, trainer, metrics)
        if name == self.hook and trainer.state.step == self.at:
            trainer.stop(f"asked in {name}")
        if name == "on_safe_point":
            self.reasons.append(trainer.state.stop_reason)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("log_every", [1, 100])
@pytest.mark.usefixtures("only_reports_settle")
def test_stop_in_a_hook_ends_the_run_where_the_ranks_next_agree(ranks: Ranks, world_size: int, log_every: int) -> None:
    """Epochs of 4 steps, an evaluation after every second: they settle even where reports are rare, on_step alone does not.
    From on_safe_point, the last of a step, the wish is for the next one."""
    next_step = 3 if world_size == 1 or log_every == 1 else 4
    expected = {"on_fit_start": 1, "on_step": 2, "on_eval": 2, "on_epoch_end": 4, "on_safe_point": next_step}
    asked_at = {"on_fit_start": 0, "on_epoch_end": 4}

    def fit(hook: str) -> tuple[int, str | None, list[str | None], tuple[str, int] | None]:
        asker = Asker(hook, asked_at.get(hook, 2))
        trainer = toy_trainer(
            4 * world_size,
            eval_numbers=2,
            callbacks=[asker],
            epochs=3,
            batch_size=1,
            eval_every=2,
            log_every=log_every,
        )
        state = trainer.fit()
        return state.step, state.stop_reason, asker.reasons, asker.order[-1] if asker.order else None

    def fit_all() -> dict[str, Any]:
        return {hook: fit(hook) for hook in expected}

    first, *others = ranks(world_size, fit_all)
    for hook, step in expected.items():
        reason = f"asked in {hook}"
        assert first[hook] == (step, reason, [None] * (step - 1) + [reason], ("on_fit_end", step)), hook
        assert all(other[hook][:2] == (step, reason) for other in others)


def test_stop_outside_fit_does_nothing(ranks: Ranks) -> None:
    """Before the first fit, between two, and in on_fit_end, which is the end already."""

    def fit() -> list[tuple[int, str | None]]:
        trainer = toy_trainer(8, callbacks=[Asker("on_fit_end", 4)], batch_size=1)
        trainer.stop("before")
        ends = [(trainer.fit().step, trainer.state.stop_reason)]
        trainer.stop("after")
        trainer.state.step = trainer.state.epoch = 0
        ends.append((trainer.fit().step, trainer.state.stop_reason))
        return ends

    assert ranks(2, fit) == [[(4, None), (4, None)]] * 2


def test_the_reason_is_cleared_by_the_next_fit_and_none_at_the_planned_end(ranks: Ranks) -> None:
    class Watching(Asker):
        def on_fit_start(self, trainer: DDPTrainer) -> None:
            self.reasons.append(trainer.state.stop_reason)

    def fit() -> tuple[list[str | None], list[str | None]]:
        asker = Watching("on_step", 2)
        trainer = toy_trainer(8, callbacks=[asker], batch_size=1)
        return [trainer.fit().stop_reason, trainer.fit().stop_reason], asker.reasons

    (ends, seen), (other, _) = ranks(2, fit)
    assert ends == other == ["asked in on_step", None]
    assert seen == [None, None, "asked in on_step", None, None, None]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wish_at_the_planned_last_step_stops_nobody(ranks: Ranks, world_size: int) -> None:
    assert [(end.step, end.reason) for end in ranks(world_size, run, 3, Asking(0, 3, "late"))] == [(3, None)] * world_size


@pytest.mark.parametrize(
    ("config", "steps", "epoch_ends"),
    [
        ({"max_steps": 3}, 3, []),  # inside the first epoch of 4 steps
        ({"max_steps": 10}, 10, [4, 8]),  # no limit on epochs
        ({"max_steps": 10, "epochs": 2}, 8, [4, 8]),  # whichever comes first
        ({"max_steps": 6, "epochs": 2}, 6, [4]),
        ({"max_steps": 8, "epochs": 2}, 8, [4, 8]),
        ({"epochs": 3}, 12, [4, 8, 12]),
        ({}, 4, [4]),
    ],
)
def test_a_run_ends_as_planned_without_a_reason(ranks: Ranks, config: dict[str, int], steps: int, epoch_ends: list[int]) -> None:
    def fit() -> tuple[int | None, int, str | None, Recorder]:
        recorder = Recorder()
        trainer = toy_trainer(14, callbacks=[recorder], batch_size=2, log_every=100, **config)
        total = trainer.total_steps
        state = trainer.fit()
        return total, state.step, state.stop_reason, recorder

    results = ranks(2, fit)
    assert [result[:3] for result in results] == [(steps, steps, None)] * 2
    recorder = results[0][3]
    assert [call.step for call in recorder.named("on_epoch_end")] == epoch_ends
    assert [call.step for call in recorder.reports] == [steps]
    assert recorder.order[-2:] == [("on_safe_point", steps), ("on_fit_end", steps)]
