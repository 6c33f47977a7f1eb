"""All ranks hold the same parameters, bit for bit; where a user's code changes that, it is found on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import Numbers, Outcome, Ranks, Recorder, Toy, mean_of_outputs, toy_trainer
from trainer import DDPTrainer, TrainerConfig
from trainer.checksum import all_equal, per_parameter, words
from trainer.replica import _move_state


class Net(nn.Module):
    """Two parameters of one shape, one that is frozen, and a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.tensor([0.5, 0.25, 0.125], dtype=dtype))
        self.right = nn.Parameter(torch.tensor([-0.5, 2.0, 4.0], dtype=dtype))
        self.frozen = nn.Parameter(torch.full((2, 2), 0.75, dtype=dtype), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(1.5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = (self.left * self.right * self.frozen.sum()).sum() * self.scalar
        return x.to(weights.dtype) * weights


Change = Callable[[Net], None]


class Drifting(DDPTrainer):
    """`change` happens to the model of rank `rank` in the optimizer step that ends step `step`."""

    change: Change
    rank = 1
    step = 3

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if (self.world.rank, self.state.step + 1) == (self.rank, self.step):
            assert isinstance(self.model, Net)
            with torch.no_grad():
                type(self).change(self.model)


def next_float(tensor: Tensor) -> None:
    tensor.copy_(torch.nextafter(tensor, torch.full_like(tensor, torch.inf)))


def swap(left: Tensor, right: Tensor) -> None:
    kept = left.clone()
    left.copy_(right)
    right.copy_(kept)


CHANGES: dict[str, tuple[Change, str]] = {
    "one": (lambda model: model.left.fill_(7.0), "left"),
    "one ulp of one element": (lambda model: next_float(model.right[1]), "right"),
    "one ulp of a scalar": (lambda model: next_float(model.scalar), "scalar"),
    "a frozen one": (lambda model: next_float(model.frozen[1, 1]), "frozen"),
    "two that swap": (lambda model: swap(model.left, model.right), "left, right"),
    "elements that swap": (lambda model: swap(model.left[0], model.left[2]), "left"),
    "elements that move in opposite directions": (
        lambda model: model.frozen.copy_(torch.tensor([[0.5, 1.0], [0.75, 0.75]])),
        "frozen",
    ),
    "a sign": (lambda model: model.scalar.neg_(), "scalar"),
}


def drifting(name: str, rank: int = 1, when: int = 3) -> type[Drifting]:
    class Trainer(Drifting):
        change = CHANGES[name][0]
        step = when

    Trainer.rank = rank
    return Trainer


def drift_error(kind: type[DDPTrainer], dtype: torch.dtype, samples: int = 16, **config: Any) -> tuple[str, int]:
    """The message that `fit` raises, and the steps taken by then."""
    model = Net(dtype)
    trainer = kind(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        Numbers(samples),
        loss_fn=mean_of_outputs,
        config=TrainerConfig(**{"batch_size": 1, "shuffle": False, **config}),
    )
    with pytest.raises(RuntimeError) as caught:
        trainer.fit()
    return str(caught.value), trainer.state.step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_on_one_rank_is_found_on_all_at_the_next_report_and_named(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    results = ranks(2, drift_error, drifting(name, when=4), dtype, log_every=4)
    assert len(set(results)) == 1
    message, step = results[0]
    assert step == 4
    assert message.startswith(f"the ranks' parameters have drifted apart by step 4: {CHANGES[name][1]}. ")


@pytest.mark.parametrize(
    ("config", "found_at"),
    [
        ({"log_every": 3}, 3),  # the report of the very step
        ({"log_every": 100, "epochs": 2}, 5),  # the end of the first epoch
        ({"log_every": 100, "epochs": 2, "max_steps": 4}, 4),  # the planned end, which reports
    ],
)
def test_drift_is_found_at_reports_and_epoch_ends(ranks: Ranks, config: dict[str, int], found_at: int) -> None:
    results = ranks(3, drift_error, drifting("one", rank=2), torch.float64, samples=14, **config)
    assert len(set(results)) == 1
    assert results[0][1] == found_at
    assert f"by step {found_at}: left. " in results[0][0]


def test_drift_is_found_by_an_evaluation_within_fit_and_outside_it(ranks: Ranks) -> None:
    """Evaluated numbers would be those of two models."""

    def within() -> tuple[str, int]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        config = TrainerConfig(batch_size=1, log_every=100, eval_every=2)
        trainer = drifting("a frozen one")(model, optimizer, Numbers(16), Numbers(3), loss_fn=mean_of_outputs, config=config)
        with pytest.raises(RuntimeError) as caught:
            trainer.fit()
        return str(caught.value), trainer.state.step

    def outside() -> str:
        trainer = toy_trainer(4, eval_numbers=1)
        trainer.evaluate()
        with torch.no_grad():
            trainer.model.w += trainer.world.rank  # type: ignore[operator]
        with pytest.raises(RuntimeError) as caught:
            trainer.evaluate()
        return str(caught.value)

    results = ranks(2, within)
    assert len(set(results)) == 1
    assert results[0][1] == 4
    assert results[0][0].startswith("the ranks' parameters have drifted apart by step 4: frozen. ")
    messages = ranks(2, outside)
    assert len(set(messages)) == 1
    assert messages[0].startswith("the ranks' parameters have drifted apart by step 0: w. ")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_that_goes_round_the_given_model_cannot_train_on(ranks: Ranks, world_size: int) -> None:
    """The loss is computed from self.model, so nothing would be averaged; found on a laptop too."""

    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            return mean_of_outputs(self.model(batch[0]), batch[1])

    for outcome in ranks.outcomes(world_size, lambda: toy_trainer(8, kind=Trainer, batch_size=2).fit()):
        assert outcome.error == "RuntimeError"
        assert "training_step did not call the model it was given" in outcome.message


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_call_of_the_given_model_without_gradients_is_not_the_one_that_trains(ranks: Ranks, world_size: int) -> None:
    """As for pseudo-labels: DDP reduces nothing of it."""

    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                model(batch[0])
            return mean_of_outputs(self.model(batch[0]), batch[1])

    for outcome in ranks.outcomes(world_size, lambda: toy_trainer(8, kind=Trainer, batch_size=2, log_every=10).fit()):
        assert outcome.error == "RuntimeError"
        assert "training_step did not call the model it was given" in outcome.message


class Scaled(Toy):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["factor", "heads", "nonsense"])
def test_an_attribute_that_the_wrapper_hides_is_named_with_the_way_out(ranks: Ranks, world_size: int, name: str) -> None:
    """At one process too, where there is no wrapper."""

    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            getattr(model, name)
            return mean_of_outputs(model(batch[0]), batch[1])

    for outcome in ranks.outcomes(world_size, lambda: toy_trainer(8, Scaled(), kind=Trainer, batch_size=2).fit()):
        assert outcome.error == "AttributeError"
        assert f"hides {name!r}: write self.model.{name} (but compute the loss from model(...)" in outcome.message


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_model_as_it_is_handed_out_has_the_parts_of_a_module(ranks: Ranks, world_size: int) -> None:
    """In the first step of each fit too, and gradients are those of the model."""

    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            assert model.training
            assert next(model.parameters()) is self.model.w
            return mean_of_outputs(model(x=batch[0]), batch[1])

    def fit() -> list[float]:
        trainer = toy_trainer(4, Scaled(), kind=Trainer, global_batch_size=4)
        weights = []
        for _ in range(2):
            trainer.state.epoch = 0
            trainer.fit()
            weights.append(trainer.model.w.item())
        return weights

    assert ranks(world_size, fit) == [[-1.5, -3.0]] * world_size


# Replicas that do not drift.


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 1))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x.unsqueeze(1)).squeeze(1)
        return outputs


