"""The exit codes and kinds of errors of docs/design.md, which scripts rely on."""

import re
from pathlib import Path

from awsddp import errors
from awsddp.errors import AwsddpError
from tests.support.exit_codes import CODES

DESIGN = (Path(__file__).resolve().parents[1] / "docs/design.md").read_text()


def rows(pattern: str) -> dict[str, re.Match[str]]:
    return {match[1]: match for match in re.finditer(pattern, DESIGN, re.MULTILINE)}


def test_every_error_is_in_the_table_with_its_number_and_whether_it_is_retryable() -> None:
    known = {value for value in vars(errors).values() if isinstance(value, type)}
    raised = {one for one in known if issubclass(one, AwsddpError)} - {AwsddpError}
    assert {one.__name__ for one in raised} == set(CODES)
    kinds = rows(r"^\| `(\w+)` \| (\d+) \| (yes|no) \| ")
    for one in raised | {AwsddpError}:
        documented = kinds[one.kind]
        assert (int(documented[2]), documented[3] == "yes") == (one.exit_code, one.retryable), one
    assert set(rows(r"^\| (\d+) \| ")) == {str(code) for code in (0, *CODES.values())}
