"""Logins: the same owner at every command, one login for all regions."""

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.credentials import CredentialResolver

from awsddp.aws import client
from awsddp.aws.client import AwsClient
from awsddp.aws.login import session_name, session_of
from awsddp.errors import ConfigError
from awsddp.model.records import Target

KEYS = "[plain]\naws_access_key_id = AKIAEXAMPLE\naws_secret_access_key = secret\n"
ROLE = "role_arn = arn:aws:iam::123456789012:role/gpu\nsource_profile = plain\n"


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write an AWS configuration, the only one that this test has."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def write(config: str) -> None:
        (tmp_path / "config").write_text(config, encoding="utf-8")
        (tmp_path / "credentials").write_text(KEYS, encoding="utf-8")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    return write


class Sts:
    """Answers AssumeRole as STS does, and records the requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def __call__(self, *_: Any, **__: Any) -> "Sts":
        return self

    def assume_role(self, **request: Any) -> dict[str, Any]:
        self.requests.append(request)
        return {
            "Credentials": {
                "AccessKeyId": "ASIAEXAMPLE",
                "SecretAccessKey": "secret",
                "SessionToken": "token",
                "Expiration": (datetime.now(UTC) + timedelta(hours=1)).isoformat(),
            },
            "AssumedRoleUser": {"AssumedRoleId": f"AROA:{request['RoleSessionName']}", "Arn": "arn"},
        }


def log_in(profile: str, sts: Sts) -> dict[str, Any]:
    """Log in with a profile as a new process does; return the last request to STS."""
    session = session_of(Target(region="us-east-1", profile=profile))
    chain: CredentialResolver = session.get_component("credential_provider")
    chain.get_provider("assume-role")._client_creator = sts
    credentials = session.get_credentials()
    assert credentials is not None
    credentials.get_frozen_credentials()
    return sts.requests[-1] if sts.requests else {}


def test_a_role_without_a_session_name_has_the_same_name_in_each_process(
    configured: Callable[[str], None], tmp_path: Path
) -> None:
    configured(f"[profile gpu]\n{ROLE}")
    first = log_in("gpu", Sts())["RoleSessionName"]
    for entry in (tmp_path / ".aws" / "cli" / "cache").iterdir():
        entry.unlink()
    assert log_in("gpu", Sts())["RoleSessionName"] == first == session_name()
    assert re.fullmatch(r"[\w+=,.@-]{2,64}", first, flags=re.ASCII)


def test_a_session_name_of_the_profile_is_used(configured: Callable[[str], None]) -> None:
    configured(f"[profile gpu]\n{ROLE}role_session_name = mine\n")
    assert log_in("gpu", Sts())["RoleSessionName"] == "mine"


def test_a_web_identity_of_the_environment_gets_the_session_name(
    configured: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured("")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/nowhere/token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/ci")
    session = session_of(Target(region="us-east-1"))
    assert session.full_config["profiles"]["default"] == {"role_session_name": session_name()}


def test_credentials_of_sts_are_cached_in_the_folder_of_the_aws_cli(
    configured: Callable[[str], None], tmp_path: Path
) -> None:
    configured(f"[profile gpu]\n{ROLE}")
    sts = Sts()
    log_in("gpu", sts)
    log_in("gpu", sts)
    assert len(sts.requests) == 1
    (entry,) = (tmp_path / ".aws" / "cli" / "cache").iterdir()
    assert json.loads(entry.read_text())["Credentials"]["AccessKeyId"] == "ASIAEXAMPLE"
    assert entry.stat().st_mode & 0o077 == 0


def test_a_login_that_cannot_be_cached_is_valid(configured: Callable[[str], None], tmp_path: Path) -> None:
    configured(f"[profile gpu]\n{ROLE}")
    (tmp_path / ".aws").write_text("no folder, as where the home is read-only")
    assert log_in("gpu", Sts())["RoleSessionName"] == session_name()


def test_only_credentials_without_renewal_have_an_end(
    configured: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(f"[profile gpu]\n{ROLE}")
    aws = AwsClient(Target(region="us-east-1", profile="gpu"))
    session = aws._session
    session.get_component("credential_provider").get_provider("assume-role")._client_creator = Sts()
    session.get_credentials().get_frozen_credentials()
    assert aws.credentials_end() is None
    ends = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=2)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", ends.isoformat())
    assert AwsClient(Target(region="us-east-1")).credentials_end() == ends


def test_a_session_name_that_changes_with_each_command_is_refused(
    configured: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured("")
    reply = {"UserId": "AROA:botocore-session-1795343", "Account": "123456789012", "Arn": "arn"}
    aws = AwsClient(Target(region="us-east-1", access_key_id="AKIA", secret_access_key="secret"))
    monkeypatch.setattr(aws, "call", lambda *_, **__: reply)
    with pytest.raises(ConfigError, match="name is not stable"):
        aws.identity()


def test_the_clients_of_all_regions_share_one_login(
    configured: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured("")
    targets = []

    def counted(target: Target, **more: Any) -> Any:
        targets.append(target)
        return session_of(target, **more)

    monkeypatch.setattr(client, "session_of", counted)
    keys = {"access_key_id": "AKIA", "secret_access_key": "secret"}
    first = AwsClient(Target(region="us-east-1", **keys))
    others = [AwsClient(Target(region=name, **keys), login=first) for name in ("eu-west-1", "eu-north-1")]
    for aws in (first, *others):
        aws.credentials_end()
    assert [target.region for target in targets] == ["us-east-1"]
    assert [aws.region for aws in others] == ["eu-west-1", "eu-north-1"]
