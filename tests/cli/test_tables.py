"""Tables on terminals of any width: nothing is lost, words stay whole, and no table is too wide."""

from hypothesis import given
from hypothesis import strategies as st

from awsddp.cli.tables import table_lines
from awsddp.report import amount

CELLS = st.lists(st.text("ab-/.4", min_size=1, max_size=20), min_size=1, max_size=6).map(" ".join)


@given(st.lists(st.lists(CELLS, min_size=3, max_size=3), min_size=1, max_size=4), st.integers(8, 120))
def test_every_word_stands_whole_and_in_the_room_there_is(rows: list[list[str]], width: int) -> None:
    lines = table_lines(("job", "state", "results"), rows, width=width)
    words = [word for row in rows for cell in row for word in cell.split()]
    assert set(words) <= {word for line in lines for word in line.split()}
    longest = [max(len(word) for row in rows for word in row[column].split()) for column in range(3)]
    if max(3, longest[0]) + max(5, longest[1]) + max(7, longest[2]) + 4 <= width:
        assert max(map(len, lines)) <= width
    else:
        assert lines[0].split()[0] == "job" and len(lines) == 3 * len(rows)


def test_what_travels_is_told_in_units_that_fit() -> None:
    told = [amount(1, 1), amount(2, 0), amount(3, 12_345), amount(4, 1_500_000), amount(5, 2_000_000_000)]
    assert told == [
        "1 file, 1 bytes",
        "2 files, 0 bytes",
        "3 files, 12 kB",
        "4 files, 1.5 MB",
        "5 files, 2.0 GB",
    ]
