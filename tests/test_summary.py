from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from tqdm import tqdm

from callbacks import Checkpoint, EarlyStopping, JSONLines, Profiler, Summary, TensorBoard
from tests.helpers import Numbers, Ranks, Toy, mean_of_outputs, toy_trainer
from trainer import Callback, DDPTrainer, TrainerConfig, TrainerState

NAN = math.nan


def fake(
    size: int = 1,
    device: str = "cpu",
    steps: tuple[int | None, int | None] = (10, 30),
    state: TrainerState | None = None,
    callbacks: tuple[Callback, ...] = (),
    model: nn.Module | None = None,
    **config: Any,
) -> DDPTrainer:
    """What a Summary sees of a trainer; `steps` an epoch and in all."""
    world = SimpleNamespace(size=size, device=torch.device(device))
    return cast(
        DDPTrainer,
        SimpleNamespace(
            world=world,
            config=TrainerConfig(**config),
            model=nn.Linear(2, 3) if model is None else model,
            state=TrainerState() if state is None else state,
            steps_per_epoch=steps[0],
            total_steps=steps[1],
            callbacks=callbacks,
        ),
    )


def start(capsys: pytest.CaptureFixture[str], trainer: DDPTrainer) -> list[str]:
    """The lines shown when `fit` starts."""
    Summary().on_fit_start(trainer)
    return capsys.readouterr().err.splitlines()


def play(callback: Summary, values: list[float]) -> None:
    """Gives the values to the callback, one an evaluation, after the steps 10, 20, ..."""
    for number, value in enumerate(values, 1):
        callback.on_eval(fake(state=TrainerState(step=10 * number)), {callback.monitor: value, "other": 0.0})


def end(callback: Summary, capsys: pytest.CaptureFixture[str], step: int = 40) -> list[str]:
    """The lines shown when `fit` ends."""
    capsys.readouterr()
    callback.on_fit_end(fake(state=TrainerState(step=step)))
    return capsys.readouterr().err.splitlines()


# When fit starts


@pytest.mark.parametrize(
    ("size", "device", "words"),
    [(1, "cpu", "1 process on cpu"), (2, "cpu", "2 processes on cpu"), (3, "meta", "3 processes on meta")],
)
def test_the_first_line_tells_processes_and_device(
    capsys: pytest.CaptureFixture[str], size: int, device: str, words: str
) -> None:
    assert start(capsys, fake(size, device))[0] == f"{words}, a fresh start"


def test_a_gpu_is_shown_with_its_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {device.index}")
    assert start(capsys, fake(2, "cuda:1"))[0] == "2 processes on cuda (Card 1), a fresh start"


@pytest.mark.parametrize(
    ("total", "words"), [(30, "resumes from step 12 of 30"), (None, "resumes from step 12")], ids=["planned", "open end"]
)
def test_a_run_that_goes_on_tells_from_where(capsys: pytest.CaptureFixture[str], total: int | None, words: str) -> None:
    lines = start(capsys, fake(steps=(10, total), state=TrainerState(step=12, epoch=1)))
    assert lines[0] == f"1 process on cpu, {words}"


def test_a_run_whose_updates_were_all_skipped_is_no_fresh_start(capsys: pytest.CaptureFixture[str]) -> None:
    lines = start(capsys, fake(state=TrainerState(skipped_steps=2, samples=8)))
    assert lines[0].endswith("resumes from step 0 of 30")


@pytest.mark.parametrize(
    ("size", "config", "words"),
    [
        (1, {"batch_size": 32}, "32 = 1 process x batch 32 x accumulation 1"),
        (4, {"batch_size": 2, "accumulation_steps": 4}, "32 = 4 processes x batch 2 x accumulation 4"),
        (1, {"batch_size": 8, "global_batch_size": 32}, "32 = 1 process x batch 8 x accumulation 4"),
        (2, {"batch_size": 32, "global_batch_size": 32}, "32 = 2 processes x batch 16 x accumulation 1"),
        (3, {"batch_size": 6, "global_batch_size": 32}, "32 over 3 processes, at most 6 samples at once"),
        (3, {"batch_size": 32, "global_batch_size": 32}, "32 over 3 processes, at most 11 samples at once"),
        (2, {"batch_size": 4, "global_batch_size": 12}, "12 over 2 processes, at most 4 samples at once"),
        (4, {"batch_size": 8, "global_batch_size": 2}, "2 over 4 processes, at most 1 sample at once"),
    ],
)
def test_the_global_batch_is_shown_with_what_makes_it(
    capsys: pytest.CaptureFixture[str], size: int, config: dict[str, Any], words: str
) -> None:
    assert start(capsys, fake(size, **config))[1].partition("; ")[0] == f"global batch {words}"


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((1875, 5625), "steps: 1,875 per epoch, 5,625 in all"),
        ((None, 100), "steps: unknown per epoch, 100 in all"),
        ((None, None), "steps: unknown per epoch, unknown in all"),
    ],
)
def test_steps_are_shown_where_they_are_known(
    capsys: pytest.CaptureFixture[str], steps: tuple[int | None, int | None], words: str
) -> None:
    assert start(capsys, fake(steps=steps))[1].partition("; ")[2] == words


