"""`Checkpoint`: when it saves, what it keeps, which one is the best, and how it fails."""

from __future__ import annotations

import errno
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callbacks import Checkpoint, JSONLines
from tests.helpers import Numbers, Outcome, Ranks, Toy, ValueToy, opening_files_for, toy_trainer
from trainer import Callback, CheckpointFolder, DDPTrainer, World, checkpoint


def name(step: int) -> str:
    return f"step-{step:08d}.pt"


def listing(folder: Path) -> list[str]:
    """Without what keeps other jobs out, which a run that is killed leaves behind."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


class Listing(Callback):
    """The folder's step files after each step, by step; to stand after the Checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.files = CheckpointFolder(folder)
        self.seen: list[list[int]] = []

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        self.seen.append(list(self.files.steps()))


class StopAfter(Callback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.state.step == self.step:
            trainer.stop("enough")


# When, and how many.


@pytest.mark.parametrize(
    ("options", "config", "stop_after", "expected"),
    [
        ({}, {}, None, [3, 6, 9, 12]),  # three steps an epoch, four epochs
        ({"every_epochs": 3}, {}, None, [9, 12]),
        ({"every_epochs": None}, {}, None, [12]),
        ({"every_epochs": None, "every_steps": 5}, {}, None, [5, 10, 12]),
        ({"every_epochs": 2, "every_steps": 5}, {}, None, [5, 6, 10, 12]),
        ({"every_epochs": 1, "every_steps": 2}, {"max_steps": 7}, None, [2, 3, 4, 6, 7]),
        ({"every_epochs": 5}, {"max_steps": 7, "epochs": None}, None, [7]),
        ({"every_epochs": 2}, {}, 4, [4]),
        ({"every_epochs": 2, "every_steps": 3}, {}, 8, [3, 6, 8]),
        ({"every_epochs": None}, {}, 12, [12]),
    ],
)
def test_conditions_add_up_and_the_last_step_of_a_run_is_saved_however_it_ends(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any], config: dict[str, Any], stop_after: int | None, expected: list[int]
) -> None:
    """At the planned end, after max_steps, and when stopped; a step for which there are two reasons is written once."""

    def run() -> tuple[list[int], int]:
        written = 0

        def counting_open(path: Path, mode: str) -> Any:
            nonlocal written
            written += 1
            return open(path, mode)

        vars(checkpoint)["open"] = counting_open
        callbacks = [Checkpoint(tmp_path, keep_last=20, **options), StopAfter(stop_after)]
        toy_trainer(5, batch_size=2, callbacks=callbacks, **{"epochs": 4, **config}).fit()
        return list(CheckpointFolder(tmp_path).steps()), written

    assert ranks(1, run) == [(expected, len(expected))]


