"""A cloud, and a bucket in which nodes save a job."""

from tests.support.saving_bucket import bucket, cloud
