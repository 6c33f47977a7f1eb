from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks import Profiler
from tests.helpers import Ranks, toy_trainer
from trainer import Callback, DDPTrainer

pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11, of more cycles than one


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of the only trace in `folder`, by name."""
    (path,) = folder.iterdir()
    assert path.name.endswith(".pt.trace.json")  # what TensorBoard's plugin looks for
    events: dict[str, list[dict[str, Any]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        events.setdefault(event["name"], []).append(event)
    return events


def steps(events: Mapping[str, Any]) -> list[int]:
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in events if name.startswith("ProfilerStep#"))


@pytest.mark.parametrize(("first", "count"), [(1, 1), (2, 2), (3, 4)])
def test_the_chosen_steps_are_traced_and_no_others(tmp_path: Path, first: int, count: int) -> None:
    """An epoch is four windows of two micro-batches."""
    with toy_trainer(8, callbacks=[Profiler(tmp_path / "a", first, count)], batch_size=1, accumulation_steps=2, epochs=2) as run:
        run.fit()
    events = read(tmp_path / "a")
    assert steps(events) == list(range(first, first + count))
    spans = [(event["ts"], event["ts"] + event["dur"]) for step in steps(events) for event in events[f"ProfilerStep#{step}"]]
    inside = [event for event in events["Optimizer.step#SGD.step"] if any(start <= event["ts"] <= end for start, end in spans)]
    assert len(inside) == len(events["Optimizer.step#SGD.step"]) == count
    assert len(events["autograd::engine::evaluate_function: MeanBackward0"]) == 2 * count  # one a micro-batch


def test_only_rank_0_writes(ranks: Ranks, tmp_path: Path) -> None:
    def fit() -> None:
        with toy_trainer(16, callbacks=[Profiler(tmp_path / "a", 2, 2)], batch_size=2) as run:
            run.fit()

    ranks(2, fit)
    events = read(tmp_path / "a")
    assert steps(events) == [2, 3]
    assert any("allreduce" in name or "all_reduce" in name for name in events)


def test_a_run_that_ends_among_the_steps_writes_what_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with toy_trainer(4, callbacks=[Profiler(tmp_path / "a", 3, 5)], batch_size=1) as run:
        run.fit()
    assert steps(read(tmp_path / "a")) == [3, 4]
    assert (tmp_path / "a" / "steps-00000003-00000004.pt.trace.json").exists()
    assert "the run ended at step 4" in caplog.text


def test_an_error_among_the_steps_leaves_a_whole_trace(tmp_path: Path) -> None:
    class Fail(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            if trainer.state.step == 3:
                raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        toy_trainer(8, callbacks=[Fail(), Profiler(tmp_path / "a", 2, 5)], batch_size=1).fit()
    assert steps(read(tmp_path / "a")) == [2, 3]


@pytest.mark.parametrize("first", [5, 6, 9])  # the first one: warmed up, never begun
def test_a_run_that_ends_before_the_steps_writes_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int
) -> None:
    with toy_trainer(4, callbacks=[Profiler(tmp_path / "a", first, 1)], batch_size=1) as run:
        run.fit()
    assert list(tmp_path.iterdir()) == []
    assert "the run ended at step 4" in caplog.text
    with torch.profiler.profile() as other:  # the profiler is free again
        torch.ones(1) + 1
    assert other.events()


def test_a_run_that_goes_on_behind_the_steps_says_that_nothing_is_traced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with toy_trainer(8, callbacks=[Profiler(tmp_path / "a", 3, 1)], batch_size=1) as run:
        run.state.step = 3
        with caplog.at_level(logging.WARNING):
            run.fit()
    assert "nothing is traced: the run goes on after step 3" in caplog.text
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folder": None}, "folder must be the path of a folder; found None"),
        ({"first": 0}, "first must be 1 or more; found 0"),
        ({"first": True}, "first must be an int, a number of steps; found True"),
        ({"steps": 1.5}, "steps must be an int, a number of steps; found 1.5"),
    ],
)
def test_arguments_out_of_range_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Profiler(**{"folder": tmp_path, **arguments})


def test_a_profiler_that_cannot_start_does_not_hide_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To end one that has never begun would crash the process."""
    monkeypatch.setattr("torch.profiler.profile.prepare_trace", lambda _: 1 / 0)
    monkeypatch.setattr("torch.profiler.profile.start_trace", lambda _: pytest.fail("ended what had not begun"))
    with pytest.raises(ZeroDivisionError), toy_trainer(4, callbacks=[Profiler(tmp_path / "a", 1, 1)], batch_size=1) as run:
        run.fit()
