"""What a person is told who does something silly: found early, with nothing written, and with the way out."""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callbacks import Checkpoint, JSONLines
from tests.helpers import Numbers, Ranks, Toy, mean_of_outputs, toy_trainer
from trainer import Callback, CheckpointError, DDPTrainer, TrainerConfig, checkpoint
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


def test_a_call_on_a_closed_world_is_told_so(ranks: Ranks) -> None:
    def late(call: str) -> str:
        with toy_trainer(8, batch_size=2) as trainer:
            trainer.fit()
        trainer.close()  # once more does nothing
        trainer.world.close()
        with pytest.raises(RuntimeError) as raised:
            trainer.world.barrier() if call == "barrier" else trainer.predict(Numbers(4))
        return str(raised.value)

    for call, name in (("barrier", "World.barrier"), ("predict", "World.gather")):
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


@pytest.mark.parametrize(
    ("key", "hook", "text"),
    [
        (
            "loss",
            "on_step",
            "'loss': metrics are empty between reports, every log_every steps; ask `if metrics:` first",
        ),
        ("acc", "on_eval", "'acc' is not reported; there are 'loss'"),
        ("acc", "on_epoch_end", "'acc' is not reported; there are 'loss'"),
    ],
)
def test_a_metric_that_is_not_there_says_what_is(key: str, hook: str, text: str) -> None:
    with pytest.raises(KeyError) as raised:
        toy_trainer(8, eval_numbers=2, callbacks=[Looks(key, hook)], batch_size=2, log_every=2).fit()
    assert raised.value.args == (text,)


def test_what_hooks_are_given_is_a_plain_mapping_otherwise() -> None:
    class Keeps(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            kept.append(metrics)

    kept: list[Mapping[str, float]] = []
    toy_trainer(8, callbacks=[Keeps()], batch_size=2, log_every=2).fit()
    assert [bool(metrics) for metrics in kept] == [False, True, False, True]
    assert kept[0] == {}
    assert kept[0].get("loss") is None
    assert "loss" not in kept[0]
    assert json.loads(json.dumps(kept[1])) == kept[1] == dict(kept[1])


def test_a_scheduler_that_cannot_be_saved_is_refused_at_once() -> None:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, math.exp)
    with pytest.raises(AttributeError, match=r"the scheduler's state_dict\(\), which every checkpoint needs, failed: .*__dict__"):
        DDPTrainer(model, optimizer, Numbers(8), loss_fn=mean_of_outputs, scheduler=scheduler)


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


class Uneven(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1 + index % 3), torch.zeros(())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an error can be given notes from Python 3.11 on")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Broken, "(Broken: __getitem__(5), in epoch 0)"),
        (BrokenBatches, "(BrokenBatches: __getitems__([4, 5]), in epoch 0)"),
        (Uneven, "(Uneven: samples [0, 1], as they were collated, in epoch 0)"),
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
    assert "(Broken: __getitem__(5), in an evaluation)" in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("text", ["buy milk\n", "buy milk", '{"a": 1}\n', "\x89PNG\r\n"])
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
