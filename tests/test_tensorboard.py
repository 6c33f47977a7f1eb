from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data
from tensorboard.util.tensor_util import make_ndarray

from callbacks import TensorBoard
from tests.helpers import Ranks, ValueToy, toy_trainer
from trainer import Callback, DDPTrainer, TrainerConfig

Points = list[tuple[int, float]]


def read(folder: Path, tag: str) -> Points:
    """What a reader of the folder sees: the points of a curve."""
    return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


def read_as_the_server_does(folder: Path, tag: str) -> Points:
    """TensorBoard's server reads with another class, which has rules of its own for restarts."""
    events = PluginEventAccumulator(str(folder)).Reload().Tensors(tag)
    return [(event.step, make_ndarray(event.tensor_proto).item()) for event in events]


def tags(folder: Path) -> list[str]:
    return sorted(EventAccumulator(str(folder)).Reload().Tags()["scalars"])


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def at(step: int) -> DDPTrainer:
    return cast(DDPTrainer, SimpleNamespace(state=SimpleNamespace(step=step), config=TrainerConfig(epochs=7, monitor="f1")))


def log(folder: Path, steps: range, loss: float, end: bool = True) -> TensorBoard:
    callback = TensorBoard(folder)
    callback.on_fit_start(at(steps.start))
    for step in steps:
        callback.on_step(at(step + 1), {"loss": loss})
        callback.on_eval(at(step + 1), {"loss": loss})
    if end:
        callback.on_fit_end(at(steps.stop))
    return callback


def test_curves_have_one_point_a_step_on_the_step_axis(ranks: Ranks, tmp_path: Path) -> None:
    """16 numbers in windows of 2 ranks x 2 samples x 2 micro-batches: means 3.5 and 11.5; twice."""

    def fit() -> None:
        toy_trainer(
            16, ValueToy(), eval_numbers=5, callbacks=[TensorBoard(tmp_path)], batch_size=2, accumulation_steps=2, epochs=2
        ).fit()

    ranks(2, fit)
    assert read(tmp_path, "train/loss") == [(1, 3.5), (2, 11.5), (3, 3.5), (4, 11.5)]
    assert read(tmp_path, "eval/loss") == [(2, 2.0), (4, 2.0)]
    assert read(tmp_path, "epoch/loss") == [(2, 7.5), (4, 7.5)]
    assert tags(tmp_path) == ["epoch/loss", "eval/loss", "train/loss", "train/lr", "train/samples_per_second"]


def test_evaluation_sets_are_told_apart_in_the_tags(tmp_path: Path) -> None:
    callback = log(tmp_path, range(0), 0, end=False)
    callback.on_eval(at(3), {"easy/loss": 0.5, "hard/loss": 1.0})
    callback.on_fit_end(at(3))
    assert tags(tmp_path) == ["eval/easy/loss", "eval/hard/loss"]


def test_four_ranks_write_one_file(ranks: Ranks, tmp_path: Path) -> None:
    """Built in every process, opened by rank 0 alone."""
    folder = tmp_path / "a" / "b"

    def fit() -> None:
        toy_trainer(8, callbacks=[TensorBoard(folder)], batch_size=1).fit()

    ranks(4, fit)
    assert len(files(tmp_path)) == 1
    assert [step for step, _ in read(folder, "train/loss")] == [1, 2]


def test_building_the_callback_touches_no_file(tmp_path: Path) -> None:
    TensorBoard(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reader", [read, read_as_the_server_does])
def test_a_resumed_run_hides_the_points_after_its_step(tmp_path: Path, reader: Any) -> None:
    log(tmp_path, range(9), 1.0, end=False)._writer.flush()  # and killed
    log(tmp_path, range(6, 12), 2.0)
    expected = [(step, 1.0 if step <= 6 else 2.0) for step in range(1, 13)]
    assert reader(tmp_path, "train/loss") == expected
    assert reader(tmp_path, "eval/loss") == expected
    log(tmp_path, range(8, 9), 3.0)
    expected = [*expected[:8], (9, 3.0)]
    assert reader(tmp_path, "train/loss") == expected


@pytest.mark.parametrize("reader", [read, read_as_the_server_does])
def test_a_fresh_run_in_a_used_folder_hides_all_earlier_points(tmp_path: Path, reader: Any) -> None:
    log(tmp_path, range(9), 1.0)
    log(tmp_path, range(3), 2.0)
    assert reader(tmp_path, "train/loss") == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_what_a_checkpoint_has_seen_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's thread may be a few events behind, which no test can rely on: look at the call as well."""
    callback = log(tmp_path, range(5), 1.0, end=False)
    flush, calls = callback._writer.flush, []
    monkeypatch.setattr(callback._writer, "flush", lambda: calls.append(flush()))
    assert callback.state_dict() == {}
    assert len(calls) == 1
    assert len(read(tmp_path, "train/loss")) == 5  # while the writer is still open
    callback.on_exception(at(5), ValueError())


def test_nan_and_infinity_are_written_as_they_are(tmp_path: Path) -> None:
    callback = log(tmp_path, range(0), 0, end=False)
    for step, value in enumerate([math.nan, math.inf, 11.5], 1):
        callback.on_step(at(step), {"loss": value})
    callback.on_fit_end(at(3))
    values = [value for _, value in read(tmp_path, "train/loss")]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, 11.5]


def test_a_window_with_nan_is_a_nan_in_the_curve_and_the_next_is_not(ranks: Ranks, tmp_path: Path) -> None:
    numbers = [math.nan if number == 5 else number for number in range(16)]

    def fit() -> None:
        with pytest.warns(RuntimeWarning, match="step 1 on rank 1") if os.environ["RANK"] == "0" else nullcontext():
            toy_trainer(numbers, ValueToy(), lr=0, callbacks=[TensorBoard(tmp_path)], batch_size=2, accumulation_steps=2).fit()

    ranks(2, fit)
    (first, second) = read(tmp_path, "train/loss")
    assert math.isnan(first[1])
    assert second == (2, 11.5)


@pytest.mark.parametrize("error", [ValueError("on purpose"), KeyboardInterrupt()])
def test_the_file_is_complete_and_closed_after_an_error(ranks: Ranks, tmp_path: Path, error: BaseException) -> None:
    class Fail(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            if trainer.state.step == 2:
                raise error

    callback = TensorBoard(tmp_path)

    def fit() -> bool:
        with pytest.raises(type(error)):
            toy_trainer(8, callbacks=[callback, Fail()], batch_size=1).fit()
        return callback._writer is None

    assert ranks(1, fit) == [True]
    assert [step for step, _ in read(tmp_path, "train/loss")] == [1, 2]


def test_the_config_is_hyper_parameters_in_the_same_file(tmp_path: Path) -> None:
    log(tmp_path, range(1), 1.0)
    assert len(files(tmp_path)) == 1
    content = PluginEventAccumulator(str(tmp_path)).Reload().PluginTagToContent("hparams")
    start = parse_session_start_info_plugin_data(content["_hparams_/session_start_info"])
    assert start.hparams["epochs"].number_value == 7
    assert start.hparams["batch_size"].number_value == 32
    assert start.hparams["shuffle"].number_value == 1
    assert start.hparams["monitor"].string_value == "f1"
    assert start.hparams["ddp_options"].string_value == "{}"
    assert "max_steps" not in start.hparams  # None
    assert "_hparams_/session_end_info" in content


def test_a_folder_of_the_wrong_type_is_an_error() -> None:
    with pytest.raises(TypeError, match="folder must be the path of a folder; found None"):
        TensorBoard(None)  # type: ignore[arg-type]
