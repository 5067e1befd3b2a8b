"""Machines with a cluster, with an ended cluster, with unfetched results; a project with data."""

from tests.support.desk import desk
from tests.support.ended_cluster import home
from tests.support.owed_results import unfetched
from tests.support.project_with_data import project
