"""With the real package, offline; and with a stand-in for a server's answers."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from callbacks import Checkpoint, WeightsAndBiases
from tests.helpers import Ranks, ValueToy, toy_trainer
from trainer import Callback, DDPTrainer

SETTINGS: dict[str, Any] = {"console": "off", "silent": True, "x_disable_stats": True, "x_disable_machine_info": True}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_DIR", "WANDB_PROJECT", "WANDB_NAME", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)


def offline(folder: Path, **options: Any) -> WeightsAndBiases:
    return WeightsAndBiases("project", "name", folder, mode="offline", **{"settings": wandb.Settings(**SETTINGS), **options})


def parts(folder: Path) -> list[Path]:
    """The files of the runs in `folder`, oldest first."""
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def records(path: Path) -> Iterator[Record]:
    """A file of wandb's is a log as LevelDB has it: a header, then blocks of 32 KiB with the pieces of records."""
    data, position, record = path.read_bytes(), 7, b""
    while (left := 32768 - position % 32768) and position + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, position) if left >= 7 else (0, 0, 0)
        if kind == 0:
            position += left
            continue
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(record)
            record = b""


def rows(path: Path) -> list[dict[str, Any]]:
    """What was logged, one mapping a step, without the times."""
    found = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append({key: value for key, value in row.items() if key not in ("_runtime", "_timestamp")})
    return found


def curve(path: Path, key: str) -> list[tuple[int, float]]:
    return [(row["_step"], row[key]) for row in rows(path) if key in row]


def run_of(path: Path) -> Any:
    (run,) = [record.run for record in records(path) if record.WhichOneof("record_type") == "run"]
    return run


def exit_code(path: Path) -> int:
    (code,) = [record.exit.exit_code for record in records(path) if record.WhichOneof("record_type") == "exit"]
    return code


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        if trainer.state.step == self.step:
            self.action()


def fail() -> None:
    raise ValueError("on purpose")


def test_curves_have_one_row_a_step_on_the_step_axis(ranks: Ranks, tmp_path: Path) -> None:
    """16 numbers in windows of 2 ranks x 2 samples x 2 micro-batches: means 3.5 and 11.5; twice. Rank 0 alone writes."""

    def fit() -> str | None:
        callback = offline(tmp_path, config={"model": "toy"}, tags=["a"])
        options: dict[str, Any] = {"batch_size": 2, "accumulation_steps": 2, "epochs": 2}
        with toy_trainer(16, ValueToy(), eval_numbers=5, callbacks=[callback], **options) as trainer:
            trainer.fit()
        return callback.run_id

    ids = ranks(2, fit)
    (path,) = parts(tmp_path)
    assert curve(path, "train/loss") == [(1, 3.5), (2, 11.5), (3, 3.5), (4, 11.5)]
    assert curve(path, "eval/loss") == [(2, 2.0), (4, 2.0)]
    assert curve(path, "epoch/loss") == [(2, 7.5), (4, 7.5)]
    assert [row["_step"] for row in rows(path)] == [1, 2, 3, 4]
    run = run_of(path)
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["epochs"], config["accumulation_steps"], config["ddp_options"], config["model"]) == (2, 2, {}, "toy")
    assert (run.project, run.display_name, list(run.tags)) == ("project", "name", ["a"])
    assert ids == [run.run_id, None]
    assert exit_code(path) == 0


