"""Interleaved rounds: everything once in each round, so that a machine that slows down slows all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import TypeVar

T = TypeVar("T")
Times = dict[str, list[float]]


def interleaved(works: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each work gave, in each of `rounds` rounds after one that doesn't count.

    Each round begins with another one, so that none always follows the same.
    """
    names = list(works)
    given: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            outcome = works[name]()
            if number > 0:
                given[name].append(outcome)
    return given


def ratio_of(times: Times, one: str, other: str) -> float:
    """Median over the rounds of what `one` took against what `other` took in the same round."""
    return median(mine / theirs for mine, theirs in zip(times[one], times[other], strict=True))
