"""The curves of a run, for TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer import Callback, DDPTrainer


class TensorBoard(Callback):
    """Writes scalars to an event file in `folder`, which is made if need be. To look: ``tensorboard --logdir folder``.

    Tags: ``train/<key>`` at each report, ``eval/<key>`` after each evaluation, ``epoch/<key>`` at the end of each
    epoch. The x axis of them all is `TrainerState.step`, optimizer updates; the first is 1. NaN and infinities are
    written as they are. The fields of the config are hyper-parameters in the same file.

    A resumed run adds a file to the folder, and its points take the place of those after the step it was restored at: in
    TensorBoard's default reader tag by tag, once there is a new point; with ``--load_fast=false`` at once. A fresh run in
    a used folder replaces the old one alike, but the table of hyper-parameters shows the folder's first: give each run
    a folder of its own. What a checkpoint has seen is on disk before the checkpoint is; besides, the file is at most ten
    seconds behind. It is closed when `fit` ends, also by an error.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"folder must be the path of a folder; found {folder!r}")
        self.folder = os.fspath(folder)
        self._writer: Any = None  # a SummaryWriter, whose types say that it has no file_writer
        self._end: Any = None

    def before_fit(self, trainer: DDPTrainer) -> None:
        if os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise NotADirectoryError(f"TensorBoard: {self.folder} is a file; give it a folder, to be made if need be")

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        # Here, not above: the imports take a second, and ranks other than 0 have no use for them.
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import SummaryWriter

        # purge_step hides earlier points from that step on: 1 to state.step stay. A reader takes the first such mark in
        # a folder for the beginning and only later ones for restarts, so a fresh run needs one as well.
        _wait_for_a_later_name(self.folder)
        self._writer = SummaryWriter(self.folder, purge_step=trainer.state.step + 1, flush_secs=10)
        # add_hparams would write into a folder of its own. Of these three summaries the first is a list of columns,
        # without which TensorBoard makes one itself, from all runs and with all metrics.
        config = {key: _plain(value) for key, value in trainer.config.plain().items()}
        _, begin, self._end = hparams(config, {})  # type: ignore[no-untyped-call]
        self._writer.file_writer.add_summary(begin)

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._write("train", trainer, metrics)

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self._write("eval", trainer, metrics)

    def on_epoch_end(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self._write("epoch", trainer, metrics)

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        self._writer.file_writer.add_summary(self._end)  # the run's status: success
        self._close()

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        self._close()

    def state_dict(self) -> dict[str, Any]:
        # A checkpoint is being taken. A run resumed from it would never write these points again.
        if self._writer is not None:
            with suppress(OSError):  # a log that cannot be written keeps no checkpoint from being; its next line says so
                self._writer.flush()
        return {}

    def _write(self, kind: str, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for them all: add_scalar, an event for each, takes several times as long.
        values = [Summary.Value(tag=f"{kind}/{key}", simple_value=value) for key, value in metrics.items()]
        self._writer.file_writer.add_summary(Summary(value=values), trainer.state.step)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _wait_for_a_later_name(folder: str) -> None:
    """Readers take a folder's event files in the order of their names, which begin with the second they were made in."""
    seconds = [int(path.name.split(".")[3]) for path in Path(folder).glob("events.out.tfevents.[0-9]*")]
    time.sleep(min(max(0.0, max(seconds, default=0) + 1 - time.time()), 1.0))


def _plain(value: Any) -> bool | int | float | str | None:
    """What a hyper-parameter can be; None is left out of the table."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
