"""A run that is killed again and again under torchrun, beside one that is left alone:

    python tests/benchmarks/kill.py --kills 20 --processes 2
    python tests/benchmarks/kill.py --kills 20 --processes 3
    python tests/benchmarks/kill.py --kills 9 --world-changes

A model with dropout and momentum on data that changes whenever it is fetched, an evaluation every 7 steps, a checkpoint every
3, written in the background. A random rank is killed with SIGKILL at a random instant of, in turn, its set-up, a step, an
evaluation, and (rank 0) a write; torchrun restarts the job (--max-restarts) until the run is finished. Then:

- next step: restarts that took a step beyond where they were restored, unless they were killed before they could; and the
  seconds from a kill to the next finished step, where no other kill came between (in set-up one does);
- importing: seconds of these until rank 0's new process has imported torch, the trainer, and what the construction of any of
  torch's optimizers imports (torch._dynamo);
- equal: final weights and optimizer state, bit for bit; every line of the log whose interval starts at or after the step that
  its writer was restored at (those of speed apart); and the lines there are at all;
- lost: steps trained again beyond what the last checkpoint explains: those from it to the kill, and no more than 3 + 3 (one file
  may just have been on its way);
- stale: unfinished files left at the end; "unfinished" counts those that kills left behind, which shows that they hit a write.

With --world-changes the job runs on 2, then on 3, then on 1 processes, each with a third of the kills, and then with a kill of
torchrun itself. The log of indices, of which a step's last attempt counts, must hold each sample once per epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.jobs import Job  # noqa: E402

CHILD = "--child"
SAMPLES, GLOBAL_BATCH, STEPS = 50, 6, 9  # an epoch; its last step is over two samples
EVERY, LOG_EVERY, EVAL_EVERY = 3, 5, 7
PER_KILL = 40  # steps, so that the run does not end before the last kill
WIDTH = 400
PACE = 0.01  # seconds that a micro-batch takes at least
PHASES = ("set-up", "step", "evaluation", "save")
LIMIT = 120.0  # seconds for what takes a few


# In the ranks.


def train(folder: Path, epochs: int, job: int) -> None:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from callbacks import Checkpoint, JSONLines
    from trainer import Callback, CheckpointFolder, DDPTrainer, TrainerConfig, checkpoint

    rank = os.environ["RANK"]
    attempt = (job, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))

    def opened(name: str, how: int = os.O_APPEND) -> int:
        return os.open(folder / name, os.O_WRONLY | os.O_CREAT | how)

    trained, steps, now = opened(f"trained-{rank}.log"), opened("steps.log"), opened(f"now-{rank}", 0)
    imports = opened(f"imports-{rank}.log")

    def say(file: int, *words: object) -> None:
        os.write(file, (" ".join(map(str, (*attempt, *words))) + "\n").encode())

    def mark(phase: str) -> None:
        os.pwrite(now, f"{os.getpid()} {phase}".ljust(40).encode(), 0)

    class Noisy(Dataset[Any]):
        def __init__(self, length: int) -> None:
            generator = torch.Generator().manual_seed(length)
            self.inputs = torch.randn(length, 8, generator=generator)
            self.targets = torch.randn(length, 2, generator=generator)

        def __len__(self) -> int:
            return len(self.inputs)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
            return self.inputs[index] * (0.5 + torch.rand(())) + 0.3 * torch.randn(8), self.targets[index], index

    class Marked(DDPTrainer):
        def training_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
            mark("step")
            say(trained, self.state.step, self.state.epoch, *batch[2].tolist())
            time.sleep(PACE)
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        def eval_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
            mark("evaluation")
            time.sleep(PACE)
            return nn.functional.mse_loss(model(batch[0]), batch[1])

    class Told(Callback):
        def on_fit_start(self, trainer: DDPTrainer) -> None:
            say(steps, "restored", trainer.state.step, time.monotonic())

        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            say(steps, "finished", trainer.state.step, time.monotonic())

    write, saving = checkpoint.write, opened("saving", 0)

    def marked_write(path: Path, content: Mapping[str, Any]) -> None:
        os.pwrite(saving, b"1", 0)
        write(path, content)
        os.pwrite(saving, b"0", 0)

    checkpoint.write = marked_write
    os.pwrite(saving, b"0", 0)
    torch.manual_seed(len(CheckpointFolder(folder).steps()))  # other weights where they are to come from a file
    hidden = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2))
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Dropout(0.3), *hidden, nn.Linear(WIDTH, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    say(imports, time.monotonic() - started())
    with Marked(
        model,
        optimizer,
        Noisy(SAMPLES),
        Noisy(23),
        config=TrainerConfig(
            epochs=epochs, global_batch_size=GLOBAL_BATCH, batch_size=2, log_every=LOG_EVERY, eval_every=EVAL_EVERY, seed=3
        ),
        callbacks=[Told(), JSONLines(folder / "log.jsonl"), Checkpoint(folder, every_steps=EVERY, every_epochs=None)],
    ) as trainer:
        trainer.fit(resume_from=folder)


def started() -> float:
    """When this process was, by the monotonic clock of Linux."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


