"""The memory that training takes beside a loop by hand, and whether it grows:

    python tests/benchmarks/memory.py --model cnn --steps 500
    python tests/benchmarks/memory.py --model mlp --steps 10000

Each loop runs in a process of its own. "peak" is the most memory that process has held, in all and beyond what it held with data
and model before the first step; "growth" is what it held after the last step, less what it held after a tenth of the steps. In
MB, medians over the rounds. By hand: the tensors' rows gathered batch by batch, no wrapper, nothing logged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.loop import network  # noqa: E402
from trainer import DDPTrainer, TrainerConfig  # noqa: E402

CHILD, LOOPS = "--child", ("by hand", "trainer", "by hand again")


def held(key: str = "VmRSS") -> float:
    """MB that this process holds, or held at most (VmHWM)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) / 1024


class Watched(DDPTrainer):
    early: float
    steps: int

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self.state.step == self.steps // 10:
            self.early = held()


def child(loop: str, name: str, steps: int) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6400, 1, 28, 28, generator=generator)
    targets = torch.randint(0, 10, (6400,), generator=generator)
    model = network(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = held()
    if loop == "trainer":
        config = TrainerConfig(max_steps=steps, batch_size=32)
        trainer = Watched(model, optimizer, TensorDataset(inputs, targets), loss_fn=functional.nll_loss, config=config)
        trainer.steps = steps
        trainer.fit()
        early = trainer.early
    else:
        for step in range(steps):
            if step % 200 == 0:
                order = torch.randperm(6400).split(32)
            indices = order[step % 200]
            functional.nll_loss(model(inputs[indices]), targets[indices]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == steps // 10:
                early = held()
    peak = held("VmHWM")
    print(json.dumps({"peak": peak, "beyond": peak - before, "growth": held() - early}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "mlp", "cnn"), default="cnn")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {loop: [] for loop in LOOPS}
    for _ in range(options.rounds):
        for loop in LOOPS:
            command = [sys.executable, __file__, CHILD, loop, options.model, str(options.steps)]
            found[loop].append(json.loads(subprocess.run(command, check=True, capture_output=True, timeout=600).stdout))
    print(f"{options.model}, {options.steps} steps, torch {torch.__version__}")
    print("| loop | peak, MB | ratio | beyond data and model, MB | growth, MB |\n|---|---|---|---|---|")
    for loop, own in found.items():
        peak, beyond, growth = (statistics.median(item[key] for item in own) for key in ("peak", "beyond", "growth"))
        ratio = statistics.median(one["peak"] / other["peak"] for one, other in zip(own, found["by hand"], strict=True))
        print(f"| {loop} | {peak:.0f} | {ratio:.3f} | {beyond:.1f} | {growth:.1f} |")


if __name__ == "__main__":
    if CHILD in sys.argv:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
