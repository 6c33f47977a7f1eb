"""How a process learns who it is: the launcher's environment, and its device."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Looked up here: a forked process must not, as another thread of its parent's may have held the dynamic linker's lock.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


_LAUNCHERS = (
    ("SLURM_NTASKS", "Slurm", "srun --ntasks-per-node=1"),
    ("OMPI_COMM_WORLD_SIZE", "MPI", "mpirun -N 1"),
    ("PMI_SIZE", "MPI", "mpiexec -ppn 1"),
)
"""Which set how many tasks there are, but not what torch needs."""


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
    if count == 0:
        raise RuntimeError(f"device={asked!r}, but torch sees no GPU here: python -m trainer.doctor prints what it sees")
    if index >= count:
        most = "1 process" if count == 1 else f"{count} processes"
        raise RuntimeError(
            f"this process is number {index} on its node (LOCAL_RANK), but the node has {count} GPU{'s' * (count > 1)}: start at "
            f"most {most} per node, or compute on the CPU with World.from_env(device='cpu'), or with CUDA_VISIBLE_DEVICES= "
            "before the command. Where every process sees only a GPU of its own, World.from_env(device='cuda:0') takes that"
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


def device_of_group(
    asked: str | None, bound: torch.device | None, local_rank: int | None, backends: Mapping[str, str]
) -> torch.device:
    """As `choose_device`, for a process group that is open already.

    `bound`: the device that it was opened for, if it was; `backends`: which serves which type of device.
    """
    nccl = backends.get("cuda", "").startswith("nccl")
    wanted = torch.device(asked or ("cuda" if nccl and torch.cuda.is_available() else "cpu"))
    if str(wanted) == "cuda":
        if bound is not None and bound.type == "cuda":
            wanted = bound
        elif local_rank is None:
            local_rank = torch.cuda.current_device()
    if wanted.type not in backends:
        served = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        raise RuntimeError(
            f"the open process group communicates over {served!r}, which does not serve {wanted.type!r}: open it with backend "
            "'gloo' for the CPU or 'nccl' for GPUs, or let World.from_env open it"
        )
    return choose_device(str(wanted), local_rank)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a whole number; found {environment[name]!r}") from None
