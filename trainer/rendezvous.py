"""What the ranks tell each other in the launcher's store: first to find each other, and in the end why they leave."""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

_log = logging.getLogger("trainer")
_PATIENCE = 20.0  # seconds
_STILL_WAITING = (
    "rank %d has been waiting for rank %s to join the group for %.0f s. Every rank must make a World or a DDPTrainer: is there "
    "an `if rank == 0` around it?"
)
CAUSE, CONSEQUENCE, CLOSED, TIMED_OUT = "cause", "too", "left", "late"
_WITHIN = 2.0  # seconds; the ranks that are alive see a peer's end at once, and each other's time limits
_AFTER_LIMIT = 0.8  # where a time limit is over: those that waited with this rank have reached theirs too
_HOLD_BACK = 2.0  # seconds: torchrun compares whole ones, and its agent must have seen the rank that failed first


class Store(Protocol):
    """What is needed of a key-value store shared by all ranks."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def agree_on_key(store: Store, rank: int, size: int, timeout: timedelta, device: str = "cpu") -> str:
    """A key that all living ranks agree on and nobody has used before, whatever dead ranks have left in the store.

    Rank r says hello with a token of its own and the type of its `device`; rank 0 offers both back with its key; rank r
    acknowledges all; once all have, rank 0 says go. A message of an earlier attempt carries another token or key, and is passed
    over.

    Raises TimeoutError naming the ranks that did not come; RuntimeError on every rank where they compute on different devices,
    and so would wait for each other over different networks.
    """
    token = f"{uuid.uuid4().hex} {device}"
    started = time.monotonic()
    deadline, patient = started + timeout.total_seconds(), True

    def read(name: str) -> str:
        return store.get(name).decode() if store.check([name]) else ""

    key, waiting, offered = token.split()[0], set(range(1, size)), dict.fromkeys(range(size), "")
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
        store.set(f"go/{key}", _other_devices(offered, device))
    if complaint := read(f"go/{key}"):
        raise RuntimeError(complaint)
    return key


def _other_devices(hellos: dict[int, str], device: str) -> str:
    """What to say where not all compute on the `device` of rank 0, which has said no hello; empty where they do."""
    others = {rank: kind for rank, hello in hellos.items() if rank > 0 and (kind := hello.split()[1]) != device}
    if not others:
        return ""
    found = ", ".join(f"rank {rank} on {kind}" for rank, kind in others.items())
    return (
        f"the ranks compute on different devices: rank 0 on {device}, {found}. Does torch see the GPUs on every node (python -m "
        "trainer.doctor)? To compute on the CPU everywhere: World.from_env(device='cpu')"
    )


class RollCall:
    """The ranks of one process group: each writes into the store why it ends. Where the store is gone, nothing is known."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._asked: float | None = None
        self._is_hang = False
        self._turn = 0

    def begin_anew(self) -> None:
        """What was said so far counts no more. On every rank."""
        self._turn += 1
        self._asked, self._is_hang = None, False

    def say(self, why: str) -> None:
        """`why`: `CAUSE` for an error of its own, `CONSEQUENCE` where a collective failed, `TIMED_OUT` where one took too long,
        `CLOSED` for a rank that leaves in good order. What was said first stays."""
        with suppress(RuntimeError):
            if not self._store.check([self._key(self._rank)]):
                self._store.set(self._key(self._rank), why)

    def ask(self, timed_out: bool) -> tuple[dict[str, list[int]], list[int]]:
        """The ranks by what they say; and those that say nothing within two seconds: they hang, are gone, or wait for such.
        `timed_out`: whether a time limit is why they are asked; then they have less time."""
        self._asked = time.monotonic()
        self.say(TIMED_OUT if timed_out else CONSEQUENCE)
        silent, deadline = list(range(self._size)), time.monotonic() + (_AFTER_LIMIT if timed_out else _WITHIN)
        said: dict[str, list[int]] = {CAUSE: [], CONSEQUENCE: [], TIMED_OUT: [], CLOSED: []}
        try:
            while silent and time.monotonic() < deadline:
                heard = [rank for rank in silent if self._store.check([self._key(rank)])]
                for rank in heard:
                    said[self._store.get(self._key(rank)).decode()].append(rank)
                silent = [rank for rank in silent if rank not in heard]
                time.sleep(0.02)
        except RuntimeError:
            return {}, []
        self._is_hang = timed_out and not said[CAUSE]
        return said, silent

    def hold_back(self) -> None:
        """Wait until torchrun has seen a rank that has failed by itself; where one hangs there is none."""
        if not self._is_hang:
            waited = 0.0 if self._asked is None else time.monotonic() - self._asked
            time.sleep(max(0.0, _HOLD_BACK - waited))

    def _key(self, rank: int) -> str:
        return f"failing/{self._turn}/{rank}"
