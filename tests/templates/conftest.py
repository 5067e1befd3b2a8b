"""Python with torch, as nodes have it."""

from tests.support.lab import ready
