"""Stop anywhere, resume, and the two halves are the one whole run, bit for bit."""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset, SequentialSampler, WeightedRandomSampler

from callbacks import Checkpoint
from tests.helpers import Ranks, Recorder, Toy, mean_of_outputs, toy_trainer
from trainer import Callback, CheckpointFolder, DDPTrainer, TrainerConfig, checkpoint
from trainer import checkpoint_folder as folder_room

LENGTH, GLOBAL_BATCH, STEPS = 11, 4, 9  # three epochs of three steps, the last of each over three samples


class Noisy(Dataset[Any]):
    """Augmented with every generator there is; the third part of a sample is its index."""

    def __init__(self, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(length, 4, generator=generator).to(dtype)
        self.targets = torch.randn(length, 2, generator=generator).to(dtype)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return self.inputs[index] + 0.1 * noise.to(self.inputs), self.targets[index], index


class Run(DDPTrainer):
    """Asks to stop, on the last rank, in step `stop_after`; remembers what this rank was trained on."""

    stop_after: int | None = None
    buckets = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[int, int]] = []  # epoch, index
        self.updates = 0

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += [(self.state.epoch, int(index)) for index in batch[-1]]
        if isinstance(model, DistributedDataParallel):
            self.buckets = len(str(model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")).split(","))
        return self.eval_step(model, batch)

    def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
        assert self.loss_fn is not None
        return self.loss_fn(model(batch[0]), batch[1])

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.updates += 1
        if self.state.step + 1 == self.stop_after and self.world.rank == self.world.size - 1:
            self.stop("enough")


class Thawing(Run):
    """Its first layer learns from the second epoch on; keeps a moving average of the weights, which is in its checkpoints."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.average = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def before_epoch(self) -> None:
        next(iter(self.model.children())).requires_grad_(self.state.epoch > 0)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        for name, value in self.model.named_parameters():
            self.average[name].lerp_(value.detach(), 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.average = {name: value.clone() for name, value in state["average"].items()}


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 2))


def with_batch_norm() -> nn.Module:
    convolution = nn.Conv1d(1, 4, 3)
    head = (nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return nn.Sequential(nn.Unflatten(1, (1, 4)), convolution, nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3), *head)


def make(
    weights: int = 0,
    *,
    kind: type[Run] = Run,
    model: Callable[[], nn.Module] = with_dropout,
    dtype: torch.dtype = torch.float64,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    length: int = LENGTH,
    evaluated: int = 0,
    workers: int = 0,
    **options: Any,
) -> Run:
    """A trainer on `Noisy`; `weights` is the seed of the model's first weights. `options`: DDPTrainer's and TrainerConfig's."""
    torch.manual_seed(weights)
    module = model().to(dtype)
    passed = {name: options.pop(name) for name in ("scheduler", "sampler", "callbacks") if name in options}
    defaults = {"epochs": 3, "global_batch_size": GLOBAL_BATCH, "batch_size": 1, "log_every": 1, "seed": 7}
    return kind(
        module,
        optimizer(module.parameters()),
        Noisy(length, dtype),
        Noisy(evaluated, dtype) if evaluated else None,
        loss_fn=mse_loss,
        loader_options={"num_workers": workers},
        config=TrainerConfig(**{**defaults, **options}),
        **passed,
    )


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Every value in nested containers by its place; tensors with their type and bits."""
    if isinstance(value, Tensor):
        tensor = value.detach().contiguous()
        return {place: (str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())}
    if not isinstance(value, (Mapping, list, tuple)):
        return {place: value}
    found: dict[str, Any] = {f"{place}()": type(value).__name__}
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        found |= flat(item, f"{place}[{key!r}]")
    return found


def everything(trainer: DDPTrainer) -> dict[str, Any]:
    """All that a run leaves behind on this rank.

    Of the generators on rank 0 only: another rank may have had no sample in the last window, and then drew nothing.
    """
    generators: list[Any] = []
    if trainer.world.is_main:
        generators = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[union-attr]
    return flat({"trainer": trainer.state_dict(), "generators": generators})


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    return sorted(place for place in left.keys() | right.keys() if (place, left.get(place)) != (place, right.get(place)))


def saved(folder: Path) -> dict[str, Any]:
    """The newest checkpoint in `folder`, without what a whole run's of the same step does not hold."""
    content = CheckpointFolder(folder).newest()
    assert content is not None
    content["state"].pop("stop_reason")
    return flat(content)


def stop_and_resume_everywhere(folder: Path, steps: int, workers: int = 0, **recipe: Any) -> dict[str, Any]:
    """Of one run and, for every step, a run stopped after it and one resumed from there: what differs, by step."""
    whole = make(callbacks=[Checkpoint(folder / "whole", every_steps=1, keep_last=steps)], **recipe)
    assert whole.fit().step == steps
    expected, files, found = everything(whole), CheckpointFolder(folder / "whole").steps(), {}
    for stop in range(1, steps):
        part = make(callbacks=[Checkpoint(folder / str(stop))], workers=workers, **recipe)
        part.stop_after = stop
        state = part.fit()
        found[f"stopped after {stop}"] = [] if (state.step, state.stop_reason) == (stop, "enough") else [str(state)]
        if part.world.is_main:
            whole_then = flat(checkpoint.read(files[stop]))
            wrong = differences(saved(folder / str(stop)), whole_then)
            found[f"saved after {stop}"] = [place for place in wrong if place != "['state']['stop_reason']"]
        part.world.barrier()  # everybody's part is over
        rest = make(weights=stop, callbacks=[Checkpoint(folder / str(stop))], workers=workers, **recipe)
        rest.fit(resume_from=folder / str(stop))
        found[f"resumed after {stop}"] = differences(everything(rest), expected)
        found[f"updates after {stop}"] = [] if rest.updates == steps - stop else [str(rest.updates)]
    return {"wrong": {place: wrong for place, wrong in found.items() if wrong}, "compared": len(found), "buckets": whole.buckets}


def one_cycle(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.3, total_steps=total_steps)


def plateau(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


RECIPES: dict[str, dict[str, Any]] = {
    "momentum, one cycle": {"scheduler": one_cycle},
    "momentum, one cycle, two workers": {"scheduler": one_cycle, "workers": 2},
    "AdamW, clipped, evaluated, on a plateau, drop_last": {
        **{"optimizer": lambda parameters: AdamW(parameters, lr=0.01), "max_grad_norm": 0.1, "drop_last": True},
        **{"scheduler": plateau, "schedule": "eval", "eval_every": 2, "evaluated": 5, "model": with_batch_norm},
    },
    "thawing, averaged": {"kind": Thawing, "scheduler": lambda optimizer, total: StepLR(optimizer, 1), "schedule": "epoch"},
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_stopped_after_any_step_and_resumed_is_the_whole_run(
    ranks: Ranks, tmp_path: Path, world_size: int, recipe: str
) -> None:
    options = RECIPES[recipe]
    steps = STEPS - 3 * options.get("drop_last", False)
    for found in ranks(world_size, stop_and_resume_everywhere, tmp_path, steps, timeout=100.0, **options):
        assert found["wrong"] == {}
        assert found["compared"] >= 3 * (steps - 1)


def test_a_run_in_a_samplers_order_is_resumed_in_that_order(ranks: Ranks, tmp_path: Path) -> None:
    def run(folder: Path) -> list[dict[str, Any]]:
        sampler = WeightedRandomSampler([0.1 * weight for weight in range(1, 14)], 9, generator=torch.Generator())
        return [stop_and_resume_everywhere(folder, STEPS, length=13, sampler=sampler)]

    for (found,) in ranks(2, run, tmp_path):
        assert found["wrong"] == {}


@pytest.mark.parametrize(("world_size", "batch_size", "options"), [(3, 2, {}), (4, 1, {"gradient_as_bucket_view": True})])
def test_from_three_ranks_on_a_resumed_run_rounds_like_the_whole_run(
    ranks: Ranks, tmp_path: Path, world_size: int, batch_size: int, options: dict[str, Any]
) -> None:
    """In float32, over several buckets; the last window of an epoch is shorter than the ranks are many."""
    found = ranks(
        world_size,
        stop_and_resume_everywhere,
        tmp_path,
        steps=6,
        model=with_batch_norm,
        dtype=torch.float32,
        length=14,
        global_batch_size=12,
        batch_size=batch_size,
        scheduler=one_cycle,
        ddp_options={"bucket_cap_mb": 0.0001, **options},
        timeout=100.0,
    )
    assert [part["wrong"] for part in found] == [{}] * world_size
    assert found[0]["buckets"] >= 3


def test_a_run_continued_by_other_numbers_of_ranks_agrees_to_1e_12_and_trains_on_each_sample_once(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Two ranks stop within the first epoch, three continue and stop within the second, one ends it."""
    recipe: dict[str, Any] = {
        **{"model": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), "length": 23, "global_batch_size": 5},
        **{"batch_size": 2, "optimizer": lambda parameters: AdamW(parameters, lr=0.01), "scheduler": one_cycle},
    }

    def run(folder: Path, stop_after: int | None, weights: int) -> tuple[dict[str, Tensor], list[tuple[int, int]], float]:
        trainer = make(weights, callbacks=[Checkpoint(folder)], **recipe)
        trainer.stop_after = stop_after
        trainer.fit(resume_from=folder)
        return dict(trainer.model.state_dict()), trainer.seen, trainer.optimizer.param_groups[0]["lr"]

    (whole, seen, rate) = ranks(1, run, tmp_path / "whole", None, 0)[0]
    assert Counter(seen) == Counter((epoch, index) for epoch in range(3) for index in range(23))

    parts = [
        *ranks(2, run, tmp_path / "parts", 3, 0),
        *ranks(3, run, tmp_path / "parts", 7, 1),
        *ranks(1, run, tmp_path / "parts", None, 2),
    ]
    assert Counter(sample for _, part, _ in parts for sample in part) == Counter(seen)
    weights, _, last_rate = parts[-1]
    assert last_rate == rate
    for name, value in whole.items():
        assert (weights[name] - value).norm() <= 1e-12 * value.norm(), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_optimizer_is_resumed_with_its_state_as_it_was(ranks: Ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    """On the parameter's device; and in the type it was in, which is not always the parameter's."""
    optimizers: dict[str, Callable[[Any], Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
        "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
        "NAdam": torch.optim.NAdam,
        "RAdam": torch.optim.RAdam,
        "Adamax": torch.optim.Adamax,
        "Adagrad": torch.optim.Adagrad,
        "Adadelta": torch.optim.Adadelta,
        "ASGD": lambda p: torch.optim.ASGD(p, t0=2),
        "Rprop": torch.optim.Rprop,
        "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    }

    def run() -> dict[str, list[str]]:
        wrong = {}
        for name, optimizer in optimizers.items():
            recipe: dict[str, Any] = {"optimizer": optimizer, "dtype": dtype}
            found = stop_and_resume_everywhere(tmp_path / name, 3, epochs=1, **recipe)
            restored = make(**recipe)
            restored.load_state_dict(checkpoint.read(tmp_path / name / "whole" / "step-00000003.pt"))
            states = {id(p): state for p, state in restored.optimizer.state.items()}
            devices = {v.device for p in restored.model.parameters() for v in states[id(p)].values() if isinstance(v, Tensor)}
            wrong[name] = found["wrong"] or ([] if devices == {torch.device("cpu")} else devices)
        return wrong

    ((wrong),) = ranks(1, run)
    assert wrong == {name: [] for name in optimizers}


def test_epochs_are_neither_repeated_nor_left_out(ranks: Ranks, tmp_path: Path) -> None:
    """Two steps an epoch, resumed after each of three; a finished run takes no step."""

    def run(epochs: int) -> tuple[list[float], list[int], int]:
        weights = []

        class Weights(Callback):
            def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
                weights.append(trainer.model.w.item())

        callbacks = [Weights(), Checkpoint(tmp_path)]
        trainer = toy_trainer(8, kind=Run, callbacks=callbacks, batch_size=2, epochs=epochs)
        state = trainer.fit(resume_from=tmp_path)
        assert isinstance(trainer, Run)
        epochs_trained = sorted({epoch for epoch, _ in trainer.seen})
        return (weights if trainer.world.is_main else [trainer.model.w.item()]), epochs_trained, state.step

    # Within an epoch: means 1.5 and 5.5; the whole takes 7 off w.
    assert ranks(2, run, 1) == [([-1.5, -7.0], [0], 2), ([-7.0], [0], 2)]
    assert ranks(2, run, 3) == [([-8.5, -14.0, -15.5, -21.0], [1, 2], 6), ([-21.0], [1, 2], 6)]
    assert ranks(2, run, 3) == [([], [], 6), ([-21.0], [], 6)]
    assert ranks(1, lambda: toy_trainer(8, batch_size=4, epochs=3).fit(tmp_path).step) == [6]


def test_a_resumed_epoch_continues_at_its_next_sample(ranks: Ranks, tmp_path: Path) -> None:
    """Window means 1.5, 5.5, 9.5, 13.5; stopped after the second."""

    def run(stop_after: int | None) -> tuple[float, list[int]]:
        trainer = toy_trainer(16, kind=Run, callbacks=[Checkpoint(tmp_path)], batch_size=1, accumulation_steps=2)
        assert isinstance(trainer, Run)
        trainer.stop_after = stop_after
        trainer.fit(resume_from=tmp_path)
        return trainer.model.w.item(), [index for _, index in trainer.seen]

    assert ranks(2, run, 2) == [(-7.0, [0, 2, 4, 6]), (-7.0, [1, 3, 5, 7])]
    assert ranks(2, run, None) == [(-30.0, [8, 10, 12, 14]), (-30.0, [9, 11, 13, 15])]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_keeps_its_permutation_and_the_next_one_has_its_own(ranks: Ranks, tmp_path: Path, workers: int) -> None:
    """Shuffled, stopped within the second of three epochs."""

    def run(folder: Path, stop_after: int | None) -> tuple[float, list[tuple[int, int]]]:
        model = Toy()
        trainer = Run(
            model,
            SGD(model.parameters(), lr=0.125, momentum=0.5),
            Dataset16(),
            loss_fn=mean_of_outputs,
            loader_options={"num_workers": workers},
            config=TrainerConfig(epochs=3, batch_size=1, accumulation_steps=2, seed=3, log_every=1),
            callbacks=[Checkpoint(folder)],
        )
        trainer.stop_after = stop_after
        trainer.fit(resume_from=folder)
        return model.w.item(), trainer.seen

    whole = ranks(2, run, tmp_path / "whole", None)
    first = ranks(2, run, tmp_path / "parts", 6)
    rest = ranks(2, run, tmp_path / "parts", None)
    for rank in (0, 1):
        assert first[rank][1] + rest[rank][1] == whole[rank][1]
        assert rest[rank][0] == whole[rank][0]
    assert Counter(whole[0][1] + whole[1][1]) == Counter((epoch, index) for epoch in range(3) for index in range(16))
    orders = [[index for e, index in whole[0][1] if e == epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


class Dataset16(Dataset[Any]):
    """Sample i is i, as input and as index."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(float(index), dtype=torch.float64), torch.tensor(index)


def test_the_same_global_batch_is_continued_at_any_world_size_and_another_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Saved by two ranks after 8 of 16 samples; a position is one of samples, whatever a rank takes at once."""

    def run(batch_size: int, accumulation_steps: int, stop_after: int | None, folder: Path) -> tuple[float, list[int]]:
        trainer = toy_trainer(
            16,
            kind=Run,
            callbacks=[Checkpoint(folder)],
            batch_size=batch_size,
            accumulation_steps=accumulation_steps,
        )
        assert isinstance(trainer, Run)
        trainer.stop_after = stop_after
        trainer.fit(resume_from=tmp_path / "step-00000002.pt" if stop_after is None else None)
        return trainer.model.w.item(), [index for _, index in trainer.seen]

    assert [w for w, _ in ranks(2, run, 1, 2, 2, tmp_path)] == [-7.0, -7.0]
    for world_size, batch_size, accumulation_steps in ((1, 2, 2), (4, 1, 1), (1, 4, 1)):
        found = ranks(world_size, run, batch_size, accumulation_steps, None, tmp_path / f"{world_size}-{batch_size}")
        assert [w for w, _ in found] == [-30.0] * world_size
        assert sorted(index for _, indices in found for index in indices) == list(range(8, 16))
    for world_size, global_batch in ((2, 2), (3, 3)):
        for outcome in ranks.outcomes(world_size, run, 1, 1, None, tmp_path / "refused"):
            assert outcome.error == "ValueError"
            assert "global_batch=4" in outcome.message
            assert f"global_batch={global_batch}" in outcome.message


def test_random_numbers_go_on_where_they_would_have_and_differ_between_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Dropout, noise from three generators, every rank with a seed of its own: 6 steps, or 3 and 3 more."""

    def run() -> tuple[list[str], list[float]]:
        def model() -> nn.Module:
            return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))

        def trainer(**options: Any) -> Run:
            made = make(rank, model=model, callbacks=[Checkpoint(tmp_path)], length=12, max_steps=6, **options)
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(100 * rank + 1)
            return made

        rank = make().world.rank
        trainer_of_part = trainer()
        trainer_of_part.stop_after = 3
        trainer_of_part.fit()
        rest = trainer()
        rest.fit(resume_from=tmp_path)
        found, drawn = everything(rest), draw()
        rest.world.barrier()
        if rank == 0:
            for path in tmp_path.iterdir():
                path.unlink()
        whole = trainer()
        whole.fit()
        wrong = differences(found, everything(whole))
        return wrong if draw() == drawn else [*wrong, "drawn"], drawn

    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]

    (wrong, drawn), (other_wrong, other_drawn) = ranks(2, run)
    assert wrong == other_wrong == []
    assert all(mine != theirs for mine, theirs in zip(drawn, other_drawn, strict=True))


@pytest.mark.parametrize("way", ["stop", "crash"])
def test_a_run_that_ends_within_a_window_is_resumed_at_the_windows_beginning(ranks: Ranks, tmp_path: Path, way: str) -> None:
    """Eight samples one by one, windows of four; the end comes with the sixth. A stop waits for the window's update."""

    class Ending(Run):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            if float(batch[0]) == 5 and way == "crash":
                raise RuntimeError("the machine burns")
            if float(batch[0]) == 5:
                self.stop("enough")
            return super().training_step(model, batch)

    def run(kind: type[Run], epochs: int) -> tuple[float, list[int]]:
        checkpoints = Checkpoint(tmp_path, every_steps=1)
        trainer = toy_trainer(8, kind=kind, callbacks=[checkpoints], batch_size=1, accumulation_steps=4, epochs=epochs)
        assert isinstance(trainer, Run)
        trainer.fit(resume_from=tmp_path)
        return trainer.model.w.item(), [index for _, index in trainer.seen]

    (ended,) = ranks.outcomes(1, run, Ending, 2)
    files = sorted(path.name for path in tmp_path.iterdir())
    if way == "stop":
        assert ended.value == (-7.0, list(range(8)))
        assert files == ["step-00000001.pt", "step-00000002.pt"]
        assert ranks(1, run, Run, 2) == [(-14.0, list(range(8)))]
    else:
        assert "the machine burns" in ended.message
        assert files == ["step-00000001.pt"]
        assert float(checkpoint.read(tmp_path / files[0])["model"]["w"]) == -1.5
        assert ranks(1, run, Run, 1) == [(-7.0, [4, 5, 6, 7])]


def test_epochs_shorter_than_a_window_are_counted_when_resumed(ranks: Ranks, tmp_path: Path) -> None:
    """One step an epoch, over six of sixteen possible samples; saved after the second of four epochs."""

    def run(epochs: int) -> tuple[float, int, list[int]]:
        trainer = toy_trainer(6, kind=Run, callbacks=[Checkpoint(tmp_path)], batch_size=2, accumulation_steps=8, epochs=epochs)
        assert isinstance(trainer, Run)
        state = trainer.fit(resume_from=tmp_path)
        return trainer.model.w.item(), state.step, [epoch for epoch, _ in trainer.seen[::6]]

    assert ranks(1, run, 2) == [(-5.0, 2, [0, 1])]
    assert ranks(1, run, 4) == [(-10.0, 4, [2, 3])]


@pytest.mark.parametrize(("momentum", "weight"), [(0.0, 4.0), (0.5, 3.5)])
@pytest.mark.parametrize("elsewhere", ["another path", "no path"])
def test_rank_0_alone_finds_and_reads_the_file(
    ranks: Ranks, tmp_path: Path, momentum: float, weight: float, elsewhere: str
) -> None:
    """w = 1, the file holds w = 5 after one step; another step of 1 (with momentum of 0.5: of 1.5)."""

    def run(w: float, epochs: int, resume: bool) -> tuple[float, dict[str, Any]]:
        model = Toy()
        nn.init.constant_(model.w, w)
        trainer = DDPTrainer(
            model,
            SGD(model.parameters(), lr=1.0, momentum=momentum),
            torch.utils.data.TensorDataset(torch.ones(2, dtype=torch.float64), torch.ones(2)),
            loss_fn=mean_of_outputs,
            config=TrainerConfig(epochs=epochs, batch_size=1),
            callbacks=[Checkpoint(tmp_path)],
        )
        path: Path | None = tmp_path / "step-00000001.pt"
        if not trainer.world.is_main:
            path = None if elsewhere == "no path" else tmp_path / "nowhere" / "step-00000001.pt"
            checkpoint.read = folder_room.find = None  # type: ignore[assignment]
        trainer.fit(resume_from=path if resume else None)
        return model.w.item(), flat(trainer.optimizer.state_dict())

    assert [w for w, _ in ranks(2, run, 6.0, 1, False)] == [5.0, 5.0]
    (w, optimizer), (other_w, other_optimizer) = ranks(2, run, 1.0, 2, True)
    assert (w, other_w) == (weight, weight)
    assert optimizer == other_optimizer


def test_what_rank_0_is_told_to_resume_from_decides(ranks: Ranks, tmp_path: Path) -> None:
    """A script whose ranks look for the folder themselves, where only a rank other than 0 has one."""

    def run() -> tuple[int, float]:
        toy_trainer(4, batch_size=1, max_steps=1, callbacks=[Checkpoint(tmp_path)]).fit()
        trainer = toy_trainer(4, batch_size=1)
        state = trainer.fit(resume_from=None if trainer.world.is_main else tmp_path)
        return state.step, trainer.model.w.item()

    assert ranks(2, run) == [(2, -3.0)] * 2


class Counting(Callback):
    """Counts steps over restarts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = 0
        self.at_start: list[int] = []

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        self.at_start.append(self.steps)

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_callbacks_get_their_state_by_name_before_fit_starts(ranks: Ranks, tmp_path: Path) -> None:
    """A name that the trainer has not is one line in the log of one rank, and ignored."""

    def run(names: list[str], epochs: int) -> list[tuple[str, list[int], int]]:
        logging.getLogger("trainer").addHandler(logging.StreamHandler(sys.stderr))
        counting = [Counting(name) for name in names]
        trainer = toy_trainer(6, batch_size=1, epochs=epochs, callbacks=[*counting, Checkpoint(tmp_path)])
        trainer.fit(resume_from=tmp_path)
        return [(callback.name, callback.at_start, callback.steps) for callback in counting]

    first = ranks(2, run, ["kept", "gone", "gone too"], 1)
    assert first == [
        [(name, [0], 3) for name in ("kept", "gone", "gone too")],
        [(n, [], 0) for n in ("kept", "gone", "gone too")],
    ]
    outcomes = ranks.outcomes(2, run, ["new", "kept"], 2)
    assert [outcome.value for outcome in outcomes] == [[("new", [0], 3), ("kept", [3], 6)], [("new", [], 0), ("kept", [], 0)]]
    lines = [[line for line in outcome.stderr.splitlines() if "gone" in line] for outcome in outcomes]
    assert [len(found) for found in lines] == [1, 0]
    assert "gone, gone too" in lines[0][0]
    assert "kept" not in lines[0][0]


def test_a_finished_run_takes_no_step_until_it_is_given_more(ranks: Ranks, tmp_path: Path) -> None:
    """Resumed with more epochs, or from the middle of one where max_steps had ended it, it is the longer run."""

    def run() -> list[Any]:
        def trainer(weights: int = 0, *callbacks: Callback, **options: Any) -> Run:
            return make(weights, scheduler=lambda o, total: StepLR(o, 2, 0.5), callbacks=callbacks, **options)

        recorder = Recorder()
        finished = trainer(0, Checkpoint(tmp_path / "finished"), recorder, epochs=1)
        finished.fit()
        before, calls = everything(finished), len(recorder.calls)
        finished.fit()
        again = differences(everything(finished), before)
        restored = trainer(1, Checkpoint(tmp_path / "finished"), recorder, epochs=1)
        restored.fit(resume_from=tmp_path / "finished")
        again += differences(flat(restored.state_dict()), flat(finished.state_dict()))
        hooks = [name for name, _ in recorder.order[calls:]]

        whole = trainer(0, Checkpoint(tmp_path / "whole"))
        whole.fit()
        longer = trainer(2, Checkpoint(tmp_path / "finished"))
        longer.fit(resume_from=tmp_path / "finished")
        trainer(0, Checkpoint(tmp_path / "cut"), max_steps=4).fit()
        uncut = trainer(3, Checkpoint(tmp_path / "cut"))
        uncut.fit(resume_from=tmp_path / "cut")
        continued = [differences(everything(other), everything(whole)) for other in (longer, uncut)]
        return [again, restored.updates, restored.state.stop_reason, hooks, continued, (longer.updates, uncut.updates)]

    idle = ["on_fit_start", "on_fit_end"] * 2
    assert ranks(2, run) == [[[], 0, None, hooks, [[], []], (6, 5)] for hooks in (idle, [])]


MISMATCHES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a layer more": ({"model": lambda: nn.Sequential(with_dropout(), nn.Linear(2, 2))}, ("0.0.weight", "3.weight")),
    "a wider layer": (
        {"model": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.4), nn.Linear(5, 2))},
        ("0.weight: (6, 4) in the file, (5, 4) here",),
    ),
    "other groups": (
        {"optimizer": lambda p: SGD([{"params": [value]} for value in p], lr=0.1, momentum=0.9)},
        ("groups of [4] parameters, this one of [1, 1, 1, 1]",),
    ),
    "no scheduler": ({"scheduler": None}, ("the checkpoint's run has a scheduler and this trainer has none",)),
    "seed": ({"seed": 8}, ("seed=7", "seed=8")),
    "no seed": ({"seed": None}, ("seed=7", "seed=None")),
    "length": ({"length": 12}, ("samples=11", "samples=12")),
    "order": ({"shuffle": False}, ("shuffle=True", "shuffle=False")),
    "a sampler": ({"sampler": SequentialSampler(range(11))}, ("sampler=False", "sampler=True")),
    "drop_last": ({"drop_last": True}, ("drop_last=False", "drop_last=True")),
    "global batch": ({"global_batch_size": 5}, ("global_batch=4", "global_batch=5")),
}


def test_a_checkpoint_of_another_run_is_refused_with_both_values_and_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    def run() -> dict[str, tuple[str, list[str]]]:
        part = make(scheduler=one_cycle, callbacks=[Checkpoint(tmp_path)])
        part.stop_after = 4
        part.fit()
        part.world.barrier()
        files = sorted(path.name for path in tmp_path.iterdir())
        found = {}
        for name, (changes, _) in MISMATCHES.items():
            recorder = Recorder()
            trainer = make(1, **{"scheduler": one_cycle, "callbacks": [recorder, Checkpoint(tmp_path)], **changes})
            before = flat(trainer.state_dict())
            with pytest.raises(ValueError) as refused:
                trainer.fit(resume_from=tmp_path)
            wrong = differences(flat(trainer.state_dict()), before)
            wrong += [hook for hook, _ in recorder.order if hook != "on_exception"]
            wrong += [] if sorted(path.name for path in tmp_path.iterdir()) == files else ["files"]
            found[name] = (str(refused.value), wrong)
        return found

    for found in ranks(2, run):
        for name, (_, words) in MISMATCHES.items():
            message, wrong = found[name]
            assert [word for word in words if word not in message] == [], message
            assert wrong == [], name


def test_a_missing_file_is_an_error_and_an_empty_or_missing_folder_a_fresh_start(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "without steps").mkdir()
    (tmp_path / "without steps" / "notes.txt").write_text("step-00000001.pt")
    (tmp_path / "without steps" / "step-00000009.pt.tmp").write_text("half")

    def fit(name: str) -> float:
        trainer = toy_trainer(4, batch_size=2)
        trainer.fit(resume_from=str(tmp_path / name))
        return trainer.model.w.item()

    for name in ("empty", "missing", "without steps"):
        assert ranks(2, fit, name) == [-1.5, -1.5]
    for name in ("missing.pt", "empty/step-00000003.pt", "missing/best.pt"):
        outcomes = ranks.outcomes(2, fit, name)
        assert [outcome.error for outcome in outcomes] == ["FileNotFoundError"] * 2
        assert all(name in outcome.message for outcome in outcomes)


def test_evaluation_does_not_disturb_what_follows(ranks: Ranks, tmp_path: Path) -> None:
    """With BatchNorm, dropout and augmented evaluation data: every two steps, never, and with a resume in between."""

    def run() -> list[list[str]]:
        def fit(weights: int, resume_from: Path | None = None, **options: Any) -> dict[str, Any]:
            trainer = make(weights, model=with_batch_norm, **options)
            trainer.fit(resume_from)
            other = ["config", "callbacks"] if trainer.world.is_main else ["config", "running", "num_batches"]
            return {place: value for place, value in everything(trainer).items() if not any(word in place for word in other)}

        never = fit(0)
        often = fit(0, evaluated=7, eval_every=2, callbacks=[Checkpoint(tmp_path, every_steps=1, keep_last=9)])
        resumed = [
            fit(9, tmp_path / f"step-{step:08d}.pt", **({"evaluated": 3, "eval_every": 1} if step % 2 else {}))
            for step in (2, 3, 4, 7)
        ]
        return [differences(other, never) for other in (often, *resumed)]

    assert ranks(2, run) == [[[]] * 5] * 2


def test_a_trainer_can_be_taken_back_and_run_again(ranks: Ranks, tmp_path: Path) -> None:
    """`fit(resume_from=...)` twice on one trainer, and `load_state_dict` before a plain `fit`."""

    def run() -> list[list[str]]:
        whole = make(scheduler=one_cycle, callbacks=[Checkpoint(tmp_path, every_steps=1, keep_last=9)])
        whole.fit()
        expected = everything(whole)
        found = []
        for step in (5, 2, 8):
            whole.fit(resume_from=tmp_path / f"step-{step:08d}.pt")
            found.append(differences(everything(whole), expected))
        part = make(1, scheduler=one_cycle)
        part.stop_after = 4
        part.load_state_dict(checkpoint.read(tmp_path / "step-00000003.pt"))
        part.fit()
        rest = make(2, scheduler=one_cycle, callbacks=[Checkpoint(tmp_path)])
        rest.load_state_dict(part.state_dict())
        part.fit()  # on from here by itself: what it remembers is its own
        rest.fit()
        found.append([place for place in differences(everything(rest), expected) if "callbacks" not in place])
        return found

    assert ranks(2, run) == [[[]] * 4] * 2


def test_a_samplers_indices_are_of_the_dataset_that_the_run_had(tmp_path: Path) -> None:
    """Of the same number of indices over a longer dataset, each may mean another sample."""
    first = make(sampler=SequentialSampler(range(8)), length=10, callbacks=[Checkpoint(tmp_path)])
    first.fit()
    longer = make(sampler=SequentialSampler(range(8)), length=12, epochs=4)
    with pytest.raises(ValueError, match=r"rows=10, this trainer has rows=12: the dataset has another length"):
        longer.fit(resume_from=tmp_path)


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_seed_an_epoch_goes_on_in_the_order_it_was_begun_in(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """Also in another process, whose own draw would be another order."""

    class Remembering(Run):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            self.__dict__.setdefault("indices", []).extend(batch[2].tolist())
            return super().training_step(model, batch)

    def part(stop_after: int) -> list[int]:
        trainer = make(kind=Remembering, seed=None, epochs=1, length=32, callbacks=[Checkpoint(tmp_path)])
        trainer.stop_after = stop_after
        trainer.fit(resume_from=tmp_path)
        seen: list[int] = vars(trainer)["indices"]
        return seen

    seen = [index for part_of in (3, 0) for found in ranks(world_size, part, part_of) for index in found]
    assert sorted(seen) == list(range(32))


def cosine(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, total_steps)


@pytest.mark.parametrize(("scheduler", "name"), [(cosine, "T_max"), (one_cycle, "total_steps")])
def test_a_schedule_that_keeps_another_length_than_the_run_has_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scheduler: Callable[[Optimizer, int], LRScheduler], name: str
) -> None:
    make(scheduler=scheduler, callbacks=[Checkpoint(tmp_path)], epochs=1).fit()
    longer = make(scheduler=scheduler, epochs=3)
    longer.load_state_dict(CheckpointFolder(tmp_path).newest() or {})
    assert f"made for 9 steps, but goes on with the checkpoint's {name}=3: it keeps the length" in caplog.text
    caplog.clear()
    make(scheduler=scheduler, epochs=1).load_state_dict(CheckpointFolder(tmp_path).newest() or {})
    assert "scheduler" not in caplog.text


@pytest.mark.parametrize("saved_fused", [False, True])
def test_how_an_optimizer_computes_is_its_own_choice_after_a_resume(tmp_path: Path, saved_fused: bool) -> None:
    """A file of a CPU's run, resumed on a GPU with a fused optimizer, or the reverse."""

    def fit(fused: bool, epochs: int) -> Optimizer:
        model = nn.Linear(1, 1).double()
        optimizer = AdamW(model.parameters(), fused=fused, capturable=fused)
        config = TrainerConfig(batch_size=2, epochs=epochs)
        data = torch.utils.data.TensorDataset(torch.ones(4, 1).double(), torch.ones(4, 1).double())
        DDPTrainer(model, optimizer, data, loss_fn=mse_loss, config=config, callbacks=[Checkpoint(tmp_path)]).fit(tmp_path)
        return optimizer

    fit(saved_fused, 1)
    resumed = fit(not saved_fused, 2)
    assert {key: resumed.param_groups[0][key] for key in ("fused", "capturable")} == dict.fromkeys(
        ("fused", "capturable"), not saved_fused
    )
    assert {float(state["step"]) for state in resumed.state.values()} == {4.0}


def test_a_fused_optimizer_counts_its_steps_in_the_type_that_its_kernels_read(tmp_path: Path) -> None:
    """A file of one that is not fused may hold float64."""

    def fit(fused: bool, epochs: int) -> list[torch.dtype]:
        model = nn.Linear(1, 1)
        optimizer = AdamW(model.parameters(), fused=fused)
        data = torch.utils.data.TensorDataset(torch.ones(4, 1), torch.ones(4, 1))
        config = TrainerConfig(batch_size=2, epochs=epochs)
        DDPTrainer(model, optimizer, data, loss_fn=mse_loss, config=config, callbacks=[Checkpoint(tmp_path)]).fit(tmp_path)
        return [state["step"].dtype for state in optimizer.state.values()]

    torch.set_default_dtype(torch.float64)
    try:
        assert fit(False, 1) == [torch.float64] * 2
        assert fit(True, 2) == [torch.float32] * 2
        assert fit(True, 3) == [torch.float32] * 2
    finally:
        torch.set_default_dtype(torch.float32)
