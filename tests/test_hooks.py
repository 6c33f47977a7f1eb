"""Callbacks: which hook fires when, on which rank, and what it may do there; what a step is."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tests.helpers import Call, Numbers, Ranks, Recorder, Toy, mean_of_outputs, toy_trainer
from trainer import Callback, DDPTrainer, TrainerConfig, TrainerState, World

HOOKS = ("on_fit_start", "on_step", "on_eval", "on_epoch_end", "on_safe_point", "on_fit_end", "on_exception")


def inside(line: str) -> Callable[[str], bool]:
    """Whether a later line of the block is indented more than `line`."""
    return lambda later: len(later) - len(later.lstrip()) > len(line) - len(line.lstrip())


def promised(epochs: int, windows: int, micro_batches: int, eval_every: int) -> list[str]:
    """What the loop in DDPTrainer's docstring says will happen, in its order."""
    text = (DDPTrainer.__doc__ or "").partition("in its place:\n")[2].partition("    Args:")[0]
    times = {"for each epoch:": epochs, "for each window": windows, "for each micro-batch": micro_batches}
    words = re.compile(r"\b(on_\w+|before_epoch|training_step|optimizer_step|scheduler\.step|evaluate)\b")
    events: list[str] = []
    step = 0

    def play(lines: list[str]) -> None:
        nonlocal step
        while lines:
            line, *rest = lines
            body = list(takewhile(inside(line), rest))
            lines = rest[len(body) :]
            line = line.partition("#")[0].strip()
            step += line.startswith("step += 1")
            if line.startswith("if evaluation is due") and step % eval_every:
                continue
            if line.startswith("if the epoch is over") and step % windows:
                continue
            events.extend(words.findall(line))
            for _ in range(next((count for head, count in times.items() if line.startswith(head)), 0)):
                play(body)

    play(textwrap.dedent(text).strip("\n").splitlines())
    return events


class Observed(DDPTrainer):
    """Records what happens on its rank, the hooks included."""

    events: list[str]

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        self.events.append("training_step")
        loss: Tensor = model(batch[0]).mean()
        return loss

    def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
        return mean_of_outputs(model(batch[0]), batch[1])

    def before_epoch(self) -> None:
        self.events.append("before_epoch")

    def optimizer_step(self) -> None:
        self.events.append("optimizer_step")
        super().optimizer_step()

    def evaluate(self, data: Any = None) -> dict[str, float]:
        self.events.append("evaluate")
        return super().evaluate(data)


class Events(Recorder):
    """Writes the hooks into the list that the trainer's own methods write into."""

    def _record(self, name: str, trainer: DDPTrainer, metrics: Mapping[str, float] | None = None) -> None:
        assert isinstance(trainer, Observed)
        trainer.events.append(name)


class NotingLR(LambdaLR):
    events: list[str] | None = None

    def step(self, epoch: int | None = None) -> None:
        if self.events is not None:
            self.events.append("scheduler.step")
        super().step(epoch)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_recorded_order_is_that_of_the_docstring(ranks: Ranks, world_size: int) -> None:
    """Two epochs of three steps, two micro-batches each, an evaluation after every second step: inside and at the end."""

    def fit() -> list[str]:
        model = Toy()
        trainer = Observed(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            Numbers(12 * world_size),
            Numbers(4),
            scheduler=lambda optimizer, total: NotingLR(optimizer, lambda step: 1.0),
            config=TrainerConfig(epochs=2, batch_size=2, accumulation_steps=2, eval_every=2, log_every=1),
            callbacks=[Events()],
        )
        scheduler = trainer.scheduler
        assert isinstance(scheduler, NotingLR)
        trainer.events = scheduler.events = []
        trainer.fit()
        trainer.close()
        return trainer.events

    expected = promised(epochs=2, windows=3, micro_batches=2, eval_every=2)
    assert expected[:9] == [
        "on_fit_start",
        "before_epoch",
        *["training_step"] * 2,
        "optimizer_step",
        "scheduler.step",
        *expected[6:9],
    ]
    assert expected[6:9] == ["on_step", "on_safe_point", "training_step"]
    assert expected[-5:] == ["evaluate", "on_eval", "on_epoch_end", "on_safe_point", "on_fit_end"]
    first, *others = ranks(world_size, fit)
    assert first == expected
    without_hooks = [event for event in expected if not event.startswith("on_")]
    assert others == [without_hooks] * (world_size - 1)