def test_a_resumed_run_goes_on_with_the_same_id_and_logs_no_step_twice(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twelve steps; a checkpoint after the sixth; an error after the ninth."""

    def fit(*others: Callback) -> tuple[str | None, list[str]]:
        callback = offline(tmp_path)
        callbacks = [callback, Checkpoint(tmp_path / "files", every_steps=6, every_epochs=None), *others]
        with toy_trainer(10, eval_numbers=3, lr=0.5, callbacks=callbacks, batch_size=2, max_steps=12, eval_every=3) as trainer:
            trainer.fit(resume_from=tmp_path / "files")
        return callback.run_id, [record.getMessage() for record in caplog.records if record.name == "callbacks"]

    (failed,) = ranks.outcomes(1, fit, At(9, fail))
    assert failed.message == "on purpose"
    ((name, log),) = ranks(1, fit)
    first, second = parts(tmp_path)
    assert [row["_step"] for row in rows(first)] == list(range(1, 10))
    assert [row["_step"] for row in rows(second)] == [10, 11, 12]
    assert [step for step, _ in curve(first, "eval/loss") + curve(second, "eval/loss")] == [3, 6, 9, 12]
    assert run_of(first).run_id == run_of(second).run_id == name
    assert (exit_code(first), exit_code(second)) == (1, 0)
    assert [f"run {name} goes on from step 6 and holds steps up to 9 already" in line for line in log] == [True]

    assert ranks(1, fit) == [(name, [])]  # finished: it takes no step
    assert rows(parts(tmp_path)[2]) == []


def test_a_fresh_run_gets_an_id_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    def fit() -> list[str | None]:
        callback, ids = offline(tmp_path), []
        for _ in range(2):
            with toy_trainer(2, callbacks=[callback], batch_size=1) as trainer:
                trainer.fit()
            ids.append(callback.run_id)
        return ids

    ((one, other),) = ranks(1, fit)
    assert one != other
    assert [len(rows(path)) for path in parts(tmp_path)] == [2, 2]


def test_a_killed_run_has_every_step_once(ranks: Ranks, tmp_path: Path) -> None:
    """With wandb's own settings. The row of the last step is unfinished, and is lost with the process."""

    def fit(*others: Callback) -> str | None:
        callback = WeightsAndBiases(folder=tmp_path, mode="offline")
        callbacks = [callback, Checkpoint(tmp_path / "files", every_steps=2, async_write=False), *others]
        with toy_trainer(8, callbacks=callbacks, batch_size=1) as trainer:
            trainer.fit(resume_from=tmp_path / "files")
        return callback.run_id

    def kill() -> None:
        time.sleep(2.5)  # until wandb has written
        os.kill(os.getpid(), signal.SIGKILL)

    (killed,) = ranks.outcomes(1, fit, At(5, kill))
    assert killed.exit_code == -signal.SIGKILL
    (name,) = ranks(1, fit)
    first, second = parts(tmp_path)
    assert first.name == second.name == f"run-{name}.wandb"
    assert [row["_step"] for row in rows(first)] == [1, 2, 3, 4]
    assert [row["_step"] for row in rows(second)] == [5, 6, 7, 8]


def test_parts_that_begin_in_one_second_are_all_seen(ranks: Ranks, tmp_path: Path) -> None:
    """wandb puts a number behind the name of the second one's folder; ids that end in one are another's."""

    def fit() -> None:
        for name in ("abc", "abc-1"):
            callback, saved = offline(tmp_path, id=name), []
            for step in (2, 3, 4):
                with toy_trainer(6, callbacks=[callback], batch_size=1, max_steps=step) as trainer:
                    for state in saved[-1:]:
                        trainer.load_state_dict(state)
                    trainer.fit()
                    saved.append(trainer.state_dict())

    ranks(1, fit)
    steps = {
        name: sorted(row["_step"] for path in parts(tmp_path) if path.name == f"run-{name}.wandb" for row in rows(path))
        for name in ("abc", "abc-1")
    }
    assert steps == {"abc": [1, 2, 3, 4], "abc-1": [1, 2, 3, 4]}


class Server:
    """What `wandb.init` gives where a server holds a run up to some step."""

    def __init__(self, held: int) -> None:
        self.id, self.offline, self.dir, self.step = "abc", False, "/nowhere/files", held + 1
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.options: dict[str, Any] = {}
        self.codes: list[int] = []

    def init(self, **options: Any) -> Server:
        self.options = options
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        self.logged.append((step, row))

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, {"id": "abc", "resume": "allow"}),
        ({"id": "mine", "resume": "must"}, {"id": "mine", "resume": "must"}),
        ({"resume_from": "abc?_step=2"}, {"id": "abc", "resume_from": "abc?_step=2"}),
        ({"fork_from": "abc?_step=2"}, {"fork_from": "abc?_step=2"}),
    ],
)
def test_online_the_server_says_what_it_holds(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], asked: dict[str, Any]
) -> None:
    server = Server(3)
    monkeypatch.setattr(wandb, "init", server.init)
    callback = WeightsAndBiases(**given)
    callback.load_state_dict({"id": "abc"})
    with toy_trainer(5, callbacks=[callback], batch_size=1) as trainer:
        trainer.state.step = trainer.state.samples = trainer.state.epoch_samples = 2
        trainer.fit()
    assert [step for step, _ in server.logged] == [4, 5, 5]  # the fifth: a report, and the epoch
    names = ("id", "resume", "resume_from", "fork_from")
    assert {key: value for key, value in server.options.items() if key in names} == asked
    assert server.codes == [0]


def test_an_open_run_of_the_users_is_an_error_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb, "run", SimpleNamespace(id="mine"))
    with pytest.raises(RuntimeError, match=r"the run mine of wandb is open .* leave out wandb\.init\(\)"):
        toy_trainer(2, callbacks=[WeightsAndBiases()], batch_size=1).fit()


def test_a_disabled_run_writes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    def fit() -> None:
        os.chdir(tmp_path)
        with toy_trainer(2, callbacks=[WeightsAndBiases(mode="disabled")], batch_size=1) as trainer:
            trainer.fit()

    ranks(1, fit)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder_of_a_run", [False, True])
def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder_of_a_run: bool
) -> None:
    """wandb's own folder of runs passes for a package without a file."""
    monkeypatch.delitem(sys.modules, "wandb")
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)] if folder_of_a_run else [])
    with pytest.raises(ModuleNotFoundError, match=r"pip install wandb"):
        WeightsAndBiases()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"project": 3}, "project must be a text or None; found 3"),
        ({"name": 3}, "name must be a text or None; found 3"),
        ({"folder": 3}, "folder must be the path of a folder; found 3"),
        ({"config": "a"}, "config must be a mapping, to be added to the trainer's; found 'a'"),
    ],
)
def test_arguments_of_the_wrong_type_are_named(arguments: Mapping[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        WeightsAndBiases(**arguments)
