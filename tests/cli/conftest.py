"""What runs the command line, in this process or beside it."""

from tests.support.lab import ready, records
