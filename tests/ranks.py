"""Runs a function on several ranks: forked processes, set up as torchrun would, under a wall limit."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import process as multiprocessing_process
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import TCPStore

Environment = Mapping[str, "str | None"]

# What a launcher sets; a test's process may itself have been started by one.
_LAUNCHER = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
)
_GRACE = 1.0  # seconds between a rank's own dump of its stacks, at the limit, and the end


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    rank: int
    value: Any
    """What the function returned; None when it did not."""
    error: str | None
    """Name of the exception's type, with its module unless that is builtins."""
    message: str
    """``str()`` of the exception."""
    traceback: str
    """As Python prints it; after a timeout the stacks of the rank's threads."""
    stdout: str
    stderr: str
    exit_code: int
    """Negative: the signal that killed the process."""
    seconds: float
    timed_out: bool
    recorded: dict[str, Any] | None
    """What the rank wrote for torchrun's agent (TORCHELASTIC_ERROR_FILE)."""

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code == 0

    def __str__(self) -> str:
        if self.ok:
            return f"rank {self.rank}: returned {self.value!r} after {self.seconds:.1f} s"
        what = f"{self.error}: {self.message}" if self.error else "ended without a result"
        text = f"rank {self.rank}: {what} (exit code {self.exit_code}, {self.seconds:.1f} s)\n"
        # A traceback that was printed is in stderr already.
        return text + "\n".join(part for part in (self.stdout, self.stderr) if part)