# In the killer.


class Event(NamedTuple):
    """What rank 0 has said: at the start, restored at a step; after each step, finished."""

    attempt: tuple[int, int]
    kind: str
    step: int
    time: float


class Kill(NamedTuple):
    phase: str
    attempt: tuple[int, int]
    time: float
    unfinished: bool
    """Whether it left a file behind that was being written."""


def launch(folder: Path, processes: int, epochs: int, job: int, restarts: int) -> Job:
    folder.mkdir(exist_ok=True)
    return Job(Path(__file__), processes, CHILD, folder, epochs, job, options=[f"--max-restarts={restarts}"])


def events(folder: Path) -> list[Event]:
    file = folder / "steps.log"
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        job, restart, kind, step, moment = line.split()
        found.append(Event((int(job), int(restart)), kind, int(step), float(moment)))
    return found


def text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text().strip()
    return ""


def kill_often(job: Job, number: int, folder: Path, processes: int, kills: int, chance: random.Random) -> list[Kill]:
    """Kills a random rank so many times, in each phase in turn; fewer times when the run is finished before."""
    done: list[Kill] = []
    killed: set[int] = set()
    for count in range(kills):
        phase = PHASES[(count + number) % len(PHASES)]
        victim = 0 if phase == "save" else chance.randrange(processes)
        try:
            ranks = new_ranks(job, processes, killed)
            if phase == "set-up":
                time.sleep(chance.uniform(0, 2.5))
            else:
                last = done[-1].time if done else 0.0
                job.until(lambda last=last: any(item.kind == "finished" for item in since(folder, last)), LIMIT)
                time.sleep(chance.uniform(0, 0.3))
                wait_for_mark(job, folder, victim, ranks[victim], phase)
                time.sleep(chance.uniform(0, 0.004))
            if phase == "set-up" and text(folder / f"now-{victim}").startswith(str(ranks[victim])):
                phase = "step"  # it was quicker
            attempt = (number, restarts_of(ranks[victim]))
            os.kill(ranks[victim], signal.SIGKILL)
        except (RuntimeError, ProcessLookupError, KeyError):
            break  # the run is finished
        moment = time.monotonic()
        while Path(f"/proc/{ranks[victim]}/maps").exists() and text(Path(f"/proc/{ranks[victim]}/maps")):
            time.sleep(0.001)
        done.append(Kill(phase, attempt, moment, victim == 0 and any(folder.glob("*.tmp"))))
        killed |= set(ranks.values())
    return done


def new_ranks(job: Job, processes: int, old: set[int]) -> dict[int, int]:
    """The process ids by rank, once all are there and none is one of `old`."""
    found: dict[int, int] = {}

    def there() -> bool:
        found.clear()
        found.update(job.ranks())
        return len(found) == processes and old.isdisjoint(found.values())

    job.until(there, LIMIT)
    return found


