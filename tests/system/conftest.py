"""Fixtures of the system tests: hosts of the local cloud, campaigns, jobs of several ranks."""

from tests.support.lab import ready, records
from tests.support.local_cloud import cloud
from tests.support.local_cloud import records as local_records
from tests.support.train_folder import TRAIN
from tests.support.world import ground, world
