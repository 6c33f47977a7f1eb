"""The same training, split in seven ways over processes and micro-batches: do the loss curves lie on each other?

    python examples/split_parity.py

Each run is `torchrun examples/mnist.py` with a global batch of 32. A table of what they reach is printed, and their
curves are drawn, each thinner than the one before, into examples/split_parity.png. Options that are not listed below
go to examples/mnist.py: `--epochs 1` or `--max-steps 40` for a quick look, `--full` for all of MNIST.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Split:
    name: str
    processes: int
    options: tuple[str, ...]


def count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def by_processes(processes: int) -> Split:
    return Split(f"{count(processes)}, global batch 32", processes, ("--global-batch", "32"))


def by_accumulation(batch: int, accumulation: int, processes: int) -> Split:
    options = ("--batch-size", str(batch), "--accumulation-steps", str(accumulation))
    return Split(f"batch {batch}, accumulation {accumulation}, {count(processes)}", processes, options)


PANELS = {
    "The same global batch on more processes": [by_processes(1), by_processes(2), by_processes(4)],
    "The same global batch in smaller pieces": [
        by_accumulation(32, 1, 1),
        by_accumulation(16, 2, 1),
        by_accumulation(8, 4, 1),
        by_accumulation(4, 2, 4),
    ],
}


@dataclass(frozen=True)
class Curve:
    steps: list[int]
    losses: list[float]
    test: dict[str, float]

    def distance(self, other: "Curve") -> float:
        """The largest difference between the two at any step, relative to `other`."""
        assert self.steps == other.steps, "the runs report at different steps"
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True))


def run(split: Split, options: list[str]) -> Curve:
    """Train in a job of its own, and read its log."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={split.processes}"]
        command += [str(HERE / "mnist.py"), "--lr", "1e-4", *split.options, *options, "--output", str(folder)]
        job = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if job.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{job.stdout}{job.stderr}")
        records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    reports = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    return Curve([r["step"] for r in reports], [r["loss"] for r in reports], evaluations[-1])


def table(curves: dict[str, Curve]) -> str:
    first, *_ = curves.values()
    lines = [
        "| set-up | last training loss | test loss | test accuracy | largest distance from the first curve |",
        "|---|---|---|---|---|",
    ]
    for name, curve in curves.items():
        lines.append(
            f"| {name} | {curve.losses[-1]:.6f} | {curve.test['loss']:.6f} | {curve.test['accuracy']:.2%} "
            f"| {curve.distance(first):.1e} |"
        )
    return "\n".join(lines)


def draw(panel: Axes, title: str, curves: dict[str, Curve]) -> None:
    """All curves, and again the last tenth of them, enlarged."""
    zoom = panel.inset_axes((0.38, 0.36, 0.59, 0.60))
    for place, (name, curve) in enumerate(curves.items()):
        for axes in (panel, zoom):
            width = 1.6 * (len(curves) - place) - 0.8
            axes.plot(curve.steps, curve.losses, label=name, linewidth=width, color=f"C{place}", solid_joinstyle="round")
    curve = next(iter(curves.values()))
    tail = min(len(curve.steps), max(2, len(curve.steps) // 10))
    low, high = min(curve.losses[-tail:]), max(curve.losses[-tail:])
    zoom.set_xlim(curve.steps[-tail], curve.steps[-1])
    zoom.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    zoom.tick_params(labelsize=8)
    panel.indicate_inset_zoom(zoom, edgecolor="black")
    panel.set(title=title, xlabel="optimizer step", ylabel="training loss")
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize="small", frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--picture", type=Path, default=HERE / "split_parity.png", help="where the curves are drawn")
    options, others = parser.parse_known_args()
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True)
    every: dict[str, Curve] = {}
    for panel, (title, splits) in zip(axes, PANELS.items(), strict=True):
        curves = {}
        for split in splits:
            start = time.monotonic()
            curves[split.name] = run(split, others)
            print(f"{split.name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        draw(panel, title, curves)
        every.update(curves)
    print(table(every))
    figure.suptitle("One training, split in different ways (MNIST, means over 10 steps)")
    figure.savefig(options.picture, dpi=110, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
