"""Checkpoint files: written whole or not at all, found, verified and read without running any code in them."""

from __future__ import annotations

import logging
import os
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FORMAT = 1
"""The version of a file's content: a dict of format, state, config, model, optimizer, scheduler, scaler and callbacks."""

_log = logging.getLogger("trainer")
_NAME = re.compile(r"step-(\d{8,})\.pt")
_UNFINISHED = ".tmp"
_PLAIN = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)  # no bytes: b"" is not loaded


class CheckpointError(RuntimeError):
    """A checkpoint file that cannot be used: the message names the file and what is wrong with it."""


class CheckpointFolder:
    """The checkpoints of one run: ``step-00000042.pt`` after step 42, and others under names of their own."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def steps(self) -> dict[int, Path]:
        """The step files by step, oldest first. Unfinished files are none."""
        found = [(match, path) for path in self.folder.glob("step-*.pt") if (match := _NAME.fullmatch(path.name))]
        return dict(sorted((int(match[1]), path) for match, path in found))

    def write(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write `content` (a trainer's ``state_dict()``) under `name`, whole or not at all; see `write`."""
        path = self.folder / name
        write(path, content)
        return path

    def newest(self) -> dict[str, Any] | None:
        """The content of the newest whole step file; damaged ones are named in the log and passed over. None: there is no file.

        Raises CheckpointError when all of them are damaged.
        """
        paths = list(self.steps().values())
        for path in reversed(paths):
            try:
                return read(path)
            except CheckpointError as error:
                _log.error("passed over a damaged checkpoint: %s", error)
        if paths:
            raise CheckpointError(
                f"all {len(paths)} checkpoints in {self.folder} are damaged; to start afresh, use another folder or remove them"
            )
        return None

    def sweep(self) -> None:
        """Remove what a killed run has left unfinished. Only the run that owns the folder may do so."""
        for path in self.folder.glob(f"*.pt{_UNFINISHED}"):
            path.unlink(missing_ok=True)


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path`, whole or not at all: a kill or a full disk at any instant leaves an older file as it was.

    Raises TypeError for a value that `read` would refuse (only tensors and plain values can be loaded without running code),
    naming it, and OSError as the system raises it.
    """
    if (place := _not_plain(content, "")) is not None:
        raise TypeError(
            f"cannot be saved in a checkpoint: {place}. Only tensors, numbers, text, None, and lists, tuples, sets and dicts of "
            "them can be loaded without running code; convert it, as with float(...), str(...) or .tolist()"
        )
    unfinished = path.with_name(path.name + _UNFINISHED)
    try:
        with open(unfinished, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch's failure to end a file that the system would not take
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new name itself must reach the disk too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU, after its checksums were verified; no code in it is run.

    Raises CheckpointError for a file that is damaged, no checkpoint, or of a newer format.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not verify the checksums
            if (damaged := archive.testzip()) is not None:
                raise CheckpointError(f"{path} is damaged: the checksum of {damaged} does not match")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is no whole checkpoint: {error}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path} was not written by DDPTrainer: it holds no 'format'")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}; this version reads format {FORMAT}")
    return content


def find(resume_from: str | Path) -> dict[str, Any] | None:
    """What to resume from: a file's content, or that of the newest whole one in a folder; None for an empty or missing folder.

    Raises TypeError or ValueError for what is no path, FileNotFoundError for a file that does not exist, CheckpointError for
    what cannot be used.
    """
    if not isinstance(resume_from, (str, os.PathLike)):
        raise TypeError(f"resume_from must be the path of a checkpoint or of a folder of them; found {resume_from!r}")
    if not os.fspath(resume_from):
        raise ValueError("resume_from is an empty text: name a checkpoint or a folder of them, or pass None to start afresh")
    path = Path(resume_from)
    if path.is_file():
        return read(path)
    if path.suffix in (".pt", ".pth", ".ckpt") and not path.is_dir():
        raise FileNotFoundError(f"resume_from={str(path)!r} does not exist: name a checkpoint file, or a folder of them")
    return CheckpointFolder(path).newest()


def _not_plain(value: Any, place: str) -> str | None:
    """The place and type of the first value that loading without running code would refuse."""
    if type(value) in _PLAIN:
        return None
    if type(value) in (Tensor, nn.Parameter):  # the attributes that it may have been given are saved with it
        return _not_plain(vars(value), f"the attributes of {place or 'the content'}")
    items: Any
    if type(value) in (dict, OrderedDict, Counter):
        items = value.items()
    elif type(value) in (list, tuple, set):
        items = enumerate(value)
    else:
        return f"{place or 'the content'} of type {type(value).__module__}.{type(value).__qualname__}"
    for key, item in items:
        inside = f"{place}[{key!r}]" if place else str(key)
        found = _not_plain(key, f"the key {key!r} of {place or 'the content'}") or _not_plain(item, inside)
        if found is not None:
            return found
    return None