def since(folder: Path, moment: float) -> list[Event]:
    return [event for event in events(folder) if event.time > moment]


def restarts_of(pid: int) -> int:
    (item,) = [
        item for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if item.startswith(b"TORCHELASTIC_RESTART_COUNT=")
    ]
    return int(item.partition(b"=")[2])


def wait_for_mark(job: Job, folder: Path, victim: int, pid: int, phase: str) -> None:
    """Until rank `victim` is in that phase. RuntimeError when the job ends before."""
    file, wanted = (folder / "saving", "1") if phase == "save" else (folder / f"now-{victim}", f"{pid} {phase}")
    while text(file) != wanted:
        if job.agent.poll() is not None:
            raise RuntimeError("the job has ended")
        time.sleep(0.0002)


class Restart(NamedTuple):
    """What came of a kill. `seconds`: to the next step; None where the next kill came first."""

    failed: bool
    seconds: float | None


def restarts(folder: Path, kills: list[Kill]) -> list[Restart]:
    found = []
    ends = [kill.time for kill in kills[1:]] + [float("inf")]
    for kill, end in zip(kills, ends, strict=True):
        after = [event for event in since(folder, kill.time) if event.kind == "finished" and event.time < end]
        later = [event for event in after if event.attempt != kill.attempt]  # a survivor may just have finished its step
        (job, restart), seconds = kill.attempt, later[0].time - kill.time if later else None
        failed = later[0].attempt != (job, restart + 1) if later else end == float("inf")
        found.append(Restart(failed, seconds))
    return found


def steps_lost(folder: Path) -> int:
    """The most that a restart had to take again."""
    most, reached = 0, 0
    for event in events(folder):
        if event.kind == "restored":
            most = max(most, reached - event.step)
            reached = event.step
        else:
            reached = event.step
    return most


