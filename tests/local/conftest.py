"""A cloud with hosts, beside the one of records."""

from tests.support.local_cloud import cloud
