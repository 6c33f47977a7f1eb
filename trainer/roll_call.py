"""Who is still there, once a collective has failed: asked in the store, which works without the ranks that are gone."""

from __future__ import annotations

import time
from contextlib import suppress

from .launch import Store

CAUSE, TOO, LEFT = "cause", "too", "left"
_WITHIN = 2.0  # seconds; the ranks that are alive see a peer's end at once, and each other's time limits


class RollCall:
    """One opening's ranks, each of which says when it is failing. A store that has gone with its process knows of nobody."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._asked: float | None = None

    def say(self, why: str) -> None:
        """`why`: `CAUSE`, `TOO` for a rank whose collective has failed, `LEFT` for one that closes. What was said first stays."""
        with suppress(RuntimeError):
            if not self._store.check([self._key(self._rank)]):
                self._store.set(self._key(self._rank), why)

    def ask(self) -> tuple[list[int], list[int], list[int]]:
        """The ranks that are the cause; those that say nothing within two seconds: they hang, are gone, or wait for such; and
        those that had left before."""
        self._asked = time.monotonic()
        self.say(TOO)
        silent, deadline = list(range(self._size)), time.monotonic() + _WITHIN
        said: dict[str, list[int]] = {CAUSE: [], TOO: [], LEFT: []}
        try:
            while silent and time.monotonic() < deadline:
                heard = [rank for rank in silent if self._store.check([self._key(rank)])]
                for rank in heard:
                    said[self._store.get(self._key(rank)).decode()].append(rank)
                silent = [rank for rank in silent if rank not in heard]
                time.sleep(0.02)
        except RuntimeError:
            return [], [], []
        return said[CAUSE], silent, said[LEFT]

    def seconds_since_asked(self) -> float:
        """0 if nobody has asked."""
        return 0.0 if self._asked is None else time.monotonic() - self._asked

    def _key(self, rank: int) -> str:
        return f"failing/{rank}"
