"""A checkpoint is whole or absent, and loading one runs no code."""

from __future__ import annotations

import argparse
import ast
import datetime
import errno
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from callbacks import Checkpoint
from tests.helpers import Numbers, Ranks, Toy, mean_of_outputs, opening_files_for, toy_trainer
from trainer import Callback, CheckpointError, CheckpointFolder, DDPTrainer, TrainerConfig, checkpoint, model_keys

ROOT = Path(__file__).parents[1]


def content(step: int, numbers: int = 500) -> dict[str, Any]:
    return {"format": checkpoint.FORMAT, "state": {"step": step}, "model": {"w": torch.full((numbers,), float(step))}}


def name(step: int) -> str:
    return f"step-{step:08d}.pt"


def step_of(loaded: dict[str, Any] | None) -> int:
    """The step that a whole file of `content` is of."""
    assert loaded is not None
    step: int = loaded["state"]["step"]
    assert bool((loaded["model"]["w"] == step).all())
    return step


def listing(folder: Path) -> list[str]:
    """Without what keeps other jobs out, which a run that is killed leaves behind."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# Whole or absent.


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("room", [0, 100, 1000, 1_000_000, 2_000_700])
def test_a_write_that_fails_half_way_leaves_the_file_before_it_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, step: int
) -> None:
    """Over the same file, and to the next; from the first byte to the last."""
    folder = CheckpointFolder(tmp_path)
    folder.write(name(1), content(1))
    before = (tmp_path / name(1)).read_bytes()
    monkeypatch.setattr(checkpoint, "open", opening_files_for(room, no_space), raising=False)
    with pytest.raises(OSError, match="No space left"):
        folder.write(name(step), content(2, 500_000))
    assert listing(tmp_path) == [name(1)]
    assert (tmp_path / name(1)).read_bytes() == before
    assert step_of(folder.newest()) == 1


class QuotaError(OSError):
    def __init__(self, user: str) -> None:
        super().__init__(f"quota of {user} exceeded")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("no tape in drive 3"), "no tape in drive 3; "),
        (QuotaError("us"), "quota of us exceeded; "),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied; "),
    ],
)
def test_what_a_failing_write_says_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, words: str) -> None:
    """Errors of file systems' own libraries have no number of the system's."""

    def replace(*_: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoint.os, "replace", replace)
    with pytest.raises(OSError, match=r"bytes are free there. The checkpoints before are as they were") as raised:
        CheckpointFolder(tmp_path).write(name(1), content(1))
    assert words in str(raised.value)
    assert str(tmp_path / name(1)) in str(raised.value)
    assert isinstance(raised.value, PermissionError) is isinstance(error, PermissionError)


@pytest.mark.parametrize("numbers", [3, 500_000])
def test_a_full_device_is_an_os_error_and_leaves_the_file_before_it(tmp_path: Path, numbers: int) -> None:
    """What is written to /dev/full finds no space left."""
    folder = CheckpointFolder(tmp_path)
    folder.write(name(1), content(1))
    (tmp_path / f"{name(2)}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        folder.write(name(2), content(2, numbers))
    assert listing(tmp_path) == [name(1)]
    assert step_of(folder.newest()) == 1


def test_a_file_system_that_takes_a_part_leaves_the_file_before_it(ranks: Ranks, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write(name(1), content(1))

    def write_too_much() -> tuple[int | None, list[str]]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        with pytest.raises(OSError) as raised:
            folder.write(name(2), content(2, 500_000))
        return raised.value.errno, listing(tmp_path)

    assert ranks(1, write_too_much) == [(errno.EFBIG, [name(1)])]
    assert step_of(folder.newest()) == 1


def test_a_process_that_dies_half_way_leaves_what_no_one_takes_for_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """The unfinished file is passed over, and removed by the next run."""

    def run(ends: bool) -> int:
        if ends:
            vars(checkpoint)["open"] = opening_files_for(700, lambda: os._exit(9))
        trainer = toy_trainer(4, batch_size=1, epochs=1 if ends else 2, callbacks=[Checkpoint(tmp_path, every_steps=1)])
        return trainer.fit(resume_from=tmp_path).step

    def first() -> int:
        return toy_trainer(4, batch_size=1, max_steps=2, callbacks=[Checkpoint(tmp_path)]).fit().step

    assert ranks(1, first) == [2]
    assert ranks.outcomes(1, run, True)[0].exit_code == 9
    assert listing(tmp_path) == [name(2), f"{name(3)}.tmp"]
    assert list(CheckpointFolder(tmp_path).steps()) == [2]
    (tmp_path / "best.pt.tmp").write_text("of another time")
    (tmp_path / "notes.tmp").write_text("somebody's")
    assert ranks(1, run, False) == [8]
    assert listing(tmp_path) == ["notes.tmp", name(6), name(7), name(8)]


class Heavy(Toy):
    """A file of half a megabyte, so that writing it takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.zeros(120_000))


