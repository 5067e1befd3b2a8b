"""A new moto cloud for each test, and a cluster with the unfetched results of a job."""

from tests.support.moto_fixtures import aws, clock, cloud, gateway, launcher, on
from tests.support.owed_results import unfetched
