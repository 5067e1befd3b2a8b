"""A bucket with the objects of a job, and a machine with a record of its cluster."""

from tests.support.desk import desk
from tests.support.shelf import shelf, store
