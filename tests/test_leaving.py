"""How a job ends: cleanly with everything still held, or within seconds with the right rank's error as the cause."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from callbacks import Checkpoint
from tests.helpers import Completed, Numbers, Outcome, Ranks, Recorder, Toy, mean_of_outputs, run_torchrun, toy_trainer
from trainer import Callback, DDPTrainer, TrainerConfig, World

LIMIT = 100.0  # seconds for a launch, which takes about 5 on an idle machine
NOISE = ("destroy_process_group", "terminate called", "Traceback", "leaked", "Warning", "resource_tracker")


# Leaving cleanly.


def test_two_fits_and_a_second_trainer_in_one_process_leave_cleanly_with_everything_held() -> None:
    """Under torchrun: the group is gone after close, and nothing is said about it at the end."""
    done = run_torchrun(
        """
import os
import torch.distributed as dist
from tests.helpers import Recorder, toy_trainer

class Once(Recorder):
    def on_step(self, trainer, metrics):
        if trainer.state.step == 1:
            trainer.stop("for now")

held = []
for number in range(3):
    trainer = toy_trainer(16, eval_numbers=3, callbacks=[Once()], batch_size=2)
    assert dist.is_initialized()
    held.append(trainer)
    assert trainer.fit().step == 1
    assert trainer.fit().step == 4
    assert trainer.evaluate() == {"loss": -30.0}  # the means of four windows of 0..15, times the mean of 0, 1, 2
    trainer.close()
    assert not dist.is_initialized()
os.write(1, f"rank {trainer.world.rank} is done\\n".encode())  # at once, beside the other rank
""",
        2,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 is done", "rank 1 is done"]
    assert not [word for word in NOISE if word in done.stderr], done.stderr


ENDINGS = {
    "closed": "held = train(); held.close()",
    "never closed": "held = train()",
    "closed by a with block": """
with train() as held:
    held.fit()
""",
    "the world closed": "held = train(); held.world.close()",
    "a hand-written loop, never closed": """
model = Toy()
held = World.from_env().wrap(model)
wrapped.append(held)
for step in range(3):
    held(torch.ones(2, dtype=torch.float64)).mean().backward()
""",
}

# Every rank is a process of its own that ends as Python ends, with everything still held; they are forked, so that torch is
# imported once. The store lives in another process, as torchrun's does.
ENDS = """
import atexit, gc, os, signal, sys

def look():
    for wrapper in wrapped:
        holds = sorted({"reducer", "logger", "process_group"} & set(vars(wrapper))) + ["the group"] * dist.is_initialized()
        os.write(1, f"{number}: holds {holds}\\n".encode())  # at once, beside the other ranks

wrapped = []
atexit.register(look)  # before the trainer registers its own, so that it comes after that

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from tests.helpers import Toy, mean_of_outputs, toy_trainer
from trainer import Callback, DDPTrainer, World

class Trainer(DDPTrainer):
    def training_step(self, model, batch):
        wrapped[:] = [model]
        return mean_of_outputs(model(batch[0]), batch[1])

def train():
    trainer = toy_trainer(8, kind=Trainer, batch_size=2)
    trainer.fit()
    return trainer

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(())])  # imports, once, what takes a second
reading, writing = os.pipe()
host = os.fork()
if host == 0:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    signal.alarm(300)  # its own end, should nobody be left to bring it about
    signal.pause()
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.read(reading, 10).decode(), "WORLD_SIZE": "2"}
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
for number, code in enumerate(sys.argv[1:]):
    children = []
    for rank in (0, 1):
        children.append(os.fork())
        if children[-1] == 0:
            gc.freeze()  # torch itself need not be looked through, which takes a second each time
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            exec(code)
            sys.exit()
    for child in children:
        os.write(1, f"{number}: exit {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n".encode())
