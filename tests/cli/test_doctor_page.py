"""The page of `awsddp doctor`."""

import pytest

from awsddp.cli.doctor_page import checks_page
from tests.support.records import as_attributes

ARN = "arn:aws:sts::123456789012:assumed-role/AWSReservedSSO_Administrator_0123456789abcdef/me@example.com"


def test_every_check_is_within_80_columns_with_whole_commands(capsys: pytest.CaptureFixture[str]) -> None:
    def check(name: str, ok: bool | None, value: str, hint: str = "") -> dict[str, object]:
        return {"name": name, "ok": ok, "value": value, "hint": hint, "node": None, "expected": ""}

    command = "awsddp up --nodes 1 --instance-type g6.12xlarge   # 4 x L4 per node, $4.60 per hour"
    checks_page(
        as_attributes(
            {
                "checks": [
                    check("credentials", True, ARN),
                    check("quota", False, "too small " * 20, f"{command}\nawsddp doctor --request-quota"),
                    *(
                        check(f"permission {name}Instances", None, "not checked: needs plan")
                        for name in "ABCDEFG"
                    ),
                ]
            }
        )
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("--instance-type g6.12xlarge" in line for line in lines)
    assert {line[:8].strip() for line in lines} == {"ok", "FAILED", "-", ""}
