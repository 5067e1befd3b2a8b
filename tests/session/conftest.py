"""A lab whose cloud keeps records only."""

from tests.support.lab import records