def test_parameters_are_counted_and_frozen_ones_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(1000, 20, bias=False), nn.Linear(20, 1))
    assert start(capsys, fake(model=model))[2] == "20,021 parameters, all trained"
    model[0].requires_grad_(False)
    assert start(capsys, fake(model=model))[2] == "20,021 parameters, 21 of them trained"


def test_weights_that_two_layers_share_count_once(capsys: pytest.CaptureFixture[str]) -> None:
    layer = nn.Linear(3, 3)
    assert start(capsys, fake(model=nn.Sequential(layer, layer)))[2] == "12 parameters, all trained"


@pytest.mark.parametrize(
    ("config", "words"),
    [({"precision": "bf16"}, ", precision bf16"), ({"compile": True}, ", compiled"), ({"precision": "fp32"}, "")],
)
def test_precision_and_compilation_are_shown_unless_they_are_the_default(
    capsys: pytest.CaptureFixture[str], config: dict[str, Any], words: str
) -> None:
    assert start(capsys, fake(**config))[2] == f"9 parameters, all trained{words}"


def test_every_callback_that_writes_is_shown_with_its_path(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Own(Callback):
        path = "own.txt"

    profiler = Profiler(tmp_path / "traces")
    profiler.name = "first steps"
    writing = (Checkpoint(tmp_path), EarlyStopping("loss", 1), JSONLines("log.jsonl"), profiler, TensorBoard("runs/a"), Own())
    assert start(capsys, fake(callbacks=writing))[3:] == [
        f"files: Checkpoint in {tmp_path}, JSONLines in log.jsonl, first steps in {tmp_path}/traces, TensorBoard in runs/a, "
        "Own in own.txt"
    ]


def test_attributes_that_are_no_paths_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Method(Callback):
        def folder(self) -> str:
            return "a"

    class Unset(Callback):
        path = None

    assert len(start(capsys, fake(callbacks=(Method(), Unset(), Summary())))) == 3


# When fit ends


@pytest.mark.parametrize(
    ("seconds", "samples", "words"),
    [
        (67.4, 6740, "0:01:07, 100 samples per second"),
        (59.6, 149_000, "0:01:00, 2,500 samples per second"),
        (93_784.0, 46_892, "26:03:04, 0.5 samples per second"),
        (3.0, 0, "0:00:03"),
    ],
)
def test_the_last_lines_tell_steps_time_and_speed_of_this_fit_and_of_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seconds: float, samples: int, words: str
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    trainer = fake(state=TrainerState(step=1000, epoch=2, samples=32_000))
    callback = Summary()
    callback.on_fit_start(trainer)
    capsys.readouterr()
    now += seconds
    trainer.state.step, trainer.state.epoch, trainer.state.samples = 1001, 4, 32_000 + samples
    callback.on_fit_end(trainer)
    line, _, memory = capsys.readouterr().err.partition("; peak memory ")
    assert line == f"1 step and 2 epochs in {words}; 1,001 steps and 4 epochs in all"
    assert 0.02 < float(memory.removesuffix(" GB\n")) < 20


def test_the_peak_memory_of_a_gpu_is_what_its_tensors_took(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12_345_678_901)
    callback = Summary()
    callback.on_fit_end(fake(device="cuda"))
    assert capsys.readouterr().err.splitlines()[0].endswith("; peak memory 12.35 GB")


@pytest.mark.parametrize(
    ("mode", "values", "words"),
    [
        ("min", [5.0, 0.25, 3.0], "best loss 0.25 at step 20, last 3"),
        ("max", [5.0, 0.25, 3.0], "best loss 5 at step 10, last 3"),
        ("min", [2.0, 1.0, 1.0], "best loss 1 at step 20, last 1"),  # a tie is not better
        ("max", [1.0, 2.0, 2.0], "best loss 2 at step 20, last 2"),
        ("min", [NAN, 0.5, NAN], "best loss 0.5 at step 20, last nan"),
        ("max", [NAN, 0.5, NAN], "best loss 0.5 at step 20, last nan"),
        ("min", [0.0, 1.0], "best loss 0 at step 10, last 1"),
        ("min", [math.inf, 1.0], "best loss 1 at step 20, last 1"),
        ("min", [NAN, NAN], "loss was NaN in every evaluation"),
    ],
)
def test_the_best_evaluation_is_shown_with_its_step_and_the_last(
    capsys: pytest.CaptureFixture[str], mode: Any, values: list[float], words: str
) -> None:
    callback = Summary("loss", mode=mode)
    play(callback, values)
    assert end(callback, capsys)[1:] == [words]


def test_without_a_name_the_first_key_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    callback = Summary()
    callback.on_fit_start(fake())
    callback.on_eval(fake(state=TrainerState(step=4)), {})
    callback.on_eval(fake(state=TrainerState(step=5)), {"near/loss": 0.5, "far/loss": 2.0})
    callback.on_eval(fake(state=TrainerState(step=6)), {"far/loss": 0.25, "near/loss": 1.0})
    assert end(callback, capsys)[1:] == ["best near/loss 0.5 at step 5, last 1"]


def test_without_an_evaluation_there_is_no_line_about_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(end(Summary(), capsys)) == 1


def test_best_and_last_survive_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Summary("loss"), Summary()
    play(first, [0.5, 0.25, 1.0])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    second.on_fit_start(fake(state=TrainerState(step=30)))
    assert end(second, capsys)[1:] == ["best loss 0.25 at step 20, last 1"]
    second.on_eval(fake(state=TrainerState(step=40)), {"loss": 0.3})
    assert end(second, capsys)[1:] == ["best loss 0.25 at step 20, last 0.3"]


def test_a_checkpoint_from_before_the_first_evaluation_holds_none(capsys: pytest.CaptureFixture[str]) -> None:
    callback = Summary("loss")
    callback.load_state_dict(Summary().state_dict())
    assert callback.best is None
    play(callback, [0.5])
    assert end(callback, capsys)[1:] == ["best loss 0.5 at step 10, last 0.5"]


@pytest.mark.parametrize("other", [{"monitor": "accuracy"}, {"mode": "max"}])
def test_the_best_of_another_metric_is_not_taken_over(other: dict[str, Any]) -> None:
    first, second = Summary(), Summary(**other)
    play(first, [0.5])
    play(second, [0.75])
    second.load_state_dict(first.state_dict())
    assert (second.best, second.best_step, second.last) == (None, None, None)


def test_a_fresh_start_forgets_the_run_before(capsys: pytest.CaptureFixture[str]) -> None:
    callback = Summary()
    play(callback, [0.5])
    callback.on_fit_start(fake())
    assert len(end(callback, capsys)) == 1


def test_a_bar_that_is_open_stays_out_of_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    bar: Any = tqdm(desc="epoch 1", total=3, file=sys.stderr)
    callback = Summary()
    callback.on_fit_start(fake())
    callback.on_fit_end(fake(state=TrainerState(step=1)))
    bar.close()
    lines = [line.rpartition("\r")[2] for line in capsys.readouterr().err.split("\n")[:4]]
    assert lines[0] == "1 process on cpu, a fresh start"
    assert lines[3].startswith("1 step and 0 epochs in ")


# Arguments


def test_an_unknown_key_is_an_error_that_lists_the_keys() -> None:
    with pytest.raises(ValueError, match="Summary monitors 'los', which is no key of the evaluation: it has 'loss', 'near/loss'"):
        Summary("los").on_eval(fake(), {"loss": 1.0, "near/loss": 2.0})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"monitor": 3}, TypeError, "monitor must be a key of the evaluation, or None for its first; found 3"),
        ({"mode": "least"}, ValueError, "mode must be 'min' or 'max'; found 'least'"),
        ({"mode": ["min"]}, ValueError, "found \\['min'\\]"),
    ],
)
def test_unusable_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Summary(**arguments)


