"""`compile` and `channels_last`: other ways to compute the same, with the same keys, with accumulation and resume."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from callbacks import Checkpoint
from tests.helpers import Ranks, Recorder, toy_trainer
from trainer import DDPTrainer, TrainerConfig, checkpoint

SIDE = 6


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.small = nn.Conv2d(4, 4, 1)  # its weights have a layout that is both
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * (SIDE - 2) ** 2, 2)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.norm(self.small(self.convolution(images))).relu().flatten(1))
        return outputs


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(22, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return TensorDataset(pixels, torch.randint(0, 2, (22,), generator=generator))


class Watching(DDPTrainer):
    """Notes how its batches are laid out, and what computes the forward."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        self.layouts = getattr(self, "layouts", set()) | {batch[0].is_contiguous(memory_format=torch.channels_last)}
        self.compiled = self.model._compiled_call_impl is not None
        return super().training_step(model, batch)


def train(folder: Path | None = None, resume: Path | None = None, steps: int | None = None, **options: Any) -> Any:
    torch.manual_seed(1)
    model = Network().double()
    recorder = Recorder()
    trainer = Watching(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        images(),
        images(),
        loss_fn=nn.functional.cross_entropy,
        config=TrainerConfig(epochs=2, max_steps=steps, global_batch_size=8, batch_size=2, log_every=1, **options),
        callbacks=[recorder] if folder is None else [recorder, Checkpoint(folder)],
    )
    trainer.fit(resume)
    assert trainer.model is model
    losses = [call.metrics["loss"] for call in recorder.calls if call.metrics]
    return trainer.model.state_dict(), losses, trainer.layouts, trainer.compiled, model._compiled_call_impl is None


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything of torch.compile but the code that it generates, which takes a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("options", [{"channels_last": True}, {"compile": True}, {"channels_last": True, "compile": True}])
def test_weights_and_curve_are_the_same_up_to_rounding(ranks: Ranks, world_size: int, options: dict[str, bool]) -> None:
    """With accumulation, a ragged tail and an evaluation; nothing is left on the model."""
    for plain, other in zip(ranks(world_size, train), ranks(world_size, train, **options), strict=True):
        assert_close(plain[0], other[0])
        assert plain[1] == pytest.approx(other[1], rel=1e-10)
        assert plain[2] == {False}
        assert other[2] == {"channels_last" in options}
        assert (plain[3], other[3]) == (False, "compile" in options)
        assert other[4]


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_file_of_a_compiled_run_resumes_without_and_the_other_way_round(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """Its keys are those of the plain module."""
    whole = ranks(world_size, train)
    for first, second in ((True, False), (False, True)):
        folder = tmp_path / str(first)
        ranks(world_size, train, folder, None, 3, compile=first)
        assert list(checkpoint.read(folder / "step-00000003.pt")["model"]) == list(Network().state_dict())
        for expected, resumed in zip(whole, ranks(world_size, train, folder, folder, compile=second), strict=True):
            assert_close(expected[0], resumed[0])


@pytest.mark.parametrize("name", ["compile", "channels_last"])
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False; found"):
        TrainerConfig(**{name: value})


@pytest.mark.usefixtures("quick_compiler")
def test_on_one_process_a_compiled_model_is_handed_out_bare_after_the_first_step() -> None:
    """As any other is."""
    handed: list[bool] = []

    class Handed(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            handed.append(model is self.model)
            return super().training_step(model, batch)

    toy_trainer(6, kind=Handed, batch_size=2, compile=True).fit()
    assert handed == [False, True, True]
