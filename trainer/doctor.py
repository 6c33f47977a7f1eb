"""Is this machine, or this cluster, fit for a run? ``python -m trainer.doctor``, or the same under torchrun.

::

    torchrun --standalone --nproc-per-node 2 -m trainer.doctor

Rank 0 prints the environment, then one line a check: ``ok   name  detail``, or ``FAIL name  rank 1: `` with what was found, what
was expected and what to do. Every check has an answer that is known beforehand. The exit code of every rank is 0 when all of
them passed on all ranks, 1 otherwise. Nothing is left on disk.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from . import World
from .doctor_checks import BUG, CHECKS, DEPENDENT, CheckFailed

_PREFIXES = ("OMP_", "MKL_", "MASTER_", "NCCL_", "GLOO_", "CUDA_", "SLURM_NTASKS", "TORCH_NCCL_", "TORCHELASTIC_RUN_ID")
_GONE = "see what the other ranks say; a firewall? NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the network to use"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, called on every rank. The exit code: 0 if all passed on all ranks, else 1."""
    parser = argparse.ArgumentParser("trainer.doctor", description="Checks whether this machine or cluster is fit for a run.")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for a rank that does not come (default: 60)")
    options = parser.parse_args(arguments)
    world, name, passed = None, "launch", True
    try:
        world = World.from_env(options.device, timeout=timedelta(seconds=options.timeout))
        show_environment(world)
        for name, check in CHECKS.items():
            if passed or name not in DEPENDENT:
                passed &= attempt(world, name, check)
            elif world.is_main:
                say(f"FAIL {name:<12} not tried: it needs what failed above")
        if world.is_main:
            say(f"{'all is well' if passed else 'not all is well'}: {len(CHECKS)} checks on {counted(world.size, 'process')}")
        world.barrier()  # torchrun ends the others as soon as one exits with 1: rank 0 has said everything by then
        world.close()
    except Exception as error:  # nothing communicates any more: each rank speaks for itself
        rank = os.environ.get("RANK", "0") if world is None else world.rank
        say(f"FAIL {name:<12} rank {rank}: {type(error).__name__}: {error}{remedy(error, name)}")
        if world is not None:
            world.record_failure(error)
        return 1
    return 0 if passed else 1


def attempt(world: World, name: str, check: Callable[[World], str]) -> bool:
    """Run `check` on every rank; rank 0 says how it went on all of them. Whether it passed on all."""
    detail, fault = "", None
    try:
        detail = check(world)
    except CheckFailed as wrong:
        fault = str(wrong)
    faults = world.gather(fault)
    if world.is_main:
        for rank, other in enumerate(faults):
            if other is not None:
                say(f"FAIL {name:<12} rank {rank}: {other}")
        if not any(faults):
            say(f"ok   {name:<12} {detail}")
    return fault is None and not any(faults)


def remedy(error: Exception, name: str) -> str:
    """What to do about an error that a check did not expect."""
    if World.is_consequence(error) or isinstance(error, TimeoutError):
        return f"; {_GONE}"
    return "" if name == "launch" else f"; {BUG}"


def say(line: str) -> None:
    """Print `line` at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def counted(number: int, thing: str) -> str:
    """``2 processes``."""
    return f"{number} {thing}{'' if number == 1 else 'es' if thing.endswith('s') else 's'}"


def show_environment(world: World) -> None:
    """Print versions, variables and each rank's place, on rank 0."""
    places = world.gather((socket.gethostname(), os.getpid(), str(world.device), device_name(world.device)))
    if not world.is_main:
        return
    cuda = f"CUDA {torch.version.cuda}, {counted(torch.cuda.device_count(), 'GPU')} here" if torch.version.cuda else "no CUDA"
    say(f"Python {platform.python_version()}, torch {torch.__version__} ({cuda}), {platform.platform()}")
    backend = "" if world.size == 1 else " over nccl" if world.device.type == "cuda" else " over gloo"
    say(f"{counted(world.size, 'process')}{backend}, {os.cpu_count()} CPU cores here")
    for variable in sorted(name for name in os.environ if name.startswith(_PREFIXES)):
        say(f"  {variable}={os.environ[variable]}")
    if "OMP_NUM_THREADS" not in os.environ:
        say(f"  OMP_NUM_THREADS is not set: torch uses {counted(torch.get_num_threads(), 'thread')} in each process")
    for rank, (host, process, device, model) in enumerate(places):
        say(f"  rank {rank}: {device} ({model}), process {process} on {host}")


def device_name(device: torch.device) -> str:
    """What the device is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())
