"""One job at a time in a folder of checkpoints, and one run."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.checkpoint_folder
from callbacks import Checkpoint, JSONLines
from tests.helpers import Ranks, Toy, toy_trainer
from trainer import Callback, CheckpointError, CheckpointFolder, DDPTrainer, checkpoint

LIMIT = 20.0  # seconds, for what must come at once


def name(step: int) -> str:
    return f"step-{step:08d}.pt"


def listing(folder: Path) -> list[str]:
    """Everything, the lock too."""
    return sorted(path.name for path in folder.iterdir())


class Job:
    """A forked process that runs `function` with this; both sides can say a line to the other."""

    def __init__(self, function: Callable[[Job], object]) -> None:
        self._in, theirs_out = os.pipe()
        theirs_in, self._out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._in, self._out = theirs_in, theirs_out
            signal.alarm(60)  # the end, whatever becomes of the test
            code = 1
            with suppress(BaseException):
                function(self)
                code = 0
            os._exit(code)
        os.close(theirs_in)
        os.close(theirs_out)
        self.code: int | None = None

    def say(self, line: str) -> None:
        os.write(self._out, f"{line}\n".encode())

    def hear(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._in, 1) or b"\n"
        return line.decode().strip()

    def end(self, number: int = 0) -> int:
        """How it ended, after that signal."""
        if self.code is None:
            os.kill(self.pid, number)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code


@pytest.fixture
def job() -> Iterator[Callable[[Callable[[Job], object]], Job]]:
    """Starts a `Job`, which is killed when the test ends."""
    jobs: list[Job] = []

    def start(function: Callable[[Job], object]) -> Job:
        jobs.append(Job(function))
        return jobs[-1]

    yield start
    for each in jobs:
        each.end(signal.SIGKILL)


Start = Callable[[Callable[[Job], object]], Job]


def training_in(folder: Path) -> Callable[[Job], object]:
    """A run of two steps that says so at its first step, and does then as it is told: "go on" or "fail"."""

    def run(job: Job) -> None:
        class Obedient(Callback):
            def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
                if trainer.state.step == 1:
                    job.say("running")
                    if job.hear() == "fail":
                        raise RuntimeError("as told")

        toy_trainer(4, batch_size=2, callbacks=[Obedient(), Checkpoint(folder)]).fit()

    return run


def small_run(folder: Path) -> Callable[[], object]:
    return lambda: toy_trainer(4, batch_size=2, callbacks=[Checkpoint(folder)]).fit()


class Waiting(threading.Thread):
    """Waits for the folder's lock, and keeps it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.files = CheckpointFolder(folder)

    def run(self) -> None:
        with suppress(CheckpointError):
            self.files.lock()

    @property
    def is_in(self) -> bool:
        return self.files._lock is not None


