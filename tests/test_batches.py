"""From samples to a batch on the device: containers, DataLoader options, and the random numbers of each sample."""

from __future__ import annotations

import collections
import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset, default_collate, get_worker_info

from tests.helpers import Numbers, Ranks, Recorder, Toy, ValueToy, mean_of_outputs, toy_trainer
from trainer import DDPTrainer, TrainerConfig, World
from trainer.data import Loader, _sent, to_device, unchanged
from trainer.order import Permutation
from trainer.randomness import seed_generators

META = torch.device("meta")


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclasses.dataclass
class Record:
    x: Tensor
    name: str
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    inner: Record


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x", "y")
    x: Tensor
    y: int


class Several(list[Any]):
    label = "several"


class Movable:
    """As tokenizers return them: it knows itself how to move."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Movable:
        return Movable(self.x.to(device))


def t() -> Tensor:
    return torch.ones(2)


BATCHES: dict[str, Callable[[], Any]] = {
    "tensor": t,
    "namedtuple": lambda: Pair(t(), t()),
    "namedtuple in a namedtuple": lambda: Pair(t(), Pair(t(), "text")),
    "mapping": lambda: {"a": {"b": t()}, "names": ["p", "q"], "n": 3, "none": None},
    "order of keys": lambda: {"z": t(), "a": t(), "m": 1},
    "nested tuples": lambda: ((t(), t()), t()),
    "list": lambda: [t(), [t(), 2.5], ()],
    "dataclass": lambda: Record(t(), "name", {"deep": [t()]}),
    "frozen dataclass": lambda: Frozen(t(), Record(t(), "inner")),
    "dataclass with slots": lambda: Slotted(t(), 4),
    "strings": lambda: ["one", "two"],
    "OrderedDict": lambda: collections.OrderedDict(b=t(), a=t()),
    "defaultdict": lambda: collections.defaultdict(list, a=[t()]),
    "UserDict": lambda: collections.UserDict(a=t()),
    "read-only mapping": lambda: types.MappingProxyType({"a": t()}),
    "list subclass": lambda: Several([t(), t()]),
    "size": lambda: (t(), torch.Size([2, 3])),
    "what torch returns": lambda: torch.max(torch.ones(2, 2), dim=0),
    "numpy": lambda: {"x": t(), "ids": np.arange(3)},
    "moves itself": lambda: [Movable(t())],
    "nothing": lambda: None,
}


def leaves(batch: Any, place: str = "") -> list[tuple[str, Any]]:
    """Every container's type and every leaf, in order, with the place where it stands."""
    if isinstance(batch, collections.abc.Mapping):
        items = [(f"[{key!r}]", value) for key, value in batch.items()]
    elif isinstance(batch, (list, tuple)):
        items = [(f"[{number}]", value) for number, value in enumerate(batch)]
    elif dataclasses.is_dataclass(batch):
        items = [(f".{field.name}", getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    elif isinstance(batch, Movable):
        items = [(".x", batch.x)]
    else:
        return [(place, batch)]
    return [(place, type(batch)), *(leaf for name, value in items for leaf in leaves(value, place + name))]


def assert_same_but_for(device: torch.device, moved: Any, original: Any) -> None:
    found, wanted = leaves(moved), leaves(original)
    assert [place for place, _ in found] == [place for place, _ in wanted]
    for (place, ours), (_, theirs) in zip(found, wanted, strict=True):
        assert type(ours) is type(theirs), place
        if isinstance(theirs, Tensor):
            assert ours.device.type == device.type, place
            assert ours.shape == theirs.shape, place
            assert device.type == "meta" or torch.equal(ours, theirs), place
        elif isinstance(theirs, np.ndarray):
            assert np.array_equal(ours, theirs), place
        else:
            assert ours == theirs, place


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("device", [META, torch.device("cpu")], ids=str)
def test_containers_keep_their_types_on_the_way_to_the_device(name: str, device: torch.device) -> None:
    """With "meta" for a real move."""
    batch, untouched = BATCHES[name](), BATCHES[name]()
    assert_same_but_for(device, to_device(batch, device), untouched)
    assert_same_but_for(torch.device("cpu"), batch, untouched)  # the input is left as it was


def test_a_moved_container_keeps_what_belongs_to_it() -> None:
    moved = to_device(collections.defaultdict(list, a=[t()]), META)
    assert moved["unknown"] == []
    packed = to_device(nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)]), META)  # a named tuple that moves itself
    assert (packed.data.device, packed.batch_sizes.device.type) == (META, "cpu")
    several = Several([t()])
    several.label = "own"
    assert to_device(several, META).label == "own"