@pytest.mark.parametrize(
    ("keep_last", "counts"), [(1, [1, 1, 1, 1, 1, 1]), (3, [1, 2, 3, 3, 3, 3]), (5, [1, 2, 3, 4, 5, 5]), (6, [1, 2, 3, 4, 5, 6])]
)
def test_the_last_files_are_kept(ranks: Ranks, tmp_path: Path, keep_last: int, counts: list[int]) -> None:
    """Over six saves."""

    def run() -> list[list[int]]:
        seen = Listing(tmp_path)
        saver = Checkpoint(tmp_path, every_steps=1, keep_last=keep_last, async_write=False)
        toy_trainer(12, batch_size=1, callbacks=[saver, seen]).fit()
        return seen.seen

    expected = [list(range(step - count + 1, step + 1)) for step, count in enumerate(counts, 1)]
    assert ranks(2, run) == [expected, []]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_old_file_goes_only_after_the_new_one_is_there(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """keep_last=1, the disk is full at the second save, after which every rank ends at once."""

    class Full(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            if trainer.state.step == 2:
                (tmp_path / f"{name(2)}.tmp").symlink_to("/dev/full")

    def run() -> None:
        checkpoints = Checkpoint(tmp_path, every_steps=1, keep_last=1)
        toy_trainer(12, batch_size=1, callbacks=[checkpoints, Full()]).fit()

    outcomes = ranks.outcomes(world_size, run)
    assert outcomes[0].error == "OSError"
    assert "No space left" in outcomes[0].message
    assert_all_ended(outcomes)
    assert listing(tmp_path) == [name(1)]
    saved = checkpoint.read(tmp_path / name(1))
    assert (saved["state"]["step"], saved["model"]["w"].item()) == (1, -0.5 * (world_size - 1))


def assert_all_ended(outcomes: list[Outcome]) -> None:
    assert all(outcome.exit_code != 0 and not outcome.timed_out and outcome.seconds < 10 for outcome in outcomes), outcomes


def test_a_file_never_lags_behind(ranks: Ranks, tmp_path: Path) -> None:
    """It holds the scheduler after its move, and what later callbacks know of the step, its evaluation and its epoch."""

    class Later(Callback):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            self.calls.append("step")

        def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            self.calls.append("eval")

        def on_epoch_end(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            self.calls.append("epoch")

        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

    def run() -> None:
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        DDPTrainer(
            model,
            optimizer,
            Numbers(4),
            Numbers(1),
            loss_fn=lambda outputs, targets: outputs.mean(),
            scheduler=lambda optimizer, total: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            callbacks=[Checkpoint(tmp_path, every_steps=1), Later()],
            config=toy_trainer(4, batch_size=2).config,
        ).fit()

    ranks(1, run)
    first, last = (checkpoint.read(tmp_path / name(step)) for step in (1, 2))
    assert first["callbacks"]["Later"]["calls"] == ["step"]
    assert last["callbacks"]["Later"]["calls"] == ["step", "step", "eval", "epoch"]
    for step, saved in ((1, first), (2, last)):
        assert saved["scheduler"]["last_epoch"] == step
        assert saved["optimizer"]["param_groups"][0]["lr"] == 0.5**step
    assert last["state"] == {
        **{"epoch": 1, "step": 2, "samples": 4, "epoch_samples": 0, "skipped_steps": 0, "stop_reason": None},
    }


def test_an_error_leaves_the_files_as_they_were(ranks: Ranks, tmp_path: Path) -> None:
    """Nothing is saved on the way out, by any callback, at any world size."""

    class Failing(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            if trainer.state.step == 3:
                raise RuntimeError("boom")

    def run(folder: Path) -> None:
        toy_trainer(12, batch_size=1, callbacks=[Checkpoint(folder, every_steps=2), Failing()]).fit()

    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        outcomes = ranks.outcomes(world_size, run, folder)
        assert outcomes[0].message == "boom"
        assert_all_ended(outcomes)
        assert listing(folder) == [name(2)]


# The best.


class Scripted(DDPTrainer):
    """Its evaluation after step n is the n-th value, on the last rank only where `lopsided`."""

    values: tuple[float, ...] = ()
    lopsided = False

    def eval_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        value = self.values[self.state.step - 1]
        if self.lopsided and self.world.rank < self.world.size - 1:
            value = 0.0
        return {"score": torch.tensor(value, dtype=torch.float64)}


def scripted(folder: Path, values: tuple[float, ...], *callbacks: Callback, steps: int | None = None, **options: Any) -> Scripted:
    """A run of a step an epoch with those evaluations, or of its first `steps`; `options`: the Checkpoint's."""
    checkpoints = Checkpoint(folder, **{"monitor": "score", "keep_last": 2, "async_write": False, **options})
    config = {"batch_size": 1, "global_batch_size": 2, "epochs": steps or len(values)}
    trainer = toy_trainer(2, kind=Scripted, eval_numbers=2, callbacks=[checkpoints, *callbacks], **config)
    assert isinstance(trainer, Scripted)
    trainer.values = values
    return trainer


def best_step(folder: Path) -> int | None:
    """The step of best.pt, whose weights must be those of that step; None without one."""
    if not (folder / "best.pt").exists():
        return None
    best = checkpoint.read(folder / "best.pt")
    step: int = best["state"]["step"]
    assert best["model"]["w"].item() == -0.5 * step
    return step


NAN = math.nan


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("min", (0.5, 0.4, 0.6, 0.3), [1, 2, 2, 4]),
        ("max", (0.5, 0.4, 0.6, 0.3), [1, 1, 3, 3]),
        ("min", (0.5, 0.5, 0.5), [1, 1, 1]),  # a tie
        ("max", (-2.0, -2.0, -1.0), [1, 1, 3]),
        ("min", (NAN, 0.5, NAN, 0.4, 0.6), [None, 2, 2, 4, 4]),
        ("max", (NAN, 0.5, NAN, 0.4, 0.6), [None, 2, 2, 2, 5]),
        ("min", (NAN, NAN), [None, None]),
        ("min", (math.inf, 2.0, -math.inf, -math.inf), [None, 2, 3, 3]),
    ],
)
def test_the_best_evaluation_is_kept_and_neither_ties_nor_nan_are_better(
    ranks: Ranks, tmp_path: Path, mode: str, values: tuple[float, ...], best: list[int | None]
) -> None:
    """best.pt after each evaluation; it is not counted among the last files, and a folder is not resumed from it."""

    class Watching(Callback):
        def __init__(self) -> None:
            self.seen: list[int | None] = []

        def on_safe_point(self, trainer: DDPTrainer) -> None:
            self.seen.append(best_step(tmp_path))

    def run() -> list[int | None]:
        watching = Watching()
        scripted(tmp_path, values, watching, mode=mode).fit()
        return watching.seen

    assert ranks(1, run) == [best]
    assert list(CheckpointFolder(tmp_path).steps()) == [len(values) - 1, len(values)]
    newest = CheckpointFolder(tmp_path).newest()
    assert newest is not None
    assert newest["state"]["step"] == len(values)


def test_nan_on_one_rank_is_nan_for_all_and_warned_of_once(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks of which one evaluates to NaN at the third step and the fifth."""

    def run() -> tuple[int | None, float]:
        trainer = scripted(tmp_path, (1.0, 0.8, NAN, 0.6, NAN))
        trainer.lopsided = True
        trainer.fit()
        trainer.world.barrier()
        return best_step(tmp_path), trainer.model.w.item()

    outcomes = ranks.outcomes(2, with_log, run)
    assert [outcome.value for outcome in outcomes] == [(4, -2.5)] * 2, outcomes
    lines = [line for outcome in outcomes for line in outcome.stderr.splitlines() if "NaN" in line]
    assert len(lines) == 1
    assert "score is NaN at step 3" in lines[0]


def with_log(function: Any) -> Any:
    """What `function` returns; the library's log goes to stderr, as it does outside of tests."""
    logging.basicConfig(stream=sys.stderr, force=True)
    return function()


def test_a_resumed_run_knows_the_best_of_before(ranks: Ranks, tmp_path: Path) -> None:
    """By name: 0.3 at the second step is neither beaten by 0.4 nor by itself after the restart, but by 0.2."""
    values = (0.5, 0.3, 0.4, 0.3, 0.2)

    def run(steps: int) -> tuple[int | None, float]:
        trainer = scripted(tmp_path, values, steps=steps)
        trainer.fit(resume_from=tmp_path)
        trainer.world.barrier()
        best = torch.load(tmp_path / "best.pt", weights_only=True)["callbacks"]["Checkpoint"]["best"]
        return best_step(tmp_path), best

    assert [ranks(2, run, steps)[1] for steps in (2, 3, 4, 5)] == [(2, 0.3), (2, 0.3), (2, 0.3), (5, 0.2)]


@pytest.mark.parametrize("file", [1, 2, 3, 4, 5, 6])
def test_a_death_between_two_files_of_a_step_loses_no_best_one(ranks: Ranks, tmp_path: Path, file: int) -> None:
    """Each of three steps is saved and is the best so far; the process dies as it begins its n-th file, and is resumed."""

    def run(dies: bool) -> None:
        opened = 0

        def open_until(path: Path, mode: str) -> Any:
            nonlocal opened
            opened += 1
            if dies and opened == file:
                os._exit(9)
            return open(path, mode)

        vars(checkpoint)["open"] = open_until
        scripted(tmp_path, (0.5, 0.4, 0.3, 0.6), steps=3 if dies else 4).fit(resume_from=tmp_path)

    assert ranks.outcomes(1, run, True)[0].exit_code == 9
    steps = list(CheckpointFolder(tmp_path).steps())
    assert (best_step(tmp_path) or 0) >= max(steps, default=0)
    ranks(1, run, False)
    assert best_step(tmp_path) == 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_death_in_the_middle_of_a_file_leaves_the_one_that_it_replaces(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """Rank 0 dies within the second best.pt; the others end too."""

    def run(dies: bool) -> None:
        opened = 0

        def open_until(path: Path, mode: str) -> Any:
            nonlocal opened
            opened += "best" in path.name
            return opening_files_for(700, lambda: os._exit(9))(path, mode) if dies and opened == 2 else open(path, mode)

        vars(checkpoint)["open"] = open_until
        scripted(tmp_path, (0.5, 0.4), steps=2).fit(resume_from=tmp_path)

    outcomes = ranks.outcomes(world_size, run, True, timeout=30)
    assert outcomes[0].exit_code == 9
    assert all(outcome.exit_code and outcome.error != "TimeoutError" for outcome in outcomes)
    assert best_step(tmp_path) == 1
    assert (tmp_path / "best.pt.tmp").exists()
    ranks(world_size, run, False)
    assert best_step(tmp_path) == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_every_rank_can_load_the_best_by_the_same_path(ranks: Ranks, tmp_path: Path) -> None:
    """The ranks' own means are 0.3 and 0.5, the evaluation's 0.4; rank 0 is the last to leave. Each rank has named the
    folder by its own clock.
    """

    class Slow(Callback):
        def on_safe_point(self, trainer: DDPTrainer) -> None:
            time.sleep(0.5)

    def run() -> tuple[str, float, float]:
        checkpoints = Checkpoint(tmp_path / f"run-{World.from_env().rank}", monitor="loss")
        trainer = toy_trainer(4, ValueToy(), eval_numbers=[0.3, 0.5], batch_size=2, callbacks=[Slow(), checkpoints])
        trainer.fit()
        best = checkpoint.read(checkpoints.best_path)
        trainer.load_state_dict(best)
        return str(checkpoints.best_path), best["callbacks"]["Checkpoint"]["best"], trainer.model.w.item()

    assert ranks(2, run) == [(str(tmp_path / "run-0" / "best.pt"), pytest.approx(0.4, abs=1e-15), 0.0)] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_unknown_monitor_is_an_error_that_lists_the_keys(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    outcomes = ranks.outcomes(world_size, lambda: scripted(tmp_path, (0.5,), monitor="acuracy").fit())
    assert "'acuracy'" in outcomes[0].message
    assert "'score'" in outcomes[0].message
    assert_all_ended(outcomes)
    outcomes = ranks.outcomes(
        world_size, lambda: toy_trainer(4, batch_size=1, callbacks=[Checkpoint(tmp_path, monitor="loss")]).fit()
    )
    assert all("pass eval_data" in outcome.message for outcome in outcomes)
    assert_all_ended(outcomes)


# The folder.


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fresh_run_into_a_folder_with_checkpoints_is_refused_before_anything_is_written(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    """On every rank, naming the way out; the log of the earlier run is still there too, whatever the order of the callbacks."""

    def run(resume: bool) -> int:
        callbacks = [JSONLines(tmp_path / "log.jsonl"), Checkpoint(tmp_path)]
        trainer = toy_trainer(4, batch_size=1, epochs=2 if resume else 1, callbacks=callbacks)
        return trainer.fit(resume_from=tmp_path if resume else None).step

    def contents() -> dict[str, tuple[bytes, int]]:
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}

    ranks(world_size, run, False)
    (tmp_path / "step-00000009.pt.tmp").write_text("unfinished")
    before = contents()
    outcomes = ranks.outcomes(world_size, run, False)
    assert [outcome.error for outcome in outcomes] == ["FileExistsError"] * world_size
    for outcome in outcomes:
        assert f"fit(resume_from={str(tmp_path)!r})" in outcome.message
        assert f"step {4 // world_size}" in outcome.message
    assert contents() == before
    assert ranks(world_size, run, True) == [8 // world_size] * world_size
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 8 // world_size + 2


def test_a_fresh_run_may_use_a_folder_without_step_files(ranks: Ranks, tmp_path: Path) -> None:
    for file in ("best.pt", "step-1.pt", "notes.txt"):
        (tmp_path / file).write_text("somebody's")
    (tmp_path / "best.pt.tmp").write_text("unfinished")
    ranks(1, lambda: toy_trainer(4, batch_size=2, callbacks=[Checkpoint(tmp_path)]).fit())
    assert listing(tmp_path) == ["best.pt", "notes.txt", name(2), "step-1.pt"]


def test_a_run_continued_from_an_older_file_replaces_what_came_after_it(ranks: Ranks, tmp_path: Path) -> None:
    """The later files stay until the new run has one of its own, then go: a folder holds one run."""

    def run(resume_from: Path | None, steps: int) -> list[list[int]]:
        seen = Listing(tmp_path)
        callbacks = [Checkpoint(tmp_path, every_steps=2, every_epochs=None, keep_last=4, async_write=False), seen]
        toy_trainer(20, batch_size=2, max_steps=steps, callbacks=callbacks).fit(resume_from)
        return seen.seen

    assert ranks(1, run, None, 10)[0][-1] == [4, 6, 8, 10]
    assert ranks(1, run, tmp_path / name(4), 6) == [[[4, 6, 8, 10], [4, 6]]]
    assert ranks(1, run, tmp_path, 10) == [[[4, 6], [4, 6, 8], [4, 6, 8], [4, 6, 8, 10]]]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nothing"])
def test_a_folder_that_cannot_be_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path, world_size: int, place: str) -> None:
    """A regular file, below one, or where nobody may write."""
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / place
    outcomes = ranks.outcomes(
        world_size, lambda: toy_trainer(4, batch_size=1, callbacks=[Checkpoint(folder)]).fit(), timeout=20.0
    )
    assert_all_ended(outcomes)
    assert all("Error" in (outcome.error or "") and str(folder) in outcome.message for outcome in outcomes), outcomes
    assert listing(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_folder_that_goes_away_ends_every_rank(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """It becomes a file after the first save."""

    class Replacing(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            if trainer.state.step == 2:
                (tmp_path / "run").rename(tmp_path / "moved")
                (tmp_path / "run").write_text("in the way")

    def run() -> None:
        checkpoints = Checkpoint(tmp_path / "run", every_steps=1, async_write=False)
        toy_trainer(12, batch_size=1, callbacks=[checkpoints, Replacing()]).fit()

    outcomes = ranks.outcomes(world_size, run, timeout=20.0)
    assert_all_ended(outcomes)
    assert outcomes[0].error == "NotADirectoryError"
    assert listing(tmp_path / "moved") == [name(1)]


# Arguments.


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"keep_last": 0}, ValueError, "keep_last must be 1 or more; found 0"),
        ({"keep_last": -1}, ValueError, "keep_last must be 1 or more; found -1"),
        ({"keep_last": None}, TypeError, "keep_last must be an int; found None"),
        ({"every_steps": 0}, ValueError, "every_steps must be 1 or more; found 0"),
        ({"every_epochs": -2}, ValueError, "every_epochs must be 1 or more; found -2"),
        ({"every_steps": 1.5}, TypeError, "every_steps must be an int; found 1.5"),
        ({"every_epochs": True}, TypeError, "every_epochs must be an int; found True"),
        ({"mode": "minimum"}, ValueError, "mode must be 'min' or 'max'; found 'minimum'"),
        ({"monitor": 3}, TypeError, "monitor must be a key of the evaluation or None; found 3"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name_and_value(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Checkpoint(tmp_path, **options)
    assert listing(tmp_path) == []


def test_a_file_is_due_once_the_minutes_have_passed_since_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 20 s, by a clock of our own: after a minute, that is every third step, and after the last."""
    clock = [1_000.0]

    class Slow(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            clock[0] += 20.0

    monkeypatch.setattr("callbacks.checkpoint.time.monotonic", lambda: clock[0])
    saver = Checkpoint(tmp_path, every_epochs=None, every_minutes=1, keep_last=9)
    toy_trainer(8, batch_size=1, callbacks=[Slow(), saver]).fit()
    assert listing(tmp_path) == [name(step) for step in (3, 6, 8)]


@pytest.mark.parametrize(("minutes", "error"), [("1", TypeError), (True, TypeError), (0, ValueError), (-0.5, ValueError)])
def test_minutes_out_of_range_are_refused(tmp_path: Path, minutes: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="every_minutes"):
        Checkpoint(tmp_path, every_minutes=minutes)


def failing(monkeypatch: pytest.MonkeyPatch, *names: str, slow: float = 0.0) -> None:
    """The disk has no room for these files, which takes `slow` seconds to find out."""
    write = checkpoint.write

    def written(path: Path, content: Mapping[str, Any]) -> None:
        if path.name not in names and f"{path.name} {content['state']['step']}" not in names:
            return write(path, content)
        time.sleep(slow)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write", written)


@pytest.mark.parametrize("async_write", [False, True])
def test_the_best_that_was_written_is_kept_though_the_step_file_beside_it_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_write: bool
) -> None:
    """A later evaluation that is worse must not take its place."""
    failing(monkeypatch, name(2))
    scripted(tmp_path, (0.6, 0.4, 0.5, 0.55), on_error="warn", async_write=async_write).fit()
    assert best_step(tmp_path) == 2


@pytest.mark.parametrize("slow", [0.0, 0.3])
def test_a_best_that_could_not_be_written_does_not_let_a_worse_one_replace_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: float
) -> None:
    """Of which one hears at the safe point of the next best evaluation: before that is written, or by waiting for it."""
    failing(monkeypatch, "best.pt 1", slow=slow)
    scripted(tmp_path, (0.6, 0.4, 0.5, 0.45), Joined() if not slow else Callback(), on_error="warn", async_write=True).fit()
    assert best_step(tmp_path) == 2
    newest = CheckpointFolder(tmp_path).newest()
    assert newest is not None
    assert newest["callbacks"]["Checkpoint"]["best"] == 0.4


class Joined(Callback):
    """Lets what is being written end before the next safe point."""

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()


def test_a_folder_is_the_one_that_was_named_wherever_the_script_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a thread writes."""
    monkeypatch.chdir(tmp_path)

    class Elsewhere(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            (tmp_path / "other" / "run").mkdir(parents=True, exist_ok=True)
            os.chdir(tmp_path / "other")

    for number in (1, 2):
        monkeypatch.chdir(tmp_path)
        toy_trainer(4, batch_size=2, epochs=number, callbacks=[Elsewhere(), Checkpoint("run")]).fit(tmp_path / "run")
    assert listing(tmp_path / "run") == [name(2), name(4)]
    assert listing(tmp_path / "other" / "run") == []
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_relative_folder_is_that_of_the_place_where_fit_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `resume_from` is."""
    (tmp_path / "work").mkdir()
    for number in (1, 2):
        monkeypatch.chdir(tmp_path)
        trainer = toy_trainer(4, batch_size=2, epochs=number, callbacks=[Checkpoint("run")])
        monkeypatch.chdir(tmp_path / "work")
        assert trainer.fit(resume_from="run").step == 2 * number
    assert listing(tmp_path / "work" / "run") == [name(2), name(4)]


class OddState(Callback):
    def __init__(self) -> None:
        self.place: Any = Path("somewhere")

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_what_cannot_be_saved_is_found_after_the_first_step(ranks: Ranks, tmp_path: Path, world_size: int, on_error: Any) -> None:
    """And not when the first file is due, after hours."""

    def run() -> None:
        saves = Checkpoint(tmp_path / "run", on_error=on_error)
        trainer = toy_trainer(40, batch_size=1, callbacks=[saves, OddState()])
        try:
            trainer.fit()
        finally:
            assert trainer.state.step == 1

    outcomes = ranks.outcomes(world_size, run)
    assert all(outcome.error is not None and not outcome.timed_out for outcome in outcomes)
    assert "TypeError" in str(outcomes[0].error)
    assert "cannot be saved in a checkpoint: callbacks['OddState']['place'] of type pathlib" in outcomes[0].message
    assert not (tmp_path / "run").exists() or listing(tmp_path / "run") == []