os.kill(host, signal.SIGKILL)
"""


def test_a_wrapper_that_is_still_held_has_let_go_when_the_process_ends() -> None:
    """A process may abort at its end while a wrapper holds what belongs to the group. The user's own references do
    not matter: to the trainer, and to what `training_step` was given."""
    done = run_torchrun(ENDS, 0, *ENDINGS.values(), timeout=LIMIT)
    for number, name in enumerate(ENDINGS):
        own = sorted(line for line in done.stdout.splitlines() if line.startswith(f"{number}: "))
        assert own == [f"{number}: exit 0"] * 2 + [f"{number}: holds []"] * 2, (name, done.stderr)
    assert not [word for word in NOISE if word in done.stderr], done.stderr


def test_two_jobs_at_once_do_not_disturb_each_other_and_need_no_certain_port() -> None:
    """torchrun's usual port is taken."""
    script = """
import os
from tests.helpers import toy_trainer
with toy_trainer(8, batch_size=2) as trainer:
    trainer.fit()
    os.write(1, f"{float(trainer.model.w)}\\n".encode())  # at once: print sends the end of the line by itself
"""
    with socket.socket() as taken, ThreadPoolExecutor() as pool:
        try:
            taken.bind(("", 29500))
            taken.listen()
        except OSError:
            pass  # somebody else has it, which is just as well
        jobs = list(pool.map(lambda _: run_torchrun(script, 2, timeout=LIMIT), range(2)))
    for job in jobs:
        assert job.returncode == 0, job.stderr
        assert job.stdout.split() == ["-7.0", "-7.0"]


@pytest.mark.parametrize("launched", ["by torchrun", "by hand"])
def test_a_port_that_was_given_and_is_taken_ends_the_job_with_its_number(tmp_path: Path, launched: str) -> None:
    (script := tmp_path / "script.py").write_text("from trainer import World\nWorld.from_env()\nprint('open')\n")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launcher = (
            ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"] if launched == "by torchrun" else []
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
        if not launcher:
            environment |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, *launcher, str(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode != 0
    assert "open" not in done.stdout
    assert f"port: {port}" in done.stderr
    assert "address already in use" in done.stderr


# Leaving with an error.


def test_an_interrupt_reaches_the_caller_and_files_are_closed(tmp_path: Path) -> None:
    """Nothing after `fit` runs, the exit code is not 0, and the log holds the two steps."""
    done = run_torchrun(
        """
import sys
from callbacks import JSONLines, TensorBoard
from tests.helpers import Recorder, toy_trainer

class Interrupting(Recorder):
    def on_step(self, trainer, metrics):
        if trainer.state.step == 2:
            raise KeyboardInterrupt

    def on_exception(self, trainer, error):
        print("told of", type(error).__name__)

callbacks = [TensorBoard(sys.argv[1]), JSONLines(sys.argv[1] + "/log.jsonl"), Interrupting()]
with toy_trainer(16, callbacks=callbacks, batch_size=2) as trainer:
    trainer.fit()
    print("AFTER")
print("AFTER")
""",
        0,
        str(tmp_path),
        timeout=LIMIT,
    )
    assert done.returncode in (-2, 130, 1)  # Python ends by the signal itself; a shell says 130
    assert done.stdout.splitlines() == ["told of KeyboardInterrupt"]
    assert "KeyboardInterrupt" in done.stderr
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
    assert scalar_steps(tmp_path) == [1, 2]


def scalar_steps(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars("train/loss")]


def root_cause(done: Completed) -> str:
    """What torchrun shows as the first failure."""
    return done.stderr.partition("Root Cause (first observed failure):")[2]


def test_torchrun_shows_the_rank_that_failed_with_its_traceback(tmp_path: Path) -> None:
    """Rank 1 fails in the first of two micro-batches, rank 0 waits in the reduction. The newest checkpoint is that of
    the last whole step."""
    done = run_torchrun(
        """
import sys, time
from callbacks import Checkpoint
from tests.helpers import toy_trainer
from trainer import Callback, DDPTrainer

class Trainer(DDPTrainer):
    micro_batches = 0

    def training_step(self, model, batch):
        self.micro_batches += 1
        if self.world.rank == 1 and self.micro_batches == 5:
            print(time.time())
            raise ValueError("boom")
        return super().training_step(model, batch)

trainer = toy_trainer(
    32, kind=Trainer, callbacks=[Checkpoint(sys.argv[1], every_steps=1)], batch_size=2, accumulation_steps=2
)
trainer.fit()
""",
        2,
        str(tmp_path),
        timeout=LIMIT,
    )
    assert done.returncode not in (0, None)
    assert time.time() - float(done.stdout) < 30  # a process group's limit is ten minutes
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root_cause(done)), done.stderr
    assert 'raise ValueError("boom")' in root_cause(done), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.pt", "step-00000002.pt"]


def test_an_error_outside_fit_is_shown_too() -> None:
    """Rank 1's trainer cannot be built, rank 0 waits for it to compare notes."""
    done = run_torchrun(
        """
import time
from tests.helpers import toy_trainer
from trainer import World
world = World.from_env()
world.barrier()
if world.rank == 1:
    print(time.time())
trainer = toy_trainer(32, batch_size=2 - 2 * world.rank)
""",
        2,
        timeout=LIMIT,
    )
    assert done.returncode not in (0, None)
    assert time.time() - float(done.stdout) < 30
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root_cause(done)), done.stderr
    assert "ValueError: batch_size must be 1 or more; found 0" in root_cause(done), done.stderr


