"""SIGTERM and SIGUSR1: all ranks leave after the same step with one checkpoint of it, or hard when that takes too long."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callbacks import Checkpoint
from tests.helpers import Numbers, Outcome, Ranks, Recorder, Toy, mean_of_outputs, toy_trainer
from trainer import Callback, CheckpointFolder, DDPTrainer, World, checkpoint, stopping
from trainer.workers import loader_options

SIGNALS = [signal.SIGTERM, signal.SIGUSR1]
STEPS = 200


class Signalled(DDPTrainer):
    """Sends itself signals in step 3, on the ranks told; steps take 20 ms."""

    ranks: tuple[int, ...] = ()
    number = signal.SIGTERM
    group = False

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        if self.state.step == 2 and self.world.rank in self.ranks:
            self.ranks = ()
            os.killpg(0, self.number) if self.group else os.kill(os.getpid(), self.number)
        time.sleep(0.02)
        loss: Tensor = model(batch[0]).mean()
        return loss


class Slow(Numbers):
    """A dataset whose workers are at work most of the time."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.01)
        return super().__getitem__(index)


def run(folder: Path, ranks: tuple[int, ...], number: int, workers: int = 0, group: bool = False) -> tuple[int, str | None]:
    if group:
        os.setpgid(0, 0)
    model = Toy()
    world = World.from_env()
    trainer = Signalled(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        Slow(STEPS * world.size),
        loss_fn=lambda outputs, targets: outputs.mean(),
        loader_options={"num_workers": workers},
        config=toy_trainer(1, batch_size=1, log_every=4).config,
        callbacks=[Checkpoint(folder)],
        world=world,
    )
    trainer.ranks, trainer.number, trainer.group = ranks, signal.Signals(number), group
    state = trainer.fit()
    return state.step, state.stop_reason


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("told", [(0,), (1,), (0, 1)])
def test_all_ranks_leave_after_the_same_step_with_one_checkpoint_of_it(
    ranks: Ranks, tmp_path: Path, told: tuple[int, ...], number: int
) -> None:
    """At the next report, whichever ranks it came to."""
    reason = f"received {signal.Signals(number).name}"
    assert ranks(2, run, tmp_path, told, number) == [(4, reason)] * 2
    assert list(CheckpointFolder(tmp_path).steps()) == [4]
    newest = CheckpointFolder(tmp_path).newest()
    assert newest is not None
    assert newest["state"]["stop_reason"] == reason


@pytest.mark.parametrize("number", SIGNALS)
def test_one_process_leaves_after_the_step_in_which_it_came(ranks: Ranks, tmp_path: Path, number: int) -> None:
    assert ranks(1, run, tmp_path, (0,), number) == [(3, f"received {signal.Signals(number).name}")]


@pytest.mark.parametrize("number", [*SIGNALS, signal.SIGINT])
def test_workers_outlive_a_signal_to_the_whole_group(ranks: Ranks, tmp_path: Path, number: int) -> None:
    """Else the process dies of its workers before it sees its own signal. Nothing is said at the end either."""
    (outcome,) = ranks.outcomes(1, run, tmp_path, (0,), number, 2, True)
    if number == signal.SIGINT:
        assert outcome.error == "KeyboardInterrupt"
    else:
        assert outcome.value == (3, f"received {signal.Signals(number).name}")
    assert "worker" not in outcome.stderr


def test_the_end_of_one_process_is_not_told_to_the_workers_of_another(ranks: Ranks, tmp_path: Path) -> None:
    """Forked from one parent: its workers would leave at the next signal, in the middle of what they do."""

    def fit(folder: str) -> bool:
        run(tmp_path / folder, (), signal.SIGUSR1, 1)
        return bool(loader_options({"num_workers": 1}, 0)["worker_init_fn"].args[1])

    assert ranks(1, fit, "first") == [False]
    assert ranks(1, fit, "second") == [False]


