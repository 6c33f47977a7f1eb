"""What `trainer.doctor` checks, on every rank. Each answer is known beforehand."""

from __future__ import annotations

import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from . import CheckpointFolder, DDPTrainer, TrainerConfig, World

SUM = "compare the torch versions of the nodes; NCCL_DEBUG=INFO shows which links are used, NCCL_P2P_DISABLE=1 avoids broken ones"
OBJECTS = "compare the Python and torch versions of the nodes"
BUG = "if all of the above is ok, this is a bug of ddp-trainer: please report it with all of these lines"


class CheckFailed(Exception):
    """A check found something else than it expected. Raised only where no other rank is kept waiting by that."""


def expect(found: Any, expected: Any, remedy: str) -> None:
    """Raise CheckFailed unless the two are equal."""
    if found != expected:
        raise CheckFailed(f"found {found}, expected {expected}; {remedy}")


def check_versions(world: World) -> str:
    """Every rank runs what rank 0 runs."""
    own = f"Python {platform.python_version()}, torch {torch.__version__}"
    expect(own, world.broadcast(own), "install the same versions on every node")
    return own


def check_device(world: World) -> str:
    """The device computes, and no other rank of the node has it."""
    places = world.gather((socket.gethostname(), str(world.device)))
    if world.device.type == "cuda":
        sharing = [rank for rank, place in enumerate(places) if place == places[world.rank]]
        expect(sharing, [world.rank], "these ranks share a GPU: start one process per GPU, with torchrun")
    try:
        row = torch.arange(64.0, device=world.device)
        found = torch.outer(row, torch.ones_like(row)).mm(torch.eye(64, device=world.device)).sum().item()
    except RuntimeError as error:
        raise CheckFailed(
            f"found {error}, expected a product; see nvidia-smi, and whether torch is built for this GPU"
        ) from error
    expect(found, 64 * 2016.0, "the device computes wrongly: take it out of the job")
    return f"{world.device} and the others compute"


def check_sum(world: World) -> str:
    """Doubles and integers; the tensor given stays as it is."""
    own = torch.tensor([world.rank + 1.0, 0.5], dtype=torch.float64, device=world.device)
    counts = world.sum(torch.tensor([world.rank], device=world.device))
    found, triangle = world.sum(own).tolist(), world.size * (world.size + 1) // 2
    expect(found + counts.tolist(), [float(triangle), world.size / 2, triangle - world.size], SUM)
    expect(own.tolist(), [world.rank + 1.0, 0.5], BUG)
    return f"1 + ... + {world.size} = {triangle}"


def check_gather(world: World) -> str:
    """Lists and tensors of unequal length, rank 0's empty."""
    own = ["item"] * world.rank, torch.ones(world.rank, device=world.device)
    found = [(items, tensor.tolist()) for items, tensor in world.gather(own)]
    on_main = world.gather_on_main(world.rank)
    expect(found, [(["item"] * rank, [1.0] * rank) for rank in range(world.size)], OBJECTS)
    expect(on_main, list(range(world.size)) if world.is_main else None, OBJECTS)
    return f"lists and tensors of 0 to {world.size - 1} items"


def check_broadcast(world: World) -> str:
    """An object, and tensors in place."""
    found = world.broadcast({"rank": world.rank})
    tensors = [torch.full((3,), world.rank + 7.0, device=world.device), torch.full((), world.rank + 8, device=world.device)]
    world.broadcast_tensors(tensors)
    expect([found, *[tensor.tolist() for tensor in tensors]], [{"rank": 0}, [7.0] * 3, 8], SUM)
    return "rank 0's object and tensors are everywhere"


def check_barrier(world: World) -> str:
    """All ranks meet."""
    world.barrier()
    started = time.perf_counter()
    world.barrier()
    return f"{(time.perf_counter() - started) * 1e3:.2f} ms"


def check_main_first(world: World) -> str:
    """On each node, the first rank has left the block before the others enter it."""
    with world.main_first():
        entered = time.monotonic()  # one clock for all processes of a node
        left = time.monotonic()
    times = world.gather((socket.gethostname(), world.local_rank, left))
    firsts = [end for host, local_rank, end in times if host == socket.gethostname() and local_rank == 0]
    expect(len(firsts), 1, "on each node one process has LOCAL_RANK=0: launch with torchrun, which sets it")
    expect("entered late" if world.local_rank == 0 or entered >= firsts[0] else "entered early", "entered late", BUG)
    return "the first rank of each node, then the others"


def check_run_on_main(world: World) -> str:
    """Rank 0's result, and its error, reach every rank."""
    found, error = world.run_on_main(lambda: world.rank), "no error"
    try:
        world.run_on_main(lambda: int("no number"))
    except ValueError:
        error = "an error"
    expect((found, error), (0, "an error"), OBJECTS)
    return "rank 0's result and its error are everywhere"