class Failing(DDPTrainer):
    """Rank 1 fails in the place named `place`: in the third of the four micro-batches of the second step, or later."""

    place = ""
    seen = 0

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += 1
        self.fail("training_step", self.seen == 7)
        return mean_of_outputs(model(batch[0]), batch[1])

    def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
        self.fail("eval_step", True)
        return mean_of_outputs(model(batch[0]), batch[1])

    def optimizer_step(self) -> None:
        self.fail("optimizer_step", self.state.step == 1)
        super().optimizer_step()

    def before_epoch(self) -> None:
        self.fail("before_epoch", self.state.epoch == 1)

    def fail(self, place: str, when: bool) -> None:
        if place == self.place and when and self.world.rank == 1:
            raise ValueError("boom")


class FailingData(Numbers):
    """Sample 19, which is rank 1's, cannot be read: in this process, or in a worker."""

    def __init__(self, numbers: int, in_worker: bool) -> None:
        super().__init__(numbers)
        self.in_worker = in_worker

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 19 and (get_worker_info() is not None) == self.in_worker:
            raise ValueError("boom")
        return super().__getitem__(index)


class Witness(Recorder):
    """Writes down when on_exception was called, and for what."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        (self.folder / "witness").write_text(f"{time.time()} {type(error).__name__}")


PLACES = ("training_step", "optimizer_step", "eval_step", "before_epoch", "dataset", "worker")


@pytest.mark.parametrize("place", PLACES)
def test_an_error_on_one_rank_is_the_recorded_cause_and_ends_the_other(ranks: Ranks, tmp_path: Path, place: str) -> None:
    """The failing rank waits for nobody. The other sees that it is gone and says so later than the cause, in whole
    seconds, because that is how torchrun compares; its callbacks are told at once; there is no checkpoint of a half step."""

    def fit() -> None:
        model = Toy()
        workers = place == "worker"
        data = FailingData(64, workers) if place in ("dataset", "worker") else Numbers(64)
        trainer = Failing(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            data,
            Numbers(4),
            loss_fn=mean_of_outputs,
            loader_options={"num_workers": int(workers)},
            config=TrainerConfig(batch_size=2, accumulation_steps=4, epochs=2, shuffle=False, eval_every=1000),
            callbacks=[Witness(tmp_path), Checkpoint(tmp_path / "files", every_steps=1)],
            world=World.from_env(timeout=timedelta(seconds=60)),
        )
        trainer.place = place
        with trainer:
            trainer.fit()
            trainer.evaluate()

    waiting, failing = ranks.outcomes(2, fit, timeout=30)
    assert failing.error == "ValueError"
    assert "boom" in failing.message
    assert "boom" in str(failing.recorded)
    assert not waiting.ok
    assert not waiting.timed_out
    assert "gloo" in str(waiting.recorded)
    assert recorded_at(waiting) > recorded_at(failing)
    if place != "eval_step":  # that was after `fit`
        told, kind = (tmp_path / "witness").read_text().split()
        assert kind == "RuntimeError"
        assert float(told) + 1 <= recorded_at(waiting)  # it holds back for two seconds
    whole = {"optimizer_step": [1, 2], "before_epoch": [2, 3, 4], "eval_step": [6, 7, 8]}.get(place, [1])
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [f"step-{step:08d}.pt" for step in whole]


def recorded_at(outcome: Outcome) -> int:
    assert outcome.recorded is not None
    return int(outcome.recorded["message"]["extraInfo"]["timestamp"])


class FailingHook(Recorder):
    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.state.step == 2:
            raise ValueError("boom")


class Vanishing(Recorder):
    """Puts a file where the folder of checkpoints was, in step 2."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.state.step == 2:
            for file in self.folder.iterdir():
                file.unlink()
            self.folder.rmdir()
            self.folder.touch()


