"""The default order is statistically sound: places, successive pairs and successive epochs, by chi-square.

Every draw is fixed, so nothing here depends on chance. A statistic beyond `RARE` on either side is a fault: orders may be too
uneven, or too even as those of a rotation are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trainer import order
from trainer.order import BLOCK, Permutation

Array = npt.NDArray[np.int64]
Draw = Callable[[int, int, int], Any]
"""(length, seed, epoch): the order."""

RARE = 1e-6
DRAWS, SHORT = 12_000, [5, 7, 12]
LONG, LONG_DRAWS, BINS = [BLOCK + 3, 100_000], 24, 16
ALONG = ["seeds", "epochs"]


def permutation(length: int, seed: int, epoch: int) -> list[int]:
    return Permutation(length, seed, epoch)(range(length))


def drawn(draw: Draw, length: int, along: str, draws: int) -> Array:
    """One order a row: over the seeds of one epoch, or the epochs of one seed."""
    places = [(number, 3) if along == "seeds" else (3, number) for number in range(draws)]
    return np.array([draw(length, seed, epoch) for seed, epoch in places])


@cache
def orders(length: int, along: str) -> Array:
    return drawn(permutation, length, along, DRAWS if length <= BLOCK else LONG_DRAWS)


def tails(statistic: float, freedom: int) -> tuple[float, float]:
    """The probabilities of a chi-square this small or smaller, and this large or larger."""
    half = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammainc(*half)), float(torch.special.gammaincc(*half))


def pearson(counts: Array, expected: npt.NDArray[np.float64] | float) -> float:
    return float((np.square(counts - expected) / expected).sum())


def of_places(rows: Array) -> list[tuple[float, float]]:
    """Which sample stands at which place. The table's margins are fixed, hence (n - 1) / n and (n - 1)^2 degrees of freedom."""
    draws, length = rows.shape
    counts = np.bincount((np.arange(length) * length + rows).ravel(), minlength=length**2)
    return [tails((length - 1) / length * pearson(counts, draws / length), (length - 1) ** 2)]


def of_pairs(rows: Array) -> list[tuple[float, float]]:
    """Which sample follows which, at every place of its own."""
    draws, length = rows.shape
    allowed = ~np.eye(length, dtype=bool).ravel()  # no sample follows itself
    found = []
    for place in range(length - 1):
        counts = np.bincount(rows[:, place] * length + rows[:, place + 1], minlength=length**2)[allowed]
        found.append(tails(pearson(counts, draws / len(counts)), len(counts) - 1))
    return found


def of_successive_orders(rows: Array) -> list[tuple[float, float]]:
    """Of independent orders each is a random one relative to the one before."""
    relative = np.take_along_axis(np.argsort(rows[:-1], axis=1), rows[1:], axis=1)
    return of_places(relative) + of_pairs(relative)


def high(values: Array, length: int) -> Array:
    return values * BINS // length


def low(values: Array, length: int) -> Array:
    return values % BINS


def of_bins(left: Array, right: Array) -> list[tuple[float, float]]:
    """Of two rows a draw: whether they are independent in each draw, and in all draws together."""
    tables = np.array([np.bincount(a * BINS + b, minlength=BINS**2) for a, b in zip(left, right, strict=True)])
    tables = tables.reshape(-1, BINS, BINS)
    statistics = []
    for table in [*tables, tables.sum(0)]:
        expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
        statistics.append(pearson(table, expected))
    freedom = (BINS - 1) ** 2
    return [tails(sum(statistics[:-1]), freedom * len(tables)), tails(statistics[-1], freedom)]


def of_binned_places(rows: Array) -> list[tuple[float, float]]:
    places = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    return [tail for bins in (high, low) for tail in of_bins(bins(places, rows.shape[1]), bins(rows, rows.shape[1]))]


