"""A job is chosen by its name among those that the nodes know."""

from types import SimpleNamespace
from typing import cast

import pytest

from awsddp.errors import NotFoundError
from awsddp.job.reported import choose_job
from awsddp.model.records import JobRecord


def test_a_job_that_nobody_knows_names_the_newest_alone() -> None:
    jobs = [cast(JobRecord, SimpleNamespace(job=f"job{number}")) for number in range(50)]
    with pytest.raises(NotFoundError) as raised:
        choose_job(jobs, "nope")
    assert raised.value.why == "the newest jobs: job45, job46, job47, job48, job49"
    assert raised.value.next.startswith("awsddp jobs")
    with pytest.raises(NotFoundError) as raised:
        choose_job(jobs, "jbo7")
    assert raised.value.next.splitlines() == ["did you mean job7?", "awsddp jobs   # all of them"]
