"""JSON documents as objects with attributes."""

from types import SimpleNamespace
from typing import Any


def as_attributes(value: Any) -> Any:
    """Return a document with its keys as attributes; other values are unchanged."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_attributes(item) for key, item in value.items()})
    return [as_attributes(item) for item in value] if isinstance(value, list | tuple) else value
