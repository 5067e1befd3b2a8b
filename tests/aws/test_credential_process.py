"""Credentials that a program prints."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from awsddp.aws import credential_process
from awsddp.aws.client import AwsClient
from awsddp.errors import AwsddpError
from awsddp.model.records import Target
from tests.support.login_answers import PROGRAM


def test_a_credential_process_that_does_not_end_is_reported_and_killed(
    configured: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "slow"
    program.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/begun\nexec sleep 1000\n")
    program.chmod(0o700)
    configured(f"[profile slow]\ncredential_process = {program}\n")
    monkeypatch.setattr(credential_process, "PROGRAM_S", 1.0)
    monkeypatch.setattr(credential_process, "QUIET_S", 0.3)
    messages: list[str] = []
    aws = AwsClient(Target(region="eu-west-1", profile="slow"), report_wait=messages.append)
    failures = []
    for call in (aws.identity, lambda: aws.call("DescribeRegions", {})):  # as of concurrent calls
        with pytest.raises(AwsddpError) as refused:
            call()
        failures.append(refused.value)
    assert failures[0].why == failures[1].why
    assert messages == [f"waiting for credential_process of profile slow: {program} (at most 1 s)"]
    assert refused.value.why == f"profile slow: {program}: it did not end within 1 s"
    assert (refused.value.exit_code, refused.value.message) == (4, PROGRAM)
    assert refused.value.next.startswith("aws configure get credential_process --profile slow")
    [pid] = (tmp_path / "begun").read_text().split()  # started once
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
