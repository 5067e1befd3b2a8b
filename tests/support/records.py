"""JSON documents as objects with attributes."""

from types import SimpleNamespace
from typing import Any


def read(value: Any) -> Any:
    """Return a document with its keys as attributes; other values are unchanged."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: read(item) for key, item in value.items()})
    return [read(item) for item in value] if isinstance(value, list | tuple) else value