def check_backward(world: World) -> str:
    """A wrapped model has rank 0's weights and the mean of all gradients."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64, device=world.device)
    nn.init.constant_(model.weight, world.rank + 1.0)
    wrapped = world.wrap(model)
    wrapped(torch.full((1, 1), world.rank + 1.0, dtype=torch.float64, device=world.device)).sum().backward()
    assert model.weight.grad is not None
    expect((model.weight.item(), round(model.weight.grad.item(), 9)), (1.0, (world.size + 1) / 2), SUM)
    return f"the mean gradient is {(world.size + 1) / 2:g}"


def check_speed(world: World) -> str:
    """How long an all-reduce takes, on the slowest rank; the copy that `World.sum` makes is included."""
    if world.size == 1:
        return "one process sends nothing"
    (small, one), (large, other) = (timed_sum(world, count) for count in (8, 2 << 20))
    expect((one, other), (world.size, world.size), SUM)
    return f"8 doubles {small * 1e3:.3f} ms, 16 MB {large * 1e3:.1f} ms ({(16 << 20) / large / 1e9:.2f} GB/s)"


def timed_sum(world: World, count: int, rounds: int = 9) -> tuple[float, float]:
    """The median seconds of a sum of `count` doubles, on the rank where that is largest; and its last element."""
    values, seconds = torch.ones(count, dtype=torch.float64, device=world.device), []
    for _ in range(rounds + 2):
        world.barrier()
        started = time.perf_counter()
        total = world.sum(values)[-1].item()  # waits for a GPU
        seconds.append(time.perf_counter() - started)
    return max(world.gather(sorted(seconds[2:])[rounds // 2])), total


def build(world: World, max_steps: int) -> DDPTrainer:
    """Three steps of ranks + 1, ranks + 1 and 1 samples: shares of two and of one, then all but one are empty."""
    inputs = 1 + torch.arange(2 * world.size + 3, dtype=torch.float64).unsqueeze(1) / (2 * world.size + 3)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    data = TensorDataset(inputs, 2 * inputs)
    config = TrainerConfig(max_steps=max_steps, batch_size=1, global_batch_size=world.size + 1, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DDPTrainer(model, optimizer, data, data, loss_fn=nn.functional.mse_loss, config=config, world=world)


def by_hand(world: World) -> tuple[float, float]:
    """The weight and the mean loss that one process gets, without the trainer."""
    count, weight = 2 * world.size + 3, 0.0
    inputs = [1 + number / count for number in range(count)]
    for start in range(0, len(inputs), world.size + 1):
        window = inputs[start : start + world.size + 1]
        weight -= 0.1 * sum(2 * (weight - 2) * x * x for x in window) / len(window)
    return weight, sum(((weight - 2) * x) ** 2 for x in inputs) / len(inputs)


def check_training(world: World) -> str:
    """Uneven shares train and evaluate to what one process gets."""
    with build(world, 3) as trainer:
        trainer.fit()
        found = (trainer.model.get_parameter("weight").item(), trainer.evaluate()["loss"])
    expected = by_hand(world)
    if any(abs(one - other) > 1e-12 for one, other in zip(found, expected, strict=True)):
        expect(found, expected, BUG)
    shares = "shares of 2, 1 and 0 samples" if world.size > 1 else "windows of 2, 2 and 1 samples"
    return f"{shares}: weight {found[0]:.6f} and loss {found[1]:.6f}, as computed by hand"


def check_checkpoint(world: World) -> str:
    """A run that is stopped, written and resumed ends with the same weight, to the bit."""
    with build(world, 3) as whole, build(world, 2) as stopped:
        whole.fit()
        stopped.fit()
    folder, size = write(world, stopped)
    try:
        with build(world, 3) as resumed:
            resumed.fit(resume_from=folder)
    finally:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    expect(resumed.model.get_parameter("weight").item(), whole.model.get_parameter("weight").item(), BUG)
    return f"{size} bytes, written and read in {Path(folder).parent}"


def write(world: World, trainer: DDPTrainer) -> tuple[str, int]:
    """Write a checkpoint on rank 0: its folder and size. CheckFailed, on every rank, if that cannot be done."""

    def work() -> tuple[str, int]:
        folder = tempfile.mkdtemp(prefix="doctor-")
        try:
            return folder, CheckpointFolder(folder).write("step-00000002.pt", trainer.state_dict()).stat().st_size
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    try:
        return world.run_on_main(work)
    except OSError as error:
        raise CheckFailed(f"found {error}, expected a checkpoint; TMPDIR names another folder for this check") from error


_COLLECTIVES = (check_sum, check_gather, check_broadcast, check_barrier, check_main_first, check_run_on_main, check_backward)
_ALL = (check_versions, check_device, *_COLLECTIVES, check_speed, check_training, check_checkpoint)
CHECKS: dict[str, Callable[[World], str]] = {check.__name__.removeprefix("check_"): check for check in _ALL}
DEPENDENT = ("speed", "training", "checkpoint")  # they stand on the others: with one of those broken, ranks could wait for ever
