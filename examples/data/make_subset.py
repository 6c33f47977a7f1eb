"""Make the MNIST subset that travels with this repository: 1,000 training and 200 test images of each digit.

    python examples/data/make_subset.py FOLDER_WITH_THE_FOUR_MNIST_FILES [OUTPUT_FOLDER]

Reads the four IDX files, gzipped or not, and writes four of the same form, gzipped. The images of a digit are picked at
even distances along all of its images, and keep their order. Nothing is random and no time is stored, so a second run
writes the same bytes (another zlib may compress a little differently; what is inside is the same).
"""

import gzip
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

PER_DIGIT = {"train": 1000, "t10k": 200}


def read(folder: Path, name: str) -> bytes:
    packed = folder / f"{name}.gz"
    return gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / name).read_bytes()


def write(folder: Path, name: str, content: bytes) -> None:
    with (
        (folder / f"{name}.gz").open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=9, mtime=0) as packed,
    ):
        packed.write(content)


def choose(labels: Sequence[int], count: int) -> list[int]:
    """Positions of `count` images of each digit, at even distances along all of the digit, in the order of the file."""
    chosen: list[int] = []
    for digit in range(10):
        places = [place for place, label in enumerate(labels) if label == digit]
        chosen += [places[len(places) * i // count] for i in range(count)]
    return sorted(chosen)


def main(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for part, count in PER_DIGIT.items():
        images, labels = (read(source, f"{part}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        magic, _, rows, columns = struct.unpack(">4I", images[:16])
        size = rows * columns
        chosen = choose(labels[8:], count)
        header = struct.pack(">4I", magic, len(chosen), rows, columns)
        pixels = b"".join(images[16 + size * i : 16 + size * (i + 1)] for i in chosen)
        write(target, f"{part}-images-idx3-ubyte", header + pixels)
        header = labels[:4] + struct.pack(">I", len(chosen))
        write(target, f"{part}-labels-idx1-ubyte", header + bytes(labels[8 + i] for i in chosen))
        print(f"{part}: {len(chosen)} images of {len(labels) - 8}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else Path(__file__).parent / "mnist_subset")
