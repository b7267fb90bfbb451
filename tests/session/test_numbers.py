"""Sets of numbers as ranges."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from everloop_trainer.session.numbers import Numbers

small = st.sets(st.integers(0, 40))


def as_numbers(members: set[int], order: list[int]) -> Numbers:
    numbers = Numbers()
    for member in sorted(members, key=lambda number: (order.index(number) if number in order else -1, number)):
        numbers.add(member)
    return numbers


@given(left=small, right=small, order=st.permutations(range(20)))
def test_numbers_are_a_set(left: set[int], right: set[int], order: list[int]) -> None:
    """Whatever is added in whatever order, membership, difference and union are those of a set."""
    numbers, other = as_numbers(left, order), as_numbers(right, order)
    assert {number for number in range(50) if number in numbers} == left
    assert bool(numbers) == bool(left)
    assert numbers.without(other) == Numbers((number, number + 1) for number in sorted(left - right))
    both = Numbers(numbers.ranges())
    both.update(other)
    assert both == Numbers((number, number + 1) for number in sorted(left | right))
    ranges = both.ranges()
    assert all(end < start for (_, end), (start, _) in pairwise(ranges)), "ranges that touch are one"
