"""Losses that count items: tokens, boxes, pixels. The gradient is that of the mean over all items of the window."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from callbacks import Checkpoint
from tests.helpers import Recorder, Toy, mean_of_outputs
from tests.ranks import Ranks
from trainer import DDPTrainer, Mean, TrainerConfig, World


class Documents(Dataset[Tensor]):
    """Sample i is a row of tokens, of any length."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = [torch.tensor(row, dtype=torch.float64) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class TokenTrainer(DDPTrainer):
    """The mean of the outputs over all tokens; keeps the gradients that each step used."""

    gradients: list[list[Tensor]]

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        tokens = torch.cat(batch)
        outputs = model(tokens)
        return {
            "loss": Mean(outputs.sum(), torch.tensor(tokens.numel())),
            "square": Mean(outputs.detach().square().sum(), len(tokens)),
        }

    def optimizer_step(self) -> None:
        self.__dict__.setdefault("gradients", []).append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])
        super().optimizer_step()


class Wavy(nn.Module):
    """A few parameters and a curve, so that the loss depends on the weights in more than one way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(1, 5, dtype=torch.float64), nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.outer(torch.tanh(self.inner(tokens.reshape(-1, 1)))).square().reshape(-1)
        return outputs


def documents(samples: int, seed: int) -> list[list[float]]:
    """0 to 50 tokens a sample."""
    numbers = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 51, (samples,), generator=numbers).tolist()
    return [torch.randn(length, generator=numbers, dtype=torch.float64).tolist() for length in lengths]


def token_trainer(model: nn.Module, rows: list[list[float]], **settings: Any) -> TokenTrainer:
    recorder, data = settings.pop("recorder", Recorder()), settings.pop("data", Documents(rows))
    config = TrainerConfig(**{"log_every": 1, "shuffle": False} | settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"collate_fn": list}
    return TokenTrainer(model, optimizer, data, loader_options=options, config=config, callbacks=[recorder])


def test_toy_of_a_06_gives_seven_sixths_exactly(ranks: Ranks) -> None:
    """The denominator spans micro-batches and ranks. Rank 0 has [4] and [0, 0, 0], rank 1 has [2] and [1]."""

    def run() -> list[float]:
        trainer = token_trainer(Toy(), [[4], [2], [0, 0, 0], [1]], batch_size=1, accumulation_steps=2)
        trainer.fit()
        return [float(gradient[0]) for gradient in trainer.gradients]

    assert ranks(2, run) == [[7 / 6], [7 / 6]]


@pytest.mark.parametrize("numerator", [1, 5, 7, 11, 13])
def test_quotients_of_small_counts_are_correctly_rounded(numerator: int) -> None:
    for count in range(1, 60):
        row = [float(numerator)] + [0.0] * (count - 1)
        trainer = token_trainer(Toy(), [row[:1], row[1:]], batch_size=1, accumulation_steps=2)
        trainer.fit()
        assert float(trainer.gradients[0][0]) == numerator / count


def full_windows(rows: list[list[float]], window: int, epochs: int, max_norm: float | None) -> list[Tensor]:
    """The same training by hand, each window in one piece."""
    model = Wavy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for first in range(0, len(rows), window):
            tokens = torch.tensor([token for row in rows[first : first + window] for token in row], dtype=torch.float64)
            optimizer.zero_grad()
            if len(tokens):
                model(tokens).mean().backward()
            else:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_equal_the_full_window_computation_at_any_split(ranks: Ranks, world_size: int) -> None:
    rows = documents(45, seed=3)
    rows[32:40] = [[] for _ in range(8)]  # a window without a single token
    splits = [{"batch_size": 8}, {"batch_size": 3}, {"batch_size": 1}]

    def run() -> list[list[Tensor]]:
        found = []
        for clip in (None, 0.05):
            for split in splits:
                model = Wavy()
                with pytest.warns(RuntimeWarning, match="no item") if world_size == 1 else _nothing():
                    token_trainer(model, rows, epochs=2, global_batch_size=8, max_grad_norm=clip, **split).fit()
                found.append([parameter.detach() for parameter in model.parameters()])
        return found

    wanted = [full_windows(rows, 8, 2, clip) for clip in (None, 0.05) for _ in splits]
    env = {"PYTHONWARNINGS": "ignore"}
    for found in ranks(world_size, _quietly(run) if world_size > 1 else run, env=env):
        for weights, right in zip(found, wanted, strict=True):
            for one, other in zip(weights, right, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def _quietly(function: Any) -> Any:
    import warnings

    def run() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function()

    return run


def test_reports_are_means_over_items_and_tell_items_per_second(ranks: Ranks) -> None:
    rows = [[1.0, 2.0], [3.0], [], [4.0, 5.0, 6.0], [7.0], [], [], [8.0]]

    def run() -> list[dict[str, float]]:
        recorder = Recorder()
        model = Toy()
        nn.init.ones_(model.w)
        trainer = token_trainer(model, rows, batch_size=1, accumulation_steps=2, recorder=recorder)
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        trainer.fit()
        return [call.metrics for call in recorder.reports]

    reports = ranks(2, run)[0]
    assert [report["loss"] for report in reports] == [21 / 6, 15 / 2]
    assert reports[0]["square"] == pytest.approx((1 + 4 + 9 + 16 + 25 + 36) / 6)
    assert all(report["items_per_second"] > 0 for report in reports)
    assert reports[0]["items_per_second"] / reports[0]["samples_per_second"] == pytest.approx(6 / 4)


def test_a_rank_without_samples_joins_an_item_weighted_run(ranks: Ranks) -> None:
    """Three documents on four ranks: rank 3 never sees a loss, and still takes part in the count."""

    def run() -> float:
        trainer = token_trainer(Toy(), [[1.0, 2.0], [6.0], []], batch_size=1)
        trainer.fit()
        return float(trainer.gradients[0][0])

    assert ranks(4, run, timeout=30) == [3.0] * 4


@pytest.mark.parametrize("lengths", [(4, 0), (0, 3), (20, 5)])
def test_a_rank_whose_shard_is_empty_joins_an_item_weighted_run(ranks: Ranks, tmp_path: Path, lengths: tuple[int, int]) -> None:
    """A stream that shards itself may leave a rank without a share of a window of any size: at first, or after a resume."""

    class Shard(IterableDataset[Tensor]):
        sharded = True

        def __iter__(self) -> Iterator[Tensor]:
            return iter([torch.ones(2, dtype=torch.float64)] * lengths[World.from_env().rank])

    def run() -> list[int]:
        steps = []
        for resume_from in (None, tmp_path / "step-00000003.pt"):
            if resume_from is None or resume_from.exists():
                files = Checkpoint(tmp_path, every_steps=1, keep_last=99)
                trainer = token_trainer(Toy(), [], data=Shard(), batch_size=2, recorder=files)
                steps.append(trainer.fit(resume_from).step)
                trainer.world.barrier()
        return steps

    right = -(-max(lengths) // 2)
    assert ranks(2, run, timeout=30) == [[right] * (1 + (right >= 3))] * 2


def test_a_count_may_have_one_dimension_and_a_graph(ranks: Ranks) -> None:
    class Counted(TokenTrainer):
        def training_step(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
            tokens = torch.cat(batch)
            count = (torch.ones(len(tokens), dtype=torch.float64, requires_grad=True)).sum(0, keepdim=True)
            return {"loss": Mean(model(tokens).sum().reshape(1), count)}

    def run() -> float:
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data, config = Documents([[1.0, 2.0], [6.0]]), TrainerConfig(batch_size=1, shuffle=False)
        Counted(model, optimizer, data, loader_options={"collate_fn": list}, config=config).fit()
        return model.w.item()

    assert ranks(2, run) == [-3.0] * 2


def test_a_window_without_items_takes_a_step_with_zero_gradients_and_warns(ranks: Ranks) -> None:
    def run() -> tuple[int, list[float]]:
        trainer = token_trainer(Toy(), [[], [], [2.0], [4.0]], batch_size=1)
        state = trainer.fit()
        return state.step, [float(gradient[0]) for gradient in trainer.gradients]

    outcomes = ranks.outcomes(2, _quietly_shown(run))
    assert [outcome.value for outcome in outcomes] == [(2, [0.0, 3.0])] * 2, outcomes
    assert "had no item" in outcomes[0].stderr
    assert "had no item" not in outcomes[1].stderr


def test_what_has_no_items_is_not_in_the_update_of_a_window_without_any() -> None:
    class Decaying(TokenTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"loss": Mean(5.0 * model(torch.ones(1, dtype=torch.float64)).sum(), torch.tensor(0.0))}

    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Decaying(model, optimizer, Documents([[1.0]]), loader_options={"collate_fn": list}, config=TrainerConfig())
    with pytest.warns(RuntimeWarning, match="had no item"):
        trainer.fit()
    assert model.w.item() == 0.0


def _quietly_shown(function: Any) -> Any:
    import warnings

    def run() -> Any:
        warnings.simplefilter("default")
        return function()

    return run


def test_a_loss_that_changes_its_kind_is_an_error() -> None:
    class Fickle(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            loss = model(batch[0]).mean()
            return {"loss": Mean(loss, 1) if self.state.step else loss}

    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows = torch.utils.data.TensorDataset(torch.ones(4, dtype=torch.float64), torch.ones(4))
    with pytest.raises(ValueError, match="the same kind every time"):
        Fickle(model, optimizer, rows, loss_fn=mean_of_outputs, config=TrainerConfig(batch_size=2)).fit()


def test_evaluation_of_means_weighs_items_not_batches(ranks: Ranks) -> None:
    rows = documents(23, seed=5)
    tokens = [token for row in rows for token in row]
    right = math.fsum(tokens) / len(tokens)

    def run() -> float:
        model = Toy()
        nn.init.ones_(model.w)
        trainer = token_trainer(model, rows, batch_size=4)
        return trainer.evaluate(Documents(rows))["loss"]

    for world_size in (1, 3):
        assert ranks(world_size, run) == pytest.approx([right] * world_size, rel=1e-12)
