"""A moto cloud, fresh for each test, and a cluster that owes the results of a job."""

from tests.support.moto_fixtures import aws, clock, cloud, gateway, launcher, on
from tests.support.owed_results import owed
