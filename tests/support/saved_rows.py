"""Rows of the list of saved files."""

from typing import Any


def make_row(modified: int = 1, key: str = "k", **more: Any) -> dict[str, Any]:
    return {"size": 1, "modified": modified, "sample": "", "parts": [[key, 1, "e", ""]], **more}
