"""The lines of a job: of the ranks that are asked for, from its nodes or as they were fetched."""

import pytest

from awsddp.errors import NotFoundError
from awsddp.job.fetch import fetch
from tests.support.folder_nodes import World
from tests.support.owed_results import lines


@pytest.mark.parametrize("fetched", [False, True])
def test_lines_are_of_the_ranks_that_are_asked_for_and_of_no_rank_that_is_not_there(
    owed: World, fetched: bool
) -> None:
    if fetched:
        fetch(owed.session(), job="j", start=print)
    assert lines(owed, ranks=[1]) == b"[rank 1 @ node1] line of 1\n"
    with pytest.raises(NotFoundError, match="job j has no rank 7") as refused:
        lines(owed, ranks=[1, 7])
    assert refused.value.why == "it has 2 ranks, on node0, node1"
