"""TrainerConfig by itself: what it takes, what it refuses and how it says so."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from trainer import TrainerConfig

COUNTS = ("batch_size", "accumulation_steps", "log_every")  # 1 or more
OPTIONAL_COUNTS = ("epochs", "max_steps", "global_batch_size", "eval_batch_size", "eval_every")  # or None
FLAGS = ("shuffle", "drop_last")


class Kind(str, enum.Enum):
    EPOCH = "epoch"


@pytest.mark.parametrize("value", [True, False, 2.0, "3", np.int64(3), np.float32(3), torch.tensor(3), [3]], ids=repr)
@pytest.mark.parametrize("name", [*COUNTS, *OPTIONAL_COUNTS, "seed"])
def test_a_count_is_a_python_int_and_nothing_like_it(name: str, value: Any) -> None:
    found = re.escape(f"found {value!r} ({type(value).__name__})")
    words = "a Python int" if name in COUNTS else "a Python int or None"
    with pytest.raises(TypeError, match=f"^{name} must be {words}; {found}$"):
        TrainerConfig(**{name: value})


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", [*COUNTS, *OPTIONAL_COUNTS])
def test_a_count_below_1_is_refused_by_name_and_value(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be 1 or more.*; found {value}$"):
        TrainerConfig(**{name: value})


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_that_has_a_default_cannot_be_none(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name} must be a Python int; found None \(NoneType\)$"):
        TrainerConfig(**{name: None})


@pytest.mark.parametrize("name", OPTIONAL_COUNTS)
def test_none_is_the_default_of_an_optional_count(name: str) -> None:
    assert getattr(TrainerConfig(), name) is None
    assert TrainerConfig(**{name: None}) == TrainerConfig()


@pytest.mark.parametrize("value", [1, 0, "yes", None, np.bool_(True)], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_a_bool_and_nothing_like_it(name: str, value: Any) -> None:
    found = re.escape(f"found {value!r} ({type(value).__name__})")
    with pytest.raises(TypeError, match=f"^{name} must be True or False; {found}$"):
        TrainerConfig(**{name: value})


def test_a_seed_is_0_or_more_of_any_size_or_none() -> None:
    with pytest.raises(ValueError, match=r"^seed must be 0 or more \(or None\); found -1$"):
        TrainerConfig(seed=-1)
    assert [TrainerConfig(seed=seed).seed for seed in (0, 2**70, None)] == [0, 2**70, None]


@pytest.mark.parametrize("value", ["1", True, np.float32(1), torch.tensor(1.0)], ids=repr)
def test_max_grad_norm_is_a_number(value: Any) -> None:
    found = re.escape(f"found {value!r} ({type(value).__name__})")
    with pytest.raises(TypeError, match=f"^max_grad_norm must be a Python number above 0 or None; {found}$"):
        TrainerConfig(max_grad_norm=value)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, -math.inf])
def test_max_grad_norm_is_above_0(value: float) -> None:
    with pytest.raises(ValueError, match=rf"^max_grad_norm must be above 0 \(None switches clipping off\); found {value}$"):
        TrainerConfig(max_grad_norm=value)


@pytest.mark.parametrize("value", ["Step", "batch", "", None, 3, ["step"]], ids=repr)
def test_an_unknown_schedule_is_refused_with_the_known_ones(value: Any) -> None:
    known = re.escape(f"must be one of 'step', 'epoch', 'eval'; found {value!r}")
    with pytest.raises(ValueError, match=f"^schedule {known}$"):
        TrainerConfig(schedule=value)


@pytest.mark.parametrize("value", [None, 3, b"loss", ["loss"]], ids=repr)
def test_monitor_is_a_text(value: Any) -> None:
    found = re.escape(f"found {value!r} ({type(value).__name__})")
    with pytest.raises(TypeError, match=f"^monitor must be a key of the evaluation; {found}$"):
        TrainerConfig(monitor=value)


@pytest.mark.parametrize("value", [None, [], ["find_unused_parameters"], "find_unused_parameters"], ids=repr)
def test_ddp_options_is_a_mapping(value: Any) -> None:
    found = re.escape(f"found {value!r} ({type(value).__name__})")
    with pytest.raises(TypeError, match=f"^ddp_options must be a mapping of .* keyword arguments; {found}$"):
        TrainerConfig(ddp_options=value)


def test_static_graph_is_refused_with_its_reason() -> None:
    with pytest.raises(
        ValueError, match=r"^ddp_options: static_graph=True is refused: with gradient accumulation .* leave it out"
    ):
        TrainerConfig(ddp_options={"static_graph": True})
    TrainerConfig(ddp_options={"static_graph": False})


def test_a_global_batch_and_an_accumulation_exclude_each_other() -> None:
    with pytest.raises(
        ValueError, match=r"^global_batch_size=8 and accumulation_steps=2 exclude .* leave accumulation_steps at 1$"
    ):
        TrainerConfig(global_batch_size=8, accumulation_steps=2)
    TrainerConfig(global_batch_size=8, accumulation_steps=1)


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(TypeError, match="'learning_rate'"):
        TrainerConfig(learning_rate=0.1)  # type: ignore[call-arg]


def test_a_config_cannot_be_changed() -> None:
    config = TrainerConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch_size = 3  # type: ignore[misc]


def test_the_window_is_the_global_batch_or_what_follows_from_the_world() -> None:
    assert TrainerConfig(batch_size=4, accumulation_steps=3).window_size(2) == 24
    assert TrainerConfig(batch_size=4, global_batch_size=10).window_size(2) == 10


def test_a_plain_config_holds_nothing_but_plain_values() -> None:
    """Any other value could not be written into a checkpoint, and that only after the first epoch."""
    config = TrainerConfig(
        max_grad_norm=np.float64(0.5), schedule=Kind.EPOCH, ddp_options={"bucket_cap_mb": np.float64(2), "hook": re.compile("x")}
    )
    plain = config.plain()
    assert {type(value) for value in plain.values()} == {type(None), bool, int, float, str, dict}
    assert (plain["max_grad_norm"], plain["schedule"]) == (0.5, "epoch")
    assert plain["ddp_options"] == {"bucket_cap_mb": 2.0, "hook": "re.compile('x')"}
    assert {type(value) for value in plain["ddp_options"].values()} == {float, str}
    assert plain.keys() == {field.name for field in dataclasses.fields(TrainerConfig)}
