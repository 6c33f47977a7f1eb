"""The fixture that every distributed test stands on."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.ranks import Ranks, RanksFailed


def sum_of_ranks() -> float:
    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def test_values_come_in_rank_order(ranks: Ranks) -> None:
    def rank_and(word: str, more: str) -> tuple[int, str]:
        return int(os.environ["RANK"]), word + more

    assert ranks(3, rank_and, "a", more="b") == [(0, "ab"), (1, "ab"), (2, "ab")]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_find_each_other(ranks: Ranks, world_size: int) -> None:
    expected = world_size * (world_size - 1) / 2
    assert ranks(world_size, sum_of_ranks) == [expected] * world_size


def test_four_ranks_take_less_than_a_launch(ranks: Ranks) -> None:
    def seconds() -> float:
        started = time.monotonic()
        ranks(4, sum_of_ranks)
        return time.monotonic() - started

    assert min(seconds() for _ in range(3)) < 5  # a launch by torchrun takes 5 to 8 on an idle machine


def test_ranks_are_forked_from_a_process_without_threads_of_the_store(ranks: Ranks) -> None:
    """A rank forked while such a thread held a lock would find it locked for ever: one call in forty hung."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def count(rank: int) -> dict[str, str | None]:  # called here, right before the fork
        counted.append(threads())
        return {}

    counted: list[int] = []
    before = threads()
    ranks(2, sum_of_ranks, env=count)
    assert counted == [before, before]


def test_calls_do_not_disturb_each_other(ranks: Ranks) -> None:
    for _ in range(3):
        assert ranks(2, sum_of_ranks) == [1.0, 1.0]


def test_closures_and_tensors_travel(ranks: Ranks) -> None:
    here = torch.arange(3.0)
    (value,) = ranks(1, lambda: here + 1)
    assert value.tolist() == [1.0, 2.0, 3.0]


