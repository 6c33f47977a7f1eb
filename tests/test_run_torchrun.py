"""The helper that launches a script as users do."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.helpers import run_torchrun


def test_a_script_runs_on_every_process_and_finds_the_library() -> None:
    # in one write: print sends the end of the line by itself, and the other process's may come between
    line = "(os.environ['RANK'] + sys.argv[1] + chr(10)).encode()"
    done = run_torchrun(f"import os, sys, trainer\nos.write(1, {line})", 2, "x")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0x", "1x"]
    assert not done.timed_out


def test_no_process_count_is_plain_python(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ.get('RANK'), os.environ['WORD']); raise SystemExit(3)")
    done = run_torchrun(script, 0, env={"WORD": "a"})
    assert (done.returncode, done.stdout.split()) == (3, ["None", "a"])


def test_a_launch_that_hangs_ends_with_its_workers(tmp_path: Path) -> None:
    script = f"import os, time\nopen(f'{tmp_path}/{{os.getpid()}}', 'w').close()\ntime.sleep(100)"
    done = run_torchrun(script, 2, timeout=8)
    assert done.timed_out
    assert done.returncode != 0
    assert done.seconds < 45
    workers = [int(file.name) for file in tmp_path.iterdir()]  # two, unless the machine is too slow to have started them
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{worker}/cmdline") for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
