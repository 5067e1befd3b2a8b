"""The exit codes and kinds of errors of docs/design.md, which scripts rely on."""

import re
from pathlib import Path

from awsddp import errors
from awsddp.errors import AwsddpError
from tests.support.exit_codes import CODES

DESIGN = (Path(__file__).resolve().parents[1] / "docs/design.md").read_text()


def rows(pattern: str) -> dict[str, re.Match[str]]:
    return {match[1]: match for match in re.finditer(pattern, DESIGN, re.MULTILINE)}


def test_every_error_is_in_the_table_with_its_exit_code_and_if_it_is_retryable() -> None:
    classes = {value for value in vars(errors).values() if isinstance(value, type)}
    raised = {error for error in classes if issubclass(error, AwsddpError)} - {AwsddpError}
    assert {error.__name__ for error in raised} == set(CODES)
    kinds = rows(r"^\| `(\w+)` \| (\d+) \| (yes|no) \| ")
    for error in raised | {AwsddpError}:
        documented = kinds[error.kind]
        assert (int(documented[2]), documented[3] == "yes") == (error.exit_code, error.retryable), error
    assert set(rows(r"^\| (\d+) \| ")) == {str(code) for code in (0, *CODES.values())}
