"""The DataLoader's worker processes: what the trainer adds to the user's options, and how a worker ends."""

from __future__ import annotations

import functools
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.worker import _worker_loop

from .launch import end_with_parent
from .randomness import mix

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_PATIENCE = 1.0  # seconds that a worker has to end when its training process does


def loader_options(options: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """The user's `options` of a DataLoader, with what the trainer adds.

    The workers' base seed comes from a generator of its own, in place of torch's default one; and workers outlive a signal to
    stop, which Ctrl-C and Slurm send to every process of a job: the training process, which gets it too, still needs them.
    """
    generator = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else mix(seed) >> 1)
    added: dict[str, Any] = {"generator": generator, **options}
    if options.get("num_workers"):
        _end_with(os.getpid())
        # the system watches over the thread that starts them: another than the main one may end before they are done
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        added["worker_init_fn"] = functools.partial(_start, parent, _ending(), options.get("worker_init_fn"))
    return added


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """``iter(loader)``; until a worker has handlers of its own, a signal to all processes waits for them."""
    if not loader.num_workers:
        return iter(loader)
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method == "forkserver":  # which would hand the mask on to all that it ever starts
        return iter(loader)
    if method == "spawn":
        resource_tracker.ensure_running()  # its start, else within the block, lets signals through
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_endings: dict[int, Tensor] = {}  # by process id: forked processes inherit this, but end one by one


def _ending() -> Tensor:
    """Whether this process ends, as its living workers see it."""
    if os.getpid() not in _endings:
        _endings[os.getpid()] = torch.zeros((), dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]
    return _endings[os.getpid()]


def dismiss() -> None:
    """After an error: let workers leave as soon as they are signalled to. Those of a later fit get a flag of their own."""
    if (ending := _endings.pop(os.getpid(), None)) is not None:
        ending.fill_(True)


def _start(parent: int | None, ending: Tensor, init_fn: Callable[[int], Any] | None, number: int) -> None:
    def outlive(signal_number: int, frame: object) -> None:
        if ending:
            os._exit(0)

    if os.getppid() == parent:  # not where a server forks the workers
        end_with_parent(parent)
    for signal_number in _SIGNALS:
        signal.signal(signal_number, outlive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    info: Any = get_worker_info()
    # What scripts expect there, not what fetches from it; of a stream that every worker reads whole there is nothing to set.
    object.__setattr__(info, "dataset", getattr(info.dataset, "user_dataset", info.dataset))
    if init_fn is not None:
        init_fn(number)


@functools.cache
def _end_with(process: int) -> None:
    """Once per process: at its end, before `multiprocessing` waits for its children, see to it that workers leave."""
    Finalize(None, _end_workers, exitpriority=100)


def _end_workers() -> None:
    """After an error some may still be at work; their signal handler says when they may leave."""
    dismiss()
    children = [child for child in multiprocessing.active_children() if vars(child).get("_target") is _worker_loop]
    deadline = time.monotonic() + _PATIENCE
    for child in children:
        child.terminate()
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