def of_binned_pairs(rows: Array) -> list[tuple[float, float]]:
    """Of pairs that share no sample: those that begin at an even place."""
    length = rows.shape[1]
    binned = [bins(rows[:, : length // 2 * 2], length) for bins in (high, low)]
    return [tail for values in binned for tail in of_bins(values[:, ::2], values[:, 1::2])]


def of_binned_successive_orders(rows: Array) -> list[tuple[float, float]]:
    return of_binned_places(np.array([np.argsort(one)[other] for one, other in pairwise(rows)]))


def rarest(found: list[tuple[float, float]]) -> float:
    return min(map(min, found))


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("length", SHORT)
def test_every_sample_is_as_likely_at_every_place(length: int, along: str) -> None:
    assert rarest(of_places(orders(length, along))) > RARE


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("length", SHORT)
def test_every_sample_is_as_likely_to_follow_every_other(length: int, along: str) -> None:
    assert rarest(of_pairs(orders(length, along))) > RARE


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("length", SHORT)
def test_an_order_tells_nothing_about_that_of_the_next_epoch_or_seed(length: int, along: str) -> None:
    assert rarest(of_successive_orders(orders(length, along))) > RARE


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("measure", [of_binned_places, of_binned_pairs, of_binned_successive_orders])
def test_a_long_order_is_as_even(measure: Callable[[Array], list[tuple[float, float]]], length: int, along: str) -> None:
    """Above 65,536 samples, where the order is that of a network; in 16 bins by size, and in 16 by remainder."""
    assert length > BLOCK
    assert rarest(measure(orders(length, along))) > RARE


def rotation(length: int, seed: int, epoch: int) -> Array:
    return (np.arange(length) + np.random.default_rng((seed, epoch)).integers(length)) % length


def congruence(length: int, seed: int, epoch: int) -> Array:
    """Sorted by a linear congruence of the place, whose first term is random."""
    first = np.random.default_rng((seed, epoch)).integers(2**31)
    return np.argsort((first + 1_103_515_245 * np.arange(length)) % 2**31)


def slightly_off(length: int, seed: int, epoch: int) -> Array:
    """Of independent random orders, but in one of ten the first sample is put back to the first place."""
    numbers = np.random.default_rng((seed, epoch))
    values = numbers.permutation(length)
    if numbers.random() < 0.1:
        place = int(np.flatnonzero(values == 0)[0])
        values[[0, place]] = values[[place, 0]]
    return values


def half_new(length: int, seed: int, epoch: int) -> Array:
    """Good orders; every second one is the one before, turned by a place."""
    number = seed + epoch
    return np.roll(np.random.default_rng(number // 2).permutation(length), number % 2)


@pytest.mark.parametrize(
    ("draw", "measure"),
    [
        *((rotation, of_pairs), (rotation, of_successive_orders), (congruence, of_places), (congruence, of_pairs)),
        *((slightly_off, of_places), (half_new, of_successive_orders)),
    ],
)
def test_the_statistics_find_a_bad_order(draw: Draw, measure: Callable[[Array], list[tuple[float, float]]]) -> None:
    assert rarest(measure(drawn(draw, 7, "epochs", 3_000))) < RARE


def test_the_statistics_pass_an_order_of_numpys() -> None:
    def numpys(length: int, seed: int, epoch: int) -> Array:
        return np.random.default_rng((seed, epoch)).permutation(length)

    short, long = drawn(numpys, 7, "epochs", 3_000), drawn(numpys, LONG[0], "epochs", 8)
    assert rarest(of_places(short) + of_pairs(short) + of_successive_orders(short)) > RARE
    assert rarest(of_binned_places(long) + of_binned_pairs(long) + of_binned_successive_orders(long)) > RARE


def test_the_statistics_find_a_network_of_too_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_ROUNDS", 2)
    assert rarest(of_binned_pairs(drawn(permutation, LONG[0], "epochs", 4))) < RARE


def test_the_statistics_find_bad_long_orders() -> None:
    assert rarest(of_binned_successive_orders(drawn(half_new, LONG[0], "epochs", 4))) < RARE
    assert rarest(of_binned_places(drawn(rotation, LONG[0], "epochs", 4))) < RARE