class KillLater(Callback):
    """kill -9, so many seconds after the start."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        running = os.getpid()
        if os.fork() == 0:
            time.sleep(self.seconds)
            if os.getppid() == running:  # else it has ended by itself
                os.kill(running, signal.SIGKILL)
            os._exit(0)


def test_a_run_killed_at_any_instant_goes_on_from_its_newest_file(ranks: Ranks, tmp_path: Path) -> None:
    """Saves all the time; kill -9 at twenty random moments. It always gets on, and its end is that of a run in one piece."""
    steps, instants = 200, random.Random(3)

    def run(seconds: float | None) -> tuple[int, float]:
        checkpoints = Checkpoint(tmp_path, every_steps=50 if seconds is None else 1, keep_last=2, monitor="loss")
        config: dict[str, Any] = {"batch_size": 2, "max_steps": steps, "eval_every": 50 if seconds is None else 2}
        callbacks = [checkpoints] if seconds is None else [checkpoints, KillLater(seconds)]
        trainer = toy_trainer(20, Heavy(), eval_numbers=2, lr=0.25, callbacks=callbacks, **config)
        state = trainer.fit(resume_from=tmp_path)
        return state.step, trainer.model.w.item()

    reached = [0]
    for _ in range(20):
        (outcome,) = ranks.outcomes(1, run, instants.uniform(0.0, 0.25))
        assert outcome.exit_code in (-signal.SIGKILL, 0), outcome
        for path in tmp_path.glob("*.pt"):
            checkpoint.read(path)  # whole, each of them
        found = CheckpointFolder(tmp_path).newest()
        if found is None:
            continue
        step, w = found["state"]["step"], found["model"]["w"].item()
        assert w == -0.25 * sum(0.5 + 2 * (window % 10) for window in range(step))
        assert len(CheckpointFolder(tmp_path).steps()) <= 3  # the new one is there before an old one goes
        best = checkpoint.read(tmp_path / "best.pt") if (tmp_path / "best.pt").exists() else found
        assert best["callbacks"]["Checkpoint"]["best"] <= found["callbacks"]["Checkpoint"]["best"]
        reached.append(step)
    assert reached == sorted(reached)
    assert len(set(reached)) > 5
    assert ranks(1, run, None) == [(steps, -0.25 * 9.5 * steps)]
    assert [file for file in listing(tmp_path) if not file.startswith("step-")] == ["best.pt"]
    assert max(CheckpointFolder(tmp_path).steps()) == steps


def test_a_file_gets_its_name_after_its_bytes_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is flushed, then renamed, then the folder is flushed: else a power cut could leave the name without the bytes."""
    calls: list[tuple[str, bool | int]] = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("folder", True) if path.is_dir() else ("file", zipfile.is_zipfile(path)))
        fsync(descriptor)

    def traced_replace(source: Path, target: Path) -> None:
        assert Path(source).parent == Path(target).parent  # another file system could not rename
        calls.append(("rename", True))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    CheckpointFolder(tmp_path).write(name(1), content(1))
    assert calls == [("file", True), ("rename", True), ("folder", True)]


# Damage.


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / name(7)
    checkpoint.write(path, content(7, 200))
    whole, damages = path.read_bytes(), random.Random(1)
    start = whole.index(content(7, 200)["model"]["w"].numpy().tobytes())
    found: Counter[str] = Counter()
    for turn in range(600):
        where = "values" if turn % 2 else "anywhere"
        place = damages.randrange(start, start + 800) if where == "values" else damages.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << damages.randrange(8)
        path.write_bytes(damaged)
        try:
            assert step_of(checkpoint.read(path)) == 7
        except CheckpointError:
            found[where] += 1
    assert found == {"values": 300, "anywhere": 300}


