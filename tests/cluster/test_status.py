"""What `status` looks for, and what it says of a job that nobody follows."""

import pytest

from awsddp.cluster.status import make_cluster_document, status
from awsddp.job.fetch import fetch
from awsddp.job.jobs import list_jobs as jobs
from tests.support.folder_nodes import World
from tests.support.machine import On
from tests.support.moto_cloud import Cloud


def test_status_without_a_cluster_searches_one_region(
    on: On, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    ctx = on("laptop").context(cluster__region=None)
    assert status(ctx)["state"] == "absent"
    assert cloud.sent("DescribeInstances") and not cloud.sent("DescribeRegions")


def test_job_that_nobody_follows_is_told_as_last_seen_until_a_node_is_asked(owed: World) -> None:
    def told() -> tuple[str, str | None, bool]:
        [job] = make_cluster_document(owed.located())["jobs"]
        return job["state"], job["last_seen"], job["fetched"]

    state, seen, fetched = told()
    assert (state, fetched) == ("running", False)
    assert seen is not None
    assert seen.endswith("Z")
    jobs(owed.session())
    assert told() == ("succeeded", None, False)
    fetch(owed.session(), start=print)
    assert told() == ("succeeded", None, True)
