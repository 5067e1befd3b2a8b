"""The progress of uploads to S3 as text."""

import pytest

from awsddp.model.records import Saving
from awsddp.model.saving_text import describe_saving


@pytest.mark.parametrize(
    ("saving", "text"),
    [
        (Saving(), "0 files, 0 bytes in S3"),
        (Saving(files=5, bytes=2_000_000, ended=True), "5 files, 2.0 MB in S3"),
        (
            Saving(files=1, bytes=7, pending_files=2, pending_bytes=9),
            "1 file, 7 bytes in S3, 2 files, 9 bytes left",
        ),
        (Saving(error="AccessDenied"), "0 files, 0 bytes in S3, not saved: AccessDenied"),
        (Saving(unasked=(1, 3)), "0 files, 0 bytes in S3, node1, node3 did not answer"),
        (Saving(silent_s=59.0), "0 files, 0 bytes in S3"),
        (Saving(silent_s=90.0, ended=True), "0 files, 0 bytes in S3"),
        (
            Saving(silent_s=90.0),
            "0 files, 0 bytes in S3, uploads have stopped (no heartbeat for 1 min 30 s)",
        ),
    ],
)
def test_the_progress_of_uploads_is_one_line(saving: Saving, text: str) -> None:
    assert describe_saving(saving) == text
