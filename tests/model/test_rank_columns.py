"""Ranks beside each other in a table."""

from awsddp.model.rank_columns import find_outliers


def test_value_far_from_the_others_is_marked() -> None:
    assert find_outliers({0: 90, 1: 92, 2: 20, 4: 91}, noise=10.0) == {2}
    assert find_outliers({0: 1, 1: 100}, noise=10.0) == set()  # which of the two?
    assert find_outliers({0: 1e7, 1: 1e7, 2: 9e7, 3: 9e7}, noise=1e6) == set()  # nor of two nodes
    assert find_outliers({0: 1e3, 1: 12e3, 2: 12e3}, noise=1e6) == set()  # nothing goes on
    assert find_outliers({}, noise=10.0) == set()