def test_prepare_batch_moves_to_the_ranks_device(ranks: Ranks) -> None:
    def run() -> None:
        trainer = toy_trainer(4)
        for make in BATCHES.values():
            assert_same_but_for(torch.device("cpu"), trainer.prepare_batch(make()), make())
        trainer.world.device = META
        for make in BATCHES.values():
            assert_same_but_for(META, trainer.prepare_batch(make()), make())

    ranks(1, run)


@pytest.mark.parametrize(
    ("option", "way_out"),
    [
        ("batch_size", "set TrainerConfig.batch_size"),
        ("shuffle", "set TrainerConfig.shuffle"),
        ("drop_last", "set TrainerConfig.drop_last"),
        ("sampler", "pass sampler= to DDPTrainer"),
        ("batch_sampler", "pass sampler= to DDPTrainer"),
        ("dataset", "pass train_data and eval_data"),
        ("worker_count", "there is no option 'worker_count'; there are collate_fn,"),
    ],
)
def test_a_loader_option_that_the_trainer_settles_is_refused_with_the_way_out(ranks: Ranks, option: str, way_out: str) -> None:
    def run() -> None:
        model = Toy()
        DDPTrainer(model, SGD(model.parameters(), lr=1.0), Numbers(4), loader_options={option: None})

    for outcome in ranks.outcomes(1, run):
        assert outcome.error == "ValueError"
        assert f"{option!r}" in outcome.message
        assert way_out in outcome.message


Draw = tuple[float, float, float]