class Caller(Callback):
    """Tries every call that needs all ranks, in every hook, and keeps what it was told."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, str], str] = {}

    def attempt(self, hook: str, trainer: DDPTrainer) -> None:
        for name, call in collective_calls(trainer).items():
            if (hook, name) in self.told:
                continue
            try:
                call()
            except RuntimeError as error:
                self.told[hook, name] = str(error)
            else:
                self.told[hook, name] = "nothing was raised"

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        self.trainer = trainer
        self.attempt("on_fit_start", trainer)

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.attempt("on_step", trainer)

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.attempt("on_eval", trainer)

    def on_epoch_end(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.attempt("on_epoch_end", trainer)

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        trainer.state_dict()  # asks this callback for its own, inside the hook
        self.attempt("on_safe_point", trainer)

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        self.attempt("on_fit_end", trainer)

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        self.attempt("on_exception", trainer)

    def state_dict(self) -> dict[str, Any]:
        self.attempt("state_dict", self.trainer)
        return {"told": len(self.told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.attempt("load_state_dict", self.trainer)


def collective_calls(trainer: DDPTrainer) -> dict[str, Callable[[], object]]:
    world = trainer.world

    def main_first() -> None:
        with world.main_first():
            pass

    return {
        "fit": trainer.fit,
        "evaluate": trainer.evaluate,
        "predict": lambda: trainer.predict(Numbers(2)),
        "close": trainer.close,
        "World.sum": lambda: world.sum(torch.ones(())),
        "World.gather": lambda: world.gather(1),
        "World.broadcast": lambda: world.broadcast(1),
        "World.barrier": world.barrier,
        "World.main_first": main_first,
        "World.wrap": lambda: world.wrap(trainer.model),
        "World.close": world.close,
        "DDPTrainer": lambda: toy_trainer(4),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_call_that_needs_all_ranks_raises_in_every_hook_and_names_both(ranks: Ranks, world_size: int) -> None:
    """What would be a deadlock is an error at once, in a job of one process too; the run itself goes on undisturbed."""

    class Trainer(DDPTrainer):
        is_broken = False

        def optimizer_step(self) -> None:
            if self.is_broken:
                raise ValueError("the end")
            super().optimizer_step()

    def fit() -> tuple[dict[tuple[str, str], str], float]:
        caller = Caller()
        trainer = toy_trainer(
            8 * world_size, eval_numbers=3, kind=Trainer, callbacks=[caller], batch_size=2, accumulation_steps=2
        )
        trainer.fit()
        value = float(trainer.model.w.detach())  # type: ignore[arg-type]
        trainer.load_state_dict(trainer.state_dict())
        trainer.state, trainer.is_broken = TrainerState(), True  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="the end"):
            trainer.fit()
        assert len(trainer.world.gather(0)) == world_size  # no hook is running any more
        return caller.told, value

    results = ranks(world_size, fit, timeout=30)
    told = results[0][0]
    hooks = (*HOOKS, "state_dict", "load_state_dict")
    calls = ("fit", "evaluate", "predict", "close", "World.sum", "World.gather", "World.broadcast", "World.barrier")
    calls += ("World.main_first", "World.wrap", "World.close", "DDPTrainer")
    assert set(told) == {(hook, call) for hook in hooks for call in calls}
    for (hook, call), message in told.items():
        assert message.startswith(f"{call} was called inside Caller.{hook}: "), (hook, call, message)
    mean = (8 * world_size - 1) / 2
    assert [value for _, value in results] == [-2 * mean] * world_size  # two steps, together the sum of their means
    assert all(not others for others, _ in results[1:])


def test_what_is_local_works_in_hooks(ranks: Ranks) -> None:
    """Reading costs no communication, and what is read is what the other rank has too."""

    class Reader(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.read: list[tuple[float, float, int | None, float]] = []

        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            weight = float(trainer.model.w.detach())  # type: ignore[arg-type]
            saved = float(trainer.state_dict()["model"]["w"])
            self.read.append((weight, saved, trainer.total_steps, metrics["loss"]))
            if trainer.state.step == 3:
                trainer.stop("seen enough")

    class Trainer(DDPTrainer):
        seen: list[float]

        def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
            self.seen.append(metrics["loss"])
            return metrics

    def fit() -> tuple[list[Any], list[float], str | None]:
        reader = Reader()
        trainer = toy_trainer(16, kind=Trainer, callbacks=[reader], batch_size=1, accumulation_steps=2)
        assert isinstance(trainer, Trainer)
        trainer.seen = []
        trainer.fit()
        trainer.close()
        return reader.read, trainer.seen, trainer.state.stop_reason

    (read, seen, reason), (nothing, others, other_reason) = ranks(2, fit)
    # windows {0 1 2 3}, {4 5 6 7}, {8 9 10 11}: the weight falls by 1.5, 5.5, 9.5; the loss is weight times mean
    assert read == [(-1.5, -1.5, 4, 0.0), (-7.0, -7.0, 4, -1.5 * 5.5), (-16.5, -16.5, 4, -7.0 * 9.5)]
    assert nothing == []
    assert seen == others == [loss for *_, loss in read]
    assert reason == other_reason == "seen enough"


class Counters(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int, int, int]] = []

    def _record(self, name: str, trainer: DDPTrainer, metrics: Mapping[str, float] | None = None) -> None:
        state = trainer.state
        self.seen.append((name, state.epoch, state.step, state.samples, state.epoch_samples))


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_counter_has_advanced_before_any_hook_of_the_step(ranks: Ranks, world_size: int) -> None:
    """10 samples in windows of 4, two epochs: the last window of an epoch holds 2 and ends it."""

    def fit() -> tuple[list[Any], dict[str, Any]]:
        counters = Counters()
        trainer = toy_trainer(
            10, eval_numbers=3, callbacks=[counters], epochs=2, batch_size=4 // world_size, eval_every=5, log_every=100
        )
        trainer.fit()
        trainer.close()
        return counters.seen, dataclasses.asdict(trainer.state)

    results = ranks(world_size, fit)
    assert results[0][0] == [
        ("on_fit_start", 0, 0, 0, 0),
        *[(hook, 0, 1, 4, 4) for hook in ("on_step", "on_safe_point")],
        *[(hook, 0, 2, 8, 8) for hook in ("on_step", "on_safe_point")],
        *[(hook, 1, 3, 10, 0) for hook in ("on_step", "on_epoch_end", "on_safe_point")],
        *[(hook, 1, 4, 14, 4) for hook in ("on_step", "on_safe_point")],
        *[(hook, 1, 5, 18, 8) for hook in ("on_step", "on_eval", "on_safe_point")],
        *[(hook, 2, 6, 20, 0) for hook in ("on_step", "on_epoch_end", "on_safe_point")],
        ("on_fit_end", 2, 6, 20, 0),
    ]
    end = {"epoch": 2, "step": 6, "samples": 20, "epoch_samples": 0, "skipped_steps": 0, "stop_reason": None}
    assert [state for _, state in results] == [end] * world_size


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 3), (2, 3)])
def test_a_step_is_an_optimizer_update_everywhere(ranks: Ranks, world_size: int, accumulation: int) -> None:
    """Hooks, counters, reports, evaluations, the schedule and max_steps count the same seven steps, whatever a step
    is made of. Windows of 6, the last of an epoch of 4 steps holds 3."""

    def fit() -> tuple[int | None, int, Recorder, list[int], int]:
        recorder = Recorder()
        model = Toy()
        lengths: list[int] = []
        trainer = DDPTrainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            Numbers(21),
            Numbers(2),
            loss_fn=mean_of_outputs,
            scheduler=lambda optimizer, total: LambdaLR(optimizer, lambda step: lengths.append(step) or 1 / (1 + step)),  # type: ignore[func-returns-value]
            config=TrainerConfig(
                max_steps=7,
                batch_size=6 // accumulation // world_size,
                accumulation_steps=accumulation,
                log_every=3,
                eval_every=2,
                shuffle=False,
            ),
            callbacks=[recorder],
        )
        total = trainer.total_steps
        state = trainer.fit()
        trainer.close()
        return total, state.step, recorder, lengths, state.samples

    for total, steps, _, lengths, samples in (results := ranks(world_size, fit)):
        assert (total, steps, samples) == (7, 7, 21 + 18)
        assert lengths == [0, 1, 2, 3, 4, 5, 6, 7]
    recorder = results[0][2]
    assert [call.step for call in recorder.named("on_step")] == [1, 2, 3, 4, 5, 6, 7]
    assert [call.step for call in recorder.reports] == [3, 6, 7]  # the planned last step reports too
    assert [call.metrics["lr"] for call in recorder.reports] == [1 / 3, 1 / 6, 1 / 7]
    assert [call.step for call in recorder.named("on_eval")] == [2, 4, 6]
    assert [call.step for call in recorder.named("on_epoch_end")] == [4]
    assert [call.step for call in recorder.named("on_safe_point")] == [1, 2, 3, 4, 5, 6, 7]


def test_without_eval_every_the_planned_end_is_evaluated_too(ranks: Ranks) -> None:
    def fit() -> list[Call]:
        recorder = Recorder()
        toy_trainer(8, eval_numbers=2, callbacks=[recorder], batch_size=2, max_steps=6).fit()
        return recorder.named("on_eval")

    assert [call.step for call in ranks(1, fit)[0]] == [4, 6]


def test_two_callbacks_of_one_name_are_refused_on_every_rank(ranks: Ranks) -> None:
    def build() -> str:
        with pytest.raises(ValueError, match=r"two callbacks are named 'Recorder'.*callback.name = 'Recorder 2'") as caught:
            toy_trainer(4, callbacks=[Recorder(), Recorder()])
        return str(caught.value)

    assert len(set(ranks(2, build))) == 1


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be instances of trainer.Callback; found <class .*Recorder"):
        toy_trainer(4, callbacks=[Recorder])  # type: ignore[list-item]
    World.from_env().close()


def test_a_name_can_be_assigned_and_is_the_key_of_the_state(ranks: Ranks) -> None:
    class Remembers(Callback):
        def __init__(self, what: int) -> None:  # and calls no super().__init__()
            self.what = what

        def state_dict(self) -> dict[str, Any]:
            return {"what": self.what}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.what = state["what"]

    def run() -> tuple[dict[str, Any], list[int], str]:
        first, second = Remembers(1), Remembers(2)
        second.name = "the other"
        trainer = toy_trainer(4, callbacks=[first, second])
        saved = trainer.state_dict()
        first.what = second.what = 0
        trainer.load_state_dict(saved)
        return saved["callbacks"], [first.what, second.what], Remembers(3).name

    expected = {"Remembers": {"what": 1}, "the other": {"what": 2}}
    assert ranks(1, run) == [(expected, [1, 2], "Remembers")]


class FailsAt(Recorder):
    """Raises `error` in the hook `hook`, also in on_exception."""

    def __init__(self, hook: str, error: BaseException | None) -> None:
        super().__init__()
        self.hook = hook
        self.error = error
        self.errors: list[BaseException] = []

    def _record(self, name: str, trainer: DDPTrainer, metrics: Mapping[str, float] | None = None) -> None:
        super()._record(name, trainer, metrics)
        if name == self.hook and self.error is not None:
            raise self.error

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        self.errors.append(error)
        super().on_exception(trainer, error)


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "on_exception"])
def test_an_error_in_a_hook_reaches_the_caller_and_every_on_exception(hook: str) -> None:
    """The later callback is told too, with the same error; on_fit_end is not called for either."""
    error = OSError(28, "no space left on device")
    failing, watching = FailsAt(hook, error), FailsAt("", None)
    watching.name = "watching"
    trainer = toy_trainer(4, eval_numbers=2, callbacks=[failing, watching], batch_size=2)
    with trainer, pytest.raises(OSError, match="no space left") as caught:
        trainer.fit()
    assert caught.value is error
    assert failing.errors == watching.errors == [error]
    assert watching.order[-1][0] == "on_exception"
    assert not watching.named("on_fit_end")
    assert len(failing.named("on_fit_end")) == (hook == "on_fit_end")


def test_on_exception_that_fails_hides_neither_the_error_nor_the_other_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    class Trainer(DDPTrainer):
        def optimizer_step(self) -> None:
            raise ArithmeticError("the real one")

    failing, watching = FailsAt("on_exception", RuntimeError("the second one")), FailsAt("", None)
    watching.name = "watching"
    trainer = toy_trainer(4, kind=Trainer, callbacks=[failing, watching], batch_size=2)
    with trainer, pytest.raises(ArithmeticError, match="the real one"):
        trainer.fit()
    assert watching.order == [("on_fit_start", 0), ("on_exception", 0)]
    assert "FailsAt.on_exception failed too" in caplog.text
    assert "the second one" in caplog.text


@pytest.mark.parametrize("hook", ["on_fit_start", "on_fit_end"])
def test_an_error_before_the_first_or_after_the_last_step_is_raised_on_every_rank(ranks: Ranks, hook: str) -> None:
    """There is no collective left in which the other rank could find out."""

    def fit() -> None:
        toy_trainer(4, callbacks=[FailsAt(hook, FileExistsError("runs/1 is taken"))], batch_size=1).fit()

    outcomes = ranks.outcomes(2, fit)
    assert [(outcome.error, outcome.message) for outcome in outcomes] == [("FileExistsError", "runs/1 is taken")] * 2
    assert max(outcome.seconds for outcome in outcomes) < 20


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_fit_continues_where_the_first_one_stopped(ranks: Ranks, world_size: int) -> None:
    """Stopped after 5 of 8 steps, inside the second epoch; together the steps of an uninterrupted run, bit for bit."""

    class Once(Recorder):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            super().on_step(trainer, metrics)
            if trainer.state.step == 5:
                trainer.stop("for now")

    def fit(callback: Recorder) -> tuple[list[tuple[str, int]], list[str | None], float, int]:
        numbers = torch.linspace(0, 1, 16 * world_size, dtype=torch.float64).square().tolist()
        trainer = toy_trainer(numbers, callbacks=[callback], epochs=2, batch_size=4, lr=0.1, shuffle=True)
        reasons = [trainer.fit().stop_reason, trainer.fit().stop_reason, trainer.fit().stop_reason]
        trainer.close()
        return callback.order, reasons, float(trainer.model.w.detach()), trainer.state.samples  # type: ignore[arg-type]

    interrupted, whole = ranks(world_size, fit, Once()), ranks(world_size, fit, Recorder())
    assert [weight for *_, weight, _ in interrupted] == [whole[0][2]] * world_size
    assert {samples for *_, samples in interrupted} == {32 * world_size}
    assert [reasons for _, reasons, *_ in interrupted] == [["for now", None, None]] * world_size
    order = interrupted[0][0]
    assert order.count(("on_epoch_end", 4)) == order.count(("on_epoch_end", 8)) == 1
    assert [step for name, step in order if name == "on_fit_start"] == [0, 5, 8]
    assert [step for name, step in order if name == "on_fit_end"] == [5, 8, 8]
    assert [step for name, step in order if name == "on_step"] == [1, 2, 3, 4, 5, 6, 7, 8]
