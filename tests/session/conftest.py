"""A lab whose cloud keeps records only; a moto cloud, fresh for each test; a cluster that owes results."""

from tests.support.lab import records
from tests.support.moto_fixtures import aws, clock, cloud, gateway, on
from tests.support.owed_results import owed
