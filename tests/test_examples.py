"""What examples/ promises, run as a reader runs it: through torchrun and through plain python."""

import gzip
import hashlib
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SUBSET = EXAMPLES / "data" / "mnist_subset"
NAMES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]
LAST_LINE = re.compile(r"test accuracy ([\d.]+) % of (\d+) images, test loss ([\d.]+), (\d+) steps")

pytest.importorskip("torchvision", reason="the examples need the extra 'examples'")


class Job(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float

    @property
    def numbers(self) -> tuple[float, int, float, int]:
        """Accuracy in percent, images, loss and steps, from the last line of what was printed."""
        assert self.code == 0, self.out + self.err
        found = LAST_LINE.fullmatch(self.out.splitlines()[-1])
        assert found is not None, self.out
        return float(found[1]), int(found[2]), float(found[3]), int(found[4])


def launch(folder: Path, processes: int | None, script: str, *options: object, limit: float = 110) -> Job:
    """Run an example in `folder`, without a network: in plain python, or through torchrun as so many processes."""
    command = [sys.executable]
    if processes is not None:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(EXAMPLES / script), *map(str, options)]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    without = {"no_proxy", "NO_PROXY"}
    environment = {k: v for k, v in os.environ.items() if k not in without} | nowhere | {"OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit)
    return Job(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cut(content: bytes, count: int) -> bytes:
    """The first `count` items of an IDX file."""
    dimensions = content[3]
    size = 1
    for place in range(1, dimensions):
        size *= struct.unpack_from(">I", content, 4 + 4 * place)[0]
    header = 4 + 4 * dimensions
    return content[:4] + struct.pack(">I", count) + content[8:header] + content[header : header + count * size]


def write_small(folder: Path, write: Callable[[Path, bytes], object]) -> None:
    """MNIST with 300 training and 100 test images."""
    folder.mkdir(parents=True)
    for name in NAMES:
        content = gzip.decompress((SUBSET / f"{name}.gz").read_bytes())
        write(folder / name, cut(content, 300 if name.startswith("train") else 100))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "data"
    write_small(folder, lambda path, content: Path(f"{path}.gz").write_bytes(gzip.compress(content)))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, small: Path) -> tuple[Job, Path]:
    """One epoch in plain python, and the folder that the run chose."""
    folder = tmp_path_factory.mktemp("plain")
    return launch(folder, None, "mnist.py", "--data", small, "--epochs", 1), folder / "runs" / "mnist-1"


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory, small: Path) -> tuple[Job, Path]:
    """The same through torchrun on two processes, as four micro-batches each, beside an earlier run."""
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "runs" / "mnist-1").mkdir(parents=True)
    options = ("--full", "--data", small, "--epochs", 1, "--batch-size", 4, "--accumulation-steps", 4)
    return launch(folder, 2, "mnist.py", *options), folder / "runs" / "mnist-2"


# The data


def test_the_bundled_data_takes_at_most_two_and_a_half_megabytes() -> None:
    assert sum(file.stat().st_size for file in (EXAMPLES / "data").rglob("*.gz") if "full" not in str(file)) <= 2_500_000


@pytest.mark.parametrize(("train", "each"), [(True, 1000), (False, 200)])
def test_the_bundled_data_has_equally_many_images_of_each_digit(train: bool, each: int) -> None:
    images, digits = load(EXAMPLES / "mnist.py").read(SUBSET, train=train).tensors
    assert digits.bincount().tolist() == [each] * 10
    assert images.shape == (10 * each, 1, 28, 28)
    assert images.dtype == torch.float32
    assert abs(images.mean()) < 0.01  # normalised
    assert abs(images.std() - 1) < 0.01


@pytest.mark.parametrize("name", NAMES)
def test_the_bundled_data_is_what_its_readme_says(name: str) -> None:
    found = hashlib.sha256(gzip.decompress((SUBSET / f"{name}.gz").read_bytes())).hexdigest()
    assert re.search(rf"`{name}\.gz` .*`{found}`", (SUBSET / "README.md").read_text())


def test_the_readme_of_the_bundled_data_names_source_and_licence() -> None:
    text = (SUBSET / "README.md").read_text()
    assert "Yann LeCun" in text
    assert "https://creativecommons.org/licenses/by-sa/3.0/" in text


