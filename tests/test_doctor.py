from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import Ranks, run_torchrun
from trainer import World
from trainer.doctor import main
from trainer.doctor_checks import CHECKS

DOCTOR = "import runpy\nrunpy.run_module('trainer.doctor', run_name='__main__')"  # what python -m does


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is tested, nothing is left on disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("doctor-*")) == []


def lines(text: str, word: str) -> list[str]:
    """The names of the checks whose line begins with `word`."""
    return [line.split()[1] for line in text.splitlines() if line.split()[:1] == [word]]


def on(rank: int) -> bool:
    return os.environ.get("RANK") == str(rank)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sound_machine_passes_every_check(ranks: Ranks, size: int) -> None:
    outcomes = ranks.outcomes(size, main, [])
    assert [outcome.value for outcome in outcomes] == [0] * size, outcomes
    text = outcomes[0].stdout
    assert lines(text, "ok") == list(CHECKS)
    assert lines(text, "FAIL") == []
    assert f"torch {torch.__version__}" in text
    assert "OMP_NUM_THREADS=1" in text
    assert len(re.findall(r"^  rank \d: cpu", text, re.MULTILINE)) == size
    assert [outcome.stdout for outcome in outcomes[1:]] == [""] * (size - 1)
    assert ("GB/s" in text) == (size > 1)


def test_torchrun_runs_it_as_a_module_and_shows_its_exit_code(tmp_path: Path) -> None:
    done = run_torchrun(DOCTOR, 2, "--device", "cpu", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout, "ok") == list(CHECKS)
    assert "MASTER_ADDR=" in done.stdout


def test_a_wrong_sum_is_named_with_its_rank_and_ends_every_rank_with_1(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    right = World.sum

    def wrong(world: World, values: Tensor) -> Tensor:
        return right(world, values) + world.rank

    monkeypatch.setattr(World, "sum", wrong)
    outcomes = ranks.outcomes(2, main, [])
    assert [outcome.value for outcome in outcomes] == [1, 1], outcomes
    text = outcomes[0].stdout
    assert re.search(
        r"^FAIL sum +rank 1: found \[4\.0, 2\.0, 2\], expected \[3\.0, 1\.0, 1\]; compare the torch", text, re.MULTILINE
    )
    assert lines(text, "FAIL") == ["sum", "speed", "training", "checkpoint"]
    assert text.count("not tried: it needs what failed above") == 3
    assert text.splitlines()[-1] == "not all is well: 12 checks on 2 processes"
    assert outcomes[1].stdout == ""


@pytest.mark.parametrize(
    ("name", "check"),
    [("gather", "gather"), ("broadcast", "broadcast"), ("broadcast_tensors", "broadcast"), ("run_on_main", "run_on_main")],
)
def test_a_wrong_answer_of_any_collective_is_found(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, check: str) -> None:
    """On rank 1 alone, which does what the call needs and then spoils the answer."""
    right = getattr(World, name)

    def wrong(world: World, value: Any) -> Any:
        answer = right(world, value)
        if not on(1):
            return answer
        if name == "broadcast_tensors":
            value[0].add_(1)
        return {"gather": lambda: list(reversed(answer)), "broadcast_tensors": lambda: None}.get(name, lambda: "spoilt")()

    monkeypatch.setattr(World, name, wrong)
    outcomes = ranks.outcomes(2, main, [])
    assert [outcome.value for outcome in outcomes] == [1, 1], outcomes
    assert re.search(rf"^FAIL {check} +rank 1: found ", outcomes[0].stdout, re.MULTILINE), outcomes[0].stdout


def test_an_unsynchronised_gradient_is_found(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "wrap", lambda world, model: model)
    outcomes = ranks.outcomes(2, main, [])
    assert [outcome.value for outcome in outcomes] == [1, 1]
    assert "rank 0: found (1.0, 1.0), expected (1.0, 1.5)" in outcomes[0].stdout
    assert "rank 1: found (2.0, 2.0), expected (1.0, 1.5)" in outcomes[0].stdout


@pytest.mark.parametrize("size", [1, 2])
def test_a_folder_that_cannot_be_written_is_named(ranks: Ranks, size: int) -> None:
    def examine() -> int:
        tempfile.tempdir = "/nowhere"
        return main([])

    outcomes = ranks.outcomes(size, examine)
    assert [outcome.value for outcome in outcomes] == [1] * size
    assert lines(outcomes[0].stdout, "FAIL") == ["checkpoint"] * size
    assert re.search("rank 0: found .*/nowhere.*; TMPDIR names another folder", outcomes[0].stdout)


def test_an_error_on_one_rank_is_told_by_that_rank_and_nothing_hangs(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    right = World.barrier

    def broken(world: World) -> None:
        if on(1):
            raise RuntimeError("on purpose")
        right(world)

    monkeypatch.setattr(World, "barrier", broken)
    outcomes = ranks.outcomes(2, main, [], timeout=30)
    assert [outcome.value for outcome in outcomes] == [1, 1]
    assert re.search("FAIL barrier +rank 1: RuntimeError: on purpose", outcomes[1].stdout)
    assert re.search("FAIL barrier +rank 0: .*see what the other ranks say", outcomes[0].stdout)


def test_a_rank_that_hangs_is_waited_for_as_long_as_was_asked(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    right = World.barrier
    monkeypatch.setattr(World, "barrier", lambda world: time.sleep(2) if on(1) else right(world))
    outcomes = ranks.outcomes(2, main, ["--timeout", "1"], timeout=15)
    assert outcomes[0].value == 1
    assert re.search("FAIL barrier +rank 0: .*see what the other ranks say; a firewall", outcomes[0].stdout)


def test_a_partial_environment_is_explained(ranks: Ranks) -> None:
    (outcome,) = ranks.outcomes(1, main, [], env={"RANK": "0"})
    assert outcome.value == 1
    assert "FAIL launch       rank 0: RuntimeError: the environment is partial" in outcome.stdout
    assert "Launch with torchrun" in outcome.stdout


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    def come() -> int | None:
        return main(["--timeout", "1"]) if on(0) else None

    outcomes = ranks.outcomes(2, come, timeout=30)
    assert outcomes[0].value == 1
    assert re.search("FAIL launch +rank 0: TimeoutError: .*for rank 1 .*a firewall", outcomes[0].stdout), outcomes[0].stdout
