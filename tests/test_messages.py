"""What a person is told who does something silly: found early, with nothing written, and with the way out."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import random
import re
import shutil
import sys
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset, TensorDataset

from callbacks import Checkpoint, EarlyStopping, JSONLines, Profiler, TensorBoard
from tests.helpers import Numbers, Ranks, Recorder, Toy, mean_of_outputs, toy_trainer
from trainer import Callback, CheckpointError, CheckpointFolder, DDPTrainer, Mean, TrainerConfig, World, checkpoint
from trainer.host_copy import HostCopy
from trainer.launch import Launch, choose_device


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("resumes", [False, True])
def test_a_folder_is_no_place_for_a_log_and_stays_where_it_is(tmp_path: Path, resumes: bool) -> None:
    (tmp_path / "run").mkdir()
    trainer = toy_trainer(8, callbacks=[JSONLines(tmp_path / "run"), Checkpoint(tmp_path / "files")], batch_size=2)
    trainer.state.step = 2 * resumes
    with pytest.raises(IsADirectoryError, match=r"run is a folder; give it a file, such as .*run/log\.jsonl"):
        trainer.fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_file_that_is_no_log_is_not_moved_away(tmp_path: Path) -> None:
    (path := tmp_path / "notes.txt").write_text("milk\neggs\n")
    with pytest.raises(ValueError, match=r"notes\.txt, line 1 is no line of a JSONLines log"):
        toy_trainer(8, callbacks=[JSONLines(path)], batch_size=2).fit()
    assert path.read_text() == "milk\neggs\n"
    assert names_in(tmp_path) == {"notes.txt"}


@pytest.mark.parametrize("resumes", [False, True])
def test_the_best_checkpoint_of_another_run_is_not_written_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resumes: bool
) -> None:
    def train(resume: Any = None) -> None:
        callback = Checkpoint(tmp_path, monitor="loss", keep_last=1)
        toy_trainer(8, eval_numbers=2, callbacks=[callback], batch_size=2, epochs=2).fit(resume_from=resume)

    train()
    for path in tmp_path.glob("step-*.pt"):
        path.unlink()
    before = (tmp_path / "best.pt").read_bytes()
    with caplog.at_level(logging.WARNING):
        train(tmp_path if resumes else None)
    assert "best.pt is of an earlier run, and this one starts afresh; moved it to" in caplog.text
    assert (tmp_path / "best-1.pt").read_bytes() == before


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "files").write_text("")
    with pytest.raises(NotADirectoryError, match="files is a file; give it a folder"):
        toy_trainer(8, callbacks=[JSONLines(tmp_path / "log.jsonl"), Checkpoint(path)], batch_size=2).fit()
    assert names_in(tmp_path) == {"files"}


@pytest.mark.parametrize(
    ("there", "meant"), [("exp/step-00000004.pt", "exp"), ("model.pt", "model.pt"), ("last.ckpt", "last.ckpt"), ("a.txt", None)]
)
def test_a_folder_without_checkpoints_beside_something_like_it_is_a_fresh_start_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, there: str, meant: str | None
) -> None:
    (path := tmp_path / there).parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert toy_trainer(8, batch_size=2).fit(resume_from=tmp_path).step == 4
    texts = [record.getMessage() for record in caplog.records if "starts afresh" in record.getMessage()]
    assert texts == ([] if meant is None else [texts[0]])
    assert meant is None or texts[0].endswith(f"did you mean {str(tmp_path / meant)!r}?")


def test_a_pickled_model_is_refused_without_the_advice_to_run_it(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(1, 1)), tmp_path / "whole.pt")
    with pytest.raises(
        CheckpointError, match=r"whole\.pt was not written by DDPTrainer: it holds torch\.nn.*Sequential"
    ) as raised:
        toy_trainer(8, batch_size=2).fit(resume_from=tmp_path / "whole.pt")
    assert "weights_only=False" not in str(raised.value)


def test_a_folder_that_went_away_is_not_called_full(tmp_path: Path) -> None:
    (folder := tmp_path / "files").mkdir()
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match="its folder is gone"):
        checkpoint.write(folder / "step-00000001.pt", {"format": 1})


@pytest.mark.parametrize(("name", "kind"), [("SLURM_NTASKS", "Slurm"), ("OMPI_COMM_WORLD_SIZE", "MPI")])
def test_tasks_of_a_launcher_that_sets_no_ranks_do_not_train_alone(name: str, kind: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}=2, but RANK is missing: each {kind} task would train alone"):
        Launch.from_environment({name: "2"})
    assert Launch.from_environment({name: "1"}).size == 1


@pytest.mark.parametrize(("count", "asked", "alone"), [(4, None, True), (1, None, True), (4, "cuda:0", True), (4, None, False)])
def test_one_process_on_one_of_several_gpus_is_told_how_to_use_all(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, count: int, asked: str | None, alone: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    assert choose_device(asked, 0, alone=alone) == torch.device("cuda", 0)
    texts = [str(item.message) for item in recwarn]
    if count > 1 and asked is None and alone:
        (text,) = texts
        assert text.startswith("one process on one of 4 GPUs. For all of them: torchrun --standalone --nproc-per-node 4")
    else:
        assert texts == []


class Indexing(DDPTrainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return mean_of_outputs(model[0](batch[0]), batch[1])  # type: ignore[index]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_part_of_the_model_taken_by_its_place_is_explained(ranks: Ranks, world_size: int) -> None:
    def fit() -> str:
        with pytest.raises(TypeError) as raised:
            toy_trainer(8, kind=Indexing, batch_size=2).fit()
        return str(raised.value)

    for text in ranks(world_size, fit):
        assert "may be wrapped, and can only be called; its parts are self.model's" in text


class OfOneNumber(DDPTrainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        _, _ = 3  # type: ignore[misc]


class Unpacking(DDPTrainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        _, _ = model  # type: ignore[misc]


@pytest.mark.parametrize(("kind", "explained"), [(OfOneNumber, False), (Unpacking, True)])
def test_only_what_takes_the_model_apart_is_told_of_its_wrapper(kind: type[DDPTrainer], explained: bool) -> None:
    with pytest.raises(TypeError, match="cannot unpack") as raised:
        toy_trainer(8, kind=kind, batch_size=2).fit()
    assert ("may be wrapped" in str(raised.value)) is explained


class Growing(DDPTrainer):
    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics | {"perplexity": math.exp(1000 + abs(metrics["loss"]))}


class Absent(DDPTrainer):
    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics | {"precision": metrics["tp"] / metrics["p"]}


@pytest.mark.parametrize(("kind", "error", "cause"), [(Growing, OverflowError, "math range error"), (Absent, KeyError, "'tp'")])
def test_an_error_in_summarize_says_what_it_was_given(kind: type[DDPTrainer], error: type[Exception], cause: str) -> None:
    with pytest.raises(error, match=rf"summarize raised {error.__name__}: {cause}, given .*'loss': .*training reports"):
        toy_trainer(8, kind=kind, batch_size=2).fit()


def test_an_error_in_summarize_of_a_class_of_its_own_is_told_too() -> None:
    class Odd(KeyError):
        def __init__(self, key: str, where: str) -> None:
            super().__init__(f"{key} in {where}")

    class Summing(DDPTrainer):
        def summarize(self, means: dict[str, float]) -> dict[str, float]:
            raise Odd("f1", "means")

    with pytest.raises(KeyError, match="summarize raised Odd: 'f1 in means', given"):
        toy_trainer(4, kind=Summing, batch_size=2).fit()


def test_a_rank_that_waits_for_one_that_has_finished_is_told_so(ranks: Ranks) -> None:
    """`fit` within ``if rank == 0``, as one person or another writes it."""

    def fit() -> str:
        with toy_trainer(8, batch_size=2) as trainer:
            if trainer.world.is_main:
                trainer.fit()
        return ""

    first, second = ranks.outcomes(2, fit)
    assert second.ok
    assert "rank 0 was waiting for the other ranks, after step 0; rank 1 has closed its world" in first.message
    assert "Is there an `if rank == 0` around one of them?" in first.message


def test_ranks_that_make_different_calls_are_told_so(ranks: Ranks) -> None:
    def fit_or_evaluate() -> str:
        with toy_trainer(8, batch_size=2, eval_numbers=4) as trainer:
            if trainer.world.rank == 1:
                trainer.fit()
            else:
                trainer.evaluate()
        return ""

    for outcome in ranks.outcomes(3, fit_or_evaluate):
        assert outcome.error == "RuntimeError"
        assert "different calls: evaluate on rank 0, 2; fit on rank 1. Every rank must make the same ones" in outcome.message
        assert outcome.seconds < 20


def test_ranks_that_go_on_from_different_places_are_told_so(ranks: Ranks) -> None:
    """A state that only rank 0 has loaded."""

    def run() -> None:
        with toy_trainer(8, batch_size=2, max_steps=1) as before:
            before.fit()
            state = before.state_dict()
        with toy_trainer(8, batch_size=2) as trainer:
            if trainer.world.is_main:
                trainer.load_state_dict(state)
            trainer.fit()

    for outcome in ranks.outcomes(2, run):
        assert "different calls: fit after step 1, sample 4 on rank 0; fit on rank 1. Every rank" in outcome.message


@pytest.mark.parametrize("built", [True, False], ids=["at construction", "in a call"])
def test_ranks_with_their_evaluations_in_another_order_are_told_so(ranks: Ranks, built: bool) -> None:
    def run() -> None:
        world, model = World.from_env(), Toy()
        sets = {name: Numbers(4) for name in ("ab" if world.is_main else "ba")}
        options: Any = {"eval_data": sets} if built else {}
        trainer = DDPTrainer(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn=mean_of_outputs, **options)
        trainer.evaluate(sets)

    told = "the order of eval_data is ['a', 'b'] on rank 0, ['b', 'a'] on rank 1"
    for outcome in ranks.outcomes(2, run):
        assert (told if built else "evaluate of a, b on rank 0; evaluate of b, a on rank 1") in outcome.message


def test_a_call_on_a_closed_world_is_told_so(ranks: Ranks) -> None:
    def late(call: str) -> str:
        with toy_trainer(8, batch_size=2) as trainer:
            trainer.fit()
        trainer.close()  # once more does nothing
        trainer.world.close()
        with pytest.raises(RuntimeError) as raised:
            trainer.world.barrier() if call == "barrier" else trainer.predict(Numbers(4))
        return str(raised.value)

    for call, name in (("barrier", "World.barrier"), ("predict", "predict")):
        for text in ranks(2, late, call):
            assert text.startswith(f"{name} needs the other ranks, but this world is closed")


def test_an_error_in_an_evaluation_is_explained_as_one_in_fit(ranks: Ranks) -> None:
    """A rank that evaluates while another has gone."""

    def evaluate() -> str:
        with toy_trainer(8, batch_size=2, eval_numbers=4) as trainer:
            if trainer.world.is_main:
                trainer.evaluate()
        return ""

    first, second = ranks.outcomes(2, evaluate)
    assert second.ok
    assert "rank 0 was waiting for the other ranks, after step 0; rank 1 has closed its world" in first.message


class Looks(Callback):
    """Takes a metric out of what a hook is given."""

    def __init__(self, key: str, hook: str) -> None:
        setattr(self, hook, lambda trainer, metrics: metrics[key])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an error can be given notes from Python 3.11 on")
@pytest.mark.parametrize(
    ("key", "hook", "text"),
    [
        ("loss", "on_step", "(metrics are empty between reports, every log_every steps: ask `if metrics:` first)"),
        ("acc", "on_eval", "(the metrics are 'loss')"),
        ("acc", "on_epoch_end", "(the metrics are 'loss')"),
    ],
)
def test_a_metric_that_is_not_there_says_what_is(key: str, hook: str, text: str) -> None:
    with pytest.raises(KeyError) as raised:
        toy_trainer(8, eval_numbers=2, callbacks=[Looks(key, hook)], batch_size=2, log_every=2).fit()
    assert raised.value.__notes__ == [text]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an error can be given notes from Python 3.11 on")
def test_a_key_that_is_none_of_the_metrics_has_no_such_note() -> None:
    class Own(Callback):
        def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            raise KeyError("loss")

    with pytest.raises(KeyError) as raised:
        toy_trainer(8, eval_numbers=2, callbacks=[Own()], batch_size=2).fit()
    assert not hasattr(raised.value, "__notes__")


def test_a_scheduler_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, math.exp)
    trainer = DDPTrainer(
        model, optimizer, Numbers(8), loss_fn=mean_of_outputs, scheduler=scheduler, callbacks=[Checkpoint(tmp_path / "run")]
    )
    with pytest.raises(TypeError, match=r"Checkpoint cannot save the scheduler: LambdaLR\.state_dict\(\) failed: .*__dict__"):
        trainer.fit()
    assert trainer.state.step == 0
    assert not names_in(tmp_path)


def test_a_finished_run_that_is_resumed_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(epochs: int) -> int:
        callbacks = [Checkpoint(tmp_path)]
        return toy_trainer(8, callbacks=callbacks, batch_size=2, epochs=epochs).fit(resume_from=tmp_path).step

    text = "nothing left to train: the planned end was reached at step 8, after 2 epochs; raise epochs or max_steps to go on"
    with caplog.at_level(logging.WARNING):
        assert train(2) == 8
        assert "nothing left" not in caplog.text
        assert train(2) == 8
        assert text in caplog.text
        caplog.clear()
        assert train(3) == 12
        assert "nothing left" not in caplog.text


class Broken(Numbers):
    """Has one sample that cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("a torn image")
        return super().__getitem__(index)


