"""Several nodes: two torchrun agents on one machine, of two processes each, and one of them killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers import Numbers, Toy, mean_of_outputs
from trainer import CheckpointFolder, DDPTrainer, TrainerConfig

ROOT = Path(__file__).parents[1]
CONFIG = "TrainerConfig(epochs=2, global_batch_size=8, batch_size=2)"
SCRIPT = f"""
import sys, time
from pathlib import Path
import torch
from callbacks import Checkpoint
from tests.helpers import Numbers, Toy, mean_of_outputs
from trainer import DDPTrainer, TrainerConfig, World

class Slow(DDPTrainer):
    def training_step(self, model, batch):
        time.sleep(0.05)
        return mean_of_outputs(model(batch[0]), batch[1])

folder = Path(sys.argv[1])
world = World.from_env()
with world.main_first():
    first = world.local_rank == 0
    assert first or (folder / f"first of {{world.rank - world.local_rank}}").exists()
    (folder / f"{{'first' if first else 'other'}} of {{world.rank}}").touch()
model = Toy()
trainer = Slow(
    model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), Numbers(400), loss_fn=mean_of_outputs,
    config={CONFIG}, callbacks=[Checkpoint(folder / "files", every_steps=5)], world=world,
)
trainer.fit(resume_from=folder / "files")
if world.is_main:
    sys.stdout.write(f"ended with {{world.size}} processes, w = {{model.w.item()!r}}\\n")  # at once: an agent writes here too
"""


def agent(script: Path, port: int, folder: Path) -> subprocess.Popen[str]:
    options = [
        *("--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=run"),
        *(f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"),
        "--rdzv-conf=last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3",
    ]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
    )


def the_same_alone() -> float:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    DDPTrainer(
        model, optimizer, Numbers(400), loss_fn=mean_of_outputs, config=eval(CONFIG, {"TrainerConfig": TrainerConfig})
    ).fit()
    return model.w.item()


@pytest.mark.timeout(240)
def test_a_run_on_two_nodes_goes_on_without_the_one_that_dies(tmp_path: Path) -> None:
    """With several agents: the world is 4, then 2, and the weights are those of one process."""
    (script := tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host = agent(script, port, tmp_path)
    time.sleep(1.0)  # the one that comes first holds the rendezvous
    other = agent(script, port, tmp_path)
    try:
        files, deadline = CheckpointFolder(tmp_path / "files"), time.monotonic() + 90
        while max(files.steps(), default=0) < 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        other.send_signal(signal.SIGKILL)
        output, _ = host.communicate(timeout=120)
    finally:
        for process in (host, other):
            process.kill()
            process.communicate()
    marks = {path.name for path in tmp_path.glob("* of *")}
    assert marks >= {"first of 0", "other of 1", "first of 2", "other of 3"}, output
    assert host.returncode == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("ended with")]
    assert line.startswith("ended with 2 processes, w = ")
    assert float(line.rpartition(" ")[2]) == pytest.approx(the_same_alone(), rel=1e-12)