class Drawing(Dataset[Any]):
    """Sample i is i and a number from each generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return (index, float(torch.rand(())), float(np.random.rand()), random.random())


class Remembering(DDPTrainer):
    """Keeps what each sample drew, in training and in evaluation, and what each micro-batch draws."""

    def fit(self, resume_from: Any = None) -> Any:
        self.training: dict[tuple[int, int], Draw] = {}
        self.evaluation: dict[tuple[int, int], Draw] = {}
        self.steps: dict[tuple[int, int, int], Draw] = {}
        return super().fit(resume_from)

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        self._remember(self.training, batch)
        place = (self.state.step, sum(key[0] == self.state.step for key in self.steps), self.world.rank)
        self.steps[place] = (float(torch.rand(())), float(np.random.rand()), random.random())
        return model(batch[0].double()).mean()

    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        self._remember(self.evaluation, batch)
        return {"loss": batch[1].mean()}

    def _remember(self, draws: dict[tuple[int, int], Draw], batch: Any) -> None:
        for index, *drawn in zip(*(part.tolist() for part in batch), strict=True):
            draws[self.state.epoch, index] = tuple(drawn)


def drawn(
    data: Dataset[Any],
    loader_options: dict[str, Any] | None = None,
    kind: type[Remembering] = Remembering,
    **config: Any,
) -> tuple[dict[Any, Draw], dict[Any, Draw], dict[Any, Draw]]:
    World.from_env()
    model = ValueToy()
    trainer = kind(
        model,
        SGD(model.parameters(), lr=1.0),
        data,
        Drawing(9),
        loader_options=loader_options,
        config=TrainerConfig(**{"epochs": 2, "global_batch_size": 6, "batch_size": 2, **config}),
    )
    trainer.fit()
    return trainer.training, trainer.evaluation, trainer.steps


def merged(by_rank: list[dict[Any, Draw]]) -> dict[Any, Draw]:
    """No sample is on two ranks."""
    together = {key: draw for draws in by_rank for key, draw in draws.items()}
    assert len(together) == sum(map(len, by_rank))
    return together


WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 1, "persistent_workers": True},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1},
]
LENGTH = 15


class Named(Subset[Any]):
    """One with an attribute of its own."""


class Stacked(StackDataset[Any]):
    """As it is, under a name of its own."""


@pytest.mark.parametrize("kind", ["Named", "Stacked"])
def test_a_subclass_that_passes_its_samples_on_draws_by_sample(kind: str) -> None:
    def data() -> Dataset[Any]:
        return Named(Drawing(6), range(6)) if kind == "Named" else Stacked(Drawing(6))

    class Unpacking(Remembering):
        def prepare_batch(self, batch: Any) -> Any:
            return batch[0] if kind == "Stacked" and isinstance(batch[0], (list, tuple)) else batch

    whole, single = (drawn(data(), kind=Unpacking, batch_size=size)[0] for size in (6, 1))
    assert whole == single


@pytest.fixture(scope="module")
def draws() -> dict[int, list[Any]]:
    """By world size: what samples drew in training, what they drew in evaluation, what steps drew; for each of WORKERS."""

    def run() -> list[Any]:
        return [drawn(Drawing(LENGTH), options) for options in WORKERS]

    return {world_size: Ranks()(world_size, run) for world_size in (1, 3)}


def test_what_a_sample_draws_depends_on_its_position_and_epoch_alone(draws: dict[int, list[Any]]) -> None:
    """Whatever workers and ranks."""
    wanted = draws[1][0][0][0]
    assert set(wanted) == {(epoch, index) for epoch in range(2) for index in range(LENGTH)}
    for by_rank in draws.values():
        for number in range(len(WORKERS)):
            assert merged([rank[number][0] for rank in by_rank]) == wanted


def test_a_sample_evaluated_draws_the_same_whatever_workers_and_ranks(draws: dict[int, list[Any]]) -> None:
    wanted = draws[1][0][0][1]
    assert len(wanted) == 2 * 9
    for by_rank in draws.values():
        for number in range(len(WORKERS)):
            assert merged([rank[number][1] for rank in by_rank]) == wanted
    assert not set(wanted.values()) & set(draws[1][0][0][0].values())  # nor what it draws in training


def test_no_two_samples_and_no_two_streams_draw_the_same(draws: dict[int, list[Any]]) -> None:
    """Over ranks, workers and epochs, in each of the generators of torch, numpy and random."""
    for stream in zip(*draws[3][0][2][0].values(), *draws[3][1][2][0].values(), strict=True):
        assert len(set(stream)) == len(stream)
    numbers = [number for draw in draws[1][0][0][0].values() for number in draw]
    assert len(set(numbers)) == len(numbers)


def test_what_a_step_draws_depends_on_window_micro_batch_and_rank_alone(draws: dict[int, list[Any]]) -> None:
    """Not on how the batch was fetched, which uses the same generators in this process when there are no workers."""
    for by_rank in draws.values():
        for rank in by_rank:
            assert all(rank[number][2] == rank[0][2] for number in range(len(WORKERS)))
    alone, steps = draws[1][0][0][2], merged([rank[0][2] for rank in draws[3]])
    assert len(alone) > len(steps) / 3  # more micro-batches a window
    for drawn_by_steps in (alone, steps):
        assert len(set(drawn_by_steps.values())) == len(drawn_by_steps)
    common = alone.keys() & steps.keys()
    assert common
    assert all(alone[key] == steps[key] for key in common)


def test_the_draws_follow_the_seed(ranks: Ranks) -> None:
    def run() -> list[Any]:
        return [drawn(Drawing(LENGTH), seed=seed, epochs=1) for seed in (0, 0, 1, 2**64 + 5)]

    first, again, *others = ranks(1, run)[0]
    assert first == again
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert ours.keys() == theirs.keys()
            assert not set(ours.values()) & set(theirs.values())


def test_another_bit_generator_of_numpys_is_seeded_too() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        seed_generators(5)
        first = np.random.rand(3).tolist()
        assert np.random.rand(3).tolist() != first
        seed_generators(5)
        assert np.random.rand(3).tolist() == first
        assert isinstance(np.random.get_bit_generator(), np.random.PCG64)
    finally:
        np.random.set_bit_generator(before)


def test_the_draw_belongs_to_the_position_in_the_order(ranks: Ranks) -> None:
    """With a sampler that gives a sample twice, each has numbers of its own; without shuffling positions are indices."""

    class Twice(Remembering):
        def _remember(self, draws: Any, batch: Any) -> None:
            for index, *numbers in zip(*(part.tolist() for part in batch), strict=True):
                draws.setdefault((self.state.epoch, index), []).append(tuple(numbers))

    def run() -> Any:
        model = ValueToy()
        config = TrainerConfig(batch_size=4)
        trainer = Twice(model, SGD(model.parameters(), lr=1.0), Drawing(3), sampler=[0, 1, 2, 0, 1, 2], config=config)
        trainer.fit()
        plain, _, _ = drawn(Drawing(6), shuffle=False, epochs=1)
        return trainer.training, plain

    (twice, plain) = ranks(1, run)[0]
    for index in range(3):
        assert twice[0, index] == [plain[0, index], plain[0, index + 3]]


def states() -> tuple[Any, Any, Any]:
    kind, keys, place, gauss, cached = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (kind, keys.tolist(), place, gauss, cached)


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_seed_no_random_state_is_touched(ranks: Ranks, world_size: int) -> None:
    def run() -> None:
        World.from_env()
        for workers in (0, 1):
            model = Toy()
            before = states()
            trainer = DDPTrainer(
                model,
                SGD(model.parameters(), lr=1.0),
                Numbers(7),
                Numbers(5),
                loss_fn=mean_of_outputs,
                loader_options={"num_workers": workers},
                config=TrainerConfig(batch_size=2, seed=None, epochs=2),
            )
            trainer.fit()
            trainer.evaluate(Numbers(3))
            assert states() == before

    ranks(world_size, run)


def test_a_subset_of_an_augmented_dataset_draws_sample_by_sample(ranks: Ranks) -> None:
    """Subset answers whole batches, but only by asking for the samples one by one."""

    def run() -> Any:
        inner = Subset(Drawing(40), range(20, 40))
        return [drawn(subset, shuffle=False)[0] for subset in (Subset(inner, list(range(0, 20, 2))), Drawing(10))]

    alone = ranks(1, run)[0]
    pair = ranks(2, run)
    subset, plain = (merged([rank[number] for rank in pair]) for number in range(2))
    assert [subset, plain] == alone
    assert set(subset) == {(epoch, 20 + 2 * place) for epoch in range(2) for place in range(10)}
    assert {(epoch, (index - 20) // 2): draw for (epoch, index), draw in subset.items()} == plain


class First(Remembering):
    """Of stacked parts, takes the first in training."""

    def prepare_batch(self, batch: Any) -> Any:
        return batch[0] if self.model.training else batch


def test_stacked_datasets_draw_sample_by_sample_unless_one_answers_batches(ranks: Ranks) -> None:
    """StackDataset too has the method for whole batches."""

    def run() -> Any:
        whole, model = Whole(8), ValueToy()
        stacked = StackDataset(Drawing(8), Subset(Drawing(20), range(8, 16)))
        plain = drawn(stacked, kind=First)[0]
        config = TrainerConfig(batch_size=4, shuffle=False)
        First(model, SGD(model.parameters(), lr=1.0), StackDataset(Drawing(8), whole), config=config).fit()
        return plain, whole.asked

    ((alone, asked),) = ranks(1, run)
    assert merged([rank[0] for rank in ranks(2, run)]) == alone
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Whole(Dataset[Any]):
    """Answers whole batches."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a dataset with __getitems__ is asked for whole batches")

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        self.asked.append(indices)
        return [(index, random.random()) for index in indices]


