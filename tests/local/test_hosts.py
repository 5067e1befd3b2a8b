"""Hosts that run instances."""

from pathlib import Path

import pytest

from awsddp.local.hosts import run_user_data


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("#cloud-config\na: [", "Failed loading yaml blob"),
        ("#cloud-config\n- a list", "not a mapping"),
        ("#cloud-config\nruncmd: [[/no/such/program]]", "No such file"),
        ("#cloud-config\nruncmd: ['exit 3']", "exit 3"),
    ],
)
def test_invalid_user_data_is_reported_in_the_result_of_cloud_init(
    tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / "run/cloud-init").mkdir(parents=True)
    with (tmp_path / "console").open("ab") as console:
        run_user_data(
            text.encode(), root=tmp_path, first=True, environ={"PATH": "/usr/bin:/bin"}, console=console
        )
    assert complaint in (tmp_path / "run/cloud-init/result.json").read_text()