def test_workers_are_gone_with_their_process_after_an_error(ranks: Ranks, tmp_path: Path) -> None:
    """Even one that is in the middle of something, and although the error's traceback holds the loader."""

    class Stuck(Numbers):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            (tmp_path / str(os.getpid())).touch()
            if index > 0:
                time.sleep(1000)
            return super().__getitem__(index)

    class Failing(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            raise ArithmeticError

    def fit() -> None:
        model = Toy()
        Failing(
            model, torch.optim.SGD(model.parameters()), Stuck(9), loader_options={"num_workers": 2}, config=toy_trainer(1).config
        )
        options = {"num_workers": 2, "prefetch_factor": 1}
        config = toy_trainer(1, batch_size=1).config
        Failing(model, torch.optim.SGD(model.parameters()), Stuck(9), loader_options=options, config=config).fit()

    (outcome,) = ranks.outcomes(1, fit, timeout=30)
    assert outcome.error == "ArithmeticError"
    assert outcome.seconds < 12  # the loader itself waits five seconds
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert workers
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_every_start_method_work(method: str) -> None:
    model = Toy()
    options = {"num_workers": 1, "multiprocessing_context": method}
    config = toy_trainer(1, batch_size=1).config
    trainer = DDPTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        Numbers(3),
        loss_fn=mean_of_outputs,
        loader_options=options,
        config=config,
    )
    assert trainer.fit().step == 3


class Once(Callback):
    """Does something in step 2."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.state.step == 2:
            self.action()


class AtStep(Callback):
    """Does something in one step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step = step
        self.action = action

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.state.step == self.step:
            self.action()