def losses_of(trainer: type[DDPTrainer]) -> type[DDPTrainer]:
    """`trainer` with a loss of the first part of the batch."""

    class First(trainer):  # type: ignore[misc, valid-type]
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            return model(batch[0].double()).mean()

    return First


@pytest.mark.parametrize("through_subset", [False, True])
def test_a_dataset_that_answers_whole_batches_is_asked_for_them(ranks: Ranks, through_subset: bool) -> None:
    def run() -> tuple[list[list[int]], int | None]:
        whole = Whole(20)
        data = Subset(whole, range(10, 20)) if through_subset else whole
        model = ValueToy()
        config = TrainerConfig(global_batch_size=8, batch_size=3, seed=4)
        losses_of(DDPTrainer)(model, SGD(model.parameters(), lr=1.0), data, config=config).fit()
        return whole.asked, len(data)

    for rank, (asked, length) in enumerate(ranks(2, run)):
        order = Permutation(length, 4, 0)(range(length))
        indices = [10 + index for index in order] if through_subset else order
        wanted = []
        for first in range(0, length, 8):
            share = indices[first : first + 8][rank::2]
            wanted += [share[:3], share[3:]]
        assert asked == [chunk for chunk in wanted if chunk]


def batches_of(data: Dataset[Any], loader_options: dict[str, Any] | None = None) -> list[Any]:
    """What training_step and then eval_step get."""
    seen: list[Any] = []

    class Keeping(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            seen.append(batch)
            return model(torch.ones(2)).mean()

    model = ValueToy()
    config = TrainerConfig(batch_size=3, shuffle=False)
    Keeping(model, SGD(model.parameters(), lr=1.0), data, data, loader_options=loader_options, config=config).fit()
    return seen


def test_a_tensor_dataset_gives_what_default_collate_would(ranks: Ranks) -> None:
    tensors = (torch.arange(14.0).reshape(7, 2), torch.arange(7), torch.arange(21).reshape(7, 1, 3).to(torch.int16))
    data = TensorDataset(*tensors)

    def run() -> Any:
        World.from_env()
        return [batches_of(data), batches_of(data, {"num_workers": 1}), batches_of(Subset(data, [6, 0, 0, 3]))]

    plain, by_worker, subset = ranks(1, run)[0]
    for found, indices in ((plain, range(7)), (by_worker, range(7)), (subset, [6, 0, 0, 3])):
        chunks = [list(indices)[first : first + 3] for first in range(0, len(indices), 3)]
        wanted = [default_collate([data[index] for index in chunk]) for chunk in chunks]
        assert len(found) == 2 * len(wanted)  # in training, then in evaluation
        for batch, collated in zip(found, wanted * 2, strict=True):
            assert type(batch) is type(collated)
            for ours, theirs in zip(batch, collated, strict=True):
                assert torch.equal(ours, theirs)
                assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_gets_the_samples_in_training_and_in_evaluation(ranks: Ranks, workers: int) -> None:
    data = TensorDataset(torch.arange(4), torch.arange(4) * 10)

    def run() -> Any:
        return batches_of(
            data, {"collate_fn": lambda samples: [tuple(map(int, sample)) for sample in samples], "num_workers": workers}
        )

    assert ranks(1, run) == [[[(0, 0), (1, 10), (2, 20)], [(3, 30)]] * 2]


def test_a_worker_init_fn_runs_in_every_worker(ranks: Ranks) -> None:
    class Marked(Numbers):
        mark = 0.0

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.values[index] + Marked.mark, self.values[index]

    def mark(worker: int) -> None:
        Marked.mark = 0.25

    def run() -> Any:
        return [batch[0].tolist() for batch in batches_of(Marked(3), {"num_workers": 2, "worker_init_fn": mark})]

    assert ranks(1, run) == [[[0.25, 1.25, 2.25]] * 2]


class Copies(TorchFunctionMode):
    """Every call of `to` and `copy_`, with whether it may be read before it has ended."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, bool]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("to", "cpu", "copy_", "cuda"):
            target = next((item for item in (*args[1:], *(kwargs or {}).values()) if isinstance(item, torch.device)), None)
            late = bool((kwargs or {}).get("non_blocking"))
            self.waits.append((function.__name__ if target is None else target.type, late))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("pin_memory", [False, None])
def test_nothing_that_is_read_on_the_cpu_is_copied_without_waiting(ranks: Ranks, pin_memory: bool | None) -> None:
    """Only host to device may go on; and nothing is said of pinned memory where there is none."""

    def fit() -> tuple[list[tuple[str, bool]], list[float]]:
        recorder = Recorder()
        model = Toy()
        trainer = DDPTrainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            Numbers(8),
            Numbers(3),
            loss_fn=mean_of_outputs,
            loader_options={} if pin_memory is None else {"pin_memory": pin_memory},
            config=TrainerConfig(batch_size=2, shuffle=False, log_every=1),
            callbacks=[recorder],
        )
        with Copies() as copies:
            trainer.fit()
            torch.ones(1).to(torch.device("cpu"), non_blocking=True)  # seen, as any other would be
        return copies.waits, [call.metrics["loss"] for call in recorder.reports]

    ((waits, losses),) = ranks(1, fit)
    assert [late for _, late in waits] == [False] * (len(waits) - 1) + [True]
    assert losses == [0.0, -0.5 * 2.5, -3.0 * 4.5, -7.5 * 6.5]


def test_rows_of_tensors_are_those_that_the_samples_would_be_over_many_batches() -> None:
    """Their places are worked out for 64 batches at once."""
    seen: dict[str, list[list[float]]] = {}

    class Rows(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            seen[type(self.data).__name__].append(batch[0].tolist())
            return mean_of_outputs(model(batch[0]), batch[1])

    values = torch.arange(451, dtype=torch.float64)
    for data in (torch.utils.data.TensorDataset(values, values), torch.utils.data.StackDataset(values, values)):
        seen[type(data).__name__] = []
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = Rows(model, optimizer, data, loss_fn=mean_of_outputs, config=TrainerConfig(batch_size=3))
        trainer.data = data  # type: ignore[attr-defined]
        trainer.fit()
    assert len(seen["TensorDataset"]) == 151
    assert seen["TensorDataset"] == seen["StackDataset"]


@pytest.mark.parametrize("workers", [0, 1])
def test_indices_of_a_subset_may_count_from_the_end(ranks: Ranks, workers: int) -> None:
    def run() -> float:
        data, model = Subset(TensorDataset(torch.arange(8.0), torch.zeros(8)), [-1, 3, -8, -2]), ValueToy(torch.float32)
        options = {"num_workers": workers}
        optimizer = SGD(model.parameters(), lr=1.0)
        config = TrainerConfig(eval_batch_size=2)
        return DDPTrainer(model, optimizer, loss_fn=mean_of_outputs, loader_options=options, config=config).evaluate(data)["loss"]

    assert ranks(1, run) == [(7 + 3 + 0 + 6) / 4]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [np.uint8, np.uint32, np.int16, np.int64])
def test_a_part_of_rows_may_be_named_by_indices_of_any_integer_type(workers: int, kind: type) -> None:
    rows = TensorDataset(torch.arange(20.0, dtype=torch.float64), torch.arange(20.0, dtype=torch.float64))
    part = Subset(Subset(rows, np.arange(19, 3, -1).astype(kind)), [0, 3, 5, -1, 7])  # type: ignore[arg-type]
    model = Toy()
    trainer = DDPTrainer(
        model,
        SGD(model.parameters(), lr=1.0),
        part,
        loss_fn=mean_of_outputs,
        loader_options={"num_workers": workers},
        config=TrainerConfig(batch_size=2, global_batch_size=5, shuffle=False),
    )
    trainer.fit()
    assert model.w.item() == pytest.approx(-(19 + 16 + 14 + 4 + 12) / 5)


def test_a_part_of_rows_that_live_on_a_device_is_gathered_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.utils.data.random_split of them: the places are sent to where the rows are, one message for many batches."""
    sent: list[Any] = []
    to = Tensor.to

    def watched(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        sent.append((self.tolist(), arguments))
        return to(self, *arguments, **named)

    rows = TensorDataset(torch.arange(8.0), torch.arange(8.0))
    source = Loader(Subset(rows, [7, 5, 3, 1]), {}, 0, 0)
    monkeypatch.setattr(Tensor, "to", watched)
    batches = list(source.batches(iter([(0, range(2), [0, 1]), (0, range(2, 4), [2, 3])])))
    monkeypatch.undo()
    assert [[column.tolist() for column in batch] for batch in batches] == [[[7, 5]] * 2, [[3, 1]] * 2]
    assert sent == [([7, 5, 3, 1], (torch.device("cpu"),))]


def test_a_dataset_that_returns_fewer_samples_than_asked_is_an_error() -> None:
    """They would be weighted, and counted, as if all were there."""

    class Dropping(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices if index != 5]

    for call in (lambda: train_on(Dropping(8)), lambda: toy_trainer(1, batch_size=4).evaluate(Dropping(8))):
        with pytest.raises(ValueError, match="__getitems__ must return every sample asked for: 4; found 3"):
            call()


def train_on(data: Dataset[Any], **options: Any) -> float:
    """The weight after an epoch in order, in batches of four."""
    model = Toy()
    config = TrainerConfig(batch_size=4, shuffle=False)
    optimizer = SGD(model.parameters(), lr=1.0)
    DDPTrainer(model, optimizer, data, loss_fn=mean_of_outputs, loader_options=options, config=config).fit()
    return model.w.item()


def test_a_dataset_may_answer_with_a_batch_that_is_collated_already() -> None:
    class Columns(Numbers):
        def __getitems__(self, indices: list[int]) -> Any:
            return self.values[indices], self.values[indices]

    assert train_on(Columns(8), collate_fn=unchanged) == -(1.5 + 5.5)


@pytest.mark.parametrize("indices", [[True, False, True, True], [0.5, 1.5]])
def test_a_part_of_rows_named_by_anything_but_integers_is_refused(indices: list[Any]) -> None:
    """A mask would be taken for the rows 1 and 0."""
    rows = TensorDataset(torch.arange(4.0), torch.arange(4.0))
    with pytest.raises((TypeError, IndexError, RuntimeError)):
        train_on(Subset(rows, np.array(indices)))  # type: ignore[arg-type]


def test_a_part_whose_dataset_is_exchanged_between_epochs_gives_the_new_one() -> None:
    class Growing(DDPTrainer):
        def before_epoch(self) -> None:
            numbers = torch.full((4,), 10.0 * self.state.epoch, dtype=torch.float64)
            part.dataset = TensorDataset(numbers, numbers)

    part = Subset(TensorDataset(torch.zeros(4), torch.zeros(4)), [0, 1, 2, 3])
    model = Toy()
    config = TrainerConfig(batch_size=4, epochs=3)
    Growing(model, SGD(model.parameters(), lr=1.0), part, loss_fn=mean_of_outputs, config=config).fit()
    assert model.w.item() == -30.0


class Files(Numbers):
    """Opened in each worker, as torch's documentation shows."""

    opened = False

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        assert self.opened
        return super().__getitem__(index)


def open_files(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.opened = True


def test_a_worker_finds_the_scripts_own_dataset() -> None:
    model = Toy()
    options = {"num_workers": 1, "worker_init_fn": open_files}
    config = TrainerConfig(batch_size=4)
    optimizer = SGD(model.parameters(), lr=1.0)
    DDPTrainer(model, optimizer, Files(8), Files(4), loss_fn=mean_of_outputs, loader_options=options, config=config).fit()


class Attributes(dict[str, Any]):
    """A dictionary whose keys are attributes too, as many a collate_fn returns."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class MovesItself:
    def __init__(self) -> None:
        self.tensor = t()

    def to(self, device: torch.device) -> None:
        self.tensor = self.tensor.to(device)


def test_keys_that_are_attributes_too_are_no_methods() -> None:
    moved = to_device(Attributes(x=t()), torch.device("meta"))
    assert type(moved) is Attributes
    assert moved.x.device.type == "meta"


def test_an_object_that_moves_itself_and_returns_nothing_is_the_batch() -> None:
    moved = to_device(MovesItself(), torch.device("meta"))
    assert moved.tensor.device.type == "meta"


class Reordered(Numbers):
    """Draws an order of its own for each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(len(self)).tolist()
        random.shuffle(self.order)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(self.order[index])


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (1, 2)])
def test_an_order_that_a_dataset_draws_for_an_epoch_is_the_same_in_every_reader(
    ranks: Ranks, world_size: int, workers: int
) -> None:
    class Seeing(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            self.__dict__.setdefault("seen", []).append(batch[0].item())
            return mean_of_outputs(model(batch[0]), batch[1])

    def run() -> list[float]:
        random.seed(World.from_env().rank)
        torch.manual_seed(World.from_env().rank)
        model = Toy()
        config = TrainerConfig(epochs=1, batch_size=1, global_batch_size=4)
        options = {"num_workers": workers}
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = Seeing(model, sgd, Reordered(16), loader_options=options, config=config)
        trainer.fit()
        seen: list[float] = vars(trainer)["seen"]
        return seen

    found = ranks(world_size, run)
    assert sorted(value for seen in found for value in seen) == [float(number) for number in range(16)]


class Noting:
    """A tensor or a batch that says how it was asked to move."""

    def __init__(self, knows_waiting: bool = True) -> None:
        self.asked: list[str] = []
        self.knows_waiting = knows_waiting

    def pin_memory(self) -> Noting:
        self.asked.append("pinned")
        return self

    def to(self, device: torch.device, **options: Any) -> Noting:
        if options and not self.knows_waiting:
            raise TypeError("to() got an unexpected keyword argument 'non_blocking'")
        self.asked.append(f"to {device.type} {options}")
        return self


def test_the_host_waits_for_no_copy_to_a_gpu() -> None:
    """Of row numbers for a dataset there, and of batches that move themselves."""
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    rows: Any = Noting()
    assert _sent(rows, gpu).asked == ["pinned", "to cuda {'non_blocking': True}"]
    assert _sent(rows, cpu).asked[2:] == ["to cpu {}"]
    assert to_device(Noting(), gpu).asked == ["to cuda {'non_blocking': True}"]
    assert to_device(Noting(knows_waiting=False), gpu).asked == ["to cuda {}"]
    assert to_device(Noting(), cpu).asked == ["to cpu {}"]


class OrderOfItsOwn(Numbers):
    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(len(self)).tolist()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(self.order[index])


@pytest.mark.parametrize(("world_size", "workers"), [(2, 0), (1, 2), (2, 2)])
def test_without_a_seed_what_a_dataset_draws_for_an_epoch_is_the_same_everywhere(
    ranks: Ranks, world_size: int, workers: int
) -> None:
    def run() -> list[float]:
        torch.manual_seed(World.from_env().rank)
        state = torch.get_rng_state()
        model, seen = Toy(), []

        class Keeping(DDPTrainer):
            def training_step(self, model: nn.Module, batch: Any) -> Any:
                seen.extend(batch[0].tolist())
                return model(batch[0]).mean()

        config = TrainerConfig(batch_size=4, epochs=2, seed=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        Keeping(model, optimizer, OrderOfItsOwn(24), loader_options={"num_workers": workers}, config=config).fit()
        assert torch.equal(torch.get_rng_state(), state)
        return seen

    found = ranks(world_size, run, timeout=60)
    assert sorted(number for seen in found for number in seen) == sorted([*range(24)] * 2)
