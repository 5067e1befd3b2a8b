"""A lab whose cloud keeps records only; a moto cloud, fresh for each test; a machine that knows a cluster."""

from tests.support.desk import desk
from tests.support.lab import records
from tests.support.moto_fixtures import aws, clock, cloud, gateway, on
from tests.support.owed_results import unfetched
