"""How a process learns who it is: the launcher's environment, its device, and a key that all ranks agree on."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

# Looked up here: a forked process must not, as another thread of its parent's may have held the dynamic linker's lock.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


_LAUNCHERS = (("SLURM_NTASKS", "Slurm", "srun --ntasks-per-node=1"), ("OMPI_COMM_WORLD_SIZE", "MPI", "mpirun -N 1"))
"""Which set how many tasks there are, but not what torch needs."""


_log = logging.getLogger("trainer")
_PATIENCE = 20.0  # seconds
_STILL_WAITING = (
    "rank %d has been waiting for rank %s to join the group for %.0f s. Every rank must make a World or a DDPTrainer: is there "
    "an `if rank == 0` around it?"
)


@dataclass(frozen=True)
class Launch:
    """Who this process is among all that were launched together."""

    rank: int
    size: int
    local_rank: int | None
    """This process among those of its node; None where the launcher does not say."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Launch:
        """Read what torchrun sets. Raises RuntimeError naming what is missing, ValueError for what is no number."""
        given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environment]
        if not given:
            for name, kind, launcher in _LAUNCHERS:
                tasks = environment.get(name, "1")
                if tasks.isdigit() and int(tasks) > 1:
                    raise RuntimeError(
                        f"{name}={tasks}, but RANK is missing: each {kind} task would train alone. Start one torchrun per node "
                        f"({launcher} torchrun ...), or unset {name} to train in one process"
                    )
            return cls(0, 1, 0)
        size = _number(environment, "WORLD_SIZE") if "WORLD_SIZE" in environment else 0
        needed = ["RANK", "WORLD_SIZE"] + ([] if size == 1 else ["MASTER_ADDR", "MASTER_PORT"])
        missing = [name for name in needed if name not in environment]
        if missing:
            raise RuntimeError(
                f"the environment is partial: {', '.join(given)} set, but {', '.join(missing)} missing. Launch with torchrun, "
                f"which sets them all, or unset {', '.join(given)} to train in one process"
            )
        rank = _number(environment, "RANK")
        if not 0 <= rank < size:
            raise ValueError(f"RANK={rank} is not within WORLD_SIZE={size}")
        return cls(rank, size, local_rank_in(environment))


def local_rank_in(environment: Mapping[str, str]) -> int | None:
    """LOCAL_RANK as a number, None where it is not set."""
    return _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else None


def end_with_parent(parent: int) -> None:
    """On Linux: let the system end this process as soon as process `parent`, which started it, has gone, however it went."""
    if _prctl is not None:
        _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it went just before
            os.kill(os.getpid(), signal.SIGKILL)


def choose_device(asked: str | None, local_rank: int | None, alone: bool = False) -> torch.device:
    """The device of this process, made the current one. `asked`: a type, or a device; None: a GPU if torch sees one.

    Warns a process that trains `alone` on one of several GPUs without having asked for one.
    """
    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return device
    index = local_rank if device.index is None else device.index  # type: ignore[redundant-expr]  # None for plain "cuda"
    if index is None:
        raise RuntimeError("LOCAL_RANK is missing: it says which GPU this process uses. Launch with torchrun, which sets it")
    count = torch.cuda.device_count()
    if index >= count:
        raise RuntimeError(
            f"this process is number {index} on its node (LOCAL_RANK), but the node has {count} GPUs: start at most {count} "
            "processes per node, or compute on the CPU with World.from_env(device='cpu')"
        )
    if alone and asked is None and count > 1:
        warnings.warn(
            f"one process on one of {count} GPUs. For all of them: torchrun --standalone --nproc-per-node {count} SCRIPT (its "
            "options before the script); for one, without this warning: CUDA_VISIBLE_DEVICES=0",
            UserWarning,
            stacklevel=3,
        )
    torch.cuda.set_device(index)  # before the group is opened: object collectives use the current device
    return torch.device("cuda", index)


def device_of_group(asked: str | None, local_rank: int | None, backends: Mapping[str, str]) -> torch.device:
    """As `choose_device`, for a process group that is open already; `backends`: which serves which type of device."""
    nccl = backends.get("cuda") == "nccl"
    wanted = torch.device(asked or ("cuda" if nccl and torch.cuda.is_available() else "cpu"))
    if wanted.type not in backends:
        served = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        raise RuntimeError(
            f"the open process group communicates over {served!r}, which does not serve {wanted.type!r}: open it with backend "
            "'gloo' for the CPU or 'nccl' for GPUs, or let World.from_env open it"
        )
    return choose_device(str(wanted), local_rank)


class Store(Protocol):
    """What is needed of a key-value store shared by all ranks."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def agree_on_key(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A key that all living ranks agree on and nobody has used before, whatever dead ranks have left in the store.

    Rank r says hello with a token of its own; rank 0 offers the token back with its key; rank r acknowledges both; once all
    have, rank 0 says go. A message of an earlier attempt carries another token or key, and is passed over.

    Raises TimeoutError naming the ranks that did not come.
    """
    token = uuid.uuid4().hex
    started = time.monotonic()
    deadline, patient = started + timeout.total_seconds(), True

    def read(name: str) -> str:
        return store.get(name).decode() if store.check([name]) else ""

    key, waiting, offered = token, set(range(1, size)), dict.fromkeys(range(size), "")
    if rank > 0:
        store.set(f"hello/{rank}", token)
        key, waiting = "", {0}
    while waiting:
        if patient and time.monotonic() > started + _PATIENCE:
            patient = False
            _log.warning(_STILL_WAITING, rank, ", ".join(map(str, sorted(waiting))), _PATIENCE)
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} waited {timeout} for rank {', '.join(map(str, sorted(waiting)))} to join the group")
        if rank == 0:
            for peer in tuple(waiting):
                hello = read(f"hello/{peer}")
                if hello != offered[peer]:
                    store.set(f"offer/{peer}", f"{hello} {key}")
                    offered[peer] = hello
                elif hello and read(f"ack/{peer}") == f"{hello} {key}":
                    waiting.remove(peer)
        else:
            offer = read(f"offer/{rank}")
            if offer.startswith(token) and offer != f"{token} {key}":
                key = offer.removeprefix(f"{token} ")
                store.set(f"ack/{rank}", offer)
            if key and store.check([f"go/{key}"]):
                waiting.clear()
        time.sleep(0.002)
    if rank == 0:
        store.set(f"go/{key}", "")
    return key


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a whole number; found {environment[name]!r}") from None