def signal_oneself(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_users_handler_runs_too_and_is_put_back(ranks: Ranks, number: int) -> None:
    def fit() -> tuple[int, list[int], bool]:
        called: list[int] = []
        signal.signal(number, handler := lambda number, frame: called.append(number))
        step = toy_trainer(9, batch_size=1, callbacks=[Once(lambda: signal_oneself(number))]).fit().step
        return step, called, signal.getsignal(number) is handler

    assert ranks(1, fit) == [(2, [number], True)]


def test_a_handler_that_is_installed_during_the_run_stays(ranks: Ranks) -> None:
    def fit() -> bool:
        handler = lambda number, frame: None  # noqa: E731
        toy_trainer(9, batch_size=1, callbacks=[Once(lambda: signal.signal(signal.SIGTERM, handler))]).fit()
        return signal.getsignal(signal.SIGTERM) is handler

    assert ranks(1, fit) == [True]


def test_a_signal_that_the_user_ignores_stays_ignored(ranks: Ranks) -> None:
    def fit() -> tuple[int, bool]:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        step = toy_trainer(9, batch_size=1, callbacks=[Once(lambda: signal_oneself(signal.SIGUSR1))]).fit().step
        return step, signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN

    assert ranks(1, fit) == [(9, True)]


def test_who_else_is_woken_by_signals_still_is(ranks: Ranks) -> None:
    """As asyncio is, by `signal.set_wakeup_fd`."""

    def fit() -> tuple[bytes, bool]:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        os.set_blocking(reading, False)
        signal.set_wakeup_fd(writing)
        toy_trainer(9, batch_size=1, callbacks=[Once(lambda: signal_oneself(signal.SIGTERM))]).fit()
        return os.read(reading, 9), signal.set_wakeup_fd(-1) == writing

    assert ranks(1, fit) == [(bytes([signal.SIGTERM]), True)]


def test_a_process_forked_during_the_run_has_the_users_handlers_and_wakes_nobody(ranks: Ranks) -> None:
    def child() -> None:
        pid = os.fork()
        if pid == 0:
            fine = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1
            if not fine:
                os._exit(1)
            signal_oneself(signal.SIGTERM)
        assert os.waitpid(pid, 0)[1] == signal.SIGTERM

    assert ranks(1, lambda: toy_trainer(9, batch_size=1, callbacks=[Once(child)]).fit().step) == [9]


def test_outside_the_main_thread_a_run_goes_without_signals(ranks: Ranks) -> None:
    def fit() -> list[int]:
        steps: list[int] = []
        thread = threading.Thread(target=lambda: steps.append(toy_trainer(9, batch_size=1).fit().step))
        thread.start()
        thread.join()
        return steps

    assert ranks(1, fit) == [[9]]


class Hanging(DDPTrainer):
    """Waits for ever in step 3, in one call into C, where no Python handler runs."""

    signals, delay = 1, 0.0

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        if self.state.step == 2:
            script = f"import os, time; time.sleep({self.delay})\n"
            script += f"for _ in range({self.signals}): os.kill({os.getpid()}, 15); time.sleep(1.5)"
            subprocess.Popen([sys.executable, "-c", script])
            lock = threading.Lock()
            lock.acquire()
            while True:
                lock.acquire()
        loss: Tensor = model(batch[0]).mean()
        return loss


def hang(folder: Path, signals: int, slack: float, delay: float = 0.0) -> None:
    from trainer import stopping

    stopping._SLACK = slack
    trainer = toy_trainer(9, kind=Hanging, batch_size=1, callbacks=[Checkpoint(folder, every_steps=1)])
    assert isinstance(trainer, Hanging)
    trainer.signals, trainer.delay = signals, delay
    trainer.fit()


def left_hard(outcome: Outcome, words: str) -> bool:
    return outcome.exit_code == 143 and words in outcome.stderr


def test_a_step_that_never_ends_is_left_hard_at_the_deadline(ranks: Ranks, tmp_path: Path) -> None:
    """The checkpoints before are whole."""
    (outcome,) = ranks.outcomes(1, hang, tmp_path, 1, 1.0, timeout=30)
    assert left_hard(outcome, "leaves after a signal to stop: its steps did not end within 1.")
    assert outcome.seconds < 15
    assert list(CheckpointFolder(tmp_path).steps()) == [1, 2]
    assert CheckpointFolder(tmp_path).newest() is not None


def test_a_step_that_has_taken_too_long_already_is_left_at_once(ranks: Ranks, tmp_path: Path) -> None:
    (outcome,) = ranks.outcomes(1, hang, tmp_path, 1, 0.0, 2.0, timeout=30)
    assert left_hard(outcome, "leaves after a signal to stop: its steps did not end within 0.2 s")


def test_a_second_signal_acts_at_once(ranks: Ranks, tmp_path: Path) -> None:
    (outcome,) = ranks.outcomes(1, hang, tmp_path, 2, 25.0, timeout=30)
    assert left_hard(outcome, "leaves after a signal to stop: another one came")
    assert outcome.seconds < 15


@pytest.mark.parametrize(("world_size", "minutes"), [(1, 0.005), (2, 0.005)])
def test_max_minutes_ends_the_run_on_all_ranks(ranks: Ranks, tmp_path: Path, world_size: int, minutes: float) -> None:
    def fit() -> tuple[int, str | None]:
        trainer = toy_trainer(
            STEPS * world_size, kind=Signalled, batch_size=1, max_minutes=minutes, callbacks=[Checkpoint(tmp_path)], log_every=3
        )
        state = trainer.fit()
        return state.step, state.stop_reason

    results = ranks(world_size, fit)
    step, reason = results[0]
    assert results == [(step, reason)] * world_size
    assert 3 <= step <= 60
    assert reason == f"max_minutes={minutes:g} have passed"
    assert list(CheckpointFolder(tmp_path).steps()) == [step]


@pytest.mark.parametrize(("minutes", "error"), [("1", TypeError), (True, TypeError), (0, ValueError), (-2.5, ValueError)])
def test_minutes_out_of_range_are_refused(minutes: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_minutes must be"):
        toy_trainer(1, max_minutes=minutes)


def test_a_finished_run_was_not_stopped(ranks: Ranks) -> None:
    """The signal comes in the last step."""
    recorder = Recorder()

    def fit() -> str | None:
        return toy_trainer(2, batch_size=1, callbacks=[Once(lambda: signal_oneself(signal.SIGTERM)), recorder]).fit().stop_reason

    assert ranks(1, fit) == [None]


def test_the_first_evaluation_is_given_all_the_time_there_is_after_a_signal(tmp_path: Path) -> None:
    """No step has shown how long it takes; the later ones are part of a step that is known."""
    allowed: list[float] = []

    class Watched(DDPTrainer):
        def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
            allowed.append(self._agreement._seconds_to_leave())
            time.sleep(0.02)
            return super().training_step(model, batch)

        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            if model.training:
                allowed.append(self._agreement._seconds_to_leave())
            return super().training_step(model, batch)  # type: ignore[return-value]

    toy_trainer(6, eval_numbers=2, kind=Watched, batch_size=2, eval_every=1).fit()
    assert [round(seconds) for seconds in allowed] == [5, 25, 5, 5, 5, 5]


def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every file takes that long."""
    write = checkpoint.torch.save

    def save(*arguments: Any, **named: Any) -> None:
        time.sleep(seconds)
        write(*arguments, **named)

    monkeypatch.setattr(checkpoint.torch, "save", save)


@pytest.mark.parametrize("told", [(0,), (1,), (0, 1)])
def test_the_first_checkpoint_is_given_its_time_after_a_signal(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: tuple[int, ...]
) -> None:
    """No write has shown how long it takes. Whoever waits for rank 0's leaves after it."""
    slowly(monkeypatch, 5.0)
    monkeypatch.setattr(stopping, "_SLACK", 2.0)
    outcomes = ranks.outcomes(2, run, tmp_path, told, signal.SIGTERM)
    assert [outcome.value for outcome in outcomes] == [(4, "received SIGTERM")] * 2, outcomes
    assert list(CheckpointFolder(tmp_path).steps()) == [4]
    assert CheckpointFolder(tmp_path).newest() is not None


def test_a_step_is_given_more_time_while_the_file_of_one_before_is_written(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slowly(monkeypatch, 3.0)
    monkeypatch.setattr(stopping, "_SLACK", 0.0)

    def report() -> None:
        signal_oneself(signal.SIGTERM)
        time.sleep(1.0)

    def fit() -> int:
        return toy_trainer(9, batch_size=1, callbacks=[Once(report), Checkpoint(tmp_path, every_steps=1)]).fit().step

    (outcome,) = ranks.outcomes(1, fit)
    assert outcome.value == 2, outcome
    assert list(CheckpointFolder(tmp_path).steps()) == [1, 2]


def test_a_handler_that_passes_signals_on_to_the_trainers_leaves_the_deadline(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries do that install theirs during the run."""
    monkeypatch.setattr(stopping, "_SLACK", 0.5)

    def chain() -> None:
        before: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: before(number, frame))
        signal_oneself(signal.SIGTERM)
        time.sleep(10)

    (outcome,) = ranks.outcomes(1, lambda: toy_trainer(9, batch_size=1, callbacks=[Once(chain)]).fit())
    assert left_hard(outcome, "leaves after a signal to stop: its steps did not end within 0.5")


def chained() -> None:
    before: Any = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: before(number, frame))


def test_a_handler_that_passes_signals_on_does_so_in_a_second_fit_too(ranks: Ranks) -> None:
    def fit() -> list[str | None]:
        trainer = toy_trainer(9, batch_size=1, epochs=2, callbacks=[Once(chained)], max_steps=4)
        reasons = [trainer.fit().stop_reason]
        trainer.config = replace(trainer.config, max_steps=9)
        trainer.callbacks[0].action = lambda: None  # type: ignore[attr-defined]
        trainer._hooks.callbacks += (AtStep(6, lambda: signal_oneself(signal.SIGTERM)),)
        return [*reasons, trainer.fit().stop_reason]

    assert ranks(1, fit) == [[None, "received SIGTERM"]]


def test_after_fit_a_signal_that_is_passed_on_has_its_usual_effect(ranks: Ranks) -> None:
    def fit() -> None:
        toy_trainer(4, batch_size=1, callbacks=[Once(chained)]).fit()
        signal_oneself(signal.SIGTERM)
        time.sleep(5)

    (outcome,) = ranks.outcomes(1, fit)
    assert outcome.exit_code == -signal.SIGTERM


@pytest.mark.parametrize("async_write", [False, True])
def test_a_file_that_is_on_its_way_when_the_signal_comes_becomes_whole(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, async_write: bool
) -> None:
    """However long the step has taken by then, and though the run ends with it."""
    slowly(monkeypatch, 2.0)
    monkeypatch.setattr(stopping, "_SLACK", 0.0)

    def fit() -> int:
        late = threading.Timer(1.0, lambda: signal_oneself(signal.SIGTERM))
        files = Checkpoint(tmp_path, async_write=async_write)
        return toy_trainer(2, batch_size=1, callbacks=[Once(late.start), files]).fit().step

    (outcome,) = ranks.outcomes(1, fit)
    assert outcome.value == 2, outcome
    assert list(CheckpointFolder(tmp_path).steps()) == [2]


def test_a_handler_that_came_during_the_run_is_obeyed_alone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is not ended for a signal that is no longer the trainer's."""
    monkeypatch.setattr(stopping, "_SLACK", 0.2)

    def fit() -> tuple[int, list[int]]:
        called: list[int] = []

        def report() -> None:
            signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
            signal_oneself(signal.SIGUSR1)
            time.sleep(1.0)

        return toy_trainer(9, batch_size=1, callbacks=[Once(report)]).fit().step, called

    assert ranks(1, fit) == [(9, [signal.SIGUSR1])]


def test_a_handler_that_python_does_not_know_of_is_left_alone(ranks: Ranks, tmp_path: Path) -> None:
    """As that of faulthandler, which shows where a run hangs."""

    def fit() -> int:
        with open(tmp_path / "stacks", "w") as file:
            faulthandler.register(signal.SIGUSR1, file)
            step = toy_trainer(9, batch_size=1, callbacks=[Once(lambda: signal_oneself(signal.SIGUSR1))]).fit().step
            signal_oneself(signal.SIGUSR1)
        return step

    assert ranks(1, fit) == [9]
    assert (tmp_path / "stacks").read_text().count("Current thread") == 2


def test_signals_work_with_more_open_files_than_select_takes(ranks: Ranks) -> None:
    def fit() -> str | None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        held = [os.dup(0) for _ in range(1_100)]
        trainer = toy_trainer(9, batch_size=1, callbacks=[Once(lambda: signal_oneself(signal.SIGTERM))])
        threads: list[str] = []
        trainer._hooks.callbacks += (Once(lambda: threads.extend(thread.name for thread in threading.enumerate())),)
        reason = trainer.fit().stop_reason
        assert "signals" in threads
        assert len(held) == 1_100
        return reason

    assert ranks(1, fit) == ["received SIGTERM"]


class Unpickled(Numbers):
    """Gets a signal on its way into the worker, which has no handlers yet."""

    def __init__(self, number: int) -> None:
        super().__init__(6)
        self.number = number
        self.parent = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if os.getpid() != self.parent:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [*SIGNALS, signal.SIGINT])
def test_a_worker_outlives_a_signal_that_comes_while_it_starts(number: int) -> None:
    model = Toy()
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    config = toy_trainer(1, batch_size=1).config
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    trainer = DDPTrainer(model, optimizer, Unpickled(number), loss_fn=mean_of_outputs, loader_options=options, config=config)
    assert trainer.fit().step == 6
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_handler_of_the_fit_before_that_is_back_in_its_place_asks_the_fit_of_now(ranks: Ranks) -> None:
    """Where the script's own, installed during the first, is taken away during the second."""

    def fit() -> list[str | None]:
        def pass_on() -> None:
            popped.append(signal.getsignal(signal.SIGTERM))
            signal.signal(signal.SIGTERM, lambda number, frame: popped[0](number, frame))

        def pop() -> None:
            signal.signal(signal.SIGTERM, popped[0])
            signal_oneself(signal.SIGTERM)

        popped: list[Any] = []
        first = toy_trainer(4, batch_size=1, callbacks=[Once(pass_on)]).fit()
        return [first.stop_reason, toy_trainer(9, batch_size=1, callbacks=[Once(pop)]).fit().stop_reason]

    assert ranks(1, fit) == [[None, "received SIGTERM"]]


def test_a_handler_that_passes_on_signals_of_its_own_does_no_harm(ranks: Ranks) -> None:
    """Of numbers that were never the trainer's."""

    def fit() -> int:
        def pass_on() -> None:
            before: Any = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGUSR2, lambda number, frame: before(number, frame))
            signal_oneself(signal.SIGUSR2)

        return toy_trainer(9, batch_size=1, callbacks=[Once(pass_on)]).fit().step

    assert ranks(1, fit) == [2]
