"""Rotten files are found before they are used. `tests/benchmarks/rot.py` is the long form."""

from __future__ import annotations

import logging
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.benchmarks.rot import BEFORE, DAMAGED, DAMAGES, SMALL, content, count_found, name
from trainer import CheckpointError, CheckpointFolder, checkpoint

SEAL = len(b"ddp-trainer crc32 00000000")
LARGE = 2_000_000  # numbers, in a file of 8 MB


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize(("numbers", "tries"), [(SMALL, 400), (LARGE, 40)])
def test_damage_is_found_and_the_file_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, numbers: int, tries: int
) -> None:
    caplog.set_level(logging.CRITICAL, "trainer")  # it names each damaged file
    assert count_found(tmp_path, kind, numbers, tries) == tries


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    path, chance = tmp_path / name(DAMAGED), random.Random(1)
    checkpoint.write(path, content(DAMAGED, SMALL))
    for _ in range(50):
        with DAMAGES[kind](path, chance), pytest.raises(CheckpointError, match=re.escape(str(path))):
            checkpoint.read(path)
    assert checkpoint.read(path)["state"]["step"] == DAMAGED


def test_every_single_bit_of_a_small_file_counts(tmp_path: Path) -> None:
    """All of the seal and of what is around it, and every 7th bit of the rest."""
    path = tmp_path / name(DAMAGED)
    checkpoint.write(path, content(DAMAGED, 3))
    whole = path.read_bytes()
    bits = len(whole) * 8
    missed = []
    for bit in sorted({*range(0, bits, 7), *range(bits - 8 * (SEAL + 30), bits)}):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            checkpoint.read(path)
        except CheckpointError:
            continue
        missed.append(bit)
    assert missed == []


def test_no_length_but_the_whole_one_will_do(tmp_path: Path) -> None:
    """A byte less, the seal less, everything less."""
    path = tmp_path / name(DAMAGED)
    checkpoint.write(path, content(DAMAGED, 3))
    whole = path.read_bytes()
    missed = []
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            checkpoint.read(path)
        except CheckpointError:
            continue
        missed.append(length - len(whole))
    assert missed == []


@pytest.mark.parametrize("place", [-1, -8, -9, -SEAL])
def test_a_damaged_seal_is_called_so(tmp_path: Path, place: int) -> None:
    path = tmp_path / name(DAMAGED)
    checkpoint.write(path, content(DAMAGED, SMALL))
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"step-00000002\.pt is damaged: .*(checksum|seal)"):
        checkpoint.read(path)


@pytest.mark.parametrize("numbers", [SMALL, LARGE])
def test_a_sealed_file_is_one_for_torch_and_zipfile_too(tmp_path: Path, numbers: int) -> None:
    path = tmp_path / name(DAMAGED)
    checkpoint.write(path, content(DAMAGED, numbers))
    assert re.fullmatch(rb"ddp-trainer crc32 [0-9a-f]{8}", path.read_bytes()[-SEAL:])
    assert same(torch.load(path, weights_only=True), content(DAMAGED, numbers))
    assert same(torch.load(path, weights_only=True, mmap=True), content(DAMAGED, numbers))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.comment == path.read_bytes()[-SEAL:]


def same(loaded: dict[str, Any], expected: dict[str, Any]) -> bool:
    weights: Tensor = loaded.pop("model")["w"]
    return torch.equal(weights, expected.pop("model")["w"]) and loaded == expected


def test_a_file_that_plain_torch_saved_is_taken_unless_its_values_are_damaged(tmp_path: Path) -> None:
    """It has no seal, but a checksum for each of its members."""
    files, path = CheckpointFolder(tmp_path), tmp_path / name(DAMAGED)
    files.write(name(BEFORE), content(BEFORE, SMALL))
    torch.save(content(DAMAGED, SMALL), path)
    assert same(checkpoint.read(path), content(DAMAGED, SMALL))
    whole, chance = path.read_bytes(), random.Random(1)
    start = whole.index(content(DAMAGED, SMALL)["model"]["w"].numpy().tobytes())
    for _ in range(50):
        damaged = bytearray(whole)
        damaged[start + chance.randrange(4 * SMALL)] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.read(path)
        taken = files.newest()
        assert taken is not None
        assert taken["state"]["step"] == BEFORE
    for length in range(0, len(whole), 10):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=path.name):
            checkpoint.read(path)


def test_what_is_added_behind_the_seal_is_found(tmp_path: Path) -> None:
    """Also a whole file, whose seal is then at the very end."""
    path = tmp_path / name(DAMAGED)
    checkpoint.write(path, content(DAMAGED, SMALL))
    whole = path.read_bytes()
    for more in (b"\0", bytes(4096), whole):
        path.write_bytes(whole + more)
        with pytest.raises(CheckpointError, match=path.name):
            checkpoint.read(path)