def test_a_truncated_zeroed_or_empty_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / name(7)
    checkpoint.write(path, content(7, 5000))
    whole, damages = path.read_bytes(), random.Random(2)
    zeroed = [whole[:start] + bytes(4096) + whole[start + 4096 :] for start in (0, 4096, 8192, 12288, len(whole) - 4096)]
    shorter = [whole[: damages.randrange(len(whole))] for _ in range(60)]
    for damaged in (*zeroed, *shorter, whole[:-1], whole[1:], b"", b"no checkpoint", bytes(5000)):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=path.name):
            checkpoint.read(path)


def test_the_newest_whole_file_is_taken_and_damaged_ones_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = CheckpointFolder(tmp_path)
    assert folder.newest() is None
    for step in (3, 20, 100, 99_999_999, 100_000_000):
        folder.write(name(step), content(step))
    for other in ("best.pt", "step-5.pt", "step-00000999.pt.tmp", "step-000009999.pth", "step-00000x99.pt", "step-best.pt"):
        (tmp_path / other).write_bytes(b"damaged")
    assert list(folder.steps()) == [3, 20, 100, 99_999_999, 100_000_000]
    assert step_of(folder.newest()) == 100_000_000
    assert caplog.records == []

    (tmp_path / name(100_000_000)).write_bytes(b"damaged")
    (tmp_path / name(99_999_999)).unlink()
    (tmp_path / name(99_999_999)).mkdir()
    os.truncate(tmp_path / name(100), 700)
    with caplog.at_level(logging.ERROR, "trainer"):
        assert step_of(folder.newest()) == 20
    for step, record in zip((100_000_000, 99_999_999, 100), caplog.records, strict=True):
        assert str(tmp_path / name(step)) in record.getMessage()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_passes_over_a_damaged_file_but_never_starts_afresh_for_it(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """All damaged, or the one that was named: an error on every rank, with the files as they were."""

    def run(path: Path | None, steps: int) -> tuple[int, float]:
        checkpoints = Checkpoint(tmp_path, every_steps=1)
        trainer = toy_trainer(8, batch_size=4 // world_size, epochs=3, max_steps=steps, callbacks=[checkpoints])
        return trainer.fit(resume_from=path).step, trainer.model.w.item()

    assert ranks(world_size, run, None, 3) == [(3, -8.5)] * world_size
    (tmp_path / name(3)).write_bytes(b"damaged")
    os.truncate(tmp_path / name(2), 1000)
    assert ranks(world_size, run, tmp_path, 2) == [(2, -7.0)] * world_size  # from the first, once more
    assert listing(tmp_path) == [name(1), name(2)]  # the damaged one beyond it is no longer in the way

    for step in (1, 2):
        (tmp_path / name(step)).write_bytes(b"damaged")
    for path, words in ((tmp_path, f"all 2 checkpoints in {tmp_path} are damaged"), (tmp_path / name(1), name(1))):
        outcomes = ranks.outcomes(world_size, run, path, 3)
        assert [outcome.error for outcome in outcomes] == ["trainer.checkpoint.CheckpointError"] * world_size
        assert all(words in outcome.message for outcome in outcomes)
    assert [(tmp_path / name(step)).read_bytes() for step in (1, 2)] == [b"damaged"] * 2


def test_a_file_of_another_make_or_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for value, words in (
        (nn.Linear(2, 2).state_dict(), "not written by DDPTrainer"),
        ([1, 2], "not written by DDPTrainer"),
        ({"format": 99}, "has format 99; this version reads format 1"),
    ):
        torch.save(value, path)
        with pytest.raises(CheckpointError, match=words) as refused:
            checkpoint.read(path)
        assert str(path) in str(refused.value)


def test_a_file_of_a_newer_format_is_not_passed_over_for_an_older_file(tmp_path: Path) -> None:
    """The run would go on from there, and remove it."""
    checkpoint.write(tmp_path / name(1), content(1))
    checkpoint.write(tmp_path / name(2), {**content(2), "format": 99})
    with pytest.raises(CheckpointError, match=r"step-00000002\.pt has format 99; this version reads format 1"):
        CheckpointFolder(tmp_path).newest()


def test_a_whole_file_that_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.write(tmp_path / name(1), content(1))
    load, asked = torch.load, []

    def unmapped(*args: Any, mmap: bool = False, **options: Any) -> Any:
        asked.append(mmap)
        if mmap:
            raise RuntimeError("unable to mmap 1024 bytes from file <x>: Cannot allocate memory (12)")
        return load(*args, mmap=mmap, **options)

    monkeypatch.setattr(torch, "load", unmapped)
    newest = CheckpointFolder(tmp_path).newest()
    assert newest is not None
    assert newest["state"] == {"step": 1}
    assert asked == [True, False]


# Keys.


class Nested(nn.Module):
    """All in a child of the name that DistributedDataParallel uses."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).double()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.module(x.unsqueeze(1))
        return outputs


@pytest.mark.parametrize("make", [Toy, Nested])
def test_a_file_has_the_keys_of_the_users_module_and_loads_with_those_of_a_wrapped_one(
    ranks: Ranks, tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    """Saved by two ranks, loaded by one without a process group; and with the prefixes of wrappers before the keys."""

    def save() -> list[str]:
        toy_trainer(8, make(), batch_size=2, callbacks=[Checkpoint(tmp_path)]).fit()
        return list(make().state_dict())

    keys = ranks(2, save)[0]
    path = tmp_path / name(2)
    saved = checkpoint.read(path)
    assert list(saved["model"]) == keys

    def load() -> list[str | None]:
        make().load_state_dict(saved["model"], strict=True)
        return [resumed(prefix) for prefix in ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")]

    def resumed(prefix: str) -> str | None:
        """What differs from the file, whose keys all begin with `prefix`."""
        other = tmp_path / "prefixed.pt"
        checkpoint.write(other, {**saved, "model": {f"{prefix}{key}": value for key, value in saved["model"].items()}})
        trainer = toy_trainer(8, make(), batch_size=2, accumulation_steps=2, epochs=1)
        trainer.fit(resume_from=other)
        own = trainer.model.state_dict()
        return next((key for key in keys if not torch.equal(own[key], saved["model"][key])), None)

    assert ranks(1, load) == [[None] * 5]


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod.", "_orig_mod.module."])
def test_a_run_goes_on_in_its_folder_though_its_file_has_the_keys_of_a_wrapped_model(tmp_path: Path, prefix: str) -> None:
    def fit(epochs: int) -> int:
        trainer = toy_trainer(8, Nested(), batch_size=4, epochs=epochs, callbacks=[Checkpoint(tmp_path)])
        return trainer.fit(resume_from=tmp_path).step

    assert fit(1) == 2
    saved = checkpoint.read(tmp_path / name(2))
    checkpoint.write(tmp_path / name(2), {**saved, "model": {f"{prefix}{key}": value for key, value in saved["model"].items()}})
    assert fit(2) == 4


def test_keys_of_which_only_some_have_a_prefix_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    def load() -> None:
        trainer = toy_trainer(4, Nested(), batch_size=2)
        state = trainer.state_dict()
        state["model"] = {key if "1." in key else f"module.{key}": value for key, value in state["model"].items()}
        with pytest.raises(ValueError, match=r"of another model; not in the file: module.1.bias.*only in the file: "):
            trainer.load_state_dict(state)

    ranks(1, load)


def test_three_lines_of_plain_torch_load_a_file(ranks: Ranks, tmp_path: Path) -> None:
    """In a process that knows nothing of the trainer."""
    ranks(1, lambda: toy_trainer(8, batch_size=4, callbacks=[Checkpoint(tmp_path)]).fit())
    script = f"""import torch
    model = torch.nn.ParameterDict({{"w": torch.zeros((), dtype=torch.float64)}})
    model.load_state_dict(torch.load({str(tmp_path / name(2))!r})["model"])
    import sys; print(model["w"].item(), "trainer" in sys.modules)""".replace("\n    ", "\n")
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "-7.0 False\n", done.stderr


# What may be in a file.


class Odd:
    pass


class OddTensor(Tensor):
    pass


def with_attribute() -> Tensor:
    tensor = torch.zeros(1)
    tensor.origin = Path("here")  # type: ignore[attr-defined]
    return tensor


REFUSED: dict[str, Any] = {
    "numpy.float64": np.float64(0.5),
    "numpy.int64": np.int64(1),
    "numpy.ndarray": np.zeros(2),
    "pathlib.PosixPath": Path("here"),
    "argparse.Namespace": argparse.Namespace(a=1),
    "datetime.timedelta": datetime.timedelta(1),
    "builtins.bytes": b"",
    "builtins.bytearray": bytearray(1),
    "builtins.frozenset": frozenset([1]),
    "builtins.range": range(3),
    "builtins.type": int,
    "builtins.function": no_space,
    "collections.defaultdict": defaultdict(list),
    "tests.test_checkpoint_files.Odd": Odd(),
    "tests.test_checkpoint_files.OddTensor": torch.zeros(1).as_subclass(OddTensor),
}

ACCEPTED: dict[str, Any] = {
    "None": None,
    "numbers": [True, 0, -(2**80), 0.1, float("inf"), 1 + 2j],
    "text": ["ü", ""],
    "containers": [(1, (2,)), {1, 2}, {1: {(1, 2): 3}, None: 4, 0.5: 5}, OrderedDict(a=1), Counter("aab")],
    "of torch": [torch.Size([1, 2]), torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)],
    "tensors": [
        torch.zeros(0),
        torch.ones(2, 3).t(),
        torch.ones(4, dtype=torch.bfloat16)[1:3],
        nn.Parameter(torch.ones(2)),
        torch.tensor([True]),
        torch.ones(1, dtype=torch.complex64),
    ],
    "generators": [random.getstate(), torch.get_rng_state()],
    "scheduler": torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.zeros(1)]), [2, 4]).state_dict(),
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("kind", ACCEPTED)
def test_what_can_be_saved_is_loaded_as_it_was(tmp_path: Path, kind: str) -> None:
    """With `weights_only=True`, and nothing else ever."""
    path = tmp_path / name(1)
    checkpoint.write(path, {**content(1), "extra": ACCEPTED[kind]})
    assert same(checkpoint.read(path)["extra"], ACCEPTED[kind])


@pytest.mark.parametrize("kind", REFUSED)
def test_what_could_not_be_loaded_is_refused_when_saved_by_its_place_and_type(tmp_path: Path, kind: str) -> None:
    """Nothing is written."""
    value = REFUSED[kind]
    for extra, place in (
        ({"extra": value}, "extra"),
        ({"extra": {"a": [0, (value,)]}}, "extra['a'][1][0]"),
        ({"model": OrderedDict(w=value)}, "model['w']"),
    ):
        with pytest.raises(TypeError, match="cannot be saved in a checkpoint") as refused:
            checkpoint.write(tmp_path / name(1), {**content(1), **extra})
        assert f"{place} of type {kind}" in str(refused.value)
    if value.__hash__ is not None and not isinstance(value, Tensor):
        for extra, place in (({"extra": {value: 1}}, f"the key {value!r} of extra"), ({"extra": {value}}, "extra[0]")):
            with pytest.raises(TypeError) as refused:
                checkpoint.write(tmp_path / name(1), {**content(1), **extra})
            assert place in str(refused.value)
    assert listing(tmp_path) == []


def test_a_tensors_attributes_are_saved_with_it_and_looked_at_too(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"the attributes of extra\['origin'\] of type pathlib"):
        checkpoint.write(tmp_path / name(1), {**content(1), "extra": with_attribute()})
    with pytest.raises(TypeError, match=r"key .* of scheduler"):
        checkpoint.write(tmp_path / name(1), {**content(1), "scheduler": {np.int64(3): 1}})
    assert listing(tmp_path) == []


def test_numpys_generator_state_goes_through_a_file_as_plain_values(tmp_path: Path) -> None:
    """As numpy gives it, it is refused; as a list, it draws the same numbers afterwards."""
    np.random.seed(5)
    state: Any = np.random.get_state()
    path = tmp_path / name(1)
    with pytest.raises(TypeError, match=r"numpy\[1\] of type numpy.ndarray"):
        checkpoint.write(path, {**content(1), "numpy": state})
    checkpoint.write(path, {**content(1), "numpy": (state[0], state[1].tolist(), *state[2:])})
    drawn = np.random.rand(3).tolist()
    np.random.seed(6)
    np.random.set_state(checkpoint.read(path)["numpy"])
    assert np.random.rand(3).tolist() == drawn


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_callback_with_state_that_could_not_be_loaded_ends_the_run_at_its_first_save(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"best": {"value": np.float64(0.5)}}

    outcomes = ranks.outcomes(
        world_size, lambda: toy_trainer(8, batch_size=2, callbacks=[Checkpoint(tmp_path), Odd()]).fit(), timeout=20.0
    )
    assert outcomes[0].error == "TypeError"
    assert "callbacks['Odd']['best']['value'] of type numpy.float64" in outcomes[0].message
    assert all(outcome.exit_code != 0 and not outcome.timed_out for outcome in outcomes)
    assert listing(tmp_path) == []


# What a file may do.


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_hostile_file_runs_nothing(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """In torch's own form and as a bare pickle, named or found in a folder; an error on every rank."""
    marker, folder = tmp_path / "marker", tmp_path / "files"
    folder.mkdir()
    hostile = {**content(1), "callbacks": {"a": Hostile(marker)}}
    torch.save(hostile, folder / name(1))
    torch.save(hostile, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    (folder / "bare.pt").write_bytes(pickle.dumps({"format": 1, "a": Hostile(marker)}))

    def resume() -> list[str]:
        found = []
        for path in (folder, *sorted(folder.iterdir())):
            trainer = toy_trainer(8, batch_size=2)
            with pytest.raises(CheckpointError) as refused:
                trainer.fit(resume_from=path)
            found.append(str(refused.value))
        return found

    for messages in ranks(world_size, resume):
        assert len(messages) == 4
        assert all(str(folder) in message for message in messages)
    assert not marker.exists()
    torch.load(folder / name(1), weights_only=False)  # it is hostile indeed
    assert marker.exists()


def test_every_load_in_the_library_refuses_code_and_names_the_device() -> None:
    """By the source; and nothing else there reads pickles but what the ranks send each other."""
    loads = []
    for path in sorted([*(ROOT / "trainer").glob("*.py"), *(ROOT / "callbacks").glob("*.py")]):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            called = ast.unparse(call.func)
            if called == "torch.load":
                options = {option.arg: ast.unparse(option.value) for option in call.keywords}
                loads.append((path.name, options))
                assert options.get("weights_only") == "True", path
                assert options.get("map_location") == "'cpu'", path
            assert not called.endswith(("jit.load", "np.load", "numpy.load", "hub.load")), path
            if called in ("pickle.load", "pickle.loads", "pickle.Unpickler"):
                assert path.name == "transport.py", path
    assert [file for file, _ in loads] == ["checkpoint.py"]


def test_a_file_of_another_device_is_loaded_into_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    """Its tensors say that they were on the GPU with index 5."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:5")
        ranks(1, lambda: toy_trainer(8, batch_size=4, callbacks=[Checkpoint(tmp_path)]).fit())
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(tmp_path / name(2), weights_only=True)
    assert checkpoint.read(tmp_path / name(2))["model"]["w"].device == torch.device("cpu")

    def resume() -> tuple[float, str]:
        trainer = toy_trainer(8, batch_size=2, epochs=2)
        trainer.fit(resume_from=tmp_path)
        return trainer.model.w.item(), str(trainer.model.w.device)

    assert ranks(2, resume) == [(-14.0, "cpu")] * 2


def test_the_optimizers_state_is_where_its_parameters_are(ranks: Ranks, tmp_path: Path) -> None:
    """Adam, saved after two steps; the third works and is that of a run in one piece."""

    def run(steps: int) -> DDPTrainer:
        model = Toy()
        nn.init.ones_(model.w)
        trainer = DDPTrainer(
            model,
            torch.optim.Adam(model.parameters(), lr=0.125),
            Numbers(12),
            loss_fn=mean_of_outputs,
            config=TrainerConfig(batch_size=2, max_steps=steps),
            callbacks=[Checkpoint(tmp_path / str(steps))],
        )
        trainer.fit(resume_from=tmp_path / "2")
        return trainer

    def compare() -> list[bool]:
        run(2)
        saved = checkpoint.read(tmp_path / "2" / name(2))
        trainer = run(2)
        (state,) = trainer.optimizer.state.values()
        found = [torch.equal(state[key], value) for key, value in saved["optimizer"]["state"][0].items()]
        found += [state[key].device == trainer.model.w.device for key in ("exp_avg", "exp_avg_sq")]
        found += [state["exp_avg"].dtype == torch.float64]
        resumed = run(3)
        shutil.rmtree(tmp_path)
        return [*found, torch.equal(resumed.model.w, run(3).model.w)]

    assert ranks(1, compare) == [[True] * 7]


# Ranks.


def test_one_rank_writes_and_every_rank_can_load_as_soon_as_fit_returns(ranks: Ranks, tmp_path: Path) -> None:
    """Twenty saves by four ranks, the last two kept, each 50 ms slower than it is."""

    def run() -> tuple[int, int, float, list[str]]:
        opened = 0

        def open_slowly(path: Path, mode: str) -> Any:
            nonlocal opened
            if mode == "wb":
                opened += 1
                time.sleep(0.05)
            return open(path, mode)

        vars(checkpoint)["open"] = open_slowly
        trainer = toy_trainer(80, batch_size=1, callbacks=[Checkpoint(tmp_path, every_steps=1, keep_last=2)])
        trainer.fit()
        newest = CheckpointFolder(tmp_path).newest()
        assert newest is not None
        files = listing(tmp_path)
        for file in files:
            checkpoint.read(tmp_path / file)
        return opened, newest["state"]["step"], newest["model"]["w"].item() - trainer.model.w.item(), files

    found = ranks(4, run)
    assert [opened for opened, *_ in found] == [20, 0, 0, 0]
    assert [rest for _, *rest in found] == [[20, 0.0, [name(19), name(20)]]] * 4


def test_what_was_read_outlives_its_file_and_does_not_change_it(tmp_path: Path) -> None:
    """The model's tensors lie in the file's memory; all others are copies."""
    path = tmp_path / name(1)
    checkpoint.write(path, {**content(1), "model": {"w": torch.ones(1000)}, "extra": torch.ones(3)})
    before = path.read_bytes()
    read = checkpoint.read(path)
    for tensor in (read["model"]["w"], read["extra"]):
        tensor.add_(1)
    assert path.read_bytes() == before
    checkpoint.write(path, {**content(1), "model": {"w": torch.zeros(1000)}})
    path.unlink()
    assert torch.equal(read["model"]["w"], torch.full((1000,), 2.0))


class Outer(nn.Module):
    """A module of which a part was compiled by hand."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)
        part = nn.Linear(1, 1, dtype=torch.float64)
        self.part = torch.compile(part, backend="eager") if compiled else part

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.part(self.norm(x.unsqueeze(1)))
        return outputs


MAKERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: Outer(False),
    "a part compiled": lambda: Outer(True),
    "compiled": lambda: torch.compile(Outer(False), backend="eager"),
    "both": lambda: torch.compile(Outer(True), backend="eager"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch's compiler looks at
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_that_the_user_has_compiled_is_saved_and_resumed_as_the_plain_one(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    """Each way round; and parameters that are not finite are found under their plain names."""

    def run() -> list[str]:
        files, values = {}, {}
        for kind, make in MAKERS.items():
            torch.manual_seed(0)
            trainer = toy_trainer(8, make(), batch_size=2, lr=0.1, callbacks=[Checkpoint(tmp_path / kind)])
            trainer.fit()
            trainer.world.barrier()
            (files[kind],) = (tmp_path / kind).glob("*.pt")
            values[kind] = [value.clone() for value in trainer.model.state_dict().values()]
        wanted = Outer(False)
        for kind, file in files.items():
            saved = checkpoint.read(file)["model"]
            assert list(saved) == list(wanted.state_dict())
            assert saved._metadata.keys() == wanted.state_dict()._metadata.keys()  # type: ignore[attr-defined]
            wanted.load_state_dict(saved, strict=True)
            for other, make in MAKERS.items():
                trainer = toy_trainer(8, make(), batch_size=2, lr=0.1, callbacks=[Checkpoint(tmp_path / kind)])
                trainer.fit(resume_from=tmp_path / kind)
                found = list(trainer.model.state_dict().values())
                assert not trainer.world.is_main or all(map(torch.equal, found, values[kind])), (kind, other)
                trainer.world.barrier()
        return list(files)

    assert ranks(world_size, run, timeout=100) == [list(MAKERS)] * world_size


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:the loss was not finite")
def test_numbers_that_are_not_finite_are_never_saved_of_a_compiled_model_either(ranks: Ranks, tmp_path: Path) -> None:
    def run() -> None:
        model: Any = torch.compile(Toy(), backend="eager")
        files = Checkpoint(tmp_path, every_steps=1)
        trainer = toy_trainer([float("inf")] * 4, model, batch_size=2, callbacks=[files], on_nonfinite="warn")
        with pytest.warns(RuntimeWarning, match="parameters are not finite"):
            trainer.fit()

    ranks(1, run)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("kind", [np.float64, np.float32, float])
def test_a_schedule_computed_with_numpy_can_be_saved(tmp_path: Path, kind: Any) -> None:
    """Its rates are numpy's numbers, which a file could not hold; what is loaded has the same value."""

    def make() -> DDPTrainer:
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=kind(1.0))
        curve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: kind(0.5 * (1 + np.cos(step / 5))))
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, np.array([1, 3]), gamma=kind(0.5))  # type: ignore[arg-type]
        scheduler = torch.optim.lr_scheduler.ChainedScheduler([curve, steps])
        config = TrainerConfig(batch_size=2, shuffle=False, log_every=1)
        callbacks = [Checkpoint(tmp_path, every_steps=1, keep_last=9)]
        options = {"loss_fn": mean_of_outputs, "scheduler": scheduler, "config": config, "callbacks": callbacks}
        return DDPTrainer(model, optimizer, Numbers(8), **options)  # type: ignore[arg-type]

    whole, part = make(), make()
    whole.fit()
    for step in (4, 3):
        (tmp_path / name(step)).unlink()
    part.fit(resume_from=tmp_path)
    assert torch.equal(whole.model.w.detach(), part.model.w.detach())  # type: ignore[operator]


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_is_told_of_which_version_its_values_are(tmp_path: Path, wrapper: str, compiled: bool) -> None:
    """So that one which changes those of an older version leaves the newer alone."""
    found = []

    class Versioned(Toy):
        _version = 2

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
            found.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    class Whole(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(Versioned())

    saved = toy_trainer(4, Whole(), batch_size=2, callbacks=[Checkpoint(tmp_path)])
    saved.fit()
    content = checkpoint.read(tmp_path / name(2))
    content["model"] = model_keys.renamed(content["model"], lambda key: f"{wrapper}{key}".removesuffix("."))
    model: Any = torch.compile(Whole(), backend="eager") if compiled else Whole()
    toy_trainer(4, model, batch_size=2).load_state_dict(content)
    assert found == [2]


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), OSError(errno.EMFILE, "no"), MemoryError()])
def test_a_file_that_cannot_be_read_now_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Or an older one would be taken, and the newer removed for it."""
    for step in (1, 2):
        CheckpointFolder(tmp_path).write(name(step), content(step))
    verify = checkpoint._verify

    def refused(path: Path) -> None:
        if path.name == name(2):
            raise error
        verify(path)

    monkeypatch.setattr(checkpoint, "_verify", refused)
    with pytest.raises(type(error)):
        toy_trainer(4).fit(resume_from=tmp_path)


def test_a_folder_that_cannot_be_listed_is_no_fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Any = ".") -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refused)
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError):
        toy_trainer(4).fit(resume_from=tmp_path)


def test_a_file_that_its_run_removes_for_a_newer_one_is_passed_over_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the listing and the reading, with ``keep_last=1``."""
    folder = CheckpointFolder(tmp_path)
    folder.write(name(1), content(1))
    verify = checkpoint._verify

    def overtaken(path: Path) -> None:
        if path.name == name(1):
            folder.write(name(2), content(2))
            path.unlink()
        verify(path)

    monkeypatch.setattr(checkpoint, "_verify", overtaken)
    assert step_of(folder.newest()) == 2


