"""Train a ResNet-50 on ImageNet, or any network of torchvision on any folder of images, on one process or many:

    python examples/imagenet.py --data DIR --precision bf16
    torchrun --standalone --nproc-per-node 8 examples/imagenet.py --data DIR --precision bf16 --batch-size 32

DIR has `train/` and `val/`, each with a folder of images for each class. A moving average of the weights is evaluated beside
them (as `ema_loss`, ...) and kept in each checkpoint, as "average". Labels are smoothed in training alone. The global batch
stays 256 at any number of processes; what BatchNorm normalises over are the images that one process holds at once.
"""

import argparse
import copy
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.models import get_model
from torchvision.transforms import v2

from callbacks import Checkpoint, JSONLines, ProgressBar, TensorBoard
from trainer import DDPTrainer, TrainerConfig, World


class Classifier(DDPTrainer):
    def __init__(self, *parts: Any, decay: float, **named: Any) -> None:
        super().__init__(*parts, **named)
        self.decay = decay
        self.average = copy.deepcopy(self.model).eval()  # never in the optimizer, always in evaluation mode

    def training_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)

    def eval_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        averaged = measure(self.average(images), labels)
        return measure(model(images), labels) | {f"ema_{name}": value for name, value in averaged.items()}

    def optimizer_step(self) -> None:
        super().optimizer_step()
        decay = min(self.decay, (1 + self.state.step) / (10 + self.state.step))  # the first weights are soon forgotten
        for average, latest in zip(*(network.state_dict().values() for network in (self.average, self.model)), strict=True):
            if average.is_floating_point():  # not the number of batches that a BatchNorm has seen
                average.lerp_(latest, 1 - decay)

    def evaluate(self, data: Dataset[Any] | Mapping[str, Dataset[Any]] | None = None) -> dict[str, float]:
        self.world.broadcast_tensors(list(self.average.buffers()))  # BatchNorm's are of the images that a process has seen
        return super().evaluate(data)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"average": self.average.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.average.load_state_dict(state["average"])


def measure(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    hits = scores.topk(min(5, scores.shape[1])).indices == labels.unsqueeze(1)
    loss = nn.functional.cross_entropy(scores, labels)
    return {"loss": loss, "top1": hits[:, 0].float().mean(), "top5": hits.any(1).float().mean()}


def schedule(optimizer: Optimizer, total_steps: int) -> LambdaLR:
    """Up to the full rate over the first twentieth of the steps, then down to 0 along a half cosine."""
    warmup = max(1, total_steps // 20)
    return LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / total_steps)))


def read(folder: Path, size: int) -> tuple[ImageFolder, ImageFolder]:
    """The images for training, cropped anew each time, and those for evaluation."""
    normalise = [
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    augmented = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *normalise])
    centred = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), *normalise])
    train, test = ImageFolder(folder / "train", augmented), ImageFolder(folder / "val", centred)
    if odd := set(train.classes) ^ set(test.classes):
        raise SystemExit(f"{folder}: train/ and val/ must have the same classes; in one of them alone: {', '.join(sorted(odd))}")
    return train, test


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, help="folder for logs and checkpoints (default: a new one below runs/)")
    where.add_argument("--resume", type=Path, help="go on with the run in this folder; without one there, start it")
    parser.add_argument("--data", type=Path, required=True, help="folder with train/ and val/")
    parser.add_argument("--model", default="resnet50", help="name of a classification model of torchvision")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images, in pixels")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=64, help="images a process holds at once, at the most")
    parser.add_argument("--global-batch", type=int, default=256, help="images per optimizer step, over all processes")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at its highest")
    parser.add_argument("--decay", type=float, default=0.9999, help="of the moving average, per optimizer step")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--workers", type=int, default=4, help="processes that read images, for each that trains")
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    train, test = read(options.data, options.size)
    world = World.from_env()
    folder = options.resume or options.output or world.broadcast(Path("runs", time.strftime("imagenet-%Y-%m-%d-%H%M%S")))
    torch.manual_seed(42)
    model = get_model(options.model, num_classes=len(train.classes))
    optimizer = SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    config = TrainerConfig(
        epochs=options.epochs,
        batch_size=options.batch_size,
        global_batch_size=options.global_batch,
        precision=options.precision,
        drop_last=True,  # BatchNorm can do nothing with a rest of one image
    )
    reading = {"num_workers": options.workers, "persistent_workers": options.workers > 0}
    best = Checkpoint(folder, monitor="ema_top1", mode="max")
    trainer = Classifier(
        model,
        optimizer,
        train,
        test,
        decay=options.decay,
        scheduler=schedule,
        loader_options=reading,
        config=config,
        callbacks=[ProgressBar(), TensorBoard(folder), JSONLines(folder / "log.jsonl"), best],
        world=world,
    )
    with trainer:
        steps, end = trainer.fit(resume_from=options.resume).step, trainer.evaluate()
    world.close()
    if world.is_main:
        print(f"files in {folder}")
        ema, raw = (f"{100 * end[key]:.2f} %" for key in ("ema_top1", "top1"))
        print(f"top-1 accuracy {ema} with the averaged weights, {raw} with the last, of {len(test)} images, {steps} steps")


if __name__ == "__main__":
    main(parse())