def compare_logs(folder: Path, wanted: Path) -> tuple[int, int, int]:
    """Lines that are equal, that differ or are missing, and those whose interval starts before their writer was restored."""
    ours, theirs = lines(folder), lines(wanted)
    starts = [event.step for event in events(folder) if event.kind == "restored"]
    equal = different = left_out = 0
    for kind, step in ours.keys() | theirs.keys():
        begin = {"step": (step - 1) // LOG_EVERY * LOG_EVERY, "epoch": step - STEPS, "eval": step}[kind]
        writer = [start for start in starts if start < step][-1]
        if (kind, step) in ours and (kind, step) in theirs and begin < writer:
            left_out += 1
        elif ours.get((kind, step)) == theirs.get((kind, step)):
            equal += 1
        else:
            different += 1
    return equal, different, left_out


def lines(folder: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        values = json.loads(line)
        for key in ("time", "samples_per_second"):
            values.pop(key, None)
        found.setdefault((values["kind"], values["step"]), []).append(values)
    return found


def same_end(folder: Path, wanted: Path) -> bool:
    import torch

    from trainer import CheckpointFolder

    def bits(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(value.shape), value.numpy().tobytes()
        if isinstance(value, Mapping):
            return {key: bits(item) for key, item in value.items()}
        return [bits(item) for item in value] if isinstance(value, list | tuple) else value

    contents = [CheckpointFolder(path).newest() or {} for path in (folder, wanted)]
    ours, theirs = ([bits(content.get(part)) for part in ("model", "optimizer", "state")] for content in contents)
    return bool(contents[0]) and ours == theirs


def once_each(folder: Path, epochs: int) -> tuple[int, int]:
    """Samples of all epochs that were trained on exactly once, where a step's last attempt counts; and how many were not."""
    trained = []
    for file in folder.glob("trained-*.log"):
        for line in file.read_text().splitlines():
            job, restart, step, epoch, *indices = map(int, line.split())
            trained.append(((job, restart), step, epoch, indices))
    last: dict[int, tuple[int, int]] = {}
    for attempt, step, _, _ in trained:
        last[step] = max(attempt, last.get(step, attempt))
    counted = Counter((epoch, index) for attempt, step, epoch, indices in trained if attempt == last[step] for index in indices)
    wanted = [(epoch, index) for epoch in range(epochs) for index in range(SAMPLES)]
    right = sum(counted[sample] == 1 for sample in wanted)
    return right, len(counted.keys() | set(wanted)) - right


def finish(job: Job) -> None:
    code = job.wait(600)
    if code != 0:
        raise RuntimeError(f"the job failed with {code}:\n{job.output}")


def count(folder: Path, kills: list[Kill]) -> str:
    """Cells of the table."""
    outcomes = restarts(folder, kills)
    phases = ", ".join(f"{sum(kill.phase == phase for kill in kills)} {phase}" for phase in PHASES)
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    good = sum(not outcome.failed for outcome in outcomes if outcome.seconds is not None)
    times = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else "-"
    unfinished = sum(kill.unfinished for kill in kills)
    imports = [line.split() for line in (folder / "imports-0.log").read_text().splitlines()]
    importing = statistics.median(float(words[2]) for words in imports if words[0] == str(kills[0].attempt[0]))
    return f"{len(kills)} ({phases}) | {unfinished} | {good} of {len(seconds)} | {times} | {importing:.1f}"


def kill_and_compare(parent: Path, kills: int, processes: int, chance: random.Random) -> None:
    epochs = -(-(kills + 1) * PER_KILL // STEPS)
    alone, killed = parent / "alone", parent / "killed"
    with launch(alone, processes, epochs, 0, 0) as job:
        finish(job)
    with launch(killed, processes, epochs, 0, kills + 5) as job:
        done = kill_often(job, 0, killed, processes, kills, chance)
        finish(job)
    equal, different, left_out = compare_logs(killed, alone)
    stale = len(list(killed.glob("*.tmp")))
    print("| processes | kills | unfinished | next step reached | seconds to it: median (max) | importing |", end="")
    print(" steps taken again, at most | weights and optimizer equal | lines equal / different / left out | stale |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    print(f"| {processes} | {count(killed, done)} | {steps_lost(killed)} | ", end="")
    print(f"{'yes' if same_end(killed, alone) else 'NO'} | {equal} / {different} / {left_out} | {stale} |")
    right, wrong = once_each(killed, epochs)
    print(f"\n{right:,} samples trained on exactly once in {epochs} epochs, {wrong} not")


def change_worlds(parent: Path, kills: int, chance: random.Random) -> None:
    epochs, each, folder = -(-(kills + 3) * PER_KILL // STEPS), max(1, kills // 3), parent / "changed"
    print("| processes | kills | unfinished | next step reached | seconds to it: median (max) |", end="")
    print(" importing | steps finished by then |")
    print("|---|---|---|---|---|---|---|")
    for number, processes in enumerate((2, 3, 1)):
        with launch(folder, processes, epochs, number, each + 5) as job:
            done = kill_often(job, number, folder, processes, each, chance)
            if number == 2:
                finish(job)
            else:
                moment = done[-1].time
                job.until(lambda moment=moment: any(event.kind == "finished" for event in since(folder, moment)), LIMIT)
                time.sleep(chance.uniform(0.2, 0.6))
                job.processes()
                job.agent.kill()
                job.until_gone(20)
        print(f"| {processes} | {count(folder, done)} | {events(folder)[-1].step} |", flush=True)
    right, wrong = once_each(folder, epochs)
    print(f"\n{right:,} samples trained on exactly once in {epochs} epochs, {wrong} not; ", end="")
    print(f"{len(list(folder.glob('*.tmp')))} stale files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--world-changes", action="store_true", help="on 2, then 3, then 1 processes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="kill-") as name:
        if options.world_changes:
            change_worlds(Path(name), options.kills, chance)
        else:
            kill_and_compare(Path(name), options.kills, options.processes, chance)


if __name__ == "__main__":
    if CHILD in sys.argv:
        train(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