# Who gets in.


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_job_waits_and_is_then_told_who_is_in_the_folder(
    ranks: Ranks, job: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """On every rank; the first one neither loses its lock nor a file by it."""
    monkeypatch.setattr(trainer.checkpoint_folder, "_LOCK_WAIT", 1.0)
    first = job(training_in(tmp_path))
    assert first.hear() == "running"
    began = time.monotonic()
    second = small_run(tmp_path)
    outcomes = ranks.outcomes(world_size, second, timeout=20.0)
    assert time.monotonic() - began > 1.0
    assert [outcome.error for outcome in outcomes] == ["trainer.checkpoint.CheckpointError"] * world_size
    for outcome in outcomes:
        assert f"process {first.pid} on {socket.gethostname()}" in outcome.message
        assert str(tmp_path) in outcome.message
    assert listing(tmp_path) == [".lock"]
    assert ranks.outcomes(1, second)[0].error == "trainer.checkpoint.CheckpointError"  # still its own
    first.say("go on")
    assert first.end() == 0
    assert listing(tmp_path) == [name(2)]


@pytest.mark.parametrize("end", ["go on", "fail", "kill -9"])
def test_the_next_job_gets_in_as_soon_as_the_first_has_ended_however_it_ends(job: Start, tmp_path: Path, end: str) -> None:
    first = job(training_in(tmp_path))
    assert first.hear() == "running"
    second = Waiting(tmp_path)
    second.start()
    time.sleep(0.3)
    assert not second.is_in
    if end == "kill -9":
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
    else:
        first.say(end)
        assert first.end() == (end == "fail")
    began = time.monotonic()
    second.join(LIMIT)
    assert second.is_in
    assert time.monotonic() - began < 1.0
    assert f"process {os.getpid()} " in os.pread(second.files._lock or 0, 100, 0).decode()
    second.files.unlock()
    assert ".lock" not in listing(tmp_path)


def test_a_killed_jobs_children_that_live_on_keep_nobody_out(job: Start, tmp_path: Path) -> None:
    """As DataLoader workers do: they were forked while the job held the lock, with its open file."""

    def run(job: Job) -> None:
        CheckpointFolder(tmp_path).lock()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            while True:
                signal.pause()
        job.say(str(child))
        job.hear()

    first = job(run)
    child = int(first.hear())
    try:
        first.end(signal.SIGKILL)
        assert any(os.path.samefile(link, tmp_path / ".lock") for link in Path(f"/proc/{child}/fd").iterdir() if link.exists())
        began = time.monotonic()
        files = CheckpointFolder(tmp_path)
        files.lock()
        assert time.monotonic() - began < 1.0
        os.kill(child, 0)  # it is still there
        files.unlock()
    finally:
        os.kill(child, signal.SIGKILL)


def test_children_that_end_take_no_lock_with_them(job: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: Job) -> None:
        CheckpointFolder(tmp_path).lock()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        job.say("alone again")
        job.hear()

    monkeypatch.setattr(trainer.checkpoint_folder, "_LOCK_WAIT", 0.2)
    assert job(run).hear() == "alone again"
    with pytest.raises(CheckpointError, match="in use by another job"):
        CheckpointFolder(tmp_path).lock()


def test_what_a_killed_job_left_lying_about_does_not_matter(job: Start, ranks: Ranks, tmp_path: Path) -> None:
    """Its lock file, whatever is written in it."""
    first = job(training_in(tmp_path))
    first.hear()
    first.end(signal.SIGKILL)
    assert listing(tmp_path) == [".lock"]
    (tmp_path / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}, who lives" * 10)
    ranks(1, small_run(tmp_path))
    assert listing(tmp_path) == [name(2)]


@pytest.mark.parametrize("error", [None, RuntimeError("boom"), KeyboardInterrupt()])
def test_the_lock_is_gone_when_fit_has_ended(ranks: Ranks, tmp_path: Path, error: BaseException | None) -> None:
    class Failing(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            assert ".lock" in listing(tmp_path)
            if error is not None and trainer.state.step == 2:
                raise error

    def run() -> list[str]:
        with suppress(RuntimeError, KeyboardInterrupt):
            toy_trainer(8, batch_size=2, callbacks=[Failing(), Checkpoint(tmp_path, every_steps=1)]).fit()
        return listing(tmp_path)

    expected = [name(1)] if error is not None else [name(2), name(3), name(4)]
    assert ranks(1, run) == [expected]


# Races: the lock file is removed while others are about to lock it.


@pytest.mark.parametrize("third", [True, False])
def test_a_lock_on_a_file_that_was_removed_is_none(
    job: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, third: bool
) -> None:
    """A job opens the file; before it locks that, the first one removes it and leaves; a third one may make another."""

    def hold(job: Job) -> None:
        files = CheckpointFolder(tmp_path)
        files.lock()
        job.say("in")
        job.hear()
        files.unlock()

    first, lockf, holder = job(hold), fcntl.lockf, list[Job]()
    assert first.hear() == "in"

    def lock_late(*args: Any) -> None:
        if not holder:
            holder.append(first)
            first.say("leave")
            assert first.end() == 0
            if third:
                monkeypatch.setattr(fcntl, "lockf", lockf)  # for the fork
                holder.append(job(hold))
                assert holder[-1].hear() == "in"
        lockf(*args)

    monkeypatch.setattr(trainer.checkpoint_folder, "_LOCK_WAIT", 0.2)
    monkeypatch.setattr(fcntl, "lockf", lock_late)
    files = CheckpointFolder(tmp_path)
    if third:
        with pytest.raises(CheckpointError) as refused:
            files.lock()
        assert f"process {holder[-1].pid} " in str(refused.value)
        holder[-1].say("leave")
        assert holder[-1].end() == 0
    else:
        files.lock()
        assert os.path.samestat(os.stat(tmp_path / ".lock"), os.fstat(files._lock or 0))
        files.unlock()
    assert listing(tmp_path) == []


def test_of_jobs_that_come_and_go_never_two_are_in_at_once(job: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them, for a second and a half, each trying all the time."""
    inside = tmp_path / "inside"
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds / 500))

    def run(job: Job) -> None:
        times, chance, end = 0, random.Random(os.getpid()), time.monotonic() + 1.5
        files = CheckpointFolder(tmp_path)
        while time.monotonic() < end:
            files.lock()
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # FileExistsError: somebody is in
            sleep(chance.uniform(0, 0.001))
            inside.unlink()
            files.unlock()
            times += 1
        job.say(str(times))

    jobs = [job(run) for _ in range(4)]
    times = [each.hear() for each in jobs]
    assert [each.end() for each in jobs] == [0] * 4
    assert all(int(count) > 5 for count in times), times
    assert listing(tmp_path) == []


# Where locks are not to be had.


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_lock_is_warned_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with caplog.at_level(logging.WARNING, "trainer"):
        toy_trainer(4, batch_size=2, callbacks=[Checkpoint(tmp_path)]).fit()
    (record,) = caplog.records
    assert str(tmp_path) in record.getMessage()
    assert os.strerror(number) in record.getMessage()
    assert checkpoint.read(tmp_path / name(2))["state"]["step"] == 2


# One run.


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def run(folder: Path, steps: int, resume_from: Path | None = None, **options: Any) -> int:
    """The step that it reached."""
    checkpoints = Checkpoint(folder, every_epochs=None, **options)
    return toy_trainer(40, batch_size=2, max_steps=steps, callbacks=[checkpoints]).fit(resume_from).step


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("resumed", [False, True])
def test_another_runs_checkpoints_are_refused_before_anything_is_written(
    ranks: Ranks, tmp_path: Path, world_size: int, resumed: bool
) -> None:
    """By a fresh run, and by one that goes on from a file of another folder; on every rank, naming the step and the folder."""
    used, other = tmp_path / "used", tmp_path / "other"
    ranks(1, run, used, 4)
    ranks(1, run, other, 3)
    (used / "step-00000009.pt.tmp").write_text("unfinished")
    before = contents(used)
    source = other / name(3) if resumed else None

    def enter() -> None:
        callbacks = [JSONLines(used / "log.jsonl"), Checkpoint(used, every_steps=1)]
        toy_trainer(40, batch_size=2 // world_size, max_steps=8, callbacks=callbacks).fit(resume_from=source)

    outcomes = ranks.outcomes(world_size, enter, timeout=20.0)
    assert [outcome.error for outcome in outcomes] == ["FileExistsError"] * world_size
    for outcome in outcomes:
        assert str(used) in outcome.message
        assert "up to step 4" in outcome.message
        assert ("step 3 of another folder" if resumed else "a new run") in outcome.message
    assert contents(used) == before


def test_a_job_that_got_in_after_another_had_written_is_refused(job: Start, tmp_path: Path) -> None:
    """It found the folder empty when it began, and waited for the lock."""
    first = job(training_in(tmp_path))
    assert first.hear() == "running"
    timer = threading.Timer(0.4, lambda: first.say("go on"))
    timer.start()
    with pytest.raises(FileExistsError, match="up to step 2"):
        toy_trainer(4, batch_size=2, callbacks=[Checkpoint(tmp_path)]).fit()
    timer.join()
    assert first.end() == 0
    assert listing(tmp_path) == [name(2)]


def test_a_run_goes_on_in_its_own_folder(ranks: Ranks, tmp_path: Path) -> None:
    """From the folder, from a file in it, and into a folder of its own from another's."""

    def go_on() -> list[int]:
        run(tmp_path / "a", 4, every_steps=2)
        reached = [run(tmp_path / "a", 6, tmp_path / "a"), run(tmp_path / "a", 5, tmp_path / "a" / name(4))]
        return [*reached, run(tmp_path / "b", 7, tmp_path / "a" / name(5))]

    assert ranks(1, go_on) == [[6, 5, 7]]
    assert listing(tmp_path / "b") == [name(7)]


class Killed(Exception):
    pass


class Killing(Callback):
    """An end that writes nothing."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.state.step == self.step:
            raise Killed


def two_folders(root: Path, last: str = "last", keep: str = "keep", **config: Any) -> DDPTrainer:
    often, rarely = Checkpoint(root / last, every_steps=2, keep_last=1), Checkpoint(root / keep, every_steps=5, keep_last=9)
    rarely.name = "keep"
    config["callbacks"] = [*config.pop("watching", []), often, rarely]
    return toy_trainer(40, batch_size=2, max_steps=12, **config)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("killed_at", [3, 5, 8, 12])
def test_a_run_with_folders_of_its_own_for_rare_files_goes_on_from_any_of_its_steps(
    ranks: Ranks, tmp_path: Path, world_size: int, killed_at: int
) -> None:
    assert ranks.outcomes(world_size, lambda: two_folders(tmp_path, watching=[Killing(killed_at)]).fit())[0].error is not None
    assert ranks(world_size, lambda: two_folders(tmp_path).fit(resume_from=tmp_path / "last").step) == [12] * world_size
    assert listing(tmp_path / "last") == [name(12)]
    assert listing(tmp_path / "keep") == [name(5), name(10), name(12)]


def test_another_continuation_of_the_same_run_gets_no_folder_that_the_first_has_written_in(tmp_path: Path) -> None:
    """Both begin with what the run had saved; the second would remove the first one's files."""
    with pytest.raises(Killed):
        two_folders(tmp_path, watching=[Killing(8)]).fit()
    start = tmp_path / "last" / name(6)
    kept = two_folders(tmp_path, "one", "of one", watching=[Killing(12)])
    with pytest.raises(Killed):
        kept.fit(resume_from=start)
    before = listing(tmp_path / "one"), listing(tmp_path / "of one")
    with pytest.raises(FileExistsError, match="a run that goes on from step 6 of another folder"):
        two_folders(tmp_path, "one", "of two").fit(resume_from=start)
    with pytest.raises(FileExistsError, match="a run that goes on from step 6 of another folder"):
        two_folders(tmp_path, "two", "of one").fit(resume_from=start)
    assert (listing(tmp_path / "one"), listing(tmp_path / "of one")) == before


def test_files_of_before_that_do_not_say_whose_they_are_are_gone_on_from(tmp_path: Path) -> None:
    run(tmp_path / "a", 4, every_steps=2)
    for step in (2, 4):
        content = dict(checkpoint.read(tmp_path / "a" / name(step)))
        content["callbacks"] = {"Checkpoint": {"monitor": None, "mode": "min", "best": math.inf}}
        checkpoint.write(tmp_path / "a" / name(step), content)
    assert run(tmp_path / "a", 6, tmp_path / "a") == 6


def test_a_run_goes_on_from_the_best_file_of_its_own_folder(ranks: Ranks, tmp_path: Path) -> None:
    """Of a step whose own file has gone long since."""

    def go_on() -> int:
        def make(steps: int) -> DDPTrainer:
            checkpoints = Checkpoint(tmp_path, every_steps=1, keep_last=1, monitor="loss", mode="max")
            config: dict[str, Any] = {"batch_size": 2, "max_steps": steps, "eval_every": 1, "callbacks": [checkpoints]}
            return toy_trainer(40, eval_numbers=2, **config)

        make(4).fit()
        assert listing(tmp_path) == ["best.pt", name(4)]
        assert checkpoint.read(tmp_path / "best.pt")["state"]["step"] == 1
        return make(6).fit(resume_from=tmp_path / "best.pt").step

    assert ranks(1, go_on) == [6]


def test_a_trainer_fits_twice(tmp_path: Path) -> None:
    """Also where it was set back in between, to what it was before its first file."""
    trainer = toy_trainer(8, batch_size=2, callbacks=[Checkpoint(tmp_path, every_steps=2)])
    start = trainer.state_dict()
    assert trainer.fit().step == 4
    assert trainer.fit().step == 4
    trainer.load_state_dict(start)
    assert trainer.fit().step == 4
    assert listing(tmp_path) == [name(2), name(4)]


def test_another_run_may_not_use_the_folder_by_way_of_the_same_callback(tmp_path: Path) -> None:
    """It would remove what the first has written beyond its own first step."""
    checkpoints = Checkpoint(tmp_path, every_steps=1)
    toy_trainer(8, batch_size=2, callbacks=[checkpoints]).fit()
    before = listing(tmp_path)
    with pytest.raises(FileExistsError, match="already holds checkpoints of a run"):
        toy_trainer(8, batch_size=2, callbacks=[checkpoints]).fit()
    assert listing(tmp_path) == before


@pytest.mark.parametrize(("monitor", "mode", "written"), [("loss", "min", False), ("loss", "max", True), ("more", "min", True)])
def test_the_best_of_another_metric_is_not_taken_over(tmp_path: Path, monitor: str, mode: Any, written: bool) -> None:
    class More(DDPTrainer):
        def eval_step(self, model: Any, batch: Any) -> Any:
            return {"loss": self.state.step - 4.0, "more": self.state.step}

    def fit(epochs: int, **options: Any) -> None:
        checkpoints = Checkpoint(tmp_path, **options)
        trainer = toy_trainer(4, kind=More, eval_numbers=[1.0], batch_size=2, epochs=epochs, callbacks=[checkpoints])
        trainer.fit(resume_from=tmp_path)

    fit(1, monitor="loss")
    fit(2, monitor=monitor, mode=mode)
    assert checkpoint.read(tmp_path / "best.pt")["state"]["step"] == (4 if written else 2)
    assert (tmp_path / "best-1.pt").exists() is written
    fit(2, monitor="loss")  # takes no step: no other best is to come
    assert (tmp_path / "best.pt").exists()


def test_a_model_that_saves_a_part_of_itself_goes_on_in_its_folder(tmp_path: Path) -> None:
    """An adapter beside a base that is not saved, with a parameter that is not a number and never was."""

    class Adapter(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Parameter(torch.ones(3), requires_grad=False)
            self.unused = torch.nn.Parameter(torch.tensor([1.0, math.nan]), requires_grad=False)

        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {key: value for key, value in super().state_dict(*args, **options).items() if key != "base"}

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state, strict=False, assign=assign)

    for epochs in (1, 2):
        trainer = toy_trainer(8, Adapter(), batch_size=2, epochs=epochs, callbacks=[Checkpoint(tmp_path)])
        assert trainer.fit(resume_from=tmp_path).step == 4 * epochs


def test_a_model_that_saves_under_other_names_does_not_get_another_runs_folder(tmp_path: Path) -> None:
    """Nor is it refused its own."""

    class Renamed(Toy):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {f"adapter.{key}": value for key, value in super().state_dict(*args, **options).items()}

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            plain = {key.removeprefix("adapter."): value for key, value in state.items()}
            return super().load_state_dict(plain, strict, assign)

    def run(folder: str, lr: float, epochs: int, resume_from: Path) -> int:
        files = Checkpoint(tmp_path / folder, every_steps=1, keep_last=99)
        return toy_trainer(8, Renamed(), lr=lr, batch_size=2, epochs=epochs, callbacks=[files]).fit(resume_from).step

    assert run("a", 1.0, 1, tmp_path / "a") == 4
    assert run("a", 1.0, 2, tmp_path / "a") == 8
    assert run("b", 0.5, 2, tmp_path / "b") == 8
    with pytest.raises(FileExistsError, match="already holds checkpoints of a run"):
        run("b", 1.0, 2, tmp_path / "a" / name(2))


def reading(folder: Path) -> None:
    """As a backup of the folder does: a lock of POSIX goes when its process closes the file."""
    (folder / ".lock").read_bytes()


@pytest.mark.parametrize("async_write", [False, True])
def test_a_lock_that_a_hook_has_lost_is_taken_again(job: Start, tmp_path: Path, async_write: bool) -> None:
    folder, refused = tmp_path / "run", []

    class Asking(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            other = job(lambda job: job.say(str(_is_free(folder))))
            refused.append(other.hear())

    saves = Checkpoint(folder, every_steps=1, async_write=async_write)
    before = type("Backup", (Callback,), {"on_safe_point": lambda self, trainer: reading(folder)})()
    toy_trainer(8, batch_size=2, callbacks=[Asking(), before, saves]).fit()
    assert refused == ["False"] * 4


def _is_free(folder: Path) -> bool:
    with (folder / ".lock").open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


@pytest.mark.parametrize("async_write", [False, True])
def test_a_lock_that_another_job_has_got_meanwhile_ends_the_run(job: Start, tmp_path: Path, async_write: bool) -> None:
    folder = tmp_path / "run"

    def other(job: Job) -> None:
        files = CheckpointFolder(folder)
        files.lock()
        job.say("in")
        job.hear()

    class Losing(Callback):
        def on_safe_point(self, trainer: DDPTrainer) -> None:
            if trainer.state.step == 2:
                reading(folder)
                trainer_folder._held.clear()
                assert job(other).hear() == "in"

    trainer_folder = trainer.checkpoint_folder
    files = Checkpoint(folder, every_steps=1, async_write=async_write)
    with pytest.raises(CheckpointError, match="in use by another job"):
        toy_trainer(8, batch_size=2, callbacks=[Losing(), files]).fit()
    assert name(2) not in listing(folder)


def test_a_full_disk_leaves_the_lock_without_a_name_but_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    files = CheckpointFolder(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        files.lock()
    assert files._lock is not None
    files.unlock()


@pytest.mark.parametrize("async_write", [False, True])
def test_a_folder_that_was_made_anew_belongs_to_the_job_that_made_it(tmp_path: Path, async_write: bool) -> None:
    """The first one neither writes there any more, nor removes files, nor lets a third in."""
    folder = tmp_path / "run"
    other = CheckpointFolder(folder)

    class Replacing(Callback):
        def on_step(self, of: DDPTrainer, metrics: Mapping[str, float]) -> None:
            if of.state.step == 2:
                for thread in threading.enumerate():
                    if thread.name == "checkpoint":
                        thread.join()
                shutil.rmtree(folder)
                folder.mkdir()
                trainer.checkpoint_folder._held.clear()  # the other one is of another process
                other.lock()
                (folder / name(99)).touch()

    files = Checkpoint(folder, every_steps=1, async_write=async_write)
    with pytest.raises(CheckpointError, match=r"in use by another job .*: it was removed, and made anew, while this run had"):
        toy_trainer(8, batch_size=2, callbacks=[Replacing(), files]).fit()
    assert listing(folder) == [".lock", name(99)]
    other.unlock()
