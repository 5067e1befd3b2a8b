"""Sizes as text."""

from awsddp.util.formatting import files_text


def test_files_text_uses_units_that_fit() -> None:
    texts = [
        files_text(1, 1),
        files_text(2, 0),
        files_text(3, 12_345),
        files_text(4, 1_500_000),
        files_text(5, 2_000_000_000),
    ]
    assert texts == [
        "1 file, 1 bytes",
        "2 files, 0 bytes",
        "3 files, 12 kB",
        "4 files, 1.5 MB",
        "5 files, 2.0 GB",
    ]
