"""The folder of a run's checkpoints: one job at a time, written in the background, the newest whole file found."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import checkpoint, model_keys
from .checkpoint import UNFINISHED, CheckpointError, FormatError
from .host_copy import HostCopy

_log = logging.getLogger("trainer")
_NAME = re.compile(r"step-(\d{8,})\.pt")
_LOCK = ".lock"
_LOCK_WAIT = 30.0  # seconds: an orphan of a killed job needs some to go
_held: dict[tuple[int, Path], CheckpointFolder] = {}  # by process (a forked one has no lock of its parent's) and lock file


class CheckpointFolder:
    """The checkpoints of one run: ``step-00000042.pt`` after step 42, and others under names of their own."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._copies = HostCopy()
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock: int | None = None
        self._lock_key = (0, self.folder)

    def steps(self) -> dict[int, Path]:
        """The step files by step, oldest first. Unfinished files are none. OSError for a folder that cannot be read."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = [match for name in names if (match := _NAME.fullmatch(name))]
        return dict(sorted((int(match[1]), self.folder / match[0]) for match in found))

    def newest(self) -> dict[str, Any] | None:
        """The content of the newest whole step file; damaged ones are named in the log and passed over. None: there is no file.

        Raises CheckpointError when all of them are damaged, or the newest is of another format; OSError for what cannot be read.
        """
        passed: set[Path] = set()
        while paths := [path for path in self.steps().values() if path not in passed]:
            passed.add(paths[-1])
            try:
                return checkpoint.read(paths[-1])
            except FormatError:
                raise
            except (CheckpointError, FileNotFoundError) as error:
                if os.path.lexists(paths[-1]):  # else the run that writes here has just removed it for a newer one
                    _log.error("passed over a damaged checkpoint: %s", error)
        if damaged := [path for path in passed if os.path.lexists(path)]:
            raise CheckpointError(
                f"all {len(damaged)} checkpoints in {self.folder} are damaged; to start afresh, use another folder or remove them"
            )
        if passed:
            raise CheckpointError(f"the checkpoints in {self.folder} were removed while they were read")
        return None

    @staticmethod
    def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameters by their keys in a checkpoint."""
        return {model_keys.plain_key(name): parameter for name, parameter in model.named_parameters()}

    def holds(self, step: int, model: nn.Module) -> bool:
        """Whether a file here, the best one or that of `step`, has just the model's parameters after just that step."""
        whole = model_keys.plain_keys(model.state_dict())  # of a model that decides what it saves perhaps some, or other names
        own = {key: whole[key] for key in self.parameters(model) if key in whole} or whole
        for path in (self.folder / f"step-{step:08d}.pt", self.folder / "best.pt"):
            with suppress(CheckpointError):
                saved = checkpoint.peek(path)
                held = model_keys.in_keys_of(whole, saved.get("model", {}))
                same = bool(own) and all(key in held and _same(value.detach().cpu(), held[key]) for key, value in own.items())
                if same and saved.get("state", {}).get("step") == step:
                    return True
        return False

    def callback_states(self) -> dict[str, Any]:
        """What the callbacks had saved, by name, in the newest step file that can be read. Not verified."""
        for path in reversed(self.steps().values()):
            with suppress(CheckpointError):
                saved = checkpoint.peek(path).get("callbacks", {})
                return saved if isinstance(saved, dict) else {}
        return {}

    @staticmethod
    def check(content: Mapping[str, Any]) -> None:
        """TypeError naming what of a trainer's ``state_dict()`` could not be saved."""
        checkpoint.check_plain(content)

    def write(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write `content` (a trainer's ``state_dict()``) under `name`, whole or not at all; see `checkpoint.write`.

        Raises CheckpointError where the folder was removed, and is another job's by now.
        """
        path, lock = self.folder / name, self.folder / _LOCK
        if self._lock is not None and lock.exists() and not _is_still(lock, self._lock):
            holder = lock.read_text(errors="replace")
            raise CheckpointError(
                f"{self.folder} is in use by another job ({holder}): it was removed, and made anew, while this run had it. Use "
                "another folder"
            )
        self._lock_again()
        checkpoint.write(path, content)
        return path

    def _lock_again(self) -> None:
        """A POSIX lock goes when its process closes the file, which whatever copies the folder may do."""
        if self._lock is None:
            return
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace")
            raise CheckpointError(
                f"{self.folder} is in use by another job ({holder}), which got in when something in this process opened "
                f"and closed {_LOCK} there: leave that file out of copies"
            ) from error

    def write_behind(self, content: Mapping[str, Any], work: Callable[[Mapping[str, Any]], None]) -> None:
        """Copy `content`, and let `work`, which calls `write`, have the copy, in a thread, while the caller goes on.

        Waits for the work before. Raises that one's error if it failed, and TypeError as `checkpoint.check_plain` does.
        """
        self.wait()
        self.folder = self.folder.absolute()  # the script may go elsewhere, while the thread writes
        checkpoint.check_plain(content)
        copied, settle = self._copies.take(content)

        def run() -> None:
            try:
                settle()
                work(copied)
            except BaseException as error:
                self._error = error

        self._writing = threading.Thread(target=run, name="checkpoint")  # no daemon: Python waits for it when it ends
        self._writing.start()

    def wait(self) -> None:
        """Wait for the write in the background, if there is one, and raise its error if it failed."""
        if self._writing is not None:
            self._writing.join()
        self._writing = None
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of a write in the background that has failed. Does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def lock(self) -> None:
        """Keep every other job out until `unlock`, or until this process ends, however it ends.

        Waits up to 30 s for a job that holds the folder. Raises CheckpointError naming it then. The lock is a POSIX one, the
        process': it also goes when this process opens the lock file a second time and closes that. `write` takes it again.
        """
        path, deadline = self.folder / _LOCK, time.monotonic() + _LOCK_WAIT
        if _held.get((os.getpid(), path.resolve()), self) is not self:
            raise CheckpointError(
                f"{self.folder} is in use by another Checkpoint of this process: give one of them another folder"
            )
        while self._lock is None:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which workers that outlive this process inherit
                if _is_still(path, file):
                    with suppress(OSError):  # on a full disk the holder has no name
                        os.truncate(file, 0)
                        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    self._lock, self._lock_key = file, (os.getpid(), path.resolve())
                    _held[self._lock_key] = self
                    return
            except OSError as error:
                holder = os.read(file, 200).decode(errors="replace")
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    _log.warning("%s cannot be locked (%s): make sure that no other job writes there", self.folder, error)
                    os.close(file)
                    return
                if time.monotonic() > deadline:
                    os.close(file)
                    raise CheckpointError(
                        f"{self.folder} is in use by another job ({holder}): end that one, or give this one another folder"
                    ) from None
            os.close(file)
            time.sleep(0.05)

    def unlock(self) -> None:
        """Let other jobs in."""
        if self._lock is not None:
            with suppress(OSError):  # the folder itself may be gone
                if _is_still(self.folder / _LOCK, self._lock):
                    (self.folder / _LOCK).unlink()
            os.close(self._lock)
            self._lock = None
            _held.pop(self._lock_key, None)

    def wait_for_others(self) -> None:
        """Until no job holds the folder, for up to 30 s: an orphan of a killed job may still be writing."""
        with suppress(OSError, CheckpointError):
            self.lock()
        self.unlock()

    def sweep(self) -> None:
        """Remove what a killed run has left unfinished. Only the run that has locked the folder may do so."""
        for path in self.folder.glob(f"*.pt{UNFINISHED}"):
            path.unlink(missing_ok=True)


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
        return checkpoint.read(path)
    if path.suffix in (".pt", ".pth", ".ckpt") and not path.is_dir():
        raise FileNotFoundError(f"resume_from={str(path)!r} does not exist: name a checkpoint file, or a folder of them")
    folder = CheckpointFolder(path)
    folder.wait_for_others()
    if not folder.steps() and (others := sorted([*path.glob("*.pt"), *path.glob("*.ckpt"), *path.glob("*/step-*.pt")])):
        _log.warning(
            "resume_from=%r holds no step-*.pt, so the run starts afresh; did you mean %r?", str(path), str(_of_run(others[0]))
        )
    return folder.newest()


def _same(value: Tensor, saved: Tensor) -> bool:
    """Whether a parameter has the value that was saved: in its own type, and NaN where that is NaN."""
    if value.shape != saved.shape:
        return False
    saved = saved.to(value.dtype)
    return torch.equal(value, saved) or bool(((value == saved) | (value.isnan() & saved.isnan())).all())


def _of_run(path: Path) -> Path:
    """What to name to resume from the run that `path` is of: its folder, or a file that no folder stands for."""
    return path.parent if path.name.startswith("step-") else path


def _is_still(path: Path, file: int) -> bool:
    """Whether `path` is the open `file`, and not one that was made after another job removed that."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
