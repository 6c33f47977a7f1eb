"""What examples/imagenet.py promises, run as a reader runs it, on a folder of generated images."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.ranks import Ranks
from tests.test_examples import EXAMPLES, Job, launch, load
from trainer import Callback, DDPTrainer, TrainerConfig

SCRIPT = "imagenet.py"
LAST_LINE = re.compile(r"top-1 accuracy [\d.]+ % with the averaged weights, [\d.]+ % with the last, of (\d+) images, (\d+) steps")
TINY = ("--model", "shufflenet_v2_x0_5")  # the smallest there with BatchNorm: a checkpoint of 5 MB, where ResNet-18 has 134
SMALL = ("--data", "images", "--size", 32, "--global-batch", 8, "--lr", 0.02, "--decay", 0.9)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of three colours, 9 of each to train on and 5 to evaluate."""
    from PIL import Image

    folder, generator = tmp_path_factory.mktemp("imagenet"), random.Random(0)
    for part, count in (("train", 9), ("val", 5)):
        for channel, colour in enumerate(("red", "green", "blue")):
            (folder / "images" / part / colour).mkdir(parents=True)
            for number in range(count):
                pixels = bytes(generator.randrange(128) + (127 if byte % 3 == channel else 0) for byte in range(3 * 8 * 8))
                image = Image.frombytes("RGB", (8, 8), pixels).resize((40, 36))
                image.save(folder / "images" / part / colour / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def plain(place: Path) -> Job:
    """One epoch of a ResNet in plain python."""
    return launch(place, None, SCRIPT, "--output", "plain", "--epochs", 1, "--workers", 0, "--model", "resnet18", *SMALL)


@pytest.fixture(scope="module")
def parallel(place: Path) -> Job:
    """Two epochs on two processes, in bf16, with a worker each."""
    options = ("--epochs", 2, "--workers", 1, "--precision", "bf16", *TINY, *SMALL)
    return launch(place, 2, SCRIPT, "--output", "parallel", *options)


def file(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / name, weights_only=True)
    return content


def last_evaluation(folder: Path) -> dict[str, float]:
    records: list[dict[str, Any]] = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "eval"][-1]