def test_making_the_subset_twice_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(EXAMPLES / "data" / "make_subset.py")
    monkeypatch.setattr(module, "PER_DIGIT", {"t10k": 200})  # of the subset itself: all of it, in its order
    for run in ("one", "two"):
        module.main(SUBSET, tmp_path / run)
        time.sleep(1.1)  # gzip files may hold the second they were made
    for name in NAMES[2:]:
        one, two = ((tmp_path / run / f"{name}.gz").read_bytes() for run in ("one", "two"))
        assert one == two
        assert gzip.decompress(one) == gzip.decompress((SUBSET / f"{name}.gz").read_bytes())


def test_the_subset_is_picked_at_even_distances_in_the_order_of_the_file() -> None:
    labels = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] * 6
    chosen = load(EXAMPLES / "data" / "make_subset.py").choose(labels, 3)
    assert chosen == [*range(10), *range(20, 30), *range(40, 50)]


def test_the_bundled_data_can_be_made_again_from_all_of_mnist(tmp_path: Path) -> None:
    source = Path(os.environ.get("MNIST_FOLDER", EXAMPLES / "data" / "mnist_full"))
    if not all((source / name).exists() or (source / f"{name}.gz").exists() for name in NAMES):
        pytest.skip(f"the four files of MNIST are not in {source}; the environment variable MNIST_FOLDER may name a folder")
    load(EXAMPLES / "data" / "make_subset.py").main(source, tmp_path)
    for name in NAMES:
        made, kept = ((folder / f"{name}.gz").read_bytes() for folder in (tmp_path, SUBSET))
        assert gzip.decompress(made) == gzip.decompress(kept)


# mnist.py


def test_two_processes_with_accumulation_end_with_the_line_of_one_process(
    plain: tuple[Job, Path], parallel: tuple[Job, Path]
) -> None:
    accuracy, images, loss, steps = plain[0].numbers
    assert images == 100
    assert steps == 10  # 300 images in global batches of 32
    assert parallel[0].numbers == (pytest.approx(accuracy, abs=1), 100, pytest.approx(loss, abs=2e-3), 10)


@pytest.mark.parametrize("run", ["plain", "parallel"])
def test_a_run_leaves_events_json_lines_and_a_checkpoint(run: str, request: pytest.FixtureRequest) -> None:
    job, folder = request.getfixturevalue(run)
    assert job.code == 0, job.err
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert [file.name for file in folder.glob("*.pt")] == ["step-00000010.pt"]
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert {record["kind"] for record in records} == {"step", "eval", "epoch"}
    last = [record for record in records if record["kind"] == "eval"][-1]
    accuracy, _, loss, _ = job.numbers
    assert 100 * last["accuracy"] == pytest.approx(accuracy, abs=0.006)
    assert last["loss"] == pytest.approx(loss, abs=6e-5)


def test_rank_0_alone_prints(plain: tuple[Job, Path], parallel: tuple[Job, Path]) -> None:
    assert len(parallel[0].out.splitlines()) == len(plain[0].out.splitlines()) == 2
    assert parallel[0].out.count("test accuracy") == 1
    assert "files in runs/mnist-2" in parallel[0].out


def test_an_existing_run_is_left_alone(parallel: tuple[Job, Path]) -> None:
    assert list((parallel[1].parent / "mnist-1").iterdir()) == []


