"""What ranks do in step with each other, built on `gather` and `broadcast` alone: blocks in turn, and errors that all raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch

from .transport import sendable

T = TypeVar("T")


class Coordination:
    """The part of `World` that needs no collectives but its own, and what it knows of the calls that are under way."""

    local_rank: int
    is_main: bool

    def __init__(self) -> None:
        self.running_hook: str | None = None
        """Set while a callback's hook runs: the hook's name."""
        self.running_call: str | None = None
        """Set while a trainer's `fit`, `evaluate` or `predict` runs: its name."""
        self.failed = False
        """Set once an error is on its way out of here: from then on nothing communicates."""
        self.remote_error: BaseException | None = None
        """Another rank's error, raised here too."""
        self._is_closed = False

    def gather(self, value: T) -> list[T]:
        raise NotImplementedError

    def _broadcast(self, value: T, device: torch.device) -> T:
        raise NotImplementedError

    def main_first(self, per_node: bool = True) -> AbstractContextManager[None]:
        """The block runs on the first rank of each node, then on the others: for downloads and other preparation.

        ``per_node=False``: on global rank 0 first, for a file system that all nodes share. An error there is raised on all
        ranks, whose blocks then do not run. Works before and after a trainer is built.
        """
        self.check_usable("World.main_first")
        return self._in_turn(self.local_rank == 0 if per_node else self.is_main)

    @contextmanager
    def _in_turn(self, goes_first: bool) -> Iterator[None]:
        if goes_first:
            with self.together():
                yield
        else:
            with self.together():
                pass
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error that the block raises on some ranks is raised on all, when every rank has left the block."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
        failures = self.gather(sendable(error))
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if isinstance(failure, BaseException):  # anything else: that rank has made another call
                self.remote_error = failure
                raise failure from RuntimeError(f"raised on rank {rank}")

    def run_on_main(self, function: Callable[[], T]) -> T:
        """`function` runs on rank 0 alone; every rank gets its result, or its error.

        Any picklable result; tensors in it arrive on the CPU.
        """
        self.check_usable("World.run_on_main")
        result, error = cast(Any, None), cast("BaseException | None", None)
        if self.is_main:
            try:
                result = function()
            except BaseException as raised:
                error = raised
        try:
            result, self.remote_error = self._broadcast((result, sendable(error)), torch.device("cpu"))
        except Exception as lost:
            raise error or lost from (lost if error else None)
        if self.remote_error is not None:
            raise error or self.remote_error
        return cast(T, result)

    def check_outside_hook(self, call: str) -> None:
        """Raise RuntimeError if a callback's hook is running: `call` needs every rank, and a hook runs on rank 0 alone."""
        if self.running_hook is not None:
            raise RuntimeError(
                f"{call} was called inside {self.running_hook}: hooks run on rank 0 only, so the other ranks would wait for "
                "ever. A hook needs no communication: what it receives is already reduced over all ranks. Call it outside the "
                "hooks, or override a method of DDPTrainer that runs on every rank"
            )

    def check_usable(self, call: str) -> None:
        """`check_outside_hook`, and RuntimeError once the other ranks cannot be reached any more."""
        self.check_outside_hook(call)
        if self._is_closed:
            raise RuntimeError(f"{call} needs the other ranks, but this world is closed: close it, or its trainer, last of all")
