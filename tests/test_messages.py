"""What a person is told who does something silly: found early, with nothing written, and with the way out."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callbacks import Checkpoint, JSONLines
from tests.helpers import Ranks, mean_of_outputs, toy_trainer
from trainer import CheckpointError, DDPTrainer, checkpoint
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
