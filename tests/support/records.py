"""Documents, or parts of them, as the records that the methods return."""

from types import SimpleNamespace
from typing import Any


def read(value: Any) -> Any:
    """Return a document whose keys are attributes; what is no document stays as it is."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: read(one) for key, one in value.items()})
    return [read(one) for one in value] if isinstance(value, list | tuple) else value
