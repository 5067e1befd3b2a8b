"""A job is chosen by its name from those that the nodes report."""

from types import SimpleNamespace
from typing import cast

import pytest

from awsddp.errors import NotFoundError
from awsddp.job.reported import choose_job
from awsddp.model.records import JobRecord


def test_an_unknown_job_is_refused_with_the_newest_names_only() -> None:
    jobs = [cast(JobRecord, SimpleNamespace(job=f"job{number}")) for number in range(50)]
    with pytest.raises(NotFoundError) as error:
        choose_job(jobs, "nope")
    assert error.value.why == "the newest jobs: job45, job46, job47, job48, job49"
    assert error.value.next.startswith("awsddp jobs")
    with pytest.raises(NotFoundError) as error:
        choose_job(jobs, "jbo7")
    assert error.value.next.splitlines() == ["did you mean job7?", "awsddp jobs   # all of them"]
