"""What a micro-batch takes in other libraries' loops, in this project's, and in one written by hand, all on the CPU:

    python tests/benchmarks/peers.py --model tiny --processes 2 --accumulation 4
    PIN=1 python tests/benchmarks/peers.py --model resnet --peers accelerate fabric

Needs ``pip install .[benchmarks]``. All loops train the same: SGD, micro-batches of 32 from a shuffled TensorDataset, nothing
saved or shown. Each has a torchrun job of its own, as libraries open the process group themselves; a round starts each once, in
turn. A job gives the median of its epochs (timed from end to end) without the first two, the table the medians over the rounds; a
ratio is taken within a round. How far that of "by hand again", the same loop, is from 1 says what a ratio means. With PIN in the
environment each rank keeps to one core. What differs besides the loops themselves:

- At one process `ignite` (whose `auto_model` leaves DistributedDataParallel out there) and `trainer` train the bare model.
- With accumulation `ignite` reduces gradients at every micro-batch; at one process `accelerate` and `pytorch_accelerated` do too.
- `ignite` and `pytorch_accelerated` turn every loss into a Python number; `trainer` reports at every 10th step, over all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from loop import network
from torch import Tensor, nn
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainer import Callback, DDPTrainer, TrainerConfig

Mark = Callable[[], None]  # called at the end of each epoch
Loop = Callable[[argparse.Namespace, nn.Module, TensorDataset, Mark], None]

BATCHES = {"tiny": 200, "cnn": 40, "resnet": 8}  # micro-batches of an epoch, per rank
EPOCHS = 7  # of a job; the first two are for warming up
# Without ACCELERATE_USE_CPU, accelerate trains on each rank alone where there is no GPU.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
sgd = functools.partial(torch.optim.SGD, lr=0.01)
shuffled = functools.partial(DataLoader, batch_size=32, shuffle=True, drop_last=True)


def by_hand(options: argparse.Namespace, model: nn.Module, data: TensorDataset, mark: Mark) -> None:
    dist.init_process_group("gloo")
    replica, optimizer, sampler = DistributedDataParallel(model), sgd(model.parameters()), DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    for number in range(EPOCHS):
        sampler.set_epoch(number)
        for place, (inputs, targets) in enumerate(loader, 1):
            last = place % options.accumulation == 0
            with contextlib.nullcontext() if last else replica.no_sync():
                (nll_loss(replica(inputs), targets) / options.accumulation).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        mark()


def of_trainer(options: argparse.Namespace, model: nn.Module, data: TensorDataset, mark: Mark) -> None:
    class Marks(Callback):
        def on_epoch_end(self, trainer: DDPTrainer, metrics: object) -> None:
            mark()

    config = TrainerConfig(epochs=EPOCHS, batch_size=32, accumulation_steps=options.accumulation, drop_last=True)
    with DDPTrainer(model, sgd(model.parameters()), data, loss_fn=nll_loss, config=config, callbacks=[Marks()]) as trainer:
        trainer.fit()


def of_accelerate(options: argparse.Namespace, model: nn.Module, data: TensorDataset, mark: Mark) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulation)
    replica, optimizer, loader = accelerator.prepare(model, sgd(model.parameters()), shuffled(data))
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(replica):
                accelerator.backward(nll_loss(replica(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        mark()


def of_fabric(options: argparse.Namespace, model: nn.Module, data: TensorDataset, mark: Mark) -> None:
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=options.processes)
    fabric.launch()
    replica, optimizer = fabric.setup(model, sgd(model.parameters()))
    loader = fabric.setup_dataloaders(shuffled(data))
    for _ in range(EPOCHS):
        for place, (inputs, targets) in enumerate(loader, 1):
            last = place % options.accumulation == 0
            with fabric.no_backward_sync(replica, enabled=not last):
                fabric.backward(nll_loss(replica(inputs), targets) / options.accumulation)
            if last:
                optimizer.step()
                optimizer.zero_grad()
        mark()


def of_lightning(options: argparse.Namespace, model: nn.Module, data: TensorDataset, mark: Mark) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            return nll_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.parameters())

        def on_train_epoch_end(self) -> None:
            mark()

    module = Module()
    module.model = model
    job = {"devices": options.processes, "max_epochs": EPOCHS, "accumulate_grad_batches": options.accumulation}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(accelerator="cpu", strategy="ddp", **job, **quiet).fit(module, shuffled(data))


def of_ignite(options: argparse.Namespace, model: nn.Module, data: TensorDataset, mark: Mark) -> None:
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_trainer

    idist.initialize("gloo")
    replica, optimizer = idist.auto_model(model), idist.auto_optim(sgd(model.parameters()))
    loader = idist.auto_dataloader(data, batch_size=32 * options.processes, shuffle=True, drop_last=True)  # 32 for each rank
    engine = create_supervised_trainer(replica, optimizer, nll_loss, gradient_accumulation_steps=options.accumulation)
    if isinstance(loader.sampler, DistributedSampler):
        engine.add_event_handler(Events.EPOCH_STARTED, lambda: loader.sampler.set_epoch(engine.state.epoch))
    engine.add_event_handler(Events.EPOCH_COMPLETED, mark)
    engine.run(loader, max_epochs=EPOCHS)


def of_pytorch_accelerated(options: argparse.Namespace, model: nn.Module, data: TensorDataset, mark: Mark) -> None:
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import TrainerCallback

    class Marks(TrainerCallback):
        def on_train_epoch_end(self, *arguments: object, **keywords: object) -> None:
            mark()

    job = {"num_epochs": EPOCHS, "per_device_batch_size": 32, "gradient_accumulation_steps": options.accumulation}
    loading = {"drop_last": True, "num_workers": 0}
    Trainer(model, nll_loss, sgd(model.parameters()), callbacks=[Marks()]).train(data, train_dataloader_kwargs=loading, **job)


PEERS: dict[str, tuple[Loop, str]] = {  # and the package that each needs
    "accelerate": (of_accelerate, "accelerate"),
    "fabric": (of_fabric, "lightning"),
    "lightning": (of_lightning, "lightning"),
    "ignite": (of_ignite, "pytorch-ignite"),
    "pytorch_accelerated": (of_pytorch_accelerated, "pytorch-accelerated"),
}
LOOPS = {"by hand": by_hand, "trainer": of_trainer, **{name: loop for name, (loop, _) in PEERS.items()}, "by hand again": by_hand}


def model_and_data(options: argparse.Namespace) -> tuple[nn.Module, TensorDataset]:
    if options.model == "resnet":
        from torchvision.models import resnet18

        torch.manual_seed(0)
        model, shape = nn.Sequential(resnet18(num_classes=10), nn.LogSoftmax(dim=1)), (3, 32, 32)
    else:
        model, shape = network(options.model), (1, 28, 28)
    samples = BATCHES[options.model] * 32 * options.processes
    return model, TensorDataset(torch.randn(samples, *shape), torch.randint(10, (samples,)))


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if os.environ.get("PIN"):
        os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"]) % (os.cpu_count() or 1)})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    ends: list[float] = []

    def mark() -> None:
        if options.processes > 1 and dist.get_world_size() != options.processes:
            raise RuntimeError("this loop trains on each rank alone")
        ends.append(time.perf_counter())

    LOOPS[options.loop](options, *model_and_data(options), mark)
    if dist.is_initialized():
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        seconds = statistics.median(end - start for start, end in pairwise(ends[1:]))
        print(json.dumps({"loop": options.loop, "seconds": seconds / BATCHES[options.model]}), flush=True)


def run_job(name: str, options: argparse.Namespace) -> float | None:
    """Seconds per micro-batch; None, with the job's stderr on this one, where it failed."""
    limit = ["timeout", "--foreground", "--kill-after=60", "120"]  # ends torchrun, which ends its ranks
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
    command = [*limit, *torchrun, __file__, *sys.argv[1:], "--loop", name]
    job = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    results = [json.loads(line)["seconds"] for line in job.stdout.splitlines() if line.startswith('{"loop": ')]
    if job.returncode == 0 and results:
        return float(results[-1])
    print(f"{name} failed with code {job.returncode} (124: after 120 seconds):\n{job.stderr}", file=sys.stderr)
    return None