class RanksFailed(AssertionError):
    """Not every rank returned. `outcomes`: one `Outcome` a rank, in rank order."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__("\n".join(str(outcome) for outcome in outcomes))
        self.outcomes = outcomes

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.ok]


class Ranks:
    """``ranks(4, function, *args)`` is what `function(*args)` returned on ranks 0, 1, 2, 3.

    The ranks are forked from this process, so torch is imported already and closures need no pickling; results are
    pickled. Each finds the environment of a torchrun worker, with a store that another process hosts. One rank runs
    without that environment, as plain python would (`launched` overrides). Ranks see no GPU.

    A rank ends as a Python process does, its atexit handlers included, up to the destruction of what is still alive:
    what happens in there needs a launch of its own (`tests.helpers.run_torchrun`). Warnings raise in it where they
    would in the test. It leads a process group of its own, which is killed with it.

    Keyword arguments besides these are the function's:

    - `timeout`: seconds after which every rank is killed; then the outcome holds the stacks of its threads.
    - `env`: more environment variables (None: absent), or a function of the rank that gives them.
    - `launched`: whether the launcher's environment is set; by default with more than one rank.
    """

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """The values in rank order. Raises RanksFailed unless every rank returned one and ended with 0."""
        outcomes = self.outcomes(world_size, function, *args, **options)
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailed(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        env: Environment | Callable[[int], Environment] | None = None,
        launched: bool | None = None,
        **kwargs: Any,
    ) -> list[Outcome]:
        """How each rank ended, in rank order; raises nothing for a rank that failed."""
        launched = world_size > 1 if launched is None else launched
        with _agent_store() if launched else nullcontext() as port, tempfile.TemporaryDirectory(prefix="ranks-") as name:
            folder = Path(name)
            started = time.monotonic()
            running: dict[int, int] = {}  # process ids, by rank
            try:
                for rank in range(world_size):
                    environment: dict[str, str | None] = dict.fromkeys(_LAUNCHER)
                    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                    if port is not None:
                        environment |= _torchrun_environment(rank, world_size, port, folder)
                    environment |= (env(rank) if callable(env) else env) or {}
                    sys.stdout.flush()  # or the child would write the rest of the buffers again
                    sys.stderr.flush()
                    pid = os.fork()
                    if pid == 0:
                        _run_rank(lambda: function(*args, **kwargs), folder / str(rank), environment, timeout)
                    running[rank] = pid
                return _wait(running, folder, started, timeout)
            except BaseException:  # an interrupt, or the time limit of the whole test
                for pid in running.values():
                    _kill(pid)
                    os.waitpid(pid, 0)
                raise


@contextmanager
def _agent_store() -> Iterator[int]:
    """The port of a store for the ranks, which a process of its own hosts, as torchrun's agent does.

    Not this one: the store's server is a thread, and a rank forked while it held a lock would find that locked for ever.
    """
    port, port_end = os.pipe()
    alive, alive_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(alive_end)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(port_end, str(store.port).encode())
            os.read(alive, 1)  # until this process is killed, or nobody is left who could do it
        finally:
            os._exit(0)
    try:
        os.close(port_end)
        os.close(alive)
        yield int(os.read(port, 16))
    finally:
        os.close(port)
        os.close(alive_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _torchrun_environment(rank: int, world_size: int, port: int, folder: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank is a client of the launcher's store
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_ERROR_FILE": f"{folder / str(rank)}.recorded",
    }


# In the child.


def _run_rank(call: Callable[[], Any], files: Path, environment: Environment, timeout: float) -> NoReturn:
    """Everything a forked rank does. Never returns into the test, whose clean-up belongs to the parent."""
    exit_code = 1
    try:
        os.setpgid(0, 0)
        _become_a_process_of_its_own(files, environment)
        faulthandler.dump_traceback_later(timeout, file=sys.stderr)
        signal.alarm(math.ceil(timeout) + 5)  # the end even when the parent is no longer there to see to it
        result: dict[str, Any] = {}
        try:
            result["value"] = call()
            exit_code = 0
        except SystemExit as error:
            exit_code = _exit_code(error)
        except BaseException as error:
            exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
            result.update(_describe(error))
            sys.stderr.write(result["traceback"])
        exit_code = _write(result, files) or exit_code
        # As the interpreter ends: threads, then the handlers, then the streams.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        exit_code = exit_code or 1
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(exit_code)


def _become_a_process_of_its_own(files: Path, environment: Environment) -> None:
    """Undo what the child has inherited from pytest, so that it behaves as a freshly started Python."""
    gc.freeze()  # the parent's objects are not this process's to destroy
    atexit._clear()
    atexit.register(multiprocessing_util._exit_function)  # ends DataLoader workers; as importing that module does
    multiprocessing_util._finalizer_registry.clear()
    multiprocessing_process._children.clear()  # type: ignore[attr-defined]  # they are the parent's
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{files}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
        stream = open(descriptor, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(file=sys.stderr)
    sys.unraisablehook = sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    warnings.showwarning = _print_warning  # pytest collects them in a list of the parent's

    for key, value in environment.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    torch.set_num_threads(1)


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _describe(error: BaseException) -> dict[str, str]:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return {"error": name, "message": str(error), "traceback": "".join(traceback.format_exception(error))}


def _write(result: dict[str, Any], files: Path) -> int:
    """The exit code that this calls for: 0, or 1 when the value cannot be pickled."""
    try:
        data, exit_code = pickle.dumps(result), 0
    except Exception as error:
        data, exit_code = pickle.dumps(_describe(error)), 1
        sys.stderr.write(f"the value that the rank returned cannot be pickled: {error}\n")
    Path(f"{files}.result").write_bytes(data)
    return exit_code


# In the parent.


def _wait(running: dict[int, int], folder: Path, started: float, timeout: float) -> list[Outcome]:
    """Waits for every rank, kills those that pass the limit, and whatever a rank leaves behind in its group."""
    ended: dict[int, tuple[int, float, bool]] = {}  # exit code, seconds, killed at the limit
    late = False
    while running:
        seconds = time.monotonic() - started
        if not late and seconds > timeout + _GRACE:
            late = True
            for pid in running.values():
                _kill(pid)
        for rank, pid in list(running.items()):
            # WNOWAIT leaves the dead process in place, so that its number still names its group and nothing else.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill(pid)
                del running[rank]
                exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                ended[rank] = (exit_code, seconds, late and exit_code == -signal.SIGKILL)
        time.sleep(0.005)
    return [_outcome(rank, folder / str(rank), *ended[rank]) for rank in sorted(ended)]


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group is there once the child has made it
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _outcome(rank: int, files: Path, exit_code: int, seconds: float, timed_out: bool) -> Outcome:
    def text(name: str) -> str:
        file = Path(f"{files}.{name}")
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    file = Path(f"{files}.result")
    result = pickle.loads(file.read_bytes()) if file.exists() else {}
    recorded, stderr = text("recorded"), text("stderr")
    if timed_out:
        result = {
            "error": "TimeoutError",
            "message": f"still running after {seconds - _GRACE:.1f} s; killed",
            "traceback": stderr[stderr.find("Timeout (") :] if "Timeout (" in stderr else "",
        }
    return Outcome(
        rank=rank,
        value=result.get("value"),
        error=result.get("error"),
        message=result.get("message", ""),
        traceback=result.get("traceback", ""),
        stdout=text("stdout"),
        stderr=stderr,
        exit_code=exit_code,
        seconds=seconds,
        timed_out=timed_out,
        recorded=json.loads(recorded) if recorded else None,
    )
