"""What the order of an epoch costs at the start, beside torch's DistributedSampler:

    python tests/benchmarks/order.py

For each length: milliseconds until the first indices of one rank are there, and the memory they take, at the epoch's start
and at a resume in its middle. Each line is measured in a process of its own. torch's sampler is asked up to 100 million.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

LENGTHS = (10**6, 10**8, 10**9)
CHILD = "--child"


def measure(kind: str, length: int, start: int) -> str:
    from torch.utils.data import DistributedSampler

    from trainer.order import Permutation

    Permutation(1_000, 0, 0)(range(10))  # what is imported and compiled on first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    if kind == "trainer":
        Permutation(length, 0, 0)(range(start, start + 32))
    else:
        sampler = DistributedSampler(range(length), num_replicas=8, rank=0, shuffle=True)  # type: ignore[arg-type]
        iterator = iter(sampler)
        for _ in range(start // 8 + 1):
            next(iterator)
    milliseconds = 1e3 * (time.perf_counter() - began)
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return f"| {length:,} | {start:,} | {kind} | {milliseconds:,.1f} | {megabytes:,.1f} |"


def main() -> None:
    print("| samples | from position | order by | first indices after, ms | memory, MB |")
    print("|---|---|---|---|---|")
    for length in LENGTHS:
        for start in (0, length // 2):
            for kind in ("trainer", "DistributedSampler"):
                if kind == "trainer" or length <= 10**7 or (length <= 10**8 and start == 0):
                    command = [sys.executable, __file__, CHILD, kind, str(length), str(start)]
                    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="", flush=True)


if __name__ == "__main__":
    if CHILD in sys.argv:
        print(measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    else:
        main()
