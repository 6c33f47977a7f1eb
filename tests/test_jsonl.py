from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from callbacks import Checkpoint, EarlyStopping, JSONLines
from tests.helpers import Ranks, ValueToy, toy_trainer
from trainer import Callback, DDPTrainer


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def at(step: int, epoch: int = 0) -> DDPTrainer:
    return cast(DDPTrainer, SimpleNamespace(state=SimpleNamespace(step=step, epoch=epoch)))


def log(path: Path, steps: range) -> None:
    """A run, or the rest of one, whose metric ``loss`` is the number of the step."""
    callback = JSONLines(path)
    callback.on_fit_start(at(steps.start))
    for step in steps:
        callback.on_step(at(step + 1), {"loss": step + 1})
    callback.on_fit_end(at(steps.stop))


def test_lines_have_kind_step_epoch_time_and_the_metrics(ranks: Ranks, tmp_path: Path) -> None:
    """Values from 0 to 19 in windows of 8, 8 and 4: means 3.5, 11.5, 17.5; over the epoch 9.5."""
    path = tmp_path / "new" / "log.jsonl"

    def fit() -> None:
        log = JSONLines(path)
        toy_trainer(20, ValueToy(), eval_numbers=5, callbacks=[log], batch_size=2, accumulation_steps=2).fit()

    ranks(2, fit)
    lines = read(path)
    assert [(line["kind"], line["step"], line["epoch"]) for line in lines] == [
        ("step", 1, 0),
        ("step", 2, 0),
        ("step", 3, 1),
        ("eval", 3, 1),
        ("epoch", 3, 1),
    ]
    assert [line["loss"] for line in lines] == [3.5, 11.5, 17.5, 2.0, 9.5]
    assert {"lr", "samples_per_second"} < lines[0].keys()
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    assert times[0] > 1.7e9


def test_steps_between_reports_write_nothing(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    ranks(1, lambda: toy_trainer(7, callbacks=[JSONLines(path)], batch_size=1, log_every=3).fit().step)
    assert [line["step"] for line in read(path) if line["kind"] == "step"] == [3, 6, 7]


def test_a_line_is_in_the_file_when_its_hook_returns(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    class Reader(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            assert [line["step"] for line in read(path)] == list(range(1, trainer.state.step + 1))

    ranks(1, lambda: toy_trainer(3, callbacks=[JSONLines(path), Reader()], batch_size=1).fit().step)


def test_nan_and_infinity_are_written_as_they_are(tmp_path: Path) -> None:
    callback = JSONLines(tmp_path / "log.jsonl")
    callback.on_fit_start(at(0))
    callback.on_step(at(1), {"loss": math.nan, "up": math.inf, "down": -math.inf})
    (line,) = read(callback.path)
    assert math.isnan(line["loss"])
    assert (line["up"], line["down"]) == (math.inf, -math.inf)
    callback.on_exception(at(1), ValueError())


def test_a_resumed_run_cuts_the_log_back_to_its_step(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log(path, range(9))
    kept = path.read_text().splitlines()[:6]
    log(path, range(6, 12))
    assert [line["loss"] for line in read(path)] == list(range(1, 13))
    assert path.read_text().splitlines()[:6] == kept
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("torn", [b'{"kind": "step", "st', b'{"kind": "step", "step": 3', b"\xc3", b"\0" * 50 + b"\n"])
def test_a_line_torn_by_a_crash_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log.jsonl"
    log(path, range(3))
    with path.open("ab") as file:
        file.write(torn)
    log(path, range(3, 5))
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5]


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log(path, range(3))
    path.write_bytes(path.read_bytes().rstrip())
    log(path, range(3, 4))
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("text", ["a diary\nof mine\n", '{"kind": "step"}\n{"step": 2}\n', "[1]\n[2]\n", '"a"\n"b"\n'])
def test_a_file_that_is_no_log_is_an_error_and_left_untouched(tmp_path: Path, text: str) -> None:
    path = tmp_path / "diary.txt"
    path.write_text(text)
    callback = JSONLines(path)
    for hook in (callback.before_fit, callback.on_fit_start):
        with pytest.raises(ValueError, match=r"diary\.txt, line 1 is no line of a JSONLines log"):
            hook(at(3))
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_fresh_run_moves_an_earlier_log_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log.jsonl"
    for length in (1, 2, 3):
        log(path, range(length))
    assert [len(read(tmp_path / name)) for name in ("log.jsonl.1", "log.jsonl.2", "log.jsonl")] == [1, 2, 3]
    assert f"moved it to {path}.2" in caplog.text


def test_a_metric_with_the_name_of_a_field_is_an_error(tmp_path: Path) -> None:
    callback = JSONLines(tmp_path / "log.jsonl")
    callback.on_fit_start(at(0))
    with pytest.raises(ValueError, match="cannot log a metric named 'time'"):
        callback.on_step(at(1), {"loss": 1.0, "time": 2.0})
    callback.on_exception(at(1), ValueError())


def test_a_path_of_the_wrong_type_is_an_error() -> None:
    with pytest.raises(TypeError, match="path must be the path of a file; found 3"):
        JSONLines(3)  # type: ignore[arg-type]


def test_building_the_callback_touches_no_file(tmp_path: Path) -> None:
    JSONLines(tmp_path / "folder" / "log.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_closed_after_an_error(ranks: Ranks, tmp_path: Path) -> None:
    callback = JSONLines(tmp_path / "log.jsonl")

    class Fail(Callback):
        def on_safe_point(self, trainer: DDPTrainer) -> None:
            if trainer.state.step == 2:
                raise KeyError("on purpose")

    def fit() -> bool:
        with pytest.raises(KeyError, match="on purpose"):
            toy_trainer(5, callbacks=[callback, Fail()], batch_size=1).fit()
        return callback._file is None

    assert ranks(1, fit) == [True]
    assert [line["step"] for line in read(callback.path)] == [1, 2]


def test_a_summary_computed_with_numpy_is_logged_monitored_and_saved(tmp_path: Path) -> None:
    class Perplexity(DDPTrainer):
        def summarize(self, means: dict[str, float]) -> dict[str, float]:
            others = {"half": np.float32(0.5), "count": np.int64(3), "is": np.bool_(True)}
            return {**means, "perplexity": np.exp(means["loss"]), **others}

    callbacks = [
        JSONLines(tmp_path / "log.jsonl"),
        EarlyStopping("perplexity", patience=9),
        Checkpoint(tmp_path / "files", monitor="perplexity"),
    ]
    trainer = toy_trainer(8, kind=Perplexity, eval_numbers=[1.0], batch_size=2, lr=0.01, callbacks=callbacks)
    assert trainer.fit().step == 4
    assert {type(value) for value in trainer.evaluate().values()} == {float}
    best = torch.load(tmp_path / "files" / "best.pt", weights_only=True)
    assert best["callbacks"]["Checkpoint"]["best"] == trainer.evaluate()["perplexity"]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {line["count"] for line in lines} == {3.0}