def test_a_run_stopped_in_mid_epoch_and_resumed_on_two_processes_ends_with_the_same_line(
    tmp_path: Path, small: Path, plain: tuple[Job, Path]
) -> None:
    stopped = launch(tmp_path, None, "mnist.py", "--data", small, "--epochs", 1, "--max-steps", 4, "--output", "here")
    assert stopped.numbers[3] == 4
    resumed = launch(tmp_path, 2, "mnist.py", "--data", small, "--epochs", 1, "--global-batch", 32, "--resume", "here")
    accuracy, images, loss, steps = plain[0].numbers
    assert resumed.numbers == (pytest.approx(accuracy, abs=1), images, pytest.approx(loss, abs=2e-3), steps)
    records = [json.loads(line) for line in (tmp_path / "here" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == [4, 10]


def test_full_without_a_network_ends_with_one_message_that_names_both_ways_out(tmp_path: Path) -> None:
    job = launch(tmp_path, 2, "mnist.py", "--full", "--data", tmp_path / "mnist")
    assert job.code != 0
    assert job.seconds < 60
    assert job.err.count("MNIST could not be downloaded") == 1
    assert re.search(rf"Either put its four files \({', '.join(NAMES)}, gzipped or not\) into {tmp_path}/mnist\n", job.err)
    assert "or run without --full" in job.err
    assert 'mnist.py", line' not in job.err  # no traceback of the example
    assert job.out == ""
    assert list((tmp_path / "mnist").iterdir()) == []


@pytest.mark.parametrize("place", ["", "MNIST/raw"])
def test_full_with_the_four_unpacked_files_downloads_nothing(tmp_path: Path, place: str) -> None:
    write_small(tmp_path / "data" / place, Path.write_bytes)
    before = sorted(tmp_path.rglob("*"))
    module = load(EXAMPLES / "mnist.py")
    module.provide(tmp_path / "data", download=True)
    assert [len(module.read(tmp_path / "data", train=train)) for train in (True, False)] == [300, 100]
    assert sorted(tmp_path.rglob("*")) == before


def test_full_with_the_four_gzipped_files_downloads_nothing(parallel: tuple[Job, Path], small: Path) -> None:
    assert parallel[0].numbers[1] == 100  # the run had --full, and no network
    assert sorted(file.name for file in small.rglob("*")) == sorted(f"{name}.gz" for name in NAMES)


def test_what_full_downloads_comes_from_torchvision_and_lands_whole(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(self: object) -> None:
        raw = Path(self.raw_folder)  # type: ignore[attr-defined]
        raw.mkdir(parents=True)
        for name in NAMES:
            (raw / f"{name}.gz").write_bytes((small / f"{name}.gz").read_bytes())
            (raw / name).write_bytes(gzip.decompress((small / f"{name}.gz").read_bytes()))

    module = load(EXAMPLES / "mnist.py")
    monkeypatch.setattr(module.MNIST, "download", download)
    module.provide(tmp_path / "data", download=True)
    assert sorted(file.name for file in (tmp_path / "data").rglob("*")) == sorted(f"{name}.gz" for name in NAMES)
    assert len(module.read(tmp_path / "data", train=False)) == 100


def test_a_data_folder_without_the_files_is_an_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} does not hold {', '.join(NAMES)}.*--full downloads them"):
        load(EXAMPLES / "mnist.py").provide(tmp_path, download=False)


def test_torchrun_takes_none_of_the_options_for_itself() -> None:
    from torch.distributed.run import parse_args

    options = re.findall(r"^  (--[\w-]+)", launch(EXAMPLES, None, "mnist.py", "--help").out, flags=re.MULTILINE)
    assert len(options) == 12
    for option in options:
        assert parse_args(["--standalone", "mnist.py", option, "1"]).training_script_args == [option, "1"]


@pytest.mark.parametrize("script", ["mnist.py", "split_parity.py"])
def test_an_example_is_shorter_than_150_lines(script: str) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) < 150


# split_parity.py


@pytest.mark.timeout(600)
def test_split_parity_prints_its_table_and_draws_its_picture(tmp_path: Path, small: Path) -> None:
    options = ("--picture", "curves.png", "--data", small, "--epochs", 3)
    job = launch(tmp_path, None, "split_parity.py", *options, limit=580)
    assert job.code == 0, job.out + job.err
    head, rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in job.out.splitlines()]
    assert head[:4] == ["set-up", "last training loss", "test loss", "test accuracy"]
    assert set(rule) == {"---"}
    assert [row[0] for row in rows] == [
        "1 process, global batch 32",
        "2 processes, global batch 32",
        "4 processes, global batch 32",
        "batch 32, accumulation 1, 1 process",
        "batch 16, accumulation 2, 1 process",
        "batch 8, accumulation 4, 1 process",
        "batch 4, accumulation 2, 4 processes",
    ]
    for row in rows:
        assert float(row[1]) == pytest.approx(float(rows[0][1]), rel=1e-3)
        assert float(row[4]) < 1e-3
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000
