"""Comparison of ranks in a table."""

from awsddp.model.rank_columns import find_outliers


def test_a_value_far_from_the_others_is_an_outlier() -> None:
    assert find_outliers({0: 90, 1: 92, 2: 20, 4: 91}, noise=10.0) == {2}
    assert find_outliers({0: 1, 1: 100}, noise=10.0) == set()  # either of the two could be it
    assert find_outliers({0: 1e7, 1: 1e7, 2: 9e7, 3: 9e7}, noise=1e6) == set()  # two groups of the same size
    assert find_outliers({0: 1e3, 1: 12e3, 2: 12e3}, noise=1e6) == set()  # below the noise
    assert find_outliers({}, noise=10.0) == set()