@pytest.mark.parametrize(("world_size", "samples"), [(2, 19), (3, 23), (4, 29)])
def test_replicas_stay_equal_over_uneven_tails_and_there_is_no_alarm(ranks: Ranks, world_size: int, samples: int) -> None:
    """Windows of 9, shares that differ by one, the last window with fewer samples than ranks for 2 and 4 ranks (1 and 2)."""

    def fit() -> tuple[int, list[float]]:
        torch.manual_seed(1)
        model = Deep()
        model.layers[1].momentum = 0.3
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = Numbers([number / 10 for number in range(samples)], torch.float32)
        config = TrainerConfig(batch_size=3, global_batch_size=9, epochs=2, log_every=1)

        class Trainer(DDPTrainer):
            def training_step(self, model: nn.Module, batch: Any) -> Tensor:
                if len(batch[0]) == 1:  # batch statistics need two
                    batch = [torch.cat([part, part + 1]) for part in batch]
                return (model(batch[0]) - batch[1].sin()).square().mean()

        trainer = Trainer(model, optimizer, data, config=config)
        trainer.fit()
        return trainer.state.step, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()

    results = ranks(world_size, fit)
    assert results == results[:1] * world_size
    assert results[0][0] == 2 * -(-samples // 9)


def test_every_rank_sees_rank_0_s_buffers_at_each_window_also_those_that_a_forward_replaces(ranks: Ranks) -> None:
    """Another tensor may be put in a buffer's place; what is sent is what is there."""

    class Counting(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
            self.at_start: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.seen, Tensor)
            self.at_start.append(self.seen.item())
            self.seen = self.seen + x.sum()
            return super().forward(x)

    def fit() -> list[float]:
        model = Counting()
        toy_trainer(8, model, batch_size=1).fit()
        return model.at_start

    # rank 0 has 0, 2, 4, 6
    assert ranks(2, fit) == [[0.0, 0.0, 2.0, 6.0]] * 2


# Where the ranks start.


def test_all_ranks_start_from_rank_0_s_weights_and_buffers(ranks: Ranks) -> None:
    """Before any step, and an evaluation before `fit` is the same everywhere."""

    def build() -> tuple[list[float], float, float]:
        torch.manual_seed(int(os.environ["RANK"]))
        model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model[1].running_mean.normal_()
        own = model[0].weight.detach().clone()
        optimizer = torch.optim.AdamW(model.parameters())

        data = [(torch.full((1,), float(number)), 0.0) for number in range(5)]
        trainer = DDPTrainer(model, optimizer, data, data, loss_fn=mean_of_outputs)  # type: ignore[arg-type]
        everything = torch.cat([tensor.detach().flatten().double() for tensor in model.state_dict().values()]).tolist()
        return everything, trainer.evaluate()["loss"], float((own - model[0].weight).abs().max().detach())

    results = ranks(3, build)
    assert len({tuple(everything) for everything, *_ in results}) == 1
    assert len({loss for _, loss, _ in results}) == 1
    assert [moved > 0 for *_, moved in results] == [False, True, True]


DIFFERENT: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "shape": (
        lambda rank: nn.Linear(1, 2 + rank),
        r"the model is .*'bias \(2,\).* on rank 0, .*'bias \(3,\).* on rank 1",
    ),
    "name": (lambda rank: nn.ModuleDict({"ab"[rank]: nn.Linear(1, 1)}), r"'a.bias.*'a.weight.* on rank 0, .*'b.bias.* on rank 1"),
    "dtype": (lambda rank: nn.Linear(1, 1, dtype=[torch.float32, torch.float64][rank]), "torch.float32.*torch.float64"),
    "frozen": (lambda rank: nn.Linear(1, 1).requires_grad_(rank == 0), "requires_grad=True.* on rank 0, .*requires_grad=False"),
    "buffer": (lambda rank: nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, track_running_stats=rank == 0)), "1.running_mean"),
    "one more": (lambda rank: nn.Linear(1, 1, bias=rank == 0), r"\['bias .* on rank 0, \[\] on rank 1"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_other_tensors_on_other_ranks_are_an_error_on_every_rank(ranks: Ranks, what: str) -> None:
    """Shapes, names, dtypes, trainability, buffers; at construction, before anything is copied."""
    make, message = DIFFERENT[what]

    def build() -> str:
        rank = int(os.environ["RANK"])
        model = make(rank)
        before = [tensor.clone() for tensor in model.state_dict().values()]
        with pytest.raises(ValueError, match=message) as caught:
            DDPTrainer(model, torch.optim.SGD(model.parameters(), lr=1.0), Numbers(4), loss_fn=mean_of_outputs)
        assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
        return str(caught.value)

    messages = ranks(2, build)
    assert len(set(messages)) == 1
    assert messages[0].startswith("the ranks were given different things: the model is ")


# Freezing.


class TwoWeights(nn.Module):
    """``y = (a + b) x``; b is frozen at first, c for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.b = nn.Parameter(torch.full((), 5.0, dtype=torch.float64), requires_grad=False)
        self.c = nn.Parameter(torch.full((), 9.0, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a + self.b + self.c) * x


class Unfreezing(DDPTrainer):
    def before_epoch(self) -> None:
        self.model.b.requires_grad_(self.state.epoch in (1, 2))  # type: ignore[operator]
        self.model.a.requires_grad_(self.state.epoch != 2)  # type: ignore[operator]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_before_epoch_unfreezes_is_trained_on_every_rank_and_only_then(
    ranks: Ranks, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs of 0..5 in one step: a alone, then a and b, then b alone, then a alone. The model is wrapped anew where that
    changes, and only there."""
    wrapped: list[int] = []

    class Counted(DistributedDataParallel):
        def __init__(self, *args: Any, **options: Any) -> None:
            wrapped.append(sum(parameter.requires_grad for parameter in args[0].parameters()))
            super().__init__(*args, **options)

    monkeypatch.setattr("trainer.ddp_wrapper.DistributedDataParallel", Counted)

    def fit() -> tuple[list[float], list[int]]:
        model = TwoWeights()
        trainer = Unfreezing(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5),
            Numbers(6),
            loss_fn=mean_of_outputs,
            config=TrainerConfig(epochs=5, global_batch_size=6, batch_size=6, log_every=1),
        )
        trainer.fit()
        return [float(parameter.detach()) for parameter in model.parameters()], wrapped

    a, b = 0.0, 5.0
    for moving in ("a", "ab", "b", "a", "a"):
        a = a - 2.5 - 0.5 * a if "a" in moving else a
        b = b - 2.5 - 0.5 * b if "b" in moving else b
    results = ranks(world_size, fit)
    assert [weights for weights, _ in results] == [[a, b, 9.0]] * world_size
    assert results[0][1] == ([1, 2, 1, 1] if world_size > 1 else [])


