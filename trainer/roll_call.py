"""Who is still there, once a collective has failed: asked in the store, which works without the ranks that are gone."""

from __future__ import annotations

import time
from contextlib import suppress

from .launch import Store

_WITHIN = 2.0  # seconds; the ranks that are alive see a peer's end at once, and each other's time limits


class RollCall:
    """One opening's ranks, each of which says when it is failing. A store that has gone with its process knows of nobody."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def say_failing(self) -> None:
        with suppress(RuntimeError):
            self._store.set(f"failing/{self._rank}", "")

    def absent(self) -> list[int]:
        """The ranks that do not say so too, within two seconds: they hang, or are gone."""
        self.say_failing()
        others, deadline = list(range(self._size)), time.monotonic() + _WITHIN
        try:
            while others and time.monotonic() < deadline:
                others = [rank for rank in others if not self._store.check([f"failing/{rank}"])]
                time.sleep(0.02)
        except RuntimeError:
            return []
        return others
