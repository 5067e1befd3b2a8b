"""Rows of the list of what a job saved to S3."""

from typing import Any


def row(modified: int = 1, key: str = "k", **more: Any) -> dict[str, Any]:
    return {"size": 1, "modified": modified, "sample": "", "parts": [[key, 1, "e", ""]], **more}
