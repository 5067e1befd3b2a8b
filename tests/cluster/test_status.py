"""Where `status` searches, and how it shows a job that no client follows."""

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
    session = on("laptop").context(cluster__region=None)
    assert status(session)["state"] == "absent"
    assert cloud.requests_of("DescribeInstances") and not cloud.requests_of("DescribeRegions")


def test_status_dates_an_unfollowed_job_until_its_nodes_are_asked(unfetched: World) -> None:
    def read_status() -> tuple[str, str | None, bool]:
        [job] = make_cluster_document(unfetched.located())["jobs"]
        return job["state"], job["last_seen"], job["fetched"]

    state, last_seen, fetched = read_status()
    assert (state, fetched) == ("running", False)
    assert last_seen is not None
    assert last_seen.endswith("Z")
    jobs(unfetched.session())
    assert read_status() == ("succeeded", None, False)
    fetch(unfetched.session(), start=print)
    assert read_status() == ("succeeded", None, True)