def test_nothing_to_train_is_an_error_on_every_rank(ranks: Ranks) -> None:
    """In the first epoch and in a later one."""

    class Freezing(DDPTrainer):
        def before_epoch(self) -> None:
            self.model.requires_grad_(self.state.epoch == 0)

    def outcomes(kind: type[DDPTrainer], frozen: bool) -> list[Outcome]:
        def fit() -> None:
            model = Toy()
            model.requires_grad_(not frozen)
            trainer = toy_trainer(4, model, eval_numbers=2, kind=kind, batch_size=2, epochs=2, callbacks=[Recorder()])
            assert trainer.evaluate() == {"loss": 0.0}
            trainer.fit()

        return ranks.outcomes(2, fit)

    for kind, frozen in ((DDPTrainer, True), (Freezing, False)):
        for outcome in outcomes(kind, frozen):
            assert outcome.error == "ValueError"
            assert outcome.message.startswith("no parameter of the model requires a gradient")


# The fingerprint by itself.


def same(left: list[Tensor], right: list[Tensor], world_size: int = 2) -> bool:
    """What `world_size` ranks conclude of which the last holds `right`, the others `left`."""
    return all_equal((words(left) * (world_size - 1) + words(right)).tolist(), world_size)


@pytest.mark.parametrize("world_size", [2, 3, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.complex64])
def test_every_bit_of_every_element_counts(dtype: torch.dtype, world_size: int) -> None:
    tensors = [torch.linspace(-3, 3, 11).to(dtype), torch.ones((), dtype=dtype)]
    assert same(tensors, [tensor.clone() for tensor in tensors], world_size)
    for place, tensor in enumerate(tensors):
        for position in (0, tensor.numel() - 1):
            for bit in range(8 * tensor.element_size()):
                flipped = [other.clone() for other in tensors]
                raw = flipped[place].reshape(-1).view(torch.uint8)
                raw[position * tensor.element_size() + bit // 8] ^= 1 << bit % 8
                assert not same(tensors, flipped, world_size), (place, position, bit)


def test_no_two_places_of_a_large_tensor_can_be_exchanged() -> None:
    tensor = torch.arange(600_000, dtype=torch.float32)
    for one, other in [(0, 1), (0, 599_999), (1, (1 << 18) + 1), (0, 1 << 18), (7, 1 << 19)]:
        swapped = tensor.clone()
        swapped[one], swapped[other] = tensor[other], tensor[one]
        assert not same([tensor], [swapped]), (one, other)
        assert per_parameter([tensor]).item() != per_parameter([swapped]).item()


def test_a_parameter_frozen_on_one_rank_only_is_an_error_on_every_rank(ranks: Ranks) -> None:
    class Freezing(DDPTrainer):
        def before_epoch(self) -> None:
            self.model.spare.requires_grad_(self.world.is_main)  # type: ignore[union-attr, operator]

    class Spare(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.spare.sum()

    for outcome in ranks.outcomes(2, lambda: toy_trainer(8, Spare(), kind=Freezing, batch_size=2).fit(), timeout=30):
        assert outcome.error == "RuntimeError"
        assert "rank 1 has 1 parameters to train and rank 0 has 2, or they differ in shape" in outcome.message


@pytest.mark.parametrize("samples", [4, 5])
def test_a_wrapper_on_gpus_takes_part_in_reductions_without_a_batch(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    """DDP moves the arguments of a forward to its GPU, and fails where there are none; the last of five leaves rank 1 without."""

    class OnOneDevice(DistributedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            self.device_ids = [0]  # what only GPUs have; its type is still the CPU's

    monkeypatch.setattr("trainer.ddp_wrapper.DistributedDataParallel", OnOneDevice)

    def fit() -> float:
        with toy_trainer(samples, batch_size=1, epochs=1) as trainer:
            trainer.fit()
            return trainer.model.w.item()

    assert ranks(2, fit) == [-float(sum((0.5, 2.5, 4.0)[: (samples + 1) // 2]))] * 2


def test_state_that_an_optimizer_has_already_follows_the_model_to_its_device() -> None:
    """Adagrad makes its sums at once; the count of steps stays on the CPU, unless the optimizer is fused."""
    optimizer = torch.optim.Adagrad([(parameter := nn.Parameter(torch.ones(3)))])
    moved = nn.Parameter(parameter.to("meta"))  # on a GPU it would be the same object
    optimizer.param_groups[0]["params"] = [moved]
    state = optimizer.state[moved] = optimizer.state.pop(parameter)
    _move_state(optimizer)
    assert {key: value.device.type for key, value in state.items()} == {"step": "cpu", "sum": "meta"}


def test_a_trainer_moves_the_state_of_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    monkeypatch.setattr("trainer.replica._move_state", moved.append)
    trainer = toy_trainer(4)
    assert moved == [trainer.optimizer]


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn])
def test_buffers_of_types_that_no_backend_sends_are_rank_0_s_too(ranks: Ranks, dtype: torch.dtype) -> None:
    class WithBuffers(Toy):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.register_buffer("one", torch.tensor(float(number)).to(dtype))
            self.register_buffer("many", torch.full((2, 3, 2, 2), float(number)).to(dtype))
            self.register_buffer("last", self.many.contiguous(memory_format=torch.channels_last))

    def start() -> list[list[float]]:
        model = WithBuffers(3 + int(os.environ["RANK"]))
        with toy_trainer(4, model, batch_size=2, epochs=1) as trainer:
            trainer.fit()
        return [sorted({*buffer.to(torch.float32).flatten().tolist()}) for buffer in model.buffers()]

    assert ranks(2, start) == [[[3.0]] * 3] * 2