@pytest.mark.parametrize("what", ["hook", "checkpoint"])
def test_an_error_on_rank_0_alone_is_the_recorded_cause_and_ends_the_other(ranks: Ranks, tmp_path: Path, what: str) -> None:
    """In a hook, or where a checkpoint cannot be written at step 2. Nobody waits in a barrier."""
    folder = tmp_path / "files"

    def fit() -> None:
        callbacks = (
            [FailingHook()] if what == "hook" else [Vanishing(folder), Checkpoint(folder, every_steps=1, async_write=False)]
        )
        World.from_env(timeout=timedelta(seconds=60))
        toy_trainer(16, callbacks=callbacks, batch_size=2).fit()

    failing, waiting = ranks.outcomes(2, fit, timeout=30)
    error, message = ("ValueError", "boom") if what == "hook" else ("NotADirectoryError", str(folder))
    assert failing.error == error
    assert message in failing.message
    assert message in str(failing.recorded)
    assert not waiting.ok
    assert not waiting.timed_out
    assert waiting.seconds < 20
    assert recorded_at(waiting) > recorded_at(failing)


@pytest.mark.parametrize("cause", [0, 1])
def test_an_error_that_every_rank_raises_is_recorded_last_where_it_is_a_copy(ranks: Ranks, cause: int) -> None:
    """Or torchrun would show a rank as the root cause that had only heard of it."""

    def begin() -> None:
        World.from_env(timeout=timedelta(seconds=60))
        with toy_trainer(8, batch_size=2) as trainer, trainer.world.together():
            if trainer.world.rank == cause:
                raise ValueError("boom")

    outcomes = ranks.outcomes(2, begin, timeout=30)
    assert [(outcome.error, outcome.message) for outcome in outcomes] == [("ValueError", "boom")] * 2
    assert recorded_at(outcomes[1 - cause]) > recorded_at(outcomes[cause])


def test_torchrun_is_told_of_an_error_though_a_hook_does_not_come_back(ranks: Ranks, tmp_path: Path) -> None:
    """Such as one that waits for a server."""

    class Looking(Recorder):
        def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
            recorded, deadline = Path(os.environ["TORCHELASTIC_ERROR_FILE"]), time.monotonic() + 10
            while not recorded.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(0.2)
            (tmp_path / "found").write_text(recorded.read_text() if recorded.exists() else "")

    outcomes = ranks.outcomes(1, lambda: toy_trainer(8, batch_size=2, callbacks=[FailingHook(), Looking()]).fit(), launched=True)
    assert outcomes[0].error == "ValueError"
    assert "boom" in (tmp_path / "found").read_text()


def test_an_error_that_cannot_be_recorded_stays_what_it_is(ranks: Ranks) -> None:
    """The disk that torchrun's file lies on may be full too; half a file would end the agent."""

    def fit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(ValueError, match="boom"):
            toy_trainer(8, batch_size=2, callbacks=[FailingHook()]).fit()
        assert not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"])
        os._exit(7)

    (outcome,) = ranks.outcomes(1, fit, launched=True)
    assert outcome.exit_code == 7, outcome