class BrokenBatches(Broken):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Ended(Numbers):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index if index != 5 else next(iter(())))


class Uneven(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1 + index % 3), torch.zeros(())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an error can be given notes from Python 3.11 on")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Broken, "(Broken: __getitem__ of 5, in epoch 0)"),
        (BrokenBatches, "(BrokenBatches: __getitems__ of [4, 5], in epoch 0)"),
        (Ended, "(Ended: __getitem__ of 5, in epoch 0)"),
        (Uneven, "(Uneven: collate_fn of [0, 1], in epoch 0)"),
    ],
)
def test_an_error_of_the_data_says_of_which_samples(kind: type[Numbers], what: str, workers: int) -> None:
    model = Toy()
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    config = TrainerConfig(batch_size=2, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = DDPTrainer(model, optimizer, kind(8), loss_fn=mean_of_outputs, loader_options=options, config=config)
    with pytest.raises((OSError, RuntimeError)) as raised:
        trainer.fit()
    assert what in "".join(traceback.format_exception(raised.value))


def test_an_error_of_the_data_in_an_evaluation_says_of_which_sample() -> None:
    with pytest.raises(OSError, match="a torn image") as raised:
        toy_trainer(8).evaluate(Broken(8))
    assert "(Broken: __getitem__ of 5, in an evaluation or prediction)" in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("text", ["buy milk\n", "buy milk", '{"a": 1}\n', '{"step": null}\n', "\x89PNG\r\n"])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_file_of_one_line_that_is_no_log_is_left_alone(tmp_path: Path, text: str, resumes: bool) -> None:
    (path := tmp_path / "notes.txt").write_text(text, encoding="latin-1")
    before = path.read_bytes()
    trainer = toy_trainer(8, callbacks=[JSONLines(path)], batch_size=2)
    trainer.state.step = 2 * resumes
    with pytest.raises(ValueError, match=r"notes\.txt, line 1 is no line of a JSONLines log"):
        trainer.fit()
    assert path.read_bytes() == before
    assert names_in(tmp_path) == {"notes.txt"}


@pytest.mark.parametrize("torn", [b"", b"\0\0\0", b'{"ki', b'{"kind": "st', b'{"kind": "step", "step": 2, "lo\0\0'])
def test_a_first_line_that_a_crash_has_torn_is_a_log_still(tmp_path: Path, torn: bytes) -> None:
    (path := tmp_path / "log.jsonl").write_bytes(torn)
    toy_trainer(8, callbacks=[JSONLines(path)], batch_size=2).fit()
    assert json.loads(path.read_text().splitlines()[0])["step"] == 1


class Inner(DDPTrainer):
    """Trains another model before each epoch, and does without it where that fails."""

    inner: DDPTrainer

    def before_epoch(self) -> None:
        with contextlib.suppress(ValueError):
            self.inner.fit()


def test_a_fit_inside_another_tells_its_callbacks_of_its_error() -> None:
    class Fails(Recorder):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            raise ValueError("boom")

    callback = Fails()
    outer = toy_trainer(8, kind=Inner, batch_size=2)
    assert isinstance(outer, Inner)
    outer.inner = toy_trainer(8, callbacks=[callback], batch_size=2)
    assert outer.fit().step == 4
    assert [call.name for call in callback.calls][-1] == "on_exception"
    with pytest.raises(ValueError, match="boom"):
        outer.inner.fit()


def test_a_model_is_let_go_of_after_an_evaluation_that_ran_out_of_memory() -> None:
    class Hungry(DDPTrainer):
        def eval_step(self, model: nn.Module, batch: Any) -> Any:
            raise RuntimeError("can't allocate memory")

    def evaluate() -> tuple[weakref.ref[nn.Module], str]:
        trainer, text = toy_trainer(8, kind=Hungry, batch_size=2, eval_batch_size=512), ""
        try:
            trainer.evaluate(Numbers(4))
        except RuntimeError as error:
            text = str(error)
        return weakref.ref(trainer.model), text

    gc.collect()
    gc.disable()
    try:
        model, text = evaluate()
        assert "out of memory with batches of 512: halve eval_batch_size" in text
        assert model() is None
    finally:
        gc.enable()


def test_ranks_of_which_one_gathers_something_else_are_told_so(ranks: Ranks) -> None:
    def other() -> str:
        with toy_trainer(8, batch_size=2, eval_numbers=4) as trainer:
            if trainer.world.is_main:
                trainer.evaluate()
            trainer.world.gather({"a": 1})
        return ""

    first = ranks.outcomes(2, other)[0]
    assert "different calls: evaluate on rank 0; something else on rank 1. Every rank" in first.message


def test_a_hook_with_other_arguments_is_refused_at_once() -> None:
    class Evaluated(Callback):
        def on_eval(self, trainer: DDPTrainer) -> None:  # type: ignore[override]
            raise AssertionError

    class Flexible(Callback):
        def on_eval(self, *given: Any, **named: Any) -> None:
            raise AssertionError

    text = r"Evaluated\.on_eval must take \(self, trainer, metrics\); found it with \(trainer: .*\) -> .*, self left out"
    with pytest.raises(TypeError, match=text):
        toy_trainer(8, callbacks=[Evaluated()])
    toy_trainer(8, callbacks=[Flexible()])


@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.ExponentialLR])
def test_a_class_of_schedulers_that_takes_something_else_is_refused(kind: Any) -> None:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(TypeError, match=rf"found the class {kind.__name__} itself, whose second argument is (step_size|gamma)"):
        DDPTrainer(model, optimizer, Numbers(8), loss_fn=mean_of_outputs, scheduler=kind)


