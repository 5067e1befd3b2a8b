"""Fixtures that run the command line."""

from tests.support.lab import ready, records