def test_an_interrupt_in_one_hook_keeps_no_other_from_closing_its_files(ranks: Ranks) -> None:
    class Impatient(Recorder):
        def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
            raise KeyboardInterrupt

    def fit() -> tuple[list[str], bool]:
        last = Recorder()
        trainer = toy_trainer(8, batch_size=2, callbacks=[FailingHook(), Impatient(), last])
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
        return [call.name for call in last.calls][-1:], trainer.world.failed

    assert ranks(1, fit) == [(["on_exception"], True)]


def test_an_error_where_no_memory_can_be_shared_is_told_as_any_other(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As too many open files, with a dataset that leaves them open, and no workers."""

    def refuse(self: Tensor) -> Tensor:
        raise RuntimeError("unable to open shared memory object: Too many open files")

    def fit() -> list[str]:
        recorder = Recorder()
        monkeypatch.setattr(Tensor, "share_memory_", refuse)
        with pytest.raises(ValueError, match="boom"):
            toy_trainer(8, batch_size=2, callbacks=[FailingHook(), recorder]).fit()
        return [call.name for call in recorder.calls][-1:]

    assert ranks(1, fit) == [["on_exception"]]


@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_script_that_ends_in_the_with_block_has_failed_only_where_it_says_so(ranks: Ranks, code: int | None) -> None:
    def fit() -> None:
        with toy_trainer(8, batch_size=2) as trainer:
            trainer.fit()
            sys.exit(code)

    (outcome,) = ranks.outcomes(1, fit, launched=True)
    assert (outcome.recorded is not None) == bool(code)
    assert outcome.exit_code == (code or 0)


def test_the_rank_that_failed_is_the_cause_though_its_hooks_take_long(ranks: Ranks) -> None:
    """The others hear of its error at once, and end before it."""

    class Slow(Recorder):
        def on_fit_end(self, trainer: DDPTrainer) -> None:
            raise ValueError("boom")

        def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
            time.sleep(5)

    cause, copy = ranks.outcomes(2, lambda: toy_trainer(8, batch_size=2, callbacks=[Slow()]).fit())
    assert (cause.error, copy.error) == ("ValueError", "ValueError")
    assert recorded_at(cause) < recorded_at(copy)


def test_what_is_told_while_a_hook_hangs_says_where_the_error_was(ranks: Ranks, tmp_path: Path) -> None:
    """Also of an error that was given more to say."""

    class Hidden(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            return model.weight_of_its_own

    class Hanging(Recorder):
        def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
            time.sleep(2)
            os._exit(9)

    (outcome,) = ranks.outcomes(1, lambda: toy_trainer(8, batch_size=2, kind=Hidden, callbacks=[Hanging()]).fit(), launched=True)
    assert outcome.exit_code == 9
    assert "in training_step" in str(outcome.recorded)
    assert "write self.model.weight_of_its_own" in str(outcome.recorded)


def test_hooks_are_told_of_an_error_though_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    recorder = Recorder()
    trainer = toy_trainer(8, batch_size=2, callbacks=[FailingHook(), recorder])
    monkeypatch.setattr(threading.Timer, "start", refuse)
    with pytest.raises(ValueError, match="boom"):
        trainer.fit()
    assert recorder.order[-1] == ("on_exception", 2)
    assert trainer.world.failed
    trainer.world.failed = False  # it is that of the tests, and goes on


def test_an_error_of_the_gpu_is_told_to_torchrun_before_the_hooks(ranks: Ranks) -> None:
    """NCCL's watchdog sees it too, and ends the process at once."""

    class Slow(Callback):
        def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
            print("told" if Path(os.environ["TORCHELASTIC_ERROR_FILE"]).exists() else "not told")

    class Failing(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered", 710)

    def fit() -> None:
        toy_trainer(4, kind=Failing, callbacks=[Slow()], batch_size=1).fit()

    outcome = ranks.outcomes(2, fit)[0]
    assert outcome.error is not None
    assert outcome.stdout == "told\n"
