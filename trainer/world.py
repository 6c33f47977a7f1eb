"""The ranks of a job and all their communication: the only file that names ``torch.distributed``.

A job of one process is a `World` like any other: the same methods, without a process group.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, TypeVar, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.parallel import DistributedDataParallel

from . import ddp_wrapper
from .coordination import Coordination
from .launch import Launch, choose_device, device_of_group, end_with_parent, local_rank_in
from .rendezvous import CAUSE, CLOSED, CONSEQUENCE, RollCall, agree_on_key
from .transport import flat, pack, unpack

T = TypeVar("T")

TIMEOUT, FIRST_TIMEOUT = timedelta(minutes=10), timedelta(minutes=30)
"""How long a collective waits for a rank; the second until a first training step is over: set-up and compilation take long."""


class World(Coordination):
    """The processes that train together, as one of them sees it. Made by `from_env`.

    Every collective is called on every rank, in the same order, and never inside a callback's hook (RuntimeError at once, at
    any world size: hooks run on rank 0 only, the other ranks would wait for ever).
    """

    rank: int
    """This process among all, 0 to size - 1."""
    size: int
    """Processes in the job (the world size)."""
    local_rank: int
    """This process among those of its node: the index of its GPU."""
    device: torch.device
    """Where this process computes."""
    is_main: bool
    """Whether this is global rank 0, which alone writes files and logs. Other scripts call it ``is_master()``."""

    _open: ClassVar[World | None] = None
    _kept: ClassVar[World | None] = None  # closed after an error: its group is still there

    def __init__(self, launch: Launch, device: torch.device, owns_group: bool) -> None:
        self.rank, self.size = launch.rank, launch.size
        self.local_rank = launch.rank if launch.local_rank is None else launch.local_rank
        self.device = device
        self.is_main = self.rank == 0
        super().__init__()
        self._owns_group = owns_group
        group = dist.group.WORLD if owns_group else None
        self._group = None if group is None else weakref.ref(group)  # gloo's ends when nobody holds it
        self.roll_call = _roll_calls[0] if owns_group and _roll_calls else None
        self._has_first_timeout = False
        self._process = os.getpid()
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        return World._opened_here, ()  # pickled inside something else, it becomes the receiving process's own open world

    @classmethod
    def from_env(cls, device: str | None = None, timeout: timedelta | None = None) -> World:
        """The world that torchrun's environment describes, or a world of one process without it. Called on every rank.

        Returns the open world if there is one; uses, and leaves open, a process group that is open already. `device`: "cpu",
        "cuda", ... (default: a GPU if torch sees one). `timeout`: how long a collective waits for a missing rank before it
        raises (default: 30 minutes until a first training step is over, 10 minutes from then on; of an open group: its own).

        Under torchrun, the process ends as soon as its agent has gone (on Linux): no orphan trains on. Raises RuntimeError for a
        partial environment (naming what is missing), for Slurm tasks without ranks, for a GPU that is not there, for ranks on
        different types of device, and when an open world or group does not fit `device`.
        """
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta such as timedelta(minutes=5); found {timeout!r}")
        if (world := cls._opened_here() or cls._kept_here()) is not None:
            if device is not None and torch.device(device).type != world.device.type:
                advice = "a process cannot change it after an error" if world is cls._kept else "close it first"
                raise RuntimeError(f"the open World computes on {world.device}, not on {device!r}: {advice}")
        elif dist.is_initialized():
            launch = Launch(dist.get_rank(), dist.get_world_size(), local_rank_in(os.environ))
            backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
            bound = getattr(dist.group.WORLD, "bound_device_id", None)
            world = cls(launch, device_of_group(device, bound, launch.local_rank, backends), owns_group=False)
        else:
            launch = Launch.from_environment(os.environ)
            if "TORCHELASTIC_RUN_ID" in os.environ:
                end_with_parent(os.getppid())
            chosen = choose_device(device, launch.local_rank, alone=launch.size == 1)
            if launch.size > 1:
                _open_group(launch, chosen, timeout or FIRST_TIMEOUT)
            else:
                _forget_error()
            world = cls(launch, chosen, owns_group=launch.size > 1)
            world._has_first_timeout = launch.size > 1
        if world is cls._kept:
            world.barrier()  # every rank goes on
            world.recover()
        if timeout is not None:
            world.shorten_timeout(timeout)
        cls._open, cls._kept = world, None
        return world

    @classmethod
    def is_open(cls) -> bool:
        """Whether this process has an open world, so that `from_env` would return that one. Local."""
        return cls._opened_here() is not None

    @classmethod
    def _opened_here(cls) -> World | None:
        """The open world; None in a forked child, which only inherits its parent's."""
        return cls._open if cls._open is not None and cls._open._process == os.getpid() else None

    @classmethod
    def _kept_here(cls) -> World | None:
        """One whose group is still there; it may have been destroyed, and the script may have opened another."""
        kept = cls._kept
        return kept if kept is not None and kept._process == os.getpid() and kept._group_is_open() else None

    def _group_is_open(self) -> bool:
        """Whether the group that `from_env` opened for this world is the one that is open now."""
        return self._group is not None and self._group() is not None and self._group() is dist.group.WORLD

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, elementwise, the same on every rank: a new tensor of the same dtype, shape and device."""
        self.check_usable("World.sum")
        if self.size == 1:
            return values.detach().clone()
        dist.all_reduce(total := values.detach().to(self.device, copy=True))  # NCCL cannot reduce CPU tensors
        return total.to(values.device)

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank. Other scripts call it ``dist_gather``.

        Any picklable object; values may differ in size. Tensors in it arrive on this rank's device.
        """
        self.check_usable("World.gather")
        own = pack(value)
        packed: list[Any] = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(packed, own)
        return [unpack(item, self.device) for item in packed]

    def gather_on_main(self, value: T) -> list[T] | None:
        """As `gather`, but on rank 0 alone, where tensors stay on the CPU; None on the other ranks."""
        self.check_usable("World.gather_on_main")
        own = pack(value)
        packed: list[Any] = [own] * self.size
        if self.size > 1:
            dist.gather_object(own, packed if self.is_main else None)
        return [unpack(item, torch.device("cpu")) for item in packed] if self.is_main else None

    def broadcast(self, value: T) -> T:
        """Rank 0's `value` on every rank (what the others pass is ignored). Any picklable object, as in `gather`."""
        self.check_usable("World.broadcast")
        return self._broadcast(value, self.device)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.check_usable("World.barrier")
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def wrap(self, model: nn.Module, **ddp_options: Any) -> nn.Module:
        """`model` in DistributedDataParallel, with its buckets settled; in a world of one process `model` itself.

        `model` must be on this rank's device; rank 0's parameters and buffers are copied to the others. `ddp_options`: the
        keyword arguments of DistributedDataParallel.
        """
        self.check_usable("World.wrap")
        if self.size == 1:
            return model
        wrapped = ddp_wrapper.settled(model, self.device, ddp_options)
        self._wrappers.add(wrapped)
        return wrapped

    def compress(self, wrapped: nn.Module, kind: str) -> None:
        """Send the gradients of what `wrap` returned in another format: "fp16" or "bf16"."""
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.register_comm_hook(None, fp16_compress_hook if kind == "fp16" else bf16_compress_hook)

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` with rank 0's, in few large messages. They must have equal shapes and dtypes on every rank."""
        self.check_usable("World.broadcast_tensors")
        if self.size > 1 and tensors:
            group, data = dist.distributed_c10d._get_default_group(), [flat(tensor) for tensor in tensors]
            dist._broadcast_coalesced(group, data, 250 << 20, 0)  # type: ignore[attr-defined]

    def shorten_timeout(self, timeout: timedelta | None = None) -> None:
        """From now on a collective waits for `timeout`, or 10 minutes unless `from_env` was given a time. On every rank."""
        if self.size > 1 and (timeout is not None or self._has_first_timeout):
            _set_timeout(timeout or TIMEOUT)
            self._has_first_timeout = False

    def close(self) -> None:
        """Let go of every wrapper, then of the process group if `from_env` opened it. A second call does nothing.

        After an error nothing is destroyed: that could wait for ranks that are gone.
        """
        self.check_outside_hook("World.close")
        if World._opened_here() is not self:
            return
        World._open = None
        ddp_wrapper.drop_groups(self._wrappers)
        if self.failed:
            World._kept = self if self._owns_group else None
            self.remote_error = None  # whose traceback holds the trainer
            return
        if self.size > 1:  # what cycles hold of a wrapper, even of one that is gone, can abort the process at its end
            gc.collect()
        if self._group_is_open():
            if self.roll_call is not None:
                self.roll_call.say(CLOSED)
            dist.destroy_process_group()
            self._is_closed = True

    @staticmethod
    def is_consequence(error: BaseException) -> bool:
        """Whether a collective failed: because another rank has gone, or did not come in time."""
        if isinstance(error, dist.DistError):
            return not (isinstance(error, dist.DistBackendError) and _OWN_FAULT.search(str(error)))
        return isinstance(error, RuntimeError) and "gloo" in re.findall(r"\w+", str(error))

    def recover(self) -> None:
        """Every rank has caught an error, and all go on: what was said of it counts no more. On every rank."""
        self.failed, self.remote_error = False, None
        if self.roll_call is not None:
            self.roll_call.begin_anew()
        _forget_error()

    def record_failure(self, error: BaseException) -> None:
        """Tell torchrun why this rank fails, so that it shows the right rank's traceback as the root cause. Local."""
        self.failed = True
        consequence = self.is_consequence(error) or error is self.remote_error
        if self.roll_call is not None:
            self.roll_call.say(CONSEQUENCE if consequence else CLOSED if isinstance(error, SystemExit) else CAUSE)
        if consequence and "TORCHELASTIC_ERROR_FILE" in os.environ:  # never the cause
            time.sleep(2.0) if self.roll_call is None else self.roll_call.hold_back()
        _record(error)

    def _broadcast(self, value: T, device: torch.device) -> T:
        packed: list[Any] = [pack(value) if self.is_main else None]
        if self.size > 1:
            dist.broadcast_object_list(packed, src=0)
        return cast(T, unpack(packed[0], device))


def _open_group(launch: Launch, device: torch.device, timeout: timedelta) -> None:
    cuda, url = device.type == "cuda", f"ddp-trainer://{device.type}"
    where: dict[str, Any] = {"init_method": url, "rank": launch.rank, "world_size": launch.size, "timeout": timeout}
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None, **where)


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """torch's own rendezvous over the environment, under a key that no earlier opening has used.

    torchrun's store outlives the group: what a dead attempt left there would be read as the new ranks' addresses.
    """
    address = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    if address not in _stores:
        _stores[address] = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    store, rank, size = _stores[address]
    if rank == 0:  # NCCL's word of a failed attempt, which it looks for beyond every prefix and would end this one for
        store.delete_key("exception_dump")
    key = agree_on_key(store, rank, size, timeout, urlsplit(url).netloc)
    store = dist.PrefixStore(key, store)  # type: ignore[attr-defined]
    _roll_calls[:] = [RollCall(store, rank, size)]
    yield store, rank, size


_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # its name before torch 2.14
_OWN_FAULT = re.compile("ncclUnhandledCudaError|ncclInvalid|unhandled cuda error|invalid (usage|argument)|out of memory")
_roll_calls: list[RollCall] = []  # that of the newest opening
_stores: dict[tuple[str, str], tuple[Any, int, int]] = {}
dist.register_rendezvous_handler("ddp-trainer", _rendezvous)  # type: ignore[attr-defined, no-untyped-call]


def _record(error: BaseException) -> None:
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        try:
            raise error
        except BaseException:  # the handler writes down the traceback of what is being handled
            try:
                get_error_handler().record_exception(error)
            except OSError:  # such as a full disk's; torchrun's agent would end at half a file
                _forget_error()


def _forget_error() -> None:
    """torchrun is told of an error that was caught no longer."""
    with suppress(OSError):
        os.unlink(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))


@atexit.register
def _close_forgotten() -> None:
    """Close what a script has left open, so that the process ends cleanly; after an error nothing communicates."""
    error = getattr(sys, "last_value", None)  # what nobody caught, wherever it was raised
    if (world := World._opened_here()) is not None:
        if error is not None and not world.failed:
            world.record_failure(error)
        world.running_hook = None
        world.close()
    elif error is not None and not os.path.exists(os.environ.get("TORCHELASTIC_ERROR_FILE", "")):
        _record(error)