def equal(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(("run", "steps"), [("plain", 3), ("parallel", 6)])  # 24 of 27 images an epoch, in batches of 8
def test_rank_0_alone_prints_and_ends_with_both_accuracies(run: str, steps: int, request: pytest.FixtureRequest) -> None:
    job = request.getfixturevalue(run)
    assert job.code == 0, job.out + job.err
    files, last = job.out.splitlines()
    assert files == f"files in {run}"
    found = LAST_LINE.fullmatch(last)
    assert found is not None, last
    assert (int(found[1]), int(found[2])) == (15, steps)


@pytest.mark.parametrize(("run", "steps"), [("plain", [3]), ("parallel", [3, 6])])
def test_a_run_leaves_events_a_log_and_checkpoints(
    place: Path, run: str, steps: list[int], request: pytest.FixtureRequest
) -> None:
    assert request.getfixturevalue(run).code == 0
    assert len(list((place / run).glob("events.out.tfevents.*"))) == 1
    assert sorted(path.name for path in (place / run).glob("*.pt")) == ["best.pt", *(f"step-{step:08d}.pt" for step in steps)]
    assert last_evaluation(place / run).keys() >= {f"{kind}{name}" for kind in ("", "ema_") for name in ("loss", "top1", "top5")}


@pytest.mark.parametrize(("run", "name"), [("plain", "step-00000003.pt"), ("parallel", "step-00000006.pt")])
def test_a_checkpoint_holds_the_average_beside_the_weights(
    place: Path, run: str, name: str, request: pytest.FixtureRequest
) -> None:
    assert request.getfixturevalue(run).code == 0
    content = file(place / run, name)
    weights, average = content["model"], content["average"]
    assert average.keys() == weights.keys()
    assert not any(torch.equal(average[key], weights[key]) for key in weights if key.endswith((".weight", ".running_mean")))
    evaluation = last_evaluation(place / run)
    assert evaluation["ema_loss"] != evaluation["loss"]


def test_a_resumed_run_restores_the_average_and_ends_bitwise_as_the_uninterrupted_one(place: Path, parallel: Job) -> None:
    assert parallel.code == 0, parallel.out + parallel.err
    shutil.copytree(place / "parallel", place / "resumed")
    (place / "resumed" / "step-00000006.pt").unlink()
    options = ("--epochs", 2, "--workers", 1, "--precision", "bf16", *TINY, *SMALL)
    job = launch(place, 2, SCRIPT, "--resume", "resumed", *options)
    assert job.code == 0, job.out + job.err
    assert job.out.splitlines()[-1] == parallel.out.splitlines()[-1]
    whole, resumed = (file(place / run, "step-00000006.pt") for run in ("parallel", "resumed"))
    assert equal(whole["model"], resumed["model"])
    assert equal(whole["average"], resumed["average"])


class Weights(Callback):
    """Those of the model at the start and after each step."""

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        self.seen = [trainer.model.weight.detach().clone()]  # type: ignore[operator]

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.seen.append(trainer.model.weight.detach().clone())  # type: ignore[operator]


def classifier(model: nn.Module, decay: float, callbacks: tuple[Callback, ...] = ()) -> Any:
    """The example's trainer on 20 random points of three classes, in steps of 4 on each process."""
    data = TensorDataset(torch.randn(20, 2, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = TrainerConfig(batch_size=4)
    return load(EXAMPLES / SCRIPT).Classifier(model, optimizer, data, data, decay=decay, config=config, callbacks=callbacks)


def test_the_average_moves_by_the_decay_and_faster_in_the_first_steps() -> None:
    weights = Weights()
    with classifier(nn.Linear(2, 3), 0.3, (weights,)) as trainer:
        trainer.fit()
    average, *later = weights.seen
    assert len(later) == 5
    for decay, latest in zip((1 / 10, 2 / 11, 3 / 12, 0.3, 0.3), later, strict=True):
        average = decay * average + (1 - decay) * latest
    assert torch.allclose(trainer.average.weight, average)


def test_without_decay_the_average_is_evaluated_as_the_weights_are_on_every_process(ranks: Ranks) -> None:
    """Also with the statistics of BatchNorm, which each process takes from its own images."""

    def run() -> dict[str, float]:
        with classifier(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), decay=0.0) as trainer:
            trainer.fit()
            metrics: dict[str, float] = trainer.evaluate()
        return metrics

    one, two = ranks(2, run)
    assert one == two
    for name in ("loss", "top1", "top5"):
        assert one[f"ema_{name}"] == one[name]


def test_labels_are_smoothed_in_training_alone() -> None:
    with classifier(nn.Linear(2, 3), 0.3) as trainer:
        batch = (torch.randn(6, 2), torch.arange(6) % 3)
        scores = trainer.model(batch[0])
        trained, evaluated = trainer.training_step(trainer.model, batch), trainer.eval_step(trainer.model, batch)
    assert torch.allclose(trained, nn.functional.cross_entropy(scores, batch[1], label_smoothing=0.1))
    assert torch.allclose(evaluated["loss"], nn.functional.cross_entropy(scores, batch[1]))
    assert evaluated["top5"] == 1  # of three classes


@pytest.mark.parametrize("total", [1, 2, 100])
def test_the_rate_rises_and_then_falls_to_nothing(total: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = load(EXAMPLES / SCRIPT).schedule(optimizer, total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert 0.9 < max(rates) <= 1
    assert rates.index(max(rates)) <= total // 20
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0)


def test_images_of_other_classes_than_the_trained_ones_are_an_error_that_names_them(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "images", tmp_path / "images")
    (tmp_path / "images" / "val" / "red").rename(tmp_path / "images" / "val" / "yellow")
    with pytest.raises(SystemExit, match=r"must have the same classes; in one of them alone: red, yellow"):
        load(EXAMPLES / SCRIPT).read(tmp_path / "images", 32)


def test_torchrun_takes_none_of_the_options_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.run import parse_args

    monkeypatch.setattr("sys.argv", [SCRIPT, "--help"])
    with pytest.raises(SystemExit):
        load(EXAMPLES / SCRIPT).parse()
    options = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(options) == 12
    for option in options:
        assert parse_args(["--standalone", SCRIPT, option, "1"]).training_script_args == [option, "1"]


def test_the_example_is_shorter_than_150_lines() -> None:
    assert len((EXAMPLES / SCRIPT).read_text().splitlines()) < 150
