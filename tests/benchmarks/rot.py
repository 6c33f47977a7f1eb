"""Files that rot: how many of so many damages are found before a checkpoint is used, and what looking for them costs:

    python tests/benchmarks/rot.py --flips 500 --megabytes 140

A folder holds a small whole checkpoint and, after it, the one that is damaged: of about 2 kB, then of so many megabytes. A damage
is *found* when `CheckpointFolder.newest` takes the small one instead. Each kind of damage is tried --flips times, on another
place each time; a zeroed page is one of 4,096 bytes or a sector of 512, and never one that was zero before.

The second table is the time to load the large file and copy it into a model, and to load it alone: checked (`newest`) over
unchecked (`torch.load`), in turn, the median of --rounds ratios. Cold: without the file in the system's memory (posix_fadvise).
`tests/test_rot.py` is the short form.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import CheckpointFolder, checkpoint

SMALL = 100  # numbers, in a file of about 2 kB
BEFORE, DAMAGED = 1, 2


def content(step: int, numbers: int) -> dict[str, Any]:
    """As long as `numbers` random numbers and little more."""
    values = torch.rand(numbers, generator=torch.Generator().manual_seed(step))
    return {"format": checkpoint.FORMAT, "state": {"step": step}, "model": {"w": values}}


def name(step: int) -> str:
    return f"step-{step:08d}.pt"


# Damages. Each undoes itself, so that a large file need not be written anew each time.


@contextmanager
def flipped(path: Path, chance: random.Random) -> Iterator[None]:
    """One bit, anywhere."""
    place = chance.randrange(path.stat().st_size)
    with _replaced(path, place, 1, lambda before: bytes([before[0] ^ 1 << chance.randrange(8)])):
        yield


@contextmanager
def zeroed(path: Path, chance: random.Random) -> Iterator[None]:
    """A page or a sector where it begins on the disk."""
    while True:
        length = chance.choice((512, 4096))
        place = chance.randrange(0, path.stat().st_size, length)
        with open(path, "rb") as file:
            file.seek(place)
            if any(file.read(length)):
                break
    with _replaced(path, place, length, lambda before: bytes(len(before))):
        yield


@contextmanager
def cut(path: Path, chance: random.Random) -> Iterator[None]:
    """The end is missing: as often a few bytes as a large part."""
    size = path.stat().st_size
    left = chance.choice((chance.randrange(size), chance.randrange(max(0, size - 100), size)))
    with open(path, "rb") as file:
        file.seek(left)
        rest = file.read()
    os.truncate(path, left)
    yield
    with open(path, "ab") as file:
        file.write(rest)


@contextmanager
def _replaced(path: Path, place: int, length: int, by: Callable[[bytes], bytes]) -> Iterator[None]:
    with open(path, "r+b") as file:
        before = os.pread(file.fileno(), length, place)
        os.pwrite(file.fileno(), by(before), place)
        yield
        os.pwrite(file.fileno(), before, place)


DAMAGES = {"one bit flipped": flipped, "a page zeroed": zeroed, "cut short": cut}


def count_found(folder: Path, kind: str, numbers: int, tries: int) -> int:
    """How many of `tries` damages of the newest file of two made `CheckpointFolder.newest` take the one before."""
    files, chance = CheckpointFolder(folder), random.Random(kind)
    files.write(name(BEFORE), content(BEFORE, SMALL))
    path = files.write(name(DAMAGED), content(DAMAGED, numbers))
    found = 0
    for _ in range(tries):
        with DAMAGES[kind](path, chance):
            taken = files.newest()
        assert taken is not None
        found += taken["state"]["step"] == BEFORE
    whole = files.newest()
    assert whole is not None
    assert whole["state"]["step"] == DAMAGED  # else the damages were not undone
    return found


# Time.


def milliseconds(load: Callable[[], object], path: Path, cold: bool) -> float:
    if cold:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    load()
    return 1e3 * (time.perf_counter() - began)


def compare(folder: Path, megabytes: float, rounds: int) -> None:
    files, numbers = CheckpointFolder(folder), int(megabytes * 1e6 / 4)
    path = files.write(name(DAMAGED), content(DAMAGED, numbers))
    model = nn.ParameterDict({"w": torch.zeros(numbers)})

    def unchecked() -> Any:
        return torch.load(path, map_location="cpu", weights_only=True)

    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "load and copy into a model": (
            lambda: model.load_state_dict((files.newest() or {})["model"]),
            lambda: model.load_state_dict(unchecked()["model"]),
        ),
        "load": (files.newest, unchecked),
    }
    print("| what | file | checked, ms | unchecked, ms | ratio | ratios from - to |\n|---|---|---|---|---|---|")
    for what, pair in ways.items():
        for cold in (False, True):
            for load in pair:
                milliseconds(load, path, cold)  # what is set up on first use
            times = [[milliseconds(load, path, cold) for load in pair] for _ in range(rounds)]
            checked, plain = (statistics.median(column) for column in zip(*times, strict=True))
            ratios = sorted(one / other for one, other in times)
            median = statistics.median(ratios)
            print(
                f"| {what} | {'cold' if cold else 'warm'} | {checked:,.0f} | {plain:,.0f} | {median:.2f} "
                f"| {ratios[0]:.2f} - {ratios[-1]:.2f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=500, help="damages of each kind and size")
    parser.add_argument("--megabytes", type=float, default=140, help="size of the large file")
    parser.add_argument("--rounds", type=int, default=9, help="of each comparison of times")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's folder for temporary files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("trainer").setLevel(logging.CRITICAL)  # it names each damaged file
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print("| damage | size, bytes | tried | found |\n|---|---|---|---|")
        for numbers in (SMALL, int(options.megabytes * 1e6 / 4)):
            for kind in DAMAGES:
                found = count_found(Path(folder), kind, numbers, options.flips)
                size = (Path(folder) / name(DAMAGED)).stat().st_size
                print(f"| {kind} | {size:,} | {options.flips} | {found} |", flush=True)
        print()
        compare(Path(folder), options.megabytes, options.rounds)


if __name__ == "__main__":
    main()