@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.CosineAnnealingLR, torch.optim.lr_scheduler.PolynomialLR])
def test_a_class_of_schedulers_that_takes_a_number_of_steps_is_as_good_as_a_function(kind: Any) -> None:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = DDPTrainer(model, optimizer, Numbers(8), loss_fn=mean_of_outputs, scheduler=kind)
    trainer.fit()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)


def test_a_mean_alone_is_told_how_to_be_named() -> None:
    class Bare(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            return Mean(model(batch[0]).sum(), 2)

    with pytest.raises(TypeError, match=r"it returned a Mean \(name it: \{'loss': Mean\(\.\.\.\)\}\)"):
        toy_trainer(8, kind=Bare, batch_size=2).fit()


def test_a_prediction_of_a_whole_batch_is_refused() -> None:
    class Averages(DDPTrainer):
        def predict_step(self, model: nn.Module, batch: Any) -> Any:
            return {"mean": model(batch[0]).mean()}

    with pytest.raises(ValueError, match="predict_step must return a row for each sample of the batch; found a 0-dim tensor"):
        toy_trainer(8, kind=Averages, batch_size=2).predict(Numbers(5))


@pytest.mark.parametrize(
    "output", [0.5, "text", np.array(0.5), {"a": 3}, ([1, 2], object()), [1, 2, 3], torch.zeros(1, 2), np.zeros((3, 2))]
)
def test_a_prediction_that_could_not_be_joined_by_sample_is_refused(output: Any) -> None:
    class One(DDPTrainer):
        def predict_step(self, model: nn.Module, batch: Any) -> Any:
            return output

    with pytest.raises(ValueError, match="predict_step must return"):
        toy_trainer(8, kind=One, batch_size=2).predict(Numbers(5))


def test_a_part_of_a_prediction_that_is_none_is_none_however_it_is_split() -> None:
    class Half(DDPTrainer):
        def predict_step(self, model: nn.Module, batch: Any) -> Any:
            return batch[0], None

    for size in (2, 5):
        values, nothing = toy_trainer(8, kind=Half, batch_size=size).predict(Numbers(5))
        assert (values.tolist(), nothing) == ([0.0, 1.0, 2.0, 3.0, 4.0], None)


def test_a_part_of_a_prediction_that_only_some_batches_have_is_refused() -> None:
    class Some(DDPTrainer):
        def predict_step(self, model: nn.Module, batch: Any) -> Any:
            return batch[0], batch[0] if batch[0][0] > 1 else None

    with pytest.raises(ValueError, match="gave None for some batches and rows for others"):
        toy_trainer(8, kind=Some, batch_size=2).predict(Numbers(5))


@pytest.mark.parametrize("first", [False, True])
def test_predictions_of_different_forms_are_refused(first: bool) -> None:
    class Some(DDPTrainer):
        def predict_step(self, model: nn.Module, batch: Any) -> Any:
            scores = {"score": batch[0]}
            return scores | {"box": batch[0]} if bool(batch[0][0] == 0) is first else scores

    with pytest.raises(ValueError, match=r"the same for every batch; found the keys \['box', 'score'\] and the keys \['score'\]"):
        toy_trainer(8, kind=Some, batch_size=2).predict(Numbers(5))


def test_a_prediction_of_a_stream_with_a_length_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError

    with pytest.raises(
        TypeError, match=r"data must be a map-style Dataset, with __getitem__ and __len__; found .*Stream, a stream"
    ):
        toy_trainer(8, batch_size=2).predict(Stream())


def test_the_default_prediction_of_texts_is_refused() -> None:
    """A batch of them is a list, of which the first is no batch of inputs."""
    with pytest.raises(ValueError, match=r"a tensor of shape \(1,\) for 2 samples"):
        toy_trainer(8, nn.Sequential(_Length()), batch_size=2).predict(["a", "bc", "d"])  # type: ignore[arg-type]


class _Length(Toy):
    def forward(self, text: Any) -> Any:
        return torch.tensor([float(len(text))])


def test_ranks_that_predict_with_other_weights_are_told_so(ranks: Ranks) -> None:
    def run() -> None:
        with toy_trainer(8, batch_size=2) as trainer:
            nn.init.constant_(trainer.model.w, float(trainer.world.rank))  # type: ignore[arg-type]
            trainer.predict(Numbers(4))

    for outcome in ranks.outcomes(2, run):
        assert "parameters have drifted apart by step 0: w. " in outcome.message


def test_ranks_that_predict_on_datasets_of_other_lengths_are_told_so(ranks: Ranks) -> None:
    def run() -> None:
        with toy_trainer(8, batch_size=2) as trainer:
            trainer.predict(Numbers(10 - trainer.world.rank))

    for outcome in ranks.outcomes(2, run):
        assert "the ranks predict on datasets of [9, 10] samples: pass the same one on every rank" in outcome.message


def test_ranks_with_other_parts_of_the_data_are_told_so(ranks: Ranks) -> None:
    """Somebody shared it out by hand."""

    def build(where: str) -> None:
        world, model = World.from_env(), Toy()
        own, whole = Subset(Numbers(8), range(world.rank, 8, 2)), Subset(Numbers(4), [3, 1, 2, 0])
        data = (own, whole) if where == "train_data" else (whole, own)
        DDPTrainer(model, torch.optim.SGD(model.parameters(), lr=1.0), *data, loss_fn=mean_of_outputs)

    for where in ("train_data", "eval_data"):
        for outcome in ranks.outcomes(2, build, where):
            assert outcome.error == "ValueError"
            assert f"different things: a checksum of the indices of {where} is " in outcome.message


def test_a_rank_that_exits_is_not_said_to_have_failed(ranks: Ranks) -> None:
    class Exits(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            if self.world.rank == 1 and self.state.step == 1:
                sys.exit(0)
            return super().training_step(model, batch)

    def fit() -> None:
        with toy_trainer(8, kind=Exits, batch_size=2) as trainer:
            trainer.fit()

    first = ranks.outcomes(2, fit)[0]
    assert "rank 1 has closed its world: every rank must make the same calls" in first.message


@pytest.mark.parametrize("kind", [TensorBoard, Profiler])
def test_a_file_in_a_folders_place_is_found_before_anything_is_written(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "file").touch()
    callbacks = [JSONLines(tmp_path / "log.jsonl"), Checkpoint(tmp_path / "run" / "files"), kind(tmp_path / "file")]
    with pytest.raises(NotADirectoryError, match=rf"{kind.__name__}: .*file is a file; give it a folder"):
        toy_trainer(8, callbacks=callbacks, batch_size=2).fit()
    assert names_in(tmp_path) == {"file"}
    assert not (tmp_path / "run" / "files").exists()


@pytest.mark.parametrize(
    "make", [lambda folder: Checkpoint(folder, monitor="loss"), lambda folder: EarlyStopping("loss", patience=1)]
)
def test_a_monitor_without_an_evaluation_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any) -> None:
    def train(eval_every: int) -> str:
        caplog.clear()
        callbacks = [make(tmp_path / str(eval_every))]
        toy_trainer(8, eval_numbers=2, callbacks=callbacks, batch_size=2, eval_every=eval_every).fit()
        return caplog.text

    assert "the run ended without an evaluation" in train(1000)
    assert train(2) == ""


def test_a_job_that_is_refused_a_folder_touches_no_log_of_the_job_that_holds_it(tmp_path: Path) -> None:
    def trainer() -> DDPTrainer:
        callbacks = [JSONLines(tmp_path / "log.jsonl"), Checkpoint(tmp_path, every_steps=1)]
        return toy_trainer(8, callbacks=callbacks, batch_size=2)

    trainer().fit()
    (tmp_path / "step-00000004.pt").unlink()  # the other job goes back to step 3
    before = (tmp_path / "log.jsonl").read_bytes()
    (holder := CheckpointFolder(tmp_path)).lock()
    try:
        with pytest.raises(CheckpointError, match="is in use by another Checkpoint of this process"):
            trainer().fit(resume_from=tmp_path / "step-00000003.pt")
    finally:
        holder.unlock()
    assert (tmp_path / "log.jsonl").read_bytes() == before


class Noisy(DDPTrainer):
    """Draws from every generator on the way to the device."""

    def prepare_batch(self, batch: Any) -> Any:
        numbers, targets = super().prepare_batch(batch)
        return numbers + torch.rand(()).double() + random.random() + np.random.rand(), targets


@pytest.mark.parametrize("tensors", [False, True])
def test_what_is_drawn_in_prepare_batch_follows_from_where_in_the_run_it_is(tmp_path: Path, tensors: bool) -> None:
    numbers = torch.arange(12, dtype=torch.float64)
    data = TensorDataset(numbers, numbers) if tensors else Numbers(12)

    def train(folder: str, resume: str | None) -> tuple[float, float]:
        for generator in (torch.rand, np.random.rand):  # wherever they are
            generator(int(time.time_ns() % 7))
        model = Toy()
        config = TrainerConfig(batch_size=2, epochs=2, log_every=1)
        callbacks = [Checkpoint(tmp_path / folder, every_steps=1, keep_last=99)]
        trainer = Noisy(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            data,
            data,
            loss_fn=mean_of_outputs,
            config=config,
            callbacks=callbacks,
        )
        trainer.fit(resume_from=None if resume is None else tmp_path / resume)
        return float(model.w.detach()), trainer.evaluate()["loss"]

    whole = train("whole", None)
    assert train("again", None) == whole
    for step in (1, 5, 6, 7):
        assert train(f"from-{step}", f"whole/step-{step:08d}.pt") == whole


def test_a_sparse_buffer_is_fine_on_one_process_and_named_on_several(ranks: Ranks) -> None:
    def fit() -> int:
        model = Toy()
        model.register_buffer("a", torch.eye(3).to_sparse())
        return toy_trainer(8, model, batch_size=2).fit().step

    assert ranks(1, fit) == [4]
    for outcome in ranks.outcomes(2, fit):
        assert outcome.error == "ValueError"
        assert "a tensor of layout torch.sparse_c" in outcome.message


def test_a_run_whose_model_holds_new_types_is_resumed(tmp_path: Path) -> None:
    def train(resume: bool) -> Any:
        model = Toy()
        model.register_buffer("a", torch.tensor([0.0, 0.0] if resume else [0.5, 2.0]).to(torch.float8_e4m3fn))
        toy_trainer(8, model, callbacks=[Checkpoint(tmp_path)], batch_size=2, epochs=1 + resume).fit(resume_from=tmp_path)
        return model.a.float().tolist()

    assert train(False) == train(True) == [0.5, 2.0]


def test_an_error_of_the_user_s_is_no_failed_collective_whatever_its_text_holds(ranks: Ranks) -> None:
    """With "gloo" in a file's name, in an error of a class that wants more than a text."""

    class Unreadable(RuntimeError):
        def __init__(self, path: str, place: int) -> None:
            super().__init__(f"cannot read {path} at {place}")

    class Images(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise Unreadable("igloo/0007.jpg", 3)
            return super().__getitem__(index)

    def run() -> None:
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        DDPTrainer(model, optimizer, Images(8), loss_fn=mean_of_outputs, config=TrainerConfig(batch_size=2)).fit()

    outcomes = ranks.outcomes(2, run)
    messages = {str(outcome.error).rpartition(".")[2]: outcome.message for outcome in outcomes}
    assert messages["Unreadable"].startswith("cannot read igloo/0007.jpg at 3")
    assert "was waiting" not in messages["Unreadable"]
    assert any("failed with an error of its own" in message for message in messages.values())


def test_an_error_that_is_told_more_keeps_what_it_can_of_its_type() -> None:
    class Allocation(RuntimeError):
        def __init__(self, size: int, device: str) -> None:
            super().__init__(f"can't allocate memory: {size} on {device}")

    class Hungry(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            raise Allocation(7, "cpu")

    with pytest.raises(RuntimeError, match="allocate memory: 7 on cpu\nout of memory with batch_size=2") as error:
        toy_trainer(8, kind=Hungry, batch_size=2).fit()
    assert isinstance(error.value.__cause__, Allocation)


def test_warnings_point_at_the_line_of_the_script() -> None:
    """Those of a trainer's methods, of a callback's, of what the optimizer lacks, and of what has no effect."""

    class Misnamed(DDPTrainer):
        def validation_step(self, batch: Any) -> None: ...

    class Hooked(Callback):
        def on_train_end(self, trainer: DDPTrainer) -> None: ...

    def lacking() -> None:
        model = nn.ModuleDict({"toy": Toy(), "more": Toy()})
        model.forward = lambda x: model["toy"](x) + model["more"](x)  # type: ignore[method-assign]
        optimizer = torch.optim.SGD(model["toy"].parameters(), lr=1.0)
        DDPTrainer(model, optimizer, Numbers(2), loss_fn=mean_of_outputs, config=TrainerConfig(batch_size=2)).fit()

    def quiet() -> None:
        model = Toy().eval()
        DDPTrainer(model, torch.optim.SGD(model.parameters()), Numbers(2), loss_fn=mean_of_outputs).fit()

    def misnamed() -> None:
        model = Toy()
        Misnamed(model, torch.optim.SGD(model.parameters()))

    def hooked() -> None:
        model = Toy()
        DDPTrainer(model, torch.optim.SGD(model.parameters()), callbacks=[Hooked()])

    for call in (lacking, quiet, misnamed, hooked):
        with pytest.warns() as caught:
            call()
        own = {(__file__, line) for *_, line in call.__code__.co_lines()}
        assert [(warning.filename, warning.lineno) in own for warning in caught] == [True], caught[0]


def test_what_runs_out_of_memory_is_named_by_where_it_did() -> None:
    """Not by names that a script has for its own methods; and the copy of a state by what makes it."""

    class Predicting(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            return self.predict(batch) if model.training else super().training_step(model, batch)

        def predict(self, data: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError, match="halve it and keep the global batch"):
        toy_trainer(4, kind=Predicting, batch_size=2).fit()


def test_a_copy_of_the_state_that_finds_no_memory_says_what_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: HostCopy, content: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(HostCopy, "take", take)
    with pytest.raises(RuntimeError, match=r"with a copy of the state to be written: Checkpoint\(async_write=False\) needs none"):
        toy_trainer(4, batch_size=2, callbacks=[Checkpoint(tmp_path)]).fit()


@pytest.mark.parametrize("world_size", [1, 2])
def test_texts_that_the_default_collate_has_put_into_a_tuple_come_in_order(ranks: Ranks, world_size: int) -> None:
    class Named(Numbers):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0], f"sample {index}"

    class Naming(DDPTrainer):
        def predict_step(self, model: nn.Module, batch: Any) -> Any:
            numbers, names = batch
            return {"y": numbers, "name": names}

    def predict() -> Any:
        return toy_trainer(1, kind=Naming, batch_size=3).predict(Named(7))

    predicted, *_ = ranks(world_size, predict)
    assert predicted["name"] == [f"sample {number}" for number in range(7)]
    assert predicted["y"].tolist() == list(range(7))


def test_a_loss_that_holds_weights_goes_to_the_device() -> None:
    class Weighted(nn.Module):
        device: Any = None

        def to(self, *arguments: Any, **named: Any) -> Any:
            self.device = arguments[0]
            return super().to(*arguments, **named)

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return outputs.mean()

    model, loss = Toy(), Weighted()
    trainer = DDPTrainer(model, torch.optim.SGD(model.parameters()), Numbers(2), loss_fn=loss)
    assert loss.device == trainer.world.device
    assert trainer.loss_fn is loss


@pytest.mark.parametrize("world_size", [1, 2])
def test_batchnorm_on_a_rest_of_one_sample_says_what_to_change(ranks: Ranks, world_size: int) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1).double()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.norm(inputs.unsqueeze(1))
            return outputs

    def run() -> None:
        toy_trainer(9 * world_size, Normed(), batch_size=4).fit()

    told = r"Expected more than 1 value per channel.*a micro-batch of one sample.*drop_last=True"
    outcome = ranks.outcomes(world_size, run, timeout=30)[0]
    assert outcome.error == "ValueError"
    assert re.search(told, outcome.message, re.DOTALL)


@pytest.mark.parametrize(("global_batch_size", "idle"), [(2, True), (3, False)])
def test_processes_without_work_are_told_once(ranks: Ranks, global_batch_size: int, idle: bool) -> None:
    def run() -> list[str]:
        logged: list[str] = []
        logging.getLogger("trainer").addFilter(lambda record: logged.append(record.getMessage()) or False)
        toy_trainer(12, batch_size=1, global_batch_size=global_batch_size).fit()
        return logged

    told = "a global batch of 2 samples leaves 1 of 3 processes without any in every step: raise global_batch_size"
    assert ranks(3, run) == [[told] * idle, [], []]
