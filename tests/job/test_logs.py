"""The log lines of the requested ranks of a job, from its nodes or from fetched files."""

import pytest

from awsddp.errors import NotFoundError
from awsddp.job.fetch import fetch
from tests.support.folder_nodes import World
from tests.support.owed_results import read_logs


@pytest.mark.parametrize("fetched", [False, True])
def test_logs_prints_the_requested_ranks_and_refuses_unknown_ones(unfetched: World, fetched: bool) -> None:
    if fetched:
        fetch(unfetched.session(), job="j", start=print)
    assert read_logs(unfetched, ranks=[1]) == b"[rank 1 @ node1] line of 1\n"
    with pytest.raises(NotFoundError, match="job j has no rank 7") as error:
        read_logs(unfetched, ranks=[1, 7])
    assert error.value.why == "the job has 2 ranks, on node0, node1"
