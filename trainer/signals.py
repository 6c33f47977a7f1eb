"""SIGTERM and SIGUSR1 while `fit` runs: a wish to stop, with a deadline after which the process leaves hard."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

HANDLED = (signal.SIGTERM, signal.SIGUSR1)
_ECHO = 1.0  # seconds: within these a second signal is the same one, sent to the group and passed on by torchrun
_END, _CALLED = 0, 255  # no signals have these numbers


class Signals:
    """While open, a signal asks to stop; handlers that the user has installed run too, and are put back by `close`.

    Python runs a handler between two lines of the main thread only, which may sit in a collective that never ends. So a thread
    is told of each signal by the system, and ends the process `seconds()` after the first (asked again then: a file may be on its
    way), or at a second one. Outside the main thread, where Python takes no handlers, nothing is installed. A signal that is
    ignored stays so, and SIGUSR1 is left to a handler that is not Python's, such as that of `faulthandler.register`.
    """

    _open: ClassVar[Signals | None] = None

    def __init__(self, ask: Callable[[str], None], seconds: Callable[[], float]) -> None:
        self._ask = ask
        self._seconds = seconds
        self._received: int | None = None

    def open(self) -> None:
        if threading.current_thread() is not threading.main_thread() or Signals._open is not None:
            return
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._users: dict[int, Any] = {}
        self._received = None
        for number in HANDLED:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN and handler is not None and not _is_of_others(number, handler):
                self._users[number] = handler
                signal.signal(number, self._handle)
        Signals._open = self
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Put everything back. A second call does nothing."""
        if Signals._open is not self:
            return
        self._put_back()
        os.write(self._writing, bytes([_END]))
        self._watcher.join()
        os.close(self._reading)
        os.close(self._writing)

    def resend(self) -> None:
        """After `close`: let a signal that came have the effect that it has without a trainer, such as ending this process."""
        if self._received is not None and self._users.get(self._received) is signal.SIG_DFL:
            os.kill(os.getpid(), self._received)

    def _put_back(self) -> None:
        Signals._open = None
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._users.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        users = self._users.get(number)
        if (current := Signals._open) is not None:  # perhaps of a later fit: a script's handler may still call this one
            current._received = number
            os.write(current._writing, bytes([_CALLED]))  # the watcher does not see who is called by another handler
            current._ask(f"received {signal.Signals(number).name}")
        elif users is signal.SIG_DFL:  # called by such a handler after `fit`
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if callable(users):
            users(number, frame)

    def _watch(self) -> None:
        first = leaving = math.inf
        wakes = select.poll()  # unlike select it takes any descriptor
        wakes.register(self._reading, select.POLLIN)
        while True:
            wait = None if leaving == math.inf else max(0.0, leaving - time.monotonic())
            if not wakes.poll(wait and 1000 * wait):
                if time.monotonic() < (leaving := max(leaving, first + self._seconds())):
                    continue
                self._leave(f"its steps did not end within {leaving - first:.1f} s")
            numbers = os.read(self._reading, 256)
            if self._wakeup >= 0:  # somebody else's, who is to be woken too
                with suppress(OSError):
                    os.write(self._wakeup, bytes(number for number in numbers if number not in (_END, _CALLED)))
            if _END in numbers:
                return
            is_own = any(number in self._users and signal.getsignal(number) == self._handle for number in numbers)
            now = time.monotonic()
            if leaving == math.inf and (is_own or _CALLED in numbers):
                first, leaving = now, now + self._seconds()
            elif is_own and now - first > _ECHO:
                self._leave("another one came")

    def _leave(self, why: str) -> None:
        os.write(2, f"process {os.getpid()} leaves after a signal to stop: {why}\n".encode())
        os._exit(128 + signal.SIGTERM)


def _is_of_others(number: int, handler: Any) -> bool:
    """Whether SIGUSR1 has a handler that Python does not know of, and so could not put back."""
    if number != signal.SIGUSR1 or handler is not signal.SIG_DFL:
        return False
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        caught = next((int(line.split()[1], 16) for line in status if line.startswith("SigCgt:")), 0)
        return bool(caught >> (number - 1) & 1)
    return False


def _forget_in_child() -> None:
    """A forked process starts with its parent's handlers, and with the pipe that wakes its parent's thread."""
    if Signals._open is not None:
        Signals._open._put_back()


os.register_at_fork(after_in_child=_forget_in_child)
