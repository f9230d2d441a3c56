"""Rows of tests that ``make test`` gives to one process each."""

from tests.in_order import neighbours


def test_neighbours_of_a_file_stay_together_and_later_ones_wait_for_their_turn():
    rows = neighbours(["a::one", "a::two", "b::one[x::y]", "b::two", "a::of_ray"])
    assert list(rows.values()) == ["a 0", "a 0", "b 1", "b 1", "a 2"]
