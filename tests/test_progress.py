from __future__ import annotations

import fcntl
import math
import os
import struct
import sys
import termios
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, TextIO, cast

import pytest
import torch
from torch.utils.data import IterableDataset
from tqdm import tqdm

from callbacks import ProgressBar, progress
from tests.helpers import Ranks, Toy, mean_of_outputs, toy_trainer
from trainer import Callback, DDPTrainer, TrainerConfig


class FakeBar(tqdm):  # type: ignore[type-arg]
    """A bar that keeps what happened to all of them."""

    made: ClassVar[list[FakeBar]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.updates = 0
        self.postfixes = 0
        self.made.append(self)

    def update(self, n: float | None = 1) -> bool | None:
        self.updates += 1
        return super().update(n)

    def set_postfix(self, *args: Any, **options: Any) -> None:
        self.postfixes += 1
        super().set_postfix(*args, **options)

    @property
    def end(self) -> tuple[int, float | None, float]:
        """Where it began, its total, where it ended."""
        return self.initial, self.total, self.n


def on_terminal(fit: Callable[[], Any], bar: type[tqdm] = tqdm) -> str:  # type: ignore[type-arg]
    """What `fit` shows on a terminal of 120 columns. To be called in a rank: it changes this process."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    progress.tqdm = bar  # type: ignore[misc]
    kept, sys.stderr = sys.stderr, cast(TextIO, os.fdopen(writer, "w", buffering=1))
    try:
        fit()
    finally:
        sys.stderr.close()
        sys.stderr = kept
    shown = b""
    try:
        while part := os.read(reader, 65536):
            shown += part
    except OSError:  # the other end is closed and everything is read
        pass
    assert not tqdm._instances, "a bar is left over"
    return shown.decode()


def bars_of(**config: Any) -> list[tuple[int, float | None, float]]:
    on_terminal(lambda: toy_trainer(10, callbacks=[ProgressBar()], **config).fit(), FakeBar)
    return [bar.end for bar in FakeBar.made]


def test_one_bar_an_epoch_counts_steps_to_its_total(ranks: Ranks) -> None:
    """Five micro-batches, two a step: three steps an epoch."""
    assert ranks(1, bars_of, batch_size=2, accumulation_steps=2, epochs=2) == [[(0, 3, 3), (0, 3, 3)]]


def test_an_epoch_of_a_single_step_has_a_bar_of_one(ranks: Ranks) -> None:
    assert ranks(1, bars_of, batch_size=10, epochs=2) == [[(0, 1, 1), (0, 1, 1)]]


def test_the_last_bar_ends_where_max_steps_ends_the_run(ranks: Ranks) -> None:
    assert ranks(1, bars_of, batch_size=4, max_steps=4) == [[(0, 3, 3), (0, 1, 1)]]


def test_a_resumed_run_starts_where_the_epoch_was_left(ranks: Ranks) -> None:

    class StopAfterTwo(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            if trainer.state.step == 2:
                trainer.stop("two are enough")

    def fit(*callbacks: Callback) -> DDPTrainer:
        return toy_trainer(10, callbacks=[ProgressBar(), *callbacks], batch_size=2, accumulation_steps=2, epochs=2)

    def run() -> tuple[str, list[tuple[int, float | None, float]]]:
        first, second = fit(StopAfterTwo()), fit()
        shown = on_terminal(first.fit, FakeBar)
        second.load_state_dict(first.state_dict())
        on_terminal(second.fit, FakeBar)
        return shown, [bar.end for bar in FakeBar.made]

    ((shown, bars),) = ranks(1, run)
    assert "stopped: two are enough" in shown
    assert bars == [(0, 3, 2), (2, 3, 3), (0, 3, 3)]


def test_a_finished_run_shows_no_bar(ranks: Ranks) -> None:
    def run() -> int:
        trainer = toy_trainer(4, callbacks=[ProgressBar()], batch_size=4)
        on_terminal(trainer.fit)
        on_terminal(trainer.fit, FakeBar)
        return len(FakeBar.made)

    assert ranks(1, run) == [0]


def test_numbers_are_set_at_reports_and_not_at_steps(ranks: Ranks) -> None:
    def run() -> tuple[int, int]:
        trainer = toy_trainer(10, callbacks=[ProgressBar()], batch_size=1, log_every=4)
        on_terminal(trainer.fit, FakeBar)
        (bar,) = FakeBar.made
        return bar.updates, bar.postfixes

    ((updates, postfixes),) = ranks(1, run)
    assert updates >= 10
    assert postfixes == 4  # steps 4, 8, 10 and the epoch's end


def test_a_terminal_shows_epoch_steps_numbers_and_evaluations(ranks: Ranks) -> None:
    def run() -> str:
        trainer = toy_trainer(4, eval_numbers=[2.0], callbacks=[ProgressBar()], batch_size=2, epochs=2)
        return on_terminal(trainer.fit)

    (shown,) = ranks(1, run)
    lines = [line.rpartition("\r")[2] for line in shown.replace("\r\n", "\n").split("\n")]
    # w after the steps: -0.5, -3, -3.5, -6; the loss is w times the mean of the numbers
    assert "step 2, evaluation: loss -6" in shown
    assert "step 4, evaluation: loss -12" in shown
    finished = [line for line in lines if "2/2" in line]
    assert [line[:10] for line in finished] == ["epoch 1/2:", "epoch 2/2:"]
    assert "loss=-0.625" in finished[0]  # the mean of 0 and -1.25


def test_only_rank_0_writes(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(4, lambda: toy_trainer(8, callbacks=[ProgressBar()], batch_size=1).fit().step)
    assert all(outcome.ok for outcome in outcomes)
    assert [bool(outcome.stderr) for outcome in outcomes] == [True, False, False, False]
    assert [outcome.stdout for outcome in outcomes] == [""] * 4


def test_a_log_file_gets_a_last_line_and_no_bars(ranks: Ranks) -> None:

    def fit() -> None:
        toy_trainer(1000, lr=0.001, eval_numbers=3, callbacks=[ProgressBar()], batch_size=1).fit()

    (outcome,) = ranks.outcomes(1, fit)
    assert outcome.ok
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("step 1000/1000, epoch 1/1, 00:0")
    assert "loss " in line
    assert "eval loss " in line


def test_a_log_file_gets_at_most_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    state = SimpleNamespace(step=0, epoch=0, epoch_samples=0, stop_reason=None)
    fake = cast(DDPTrainer, SimpleNamespace(state=state, total_steps=300, steps_per_epoch=100))
    callback = ProgressBar()
    callback.on_fit_start(fake)
    for _ in range(70):  # half a second each, a report at every second step
        now += 0.5
        state.step, state.epoch_samples = state.step + 1, state.epoch_samples + 8
        callback.on_step(fake, {"loss": 1 / state.step, "samples_per_second": 12345.6} if state.step % 2 == 0 else {})
        callback.on_safe_point(fake)
    state.stop_reason = "enough"
    callback.on_fit_end(fake)
    assert capsys.readouterr().err.splitlines() == [
        "step 20/300, epoch 1/3, 00:10: loss 0.05, samples_per_second 12346",
        "step 40/300, epoch 1/3, 00:20: loss 0.025, samples_per_second 12346",
        "step 60/300, epoch 1/3, 00:30: loss 0.01667, samples_per_second 12346",
        "step 70/300, epoch 1/3, 00:35: loss 0.01429, samples_per_second 12346",
        "stopped: enough",
    ]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_no_bar_is_left_after_an_error(ranks: Ranks, error: type[BaseException]) -> None:
    class Fail(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            if trainer.state.step == 2:
                raise error("on purpose")

    def run() -> list[tuple[int, float | None, float]]:
        def fit() -> None:
            with pytest.raises(error, match="on purpose"):
                toy_trainer(10, callbacks=[ProgressBar(), Fail()], batch_size=1).fit()

        on_terminal(fit, FakeBar)  # asserts it
        return [bar.end for bar in FakeBar.made]

    assert ranks(1, run) == [[(0, 10, 2)]]


def test_lines_written_through_tqdm_leave_the_bar_whole(ranks: Ranks) -> None:
    class Speak(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            tqdm.write(f"line {trainer.state.step}", file=sys.stderr)

    def run() -> str:
        return on_terminal(toy_trainer(3, callbacks=[ProgressBar(), Speak()], batch_size=1).fit)

    (shown,) = ranks(1, run)
    lines = [line.rpartition("\r")[2].strip() for line in shown.replace("\r\n", "\n").split("\n")]
    assert lines[:3] == ["line 1", "line 2", "line 3"]
    assert "3/3" in lines[3]


@pytest.mark.parametrize("config", [{}, {"precision": "fp16"}], ids=["fp32", "fp16"])
@pytest.mark.filterwarnings("ignore:the loss was not finite")
def test_no_bar_is_opened_for_an_epoch_that_never_comes(ranks: Ranks, config: dict[str, Any]) -> None:
    """Of a stream, whose total is unknown; and where an update was skipped."""

    class Items(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.tensor(value), torch.tensor(0.0)) for value in (1.0, math.inf if config else 1.0, 1.0)])

    def run() -> int:
        model = Toy(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        settings = TrainerConfig(batch_size=1, log_every=1, **config)
        trainer = DDPTrainer(model, optimizer, Items(), loss_fn=mean_of_outputs, config=settings, callbacks=[ProgressBar()])
        on_terminal(trainer.fit, FakeBar)
        return len(FakeBar.made)

    assert ranks(1, run) == [1]
