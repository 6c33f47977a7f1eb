"""Train a small convolutional network on MNIST, on one process or many:

    python examples/mnist.py
    torchrun --standalone --nproc-per-node 2 examples/mnist.py

Both take the same optimizer steps, each on 32 images over all processes, and end with the same line up to rounding,
with `--float64` to the digit. 10,000 training and 2,000 test images come with the repository; `--full` downloads all of MNIST.
"""

import argparse
import contextlib
import gzip
import itertools
import socket
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset
from torchvision.datasets import MNIST

from callbacks import Checkpoint, JSONLines, ProgressBar, Summary, TensorBoard
from trainer import DDPTrainer, TrainerConfig, World

FILES = [name.removesuffix(".gz") for name, _ in MNIST.resources]


class Classifier(DDPTrainer):
    def training_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, digits = batch
        return nn.functional.nll_loss(model(images), digits)

    def eval_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, digits = batch
        scores = model(images)
        return {"loss": nn.functional.nll_loss(scores, digits), "accuracy": (scores.argmax(1) == digits).float().mean()}


def network() -> nn.Module:
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convolutions, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10), nn.LogSoftmax(dim=1))


def files(folder: Path) -> list[Path]:
    """Those of MNIST's four files that are in `folder`, gzipped or not, in itself or where torchvision puts them."""
    places = [place / (name + end) for name in FILES for place in (folder, folder / "MNIST/raw") for end in ("", ".gz")]
    return list({place.name.removesuffix(".gz"): place for place in places if place.is_file()}.values())


def provide(folder: Path, download: bool) -> None:
    """Make sure that all four files are there, or raise FileNotFoundError. For one process at a time."""
    if len(files(folder)) == len(FILES):
        return
    if not download:
        raise FileNotFoundError(f"{folder} does not hold {', '.join(FILES)} (gzipped or not); --full downloads them.")
    try:
        socket.setdefaulttimeout(10)  # seconds: a network that swallows everything is none
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # then moved: the folder never holds half a file
            MNIST(scratch, download=True)
            for file in Path(scratch, "MNIST/raw").glob("*.gz"):
                file.replace(folder / file.name)
    except (OSError, RuntimeError) as error:
        raise FileNotFoundError(
            f"MNIST could not be downloaded: {' '.join(str(error).split())}\n"
            f"Either put its four files ({', '.join(FILES)}, gzipped or not) into {folder}\n"
            "or run without --full, on the images that come with this example."
        ) from error


def read(folder: Path, train: bool) -> TensorDataset:
    """The images, normalised, and their digits. torchvision reads unpacked files only: it gets a copy for that long."""
    with tempfile.TemporaryDirectory() as scratch:
        (raw := Path(scratch, "MNIST/raw")).mkdir(parents=True)
        for file in files(folder):
            content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            (raw / file.name.removesuffix(".gz")).write_bytes(content)
        data = MNIST(scratch, train=train)
    return TensorDataset(data.data.unsqueeze(1).div(255).sub(0.1307).div(0.3081), data.targets)


def new_folder(parent: Path) -> Path:
    """Make `parent`/mnist-1, or with the next number that no other run has."""
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (folder := parent / f"mnist-{number}").mkdir(parents=True)
            break
    return folder


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, help="folder for logs and checkpoints (default: a new one below runs/)")
    where.add_argument("--resume", type=Path, help="go on with the run in this folder; without one there, start it")
    parser.add_argument("--full", action="store_true", help="all 70,000 images, downloaded if they are not in --data")
    parser.add_argument("--data", type=Path, help="folder with the four files of MNIST, gzipped or not")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, help="end after so many optimizer steps, if the epochs have not")
    parser.add_argument("--batch-size", type=int, default=32, help="samples a process holds at once, at the most")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--global-batch", type=int, default=32, help="samples per optimizer step, over all processes")
    step.add_argument("--accumulation-steps", type=int, help="instead: batches per optimizer step, on each process")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--float64", action="store_true", help="in float64, where splits agree to the printed digits")
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64 if options.float64 else torch.float32)
    data = options.data or Path(__file__).parent / "data" / ("mnist_full" if options.full else "mnist_subset")
    world = World.from_env()
    try:
        with world.main_first():
            provide(data, download=options.full)
    except FileNotFoundError as error:
        raise SystemExit(str(error) if world.is_main else 1) from None
    train, test = read(data, train=True), read(data, train=False)
    folder = options.resume or options.output or world.run_on_main(lambda: new_folder(Path("runs")))
    torch.manual_seed(options.seed)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    config = TrainerConfig(
        epochs=options.epochs,
        max_steps=options.max_steps,
        batch_size=options.batch_size,
        accumulation_steps=1 if options.accumulation_steps is None else options.accumulation_steps,
        global_batch_size=options.global_batch if options.accumulation_steps is None else None,
        seed=options.seed,
    )
    planned = options.epochs * -(-len(train) // config.window_size(world.size))  # total_steps, if --max-steps does not cut it
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, 2 - 2 * step / planned))  # half the steps at --lr, then down to 0
    callbacks = [Summary(), ProgressBar(), TensorBoard(folder), JSONLines(folder / "log.jsonl"), Checkpoint(folder)]
    trainer = Classifier(model, optimizer, train, test, scheduler=scheduler, config=config, callbacks=callbacks, world=world)
    with trainer:
        steps = trainer.fit(resume_from=options.resume).step
        end = trainer.evaluate()
    world.close()
    if world.is_main:
        print(f"files in {folder}")
        accuracy, loss = 100 * end["accuracy"], end["loss"]
        print(f"test accuracy {accuracy:.2f} % of {len(test)} images, test loss {loss:.4f}, {steps} steps")


if __name__ == "__main__":
    main(parse())
