from __future__ import annotations

import io
import math
import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from callbacks import EarlyStopping
from tests.helpers import Ranks, Recorder, toy_trainer
from trainer import DDPTrainer

NAN = math.nan


def play(callback: EarlyStopping, values: list[float]) -> list[tuple[int, str]]:
    """Gives the values to the callback, one an evaluation: the evaluations (1, 2, ...) that asked to stop, and why."""
    asked: list[tuple[int, str]] = []
    for number, value in enumerate(values, 1):
        trainer = SimpleNamespace(
            state=SimpleNamespace(step=10 * number), stop=lambda reason, at=number: asked.append((at, reason))
        )
        callback.on_eval(cast(DDPTrainer, trainer), {"loss": value, "other": 0.0})
    return asked


@pytest.mark.parametrize(
    ("values", "options", "stop_at"),
    [
        ([5, 4, 3, 2], {"patience": 1}, None),
        ([5, 6], {"patience": 1}, 2),
        ([5, 6, 6], {"patience": 2}, 3),
        ([5, 6, 4, 6, 3, 6], {"patience": 2}, None),  # in a row
        ([5, 5], {"patience": 1}, 2),  # a tie
        ([1, 2, 3], {"patience": 1, "mode": "max"}, None),
        ([1, 2, 2], {"patience": 1, "mode": "max"}, 3),
        ([5, 4.5], {"patience": 1, "min_delta": 0.5}, 2),  # not by more than min_delta
        ([5, 4.25], {"patience": 1, "min_delta": 0.5}, None),
        ([1, 1.5], {"patience": 1, "mode": "max", "min_delta": 0.5}, 2),
        ([5, 4.75, 4.25], {"patience": 2, "min_delta": 0.5}, None),  # against the best, not against the last
        ([math.inf, 5], {"patience": 2}, None),
    ],
)
def test_stop_is_asked_at_the_patience_th_evaluation_in_a_row_without_improvement(
    values: list[float], options: dict[str, Any], stop_at: int | None
) -> None:
    asked = play(EarlyStopping("loss", **options), values)
    assert [number for number, _ in asked] == ([] if stop_at is None else [stop_at])


def test_the_reason_names_metric_value_and_count() -> None:
    assert play(EarlyStopping("loss", 2), [0.25, 1, 1]) == [(3, "loss has not improved on 0.25 in 2 evaluations")]


def test_nan_is_no_improvement_and_warned_of_once() -> None:
    callback = EarlyStopping("loss", 2)
    with pytest.warns(RuntimeWarning, match="loss is NaN in the evaluation at step 10;") as caught:
        assert play(callback, [NAN, 0.5, NAN, 0.4, 0.6]) == []
    assert len(caught) == 1
    assert (callback.best, callback.count) == (0.4, 1)


@pytest.mark.filterwarnings("ignore:loss is NaN")
def test_a_run_of_nan_stops() -> None:
    assert [number for number, _ in play(EarlyStopping("loss", 3), [NAN] * 3)] == [3]
    assert [number for number, _ in play(EarlyStopping("loss", 3, mode="max"), [NAN] * 3)] == [3]


def test_an_unknown_key_is_an_error_that_lists_the_keys() -> None:
    with pytest.raises(ValueError, match="'acuracy', which is no key of the evaluation: it has 'loss', 'other'"):
        play(EarlyStopping("acuracy", 1), [1.0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"monitor": 3}, TypeError, "monitor must be a key of the evaluation; found 3"),
        ({"patience": 0}, ValueError, "patience must be 1 or more; found 0"),
        ({"patience": 1.5}, TypeError, "patience must be an int, a number of evaluations; found 1.5"),
        ({"patience": True}, TypeError, "found True"),
        ({"mode": "least"}, ValueError, "mode must be 'min' or 'max'; found 'least'"),
        ({"min_delta": -1.0}, ValueError, "min_delta must be finite and 0 or more; found -1.0"),
        ({"min_delta": NAN}, ValueError, "found nan"),
        ({"min_delta": "1"}, TypeError, "min_delta must be a number; found '1'"),
    ],
)
def test_unusable_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EarlyStopping(**{"monitor": "loss", "patience": 1, **arguments})


def test_best_and_count_survive_a_checkpoint() -> None:
    first, second = EarlyStopping("loss", 3), EarlyStopping("loss", 3)
    play(first, [0.5, 0.25, 1, 1])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert [number for number, _ in play(second, [0.3])] == [1]
    assert second.best == 0.25


class Scripted(DDPTrainer):
    """Rank r's evaluation number n (0, 1, ...) has the loss ``script[r][n]``, with one sample a rank."""

    script: list[list[float]]

    def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.tensor(self.script[self.world.rank][self.state.step - 1], dtype=torch.float64)


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_ranks_stop_together_by_the_global_mean(ranks: Ranks, world_size: int) -> None:
    """The means over two ranks are 1, 0.5, NaN, 0.5: the third and fourth are no improvement."""
    scripts = [[0.0, 1.0, 0.5, 0.9, 0.0, 0.0], [2.0, 0.0, NAN, 0.1, 0.0, 0.0]]
    one = [[(a + b) / 2 for a, b in zip(*scripts, strict=True)]]

    class Trainer(Scripted):
        script = scripts if world_size == 2 else one

    def fit() -> tuple[int, str | None, list[float], int]:
        recorder = Recorder()
        trainer = toy_trainer(
            6 * world_size,
            eval_numbers=world_size,
            kind=Trainer,
            callbacks=[recorder, EarlyStopping("loss", patience=2)],
            batch_size=1,
            eval_every=1,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = trainer.fit()
        trainer.close()
        nan_warnings = [str(warning.message) for warning in caught if "EarlyStopping" in str(warning.message)]
        return (
            state.step,
            state.stop_reason,
            [call.metrics["loss"] for call in recorder.named("on_eval")],
            len(nan_warnings),
        )

    results = ranks(world_size, fit)
    assert {(step, reason) for step, reason, _, _ in results} == {(4, "loss has not improved on 0.5 in 2 evaluations")}
    assert str(results[0][2]) == str([1.0, 0.5, NAN, 0.5])
    assert [count for _, _, _, count in results] == [1, 0][:world_size]


def test_without_evaluation_data_the_run_does_not_begin(ranks: Ranks) -> None:
    def fit() -> None:
        toy_trainer(4, callbacks=[EarlyStopping("loss", patience=1)], batch_size=1).fit()

    for outcome in ranks.outcomes(2, fit):
        assert (outcome.error, outcome.message) == (
            "ValueError",
            "EarlyStopping monitors 'loss' of an evaluation: pass eval_data to the trainer",
        )


def test_another_run_is_watched_afresh() -> None:
    callback = EarlyStopping("loss", patience=3)
    callback.best, callback.count = -1e9, 2
    toy_trainer(8, eval_numbers=[1.0], callbacks=[callback], batch_size=2).fit()
    assert callback.best > -1e9
    assert callback.count == 0


@pytest.mark.parametrize(("monitor", "mode", "kept"), [("loss", "min", True), ("other", "min", False), ("loss", "max", False)])
def test_the_best_of_another_metric_is_not_taken_over(monitor: str, mode: Any, kept: bool) -> None:
    before, after = EarlyStopping("loss", patience=3), EarlyStopping(monitor, patience=3, mode=mode)
    play(before, [0.5, 0.75])
    after.load_state_dict(before.state_dict())
    fresh = EarlyStopping(monitor, patience=3, mode=mode)
    assert (after.best, after.count) == ((0.5, 1) if kept else (fresh.best, 0))