def test_a_link_to_nowhere_is_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / name(3)).symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"all 1 checkpoints in .* are damaged"):
        CheckpointFolder(tmp_path).newest()


def test_a_file_system_that_cannot_sync_folders_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def refuse_folders(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(file)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    CheckpointFolder(tmp_path).write(name(1), content(1))
    assert step_of(CheckpointFolder(tmp_path).newest()) == 1


def test_a_folder_that_is_emptied_while_it_is_read_is_no_fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointFolder(tmp_path).write(name(1), content(1))

    def removed(path: Path) -> None:
        path.unlink()
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    monkeypatch.setattr(checkpoint, "_verify", removed)
    with pytest.raises(CheckpointError, match="were removed while they were read"):
        CheckpointFolder(tmp_path).newest()


def test_a_link_to_nowhere_is_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CheckpointFolder(tmp_path).write(name(1), content(1))
    (tmp_path / name(3)).symlink_to(tmp_path / "gone")
    with caplog.at_level(logging.ERROR, "trainer"):
        assert step_of(CheckpointFolder(tmp_path).newest()) == 1
    assert [name(3) in record.getMessage() for record in caplog.records] == [True]


def test_a_file_that_a_thread_writes_goes_where_the_script_was_when_it_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    files, gone = CheckpointFolder("run"), threading.Event()

    def work(copied: Any) -> None:
        gone.wait(10)
        files.write(name(1), copied)

    files.write_behind(content(1), work)
    monkeypatch.chdir(tmp_path / "other")
    gone.set()
    files.wait()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name(1)]