# In a run


def shown(stderr: str) -> list[str]:
    """The lines, without what is the machine's: times, speeds, memory."""
    lines = [line.partition("; peak memory ")[0] for line in stderr.splitlines()]
    return [line.partition(" in 0:00:")[0] + line[line.find("; ") :] * (" in 0:00:" in line) for line in lines]


def test_rank_0_alone_shows_a_run_from_its_start_to_its_end(ranks: Ranks) -> None:
    def fit() -> None:
        toy_trainer(10, eval_numbers=[2.0], callbacks=[Summary(mode="max")], batch_size=2, epochs=2).fit()

    first, second = ranks.outcomes(2, fit)
    assert shown(first.stderr) == [
        "2 processes on cpu, a fresh start",
        "global batch 4 = 2 processes x batch 2 x accumulation 1; steps: 3 per epoch, 6 in all",
        "1 parameter, all trained",
        "6 steps and 2 epochs; 6 steps and 2 epochs in all",
        "best loss -31 at step 3, last -62",  # w after an epoch: -(1.5 + 5.5 + 8.5), twice that after two
    ]
    assert (second.stderr, first.stdout, second.stdout) == ("", "", "")


def test_a_run_resumed_from_a_folder_knows_the_best_of_its_first_part(ranks: Ranks, tmp_path: Path) -> None:
    class StopAfterFour(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            if trainer.state.step == 4:
                trainer.stop("four are enough")

    def fit(*callbacks: Callback) -> None:
        watching = [Summary(mode="max"), Checkpoint(tmp_path), *callbacks]
        trainer = toy_trainer(10, eval_numbers=[2.0], callbacks=watching, batch_size=2, global_batch_size=4, epochs=2)
        trainer.fit(resume_from=tmp_path)

    (first,) = ranks.outcomes(1, fit, StopAfterFour())
    assert shown(first.stderr)[-2:] == ["4 steps and 1 epoch; 4 steps and 1 epoch in all", "best loss -31 at step 3, last -31"]
    second, _ = ranks.outcomes(2, fit)
    assert shown(second.stderr) == [
        "2 processes on cpu, resumes from step 4 of 6",
        "global batch 4 = 2 processes x batch 2 x accumulation 1; steps: 3 per epoch, 6 in all",
        "1 parameter, all trained",
        f"files: Checkpoint in {tmp_path}",
        "2 steps and 1 epoch; 6 steps and 2 epochs in all",
        "best loss -31 at step 3, last -62",
    ]


def test_a_stream_has_unknown_steps(ranks: Ranks) -> None:
    class Stream(IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter([Numbers(8)[index] for index in range(8)])

    def fit() -> None:
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        config = TrainerConfig(batch_size=4, shuffle=False)
        DDPTrainer(model, optimizer, Stream(), loss_fn=mean_of_outputs, config=config, callbacks=[Summary()]).fit()

    (outcome,) = ranks.outcomes(1, fit)
    assert outcome.ok, outcome
    lines = shown(outcome.stderr)
    assert lines[1].endswith("steps: unknown per epoch, unknown in all")
    assert lines[3:] == ["2 steps and 1 epoch; 2 steps and 1 epoch in all"]


def test_a_run_with_several_evaluation_sets_follows_the_one_that_is_named(ranks: Ranks) -> None:
    def fit(monitor: str) -> None:
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sets = {"near": Numbers([1.0]), "far": Numbers([8.0])}
        config = TrainerConfig(batch_size=4, shuffle=False)
        watching = [Summary(monitor)]
        DDPTrainer(model, optimizer, Numbers(4), sets, loss_fn=mean_of_outputs, config=config, callbacks=watching).fit()

    (outcome,) = ranks.outcomes(1, fit, "far/loss")
    assert outcome.ok, outcome
    assert outcome.stderr.splitlines()[-1] == "best far/loss -12 at step 1, last -12"  # w is -1.5
    (outcome,) = ranks.outcomes(1, fit, "loss")
    assert (outcome.error, outcome.message) == (
        "ValueError",
        "Summary monitors 'loss', which is no key of the evaluation: it has 'near/loss', 'far/loss'",
    )


def test_the_first_key_is_that_of_the_evaluations_of_now(capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run, or another trainer with the same callback, may evaluate other sets."""
    before = Summary()
    before.on_eval(fake(), {"loss": 0.5})
    for resumed in (True, False):
        callback = Summary() if resumed else before
        if resumed:
            callback.load_state_dict(before.state_dict())
        callback.on_fit_start(fake(state=TrainerState(step=4, samples=4, epoch=1) if resumed else TrainerState()))
        capsys.readouterr()
        callback.on_eval(fake(state=TrainerState(step=10)), {"val/loss": 0.75, "test/loss": 0.25})
        assert "best val/loss 0.75 at step 10, last 0.75" in end(callback, capsys)


def test_the_key_may_be_chosen_after_construction(capsys: pytest.CaptureFixture[str]) -> None:
    callback = Summary()
    callback.monitor = "accuracy"
    callback.on_fit_start(fake())
    capsys.readouterr()
    callback.on_eval(fake(state=TrainerState(step=10)), {"loss": 0.5, "accuracy": 0.75})
    assert "best accuracy 0.75 at step 10, last 0.75" in end(callback, capsys)