def test_one_rank_has_no_launcher_environment(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS")
    assert ranks(1, lambda: [name for name in names if name in os.environ]) == [[]]


def test_one_rank_can_be_launched_as_torchrun_does(ranks: Ranks) -> None:
    assert ranks(1, sum_of_ranks, launched=True) == [0.0]


def test_environment_can_differ_by_rank(ranks: Ranks) -> None:
    def env(rank: int) -> dict[str, str | None]:
        return {"LOCAL_RANK": str(rank % 2), "GROUP_RANK": None if rank == 0 else str(rank // 2)}

    assert ranks(3, lambda: (os.environ["LOCAL_RANK"], os.environ.get("GROUP_RANK")), env=env) == [
        ("0", None),
        ("1", "0"),
        ("0", "1"),
    ]
    assert ranks(1, lambda: os.environ["WORD"], env={"WORD": "a"}) == ["a"]
    assert "WORD" not in os.environ


def test_an_exception_is_reported_with_type_message_and_traceback(ranks: Ranks) -> None:
    def fail() -> int:
        if os.environ["RANK"] == "1":
            raise ValueError("batch_size must be 1 or more; found 0")
        return 5

    with pytest.raises(RanksFailed, match="rank 1: ValueError: batch_size must be 1 or more") as caught:
        ranks(2, fail)
    good, bad = caught.value.outcomes
    assert caught.value.failed == [bad]
    assert (good.value, good.error, good.exit_code) == (5, None, 0)
    assert (bad.error, bad.message, bad.exit_code) == ("ValueError", "batch_size must be 1 or more; found 0", 1)
    assert "in fail" in bad.traceback
    assert bad.traceback in bad.stderr


def test_outcomes_raise_nothing_and_hold_the_output_of_each_rank(ranks: Ranks) -> None:
    def speak() -> None:
        print("out", os.environ["RANK"])
        os.write(2, b"err " + os.environ["RANK"].encode())
        if os.environ["RANK"] == "1":
            raise SystemExit(3)

    outcomes = ranks.outcomes(2, speak)
    assert [outcome.stdout for outcome in outcomes] == ["out 0\n", "out 1\n"]
    assert [outcome.stderr for outcome in outcomes] == ["err 0", "err 1"]
    assert [outcome.exit_code for outcome in outcomes] == [0, 3]
    assert [outcome.ok for outcome in outcomes] == [True, False]


def test_a_killed_rank_has_a_negative_exit_code_and_no_value(ranks: Ranks) -> None:
    (outcome,) = ranks.outcomes(1, lambda: os.kill(os.getpid(), 9))
    assert (outcome.exit_code, outcome.value, outcome.timed_out, outcome.ok) == (-9, None, False, False)


def test_a_value_that_cannot_be_pickled_is_a_failure(ranks: Ranks) -> None:
    (outcome,) = ranks.outcomes(1, lambda: lambda: 0)
    assert not outcome.ok
    assert "cannot be pickled" in outcome.stderr


def test_a_hang_ends_at_its_limit_with_the_stacks(ranks: Ranks) -> None:
    def wait_for_a_friend() -> None:
        if os.environ["RANK"] == "0":
            time.sleep(100)

    started = time.monotonic()
    hung, done = ranks.outcomes(2, wait_for_a_friend, timeout=1)
    assert time.monotonic() - started < 10
    assert done.ok
    assert (hung.error, hung.exit_code, hung.timed_out) == ("TimeoutError", -9, True)
    assert "wait_for_a_friend" in hung.traceback


class Slow(torch.utils.data.Dataset[int]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        (self.folder / f"worker-{os.getpid()}").touch()
        time.sleep(100)
        return index


def test_data_loader_workers_die_with_their_rank(ranks: Ranks, tmp_path: Path) -> None:
    def read() -> None:
        next(iter(DataLoader(Slow(tmp_path), num_workers=2)))

    (outcome,) = ranks.outcomes(1, read, timeout=2)
    workers = [int(file.name.partition("-")[2]) for file in tmp_path.iterdir()]
    assert outcome.timed_out
    assert len(workers) == 2
    deadline = time.monotonic() + 5
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:  # a killed orphan may stay as a zombie until someone collects it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_rank_runs_its_own_exit_handlers_and_not_its_parents(ranks: Ranks, tmp_path: Path) -> None:
    parents = tmp_path / "parents"
    atexit.register(parents.touch)
    try:

        def leave() -> None:
            atexit.register((tmp_path / "own").touch)

        ranks(1, leave)
    finally:
        atexit.unregister(parents.touch)
    assert [file.name for file in tmp_path.iterdir()] == ["own"]


def test_warnings_are_errors_in_ranks_too(ranks: Ranks) -> None:
    (outcome,) = ranks.outcomes(1, lambda: warnings.warn("careful", UserWarning, stacklevel=1))
    assert (outcome.error, outcome.message) == ("UserWarning", "careful")


@pytest.mark.filterwarnings("default")
def test_warnings_that_are_let_through_are_on_the_ranks_stderr(ranks: Ranks) -> None:
    (outcome,) = ranks.outcomes(1, lambda: warnings.warn("careful", UserWarning, stacklevel=1))
    assert outcome.ok
    assert "UserWarning: careful" in outcome.stderr


def test_what_a_rank_records_for_the_agent_is_kept(ranks: Ranks) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def fail() -> None:
        raise ValueError("root cause")

    (outcome,) = ranks.outcomes(1, fail, launched=True)
    assert outcome.recorded is not None
    assert "root cause" in str(outcome.recorded)


def test_pytest_reports_once_and_cleans_up_once(tmp_path: Path) -> None:
    """A failing rank inside a pytest of its own: one report, one teardown, no child that goes on as pytest."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "from tests.ranks import Ranks\n"
        "@pytest.fixture\n"
        "def resource():\n"
        "    yield\n"
        "    print('TORN DOWN')\n"
        "def test_it(resource):\n"
        "    Ranks()(2, lambda: 1 / 0)\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout.count("TORN DOWN") == 1
    assert done.stdout.count("1 failed") == 1
    assert "rank 0: ZeroDivisionError" in done.stdout
    assert "rank 1: ZeroDivisionError" in done.stdout
