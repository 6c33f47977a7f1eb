"""The machine-readable log."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from trainer import Callback, DDPTrainer

_log = logging.getLogger("callbacks")
_FIELDS = ("kind", "step", "epoch", "time")
_BEGINNING = b'{"kind": "'


class JSONLines(Callback):
    """Writes one JSON object a line to the file `path`, whose folder is made if need be.

    ``{"kind": "step", "step": 40, "epoch": 0, "time": 1764460800.25, "loss": 0.31, "lr": 0.001, ...}``

    - ``kind``: "step" at each report, "eval" after each evaluation, "epoch" at the end of each epoch.
    - ``step``, ``epoch``: optimizer updates and epochs finished by then.
    - ``time``: seconds since 1970-01-01 UTC.
    - then the metrics. NaN and infinities are written as ``NaN``, ``Infinity`` and ``-Infinity``: Python and pandas
      read them back, strict JSON parsers do not.

    Each line is complete in the file when its hook returns. A resumed run first drops the lines after the step it was
    restored at (and a last line that a crash has torn), then continues the file. A run that starts at step 0 moves a
    log that it finds aside, to ``<path>.1``, ``<path>.2``, ...: two runs are never mixed, and none is lost.

    Raises ValueError, when `fit` starts, if the file exists and is not such a log (it stays untouched), and, at the
    first report, for a metric with the name of a field.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be the path of a file; found {path!r}")
        self.path = Path(path)
        self._file: BinaryIO | None = None

    def before_fit(self, trainer: DDPTrainer) -> None:
        if self.path.is_dir():
            raise IsADirectoryError(f"JSONLines: {self.path} is a folder; give it a file, such as {self.path / 'log.jsonl'}")
        if self.path.exists():  # raises for a file that is no log, before any callback has written anything
            for number, _ in enumerate(_lines_up_to(self.path, trainer.state.step or sys.maxsize)):
                if trainer.state.step == 0 and number > 0:
                    break  # it will only be moved

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size:
            if trainer.state.step == 0:
                _move_aside(self.path)
            else:
                _cut_back(self.path, trainer.state.step)
        self._file = self.path.open("ab")

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._write("step", trainer, metrics)

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self._write("eval", trainer, metrics)

    def on_epoch_end(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self._write("epoch", trainer, metrics)

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        self._close()

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        self._close()

    def _write(self, kind: str, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        clash = [key for key in metrics if key in _FIELDS]
        if clash:
            raise ValueError(f"JSONLines cannot log a metric named {clash[0]!r}, a field that every line has: rename the metric")
        assert self._file is not None
        state = trainer.state
        line = {"kind": kind, "step": state.step, "epoch": state.epoch, "time": time.time(), **metrics}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _move_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
    _log.warning("%s holds the log of an earlier run; moved it to %s", path, aside)


def _cut_back(path: Path, step: int) -> None:
    """Keep the lines up to `step`. At any instant there is either the old file or the new one."""
    new = path.with_name(f"{path.name}.tmp")
    try:
        with new.open("wb") as file:
            file.writelines(_lines_up_to(path, step))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _lines_up_to(path: Path, step: int) -> Iterator[bytes]:
    torn, line = None, b""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if torn is not None:
                raise ValueError(f"{path}, line {torn} is no line of a JSONLines log; give the callback another path")
            try:
                is_kept = json.loads(line)["step"] <= step
            except (ValueError, LookupError, TypeError):
                torn = number  # fine if it is the last one: the crash came while it was written
                continue
            if is_kept:
                yield line if line.endswith(b"\n") else line + b"\n"
    if torn == 1 and not _BEGINNING.startswith(line.rstrip(b"\0")[: len(_BEGINNING)]):  # all there is, and never one of a log
        raise ValueError(f"{path}, line 1 is no line of a JSONLines log; give the callback another path")
