"""Checkpoint files: written whole or not at all, verified, and read without running any code in them."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import threading
import time
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor, nn

FORMAT = 1
"""The version of a file's content: a dict of format, state, config, model, optimizer, scheduler, scaler and callbacks; of a
stream that shards itself also epoch_windows and shards, and without a seed order_seed."""

UNFINISHED = ".tmp"
"""What the name of a file ends in until it is whole."""

_UNREADABLE = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)  # says nothing of the file

_PLAIN = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)  # no bytes: b"" is not loaded


class Writes:
    """This process's writes of checkpoints: the seconds that the last one took, and the threads that are at one now."""

    last_seconds = 0.0
    under_way: ClassVar[set[int]] = set()


class CheckpointError(RuntimeError):
    """A checkpoint file that cannot be used: the message names the file and what is wrong with it."""


class FormatError(CheckpointError):
    """A whole file of another version of the format: no older one may take its place."""


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path`, whole or not at all: a kill or a full disk at any instant leaves an older file as it was.

    Raises TypeError as `check_plain` does, and OSError naming the path and the space that is left where the system refuses.
    """
    check_plain(content)
    started = time.monotonic()
    Writes.under_way.add(threading.get_ident())
    try:
        _write_whole(path, content)
    finally:
        Writes.under_way.discard(threading.get_ident())
    Writes.last_seconds = time.monotonic() - started


def _write_whole(path: Path, content: Mapping[str, Any]) -> None:
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with open(unfinished, "wb") as file:
            sealed = _SealingFile(file)
            torch.save(content, sealed)  # type: ignore[arg-type]  # it needs write and flush only
            sealed.seal()
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as raised:
        unfinished.unlink(missing_ok=True)
        # torch's failure to end a file that the system would not take hides the system's
        error = raised.__context__ if isinstance(raised, RuntimeError) and isinstance(raised.__context__, OSError) else raised
        if isinstance(error, OSError):
            raise _with_free_space(error, path) from None
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new name itself must reach the disk too
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems know no such thing of folders
            raise
    finally:
        os.close(folder)


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU, after its seal was verified; no code in it is run.

    The tensors of its model are those in the file (where they are changed, copies), as a model copies them anyway.

    Raises CheckpointError for a file that is damaged, no checkpoint, or of a newer format; OSError for one that is not there, or
    that this process may not read or cannot now.
    """
    try:
        _verify(path)
        content = _load_verified(path)
    except (CheckpointError, FileNotFoundError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _UNREADABLE:
            raise
        if type(error).__name__ == "UnpicklingError":  # torch's text advises to let the code run
            refused = str(error).partition("GLOBAL ")[2].split(" ")[0] or "objects"
            raise CheckpointError(
                f"{path} was not written by DDPTrainer: it holds {refused}, and loading that could run code. Save its "
                "state_dict() instead"
            ) from error
        raise CheckpointError(f"{path} is no whole checkpoint: {error}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path} was not written by DDPTrainer: it holds no 'format'")
    if content["format"] != FORMAT:
        raise FormatError(f"{path} has format {content['format']}; this version reads format {FORMAT}")
    return {key: part if key == "model" else copy.deepcopy(part) for key, part in content.items()}


def _load_verified(path: Path) -> Any:
    """Mapped, where that is possible: the file is in memory now."""
    try:
        return _load(path)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return _load(path, mmap=False)


def _load(path: Path, mmap: bool = True) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def peek(path: Path) -> dict[str, Any]:
    """As `read`, of a file that need not be whole to the last byte: only what is looked at is read."""
    try:
        content = _load(path)
    except Exception as error:
        raise CheckpointError(f"{path} is no whole checkpoint: {error}") from error
    return content if isinstance(content, dict) else {}


def check_plain(content: Mapping[str, Any]) -> None:
    """TypeError naming the first value that `read` would refuse: only tensors and plain values load without running code."""
    if (found := _not_plain(content, "")) is not None:
        raise TypeError(
            f"cannot be saved in a checkpoint: {found}. Only tensors, numbers, text, None, and lists, tuples, sets and dicts of "
            "them can be loaded without running code; convert it, as with float(...), str(...) or .tolist()"
        )


# The seal: the comment that a zip archive may end in says the CRC-32 of every byte before it. The checksums inside the archive
# are of its members alone, and torch.load looks at none. torch and zipfile read sealed files like others.
_SEAL = b"ddp-trainer crc32 %08x"
_SEAL_LENGTH = len(_SEAL % 0)
_COMMENT_LENGTH_BYTES = 2  # at the very end of an archive without a comment: 0
_END_LENGTH = 22  # of the record that such an archive ends in


class _SealingFile:
    """Passes on to `file` what torch.save writes, except for the last bytes, which say how long the comment is."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._crc = 0
        self._held = b""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        length = len(view)
        if length < _COMMENT_LENGTH_BYTES:
            view = memoryview(self._held + bytes(view))
        else:
            self._pass_on(self._held)
        self._pass_on(view[:-_COMMENT_LENGTH_BYTES])
        self._held = bytes(view[-_COMMENT_LENGTH_BYTES:])
        return length

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        self._pass_on(_SEAL_LENGTH.to_bytes(_COMMENT_LENGTH_BYTES, "little"))
        self._file.write(_SEAL % self._crc)

    def _pass_on(self, data: Any) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)


def _verify(path: Path) -> None:
    """CheckpointError unless the seal fits every byte; for an archive without any, unless its members' checksums do."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _SEAL_LENGTH, 0))
        seal = file.read()
        file.seek(0)
        if seal.startswith(_SEAL[: -len(b"%08x")]):
            crc, left, buffer = 0, size - _SEAL_LENGTH, memoryview(bytearray(1 << 20))
            while left > 0 and (count := file.readinto(buffer[: min(left, len(buffer))])):
                crc, left = zlib.crc32(buffer[:count], crc), left - count
            if seal != _SEAL % crc:
                raise CheckpointError(f"{path} is damaged: its checksum does not match")
            return
        file.seek(max(size - _END_LENGTH, 0))
        end = file.read()
        with zipfile.ZipFile(file) as archive:
            if not (end.startswith(b"PK\x05\x06") and end.endswith(bytes(_COMMENT_LENGTH_BYTES))):
                raise CheckpointError(f"{path} is damaged: its seal is cut off, or no longer one")
            if (damaged := archive.testzip()) is not None:
                raise CheckpointError(f"{path} is damaged: the checksum of {damaged} does not match")


def _with_free_space(error: OSError, path: Path) -> OSError:
    """An OSError of the kind that `error` is; its number alone says which."""
    if not path.parent.is_dir():
        return OSError(error.errno, "its folder is gone: something has removed it while the run went on", str(path))
    free = shutil.disk_usage(path.parent).free
    text = f"{error.strerror or error}; {free:,} bytes are free there. The checkpoints before are as they were"
    return OSError(f"{path}: {text}") if error.errno is None else OSError(error.errno, text, str(path))


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
