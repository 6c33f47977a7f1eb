"""Who is still there, once a collective has failed: asked in the store, which works without the ranks that are gone."""

from __future__ import annotations

import time
from contextlib import suppress

from .launch import Store

CAUSE, TOO, LEFT, LATE = "cause", "too", "left", "late"
_WITHIN = 2.0  # seconds; the ranks that are alive see a peer's end at once, and each other's time limits
_AFTER_LIMIT = 0.8  # where a time limit is over: those that waited with this rank have reached theirs too
_HOLD_BACK = 2.0  # seconds: torchrun compares whole ones, and its agent must have seen the rank that failed first


class RollCall:
    """One opening's ranks, each of which says when it is failing. A store that has gone with its process knows of nobody."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._asked: float | None = None
        self._is_hang = False

    def say(self, why: str) -> None:
        """`why`: `CAUSE`, `TOO` for a rank whose collective has failed, `LATE` for one whose time limit was over, `LEFT` for one
        that closes. What was said first stays."""
        with suppress(RuntimeError):
            if not self._store.check([self._key(self._rank)]):
                self._store.set(self._key(self._rank), why)

    def ask(self, timed_out: bool) -> tuple[dict[str, list[int]], list[int]]:
        """The ranks by what they say; and those that say nothing within two seconds: they hang, are gone, or wait for such.
        `timed_out`: whether a time limit is why they are asked; then they have less time."""
        self._asked = time.monotonic()
        self.say(LATE if timed_out else TOO)
        silent, deadline = list(range(self._size)), time.monotonic() + (_AFTER_LIMIT if timed_out else _WITHIN)
        said: dict[str, list[int]] = {CAUSE: [], TOO: [], LATE: [], LEFT: []}
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
        return f"failing/{rank}"
