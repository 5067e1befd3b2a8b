"""Describe how uploads to S3 progress."""

from awsddp.model.records import Saving
from awsddp.util.formatting import duration, files_text, node_name


def describe_saving(saving: Saving) -> str:
    """Return a text that describes the uploads' progress and error: "5 files, 2 MB in S3, 1 file left"."""
    parts = [f"{files_text(saving.files, saving.bytes)} in S3"]
    if saving.pending_files:
        parts.append(f"{files_text(saving.pending_files, saving.pending_bytes)} left")
    if saving.unasked:
        parts.append(f"{', '.join(map(node_name, saving.unasked))} did not answer")
    if saving.error:
        parts.append(f"not saved: {saving.error}")
    if saving.is_silent:
        parts.append(f"uploads have stopped (no heartbeat for {duration(saving.silent_s)})")
    return ", ".join(parts)
