"""Fills in the templates that are sent to nodes."""

import string

from awsddp.resources import template


class _Rendered(string.Template):
    delimiter = "@@"  # shells and units use the dollar themselves


def render(name: str, **values: object) -> str:
    """Return the template `name` with its places, written @@{place}, filled in; each must have a value."""
    return _Rendered(template(name)).substitute(values)
