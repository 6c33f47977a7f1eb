"""A job under torchrun that is killed, signalled and looked at while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Process(NamedTuple):
    """A process of a job. `rank` is that of a training process; None for the agent, and for whatever a rank has started."""

    pid: int
    parent: int
    rank: int | None


class Job:
    """``torchrun --standalone`` in a session of its own, as a context; whatever is left of it in the end is killed."""

    def __init__(
        self, script: Path, nproc: int, *args: object, options: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *options, str(script)]
        self.started = time.monotonic()
        self.agent = subprocess.Popen(
            [sys.executable, *command, *map(str, args)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **fixed, **(env or {})},
            start_new_session=True,
        )
        self._seen: dict[int, Process] = {}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.processes()
        self.agent.kill()
        self.agent.wait()
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._output.close()

    @property
    def output(self) -> str:
        """What the job has printed so far."""
        self._output.flush()
        return os.pread(self._output.fileno(), 10_000_000, 0).decode(errors="replace")

    def processes(self) -> list[Process]:
        """The agent's descendants that are alive."""
        table = _table()
        found, parents = list[Process](), {self.agent.pid}
        while parents:
            children = [pid for pid, parent in table.items() if parent in parents]
            direct = self.agent.pid in parents
            found += [Process(pid, table[pid], _rank_of(pid) if direct else None) for pid in children]
            parents = set(children)
        self._seen |= {process.pid: process for process in found}
        return found

    def ranks(self) -> dict[int, int]:
        """The process ids of the training processes by rank."""
        return {process.rank: process.pid for process in self.processes() if process.rank is not None}

    def alive(self) -> list[int]:
        """The process ids that are alive of all that `processes` has ever found, whoever is their parent now."""
        table = _table()
        return [pid for pid, process in self._seen.items() if pid in table and _is_ours(pid)]

    def signal_all(self, number: int) -> None:
        """As a scheduler signals all processes of a job: the agent, the ranks, and what they have started."""
        pids = [process.pid for process in self.processes()]
        for pid in (self.agent.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, seconds: float) -> int:
        """The agent's exit code. Raises TimeoutError with what the job has printed."""
        try:
            return self.agent.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the job has not ended within {seconds} s:\n{self.output}") from None

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> float:
        """Waits for it; the time. Raises RuntimeError if the job ends before, TimeoutError at the limit."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.agent.poll() is not None:
                if condition():
                    break
                raise RuntimeError(f"the job has ended with {self.agent.returncode} too early:\n{self.output}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened within {seconds} s:\n{self.output}")
            time.sleep(0.005)
        return time.monotonic()

    def until_gone(self, seconds: float, pids: Collection[int] | None = None) -> float:
        """Waits until these are gone, or agent and all that `processes` has found; the time. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while set(self.alive()) & set(pids) if pids is not None else self.agent.poll() is None or self.alive():
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {self.alive()} are still there after {seconds} s:\n{self.output}")
            time.sleep(0.005)
        return time.monotonic()


def _table() -> dict[int, int]:
    """The parent of each process that is alive, zombies left out."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    found[int(entry.name)] = int(parent)
    return found


def _rank_of(pid: int) -> int | None:
    with suppress(OSError):
        for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if item.startswith(b"RANK="):
                return int(item.removeprefix(b"RANK="))
    return None


def _is_ours(pid: int) -> bool:
    """Whether it is still a Python of a torchrun job, and not another process that was given the number of one that has gone."""
    with suppress(OSError):
        return b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False
