"""Ranks beside each other in a table."""

from awsddp.model.rank_columns import far_from_others


def test_value_far_from_the_others_is_marked() -> None:
    assert far_from_others({0: 90, 1: 92, 2: 20, 4: 91}, noise=10.0) == {2}
    assert far_from_others({0: 1, 1: 100}, noise=10.0) == set()  # which of the two?
    assert far_from_others({0: 1e7, 1: 1e7, 2: 9e7, 3: 9e7}, noise=1e6) == set()  # nor of two nodes
    assert far_from_others({0: 1e3, 1: 12e3, 2: 12e3}, noise=1e6) == set()  # nothing goes on
    assert far_from_others({}, noise=10.0) == set()