def show_facts(options: argparse.Namespace, versions: dict[str, str | None]) -> None:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = [line.partition(": ")[2] for line in lines if line.startswith("model name")] or ["CPU of unknown model"]
    print(f"{time.strftime('%Y-%m-%d')}, {cpu[0]}, {os.cpu_count()} cores{', pinned' * bool(os.environ.get('PIN'))}")
    print(", ".join(f"{name} {version}" for name, version in {"torch": torch.__version__, **versions}.items() if version))
    job = f"{options.model}, {options.processes} processes, accumulation {options.accumulation}"
    print(f"{job}, {BATCHES[options.model]} micro-batches an epoch, {options.rounds} rounds")
    print("".join(f"{name} is left out: {PEERS[name][1]} is not installed\n" for name in versions if versions[name] is None))


def show_table(times: dict[str, list[float | None]]) -> None:
    print("| loop | µs per micro-batch | ratio to the loop by hand |\n|---|---|---|")
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times["by hand"], strict=True) if a and b]
        if ratios:
            middle = 1e6 * statistics.median(seconds for seconds in own if seconds)
            print(f"| {name} | {middle:.0f} | {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=BATCHES, default="tiny")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--accumulation", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)  # makes this process a rank of a job
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.loop:
        return run_rank(options)
    versions = {name: next((own.version for own in metadata.distributions(name=PEERS[name][1])), None) for name in options.peers}
    show_facts(options, versions)
    times: dict[str, list[float | None]] = {name: [] for name in LOOPS if name not in PEERS or versions.get(name)}
    for _ in range(options.rounds):
        for name, own in times.items():
            own.append(run_job(name, options))
    show_table(times)
    sys.exit(any(None in own for own in times.values()))


if __name__ == "__main__":
    main()
