"""Profiles of the AWS configuration: the identity, or the error, exit code and next step.

botocore reads a real configuration in a folder of the test; STS, SSO and sign-in answer on the loopback.
"""

import base64
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from awsddp.aws.client import AwsClient
from awsddp.errors import AwsddpError, ConfigError
from awsddp.model.records import Target
from tests.support.login_answers import LATER, PROGRAM, LoginHandler, make_keys

BEFORE = datetime.now(UTC) - timedelta(hours=13)
CONSOLE = "arn:aws:iam::123456789012:user/ann"
KEYS = "aws_access_key_id = AKIAKEYS\naws_secret_access_key = secret\n"
SSO_SESSION = "[sso-session corp]\nsso_start_url = https://corp.example/start\nsso_region = eu-west-1\n"
SSO = f"""\
{SSO_SESSION}
[profile sso]
sso_session = corp
sso_account_id = 123456789012
sso_role_name = gpu
"""
LOGIN = f"[profile console]\nlogin_session = {CONSOLE}\n"
_SOURCE = "role_arn = arn:aws:iam::123456789012:role/gpu\nsource_profile ="
PRINTED = json.dumps({"Version": 1, "AccessKeyId": "AKIAPROCESS", "SecretAccessKey": "secret"})


def _until(expiration: str) -> str:
    """Return a `credential_process` whose credentials end."""
    return f"echo '{json.dumps(json.loads(PRINTED) | {'Expiration': expiration})}'"


def write_sso(home: Path, *, until: datetime = LATER) -> None:
    """Write the token that `aws sso login` writes."""
    path = home / ".aws/sso/cache" / f"{hashlib.sha1(b'corp').hexdigest()}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"accessToken": "token", "expiresAt": f"{until:%FT%TZ}"}))


def write_login(home: Path, *, until: datetime = LATER, begun: datetime = BEFORE) -> None:
    """Write the token that `aws login` writes."""
    path = home / ".aws/login/cache" / f"{hashlib.sha256(CONSOLE.encode()).hexdigest()}.json"
    path.parent.mkdir(parents=True)
    kind = serialization.PrivateFormat.TraditionalOpenSSL
    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, kind, serialization.NoEncryption()
    )
    claims = base64.urlsafe_b64encode(json.dumps({"iat": int(begun.timestamp())}).encode())
    access = make_keys("ASIACONSOLE") | {"accountId": "123456789012", "expiresAt": f"{until:%FT%TZ}"}
    token = {
        "accessToken": access,
        "refreshToken": "refresh",
        "idToken": f"e30.{claims.decode().rstrip('=')}.c2ln",
        "clientId": "arn:aws:signin:::devtools/same-device",
        "dpopKey": pem.decode(),
    }
    path.write_text(json.dumps(token))


def write_expired(home: Path) -> None:
    write_login(home, until=BEFORE)


def write_expired_sso(home: Path) -> None:
    write_sso(home, until=BEFORE)


def write_nothing(home: Path) -> None:
    pass


def signin(error: str) -> dict[str, tuple[int, dict[str, str]]]:
    return {"signin": (403, {"code": "AccessDeniedException", "error": error, "message": "no"})}


@dataclass(frozen=True)
class Case:
    """A configuration, and the access key that is used, or the exit code, message and next step."""

    name: str
    config: str
    key: str = ""
    code: int = 0
    message: str = ""
    hint: str = ""
    why: str = ""
    profile: str | None = None
    environ: dict[str, str] = field(default_factory=dict)
    setup: Callable[[Path], None] = write_nothing
    refusals: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)


LOAD = "could not load AWS credentials"
INVALID = "invalid AWS configuration"
FORBIDDEN = {"SSO": (403, {"code": "ForbiddenException", "message": "No access"})}
CASES = [
    Case("keys", f"[profile mine]\n{KEYS}", key="AKIAKEYS", profile="mine"),
    Case("role", f"[profile mine]\n{KEYS}[profile gpu]\n{_SOURCE} mine\n", key="ASIAROLE", profile="gpu"),
    Case("sso", SSO, key="ASIASSO", profile="sso", setup=write_sso),
    Case(
        "process",
        f"[profile mine]\ncredential_process = echo '{PRINTED}'\n",
        key="AKIAPROCESS",
        profile="mine",
    ),
    Case("login", LOGIN, key="ASIACONSOLE", profile="console", setup=write_login),
    Case("login-renewed", LOGIN, key="ASIAREFRESHED", profile="console", setup=write_expired),
    Case("empty", f"[default]\n{KEYS}", key="AKIAKEYS", environ={"AWS_PROFILE": ""}),
    Case(
        "empty-default",
        f"[profile mine]\n{KEYS}",
        key="AKIAKEYS",
        environ={"AWS_DEFAULT_PROFILE": "", "AWS_PROFILE": "mine"},
    ),
    Case(
        "login-none",
        LOGIN,
        code=4,
        message=LOAD,
        hint="log in again: aws login --profile console",
        profile="console",
    ),
    Case(
        "login-ended",
        LOGIN,
        code=4,
        message=LOAD,
        hint="log in again: aws login --profile console",
        environ={"AWS_PROFILE": "console"},
        setup=write_expired,
        refusals=signin("TOKEN_EXPIRED"),
    ),
    Case(
        "login-not-allowed",
        LOGIN,
        code=4,
        message="permission denied: CreateOAuth2Token",
        hint="ask an AWS administrator for the policy SignInLocalDevelopmentAccess, or use another --profile",
        profile="console",
        setup=write_expired,
        refusals=signin("INSUFFICIENT_PERMISSIONS"),
    ),
    Case(
        "login-of-a-source",
        f"{LOGIN}[profile gpu]\n{_SOURCE} console\n",
        code=4,
        message=LOAD,
        hint="log in again: aws login --profile console",
        profile="gpu",
    ),
    Case(
        "sso-ended",
        SSO,
        code=4,
        message=LOAD,
        hint="log in again: aws sso login --profile sso",
        profile="sso",
        setup=write_expired_sso,
    ),
    Case(
        "sso-default",
        SSO.replace("profile sso", "default"),
        code=4,
        message=LOAD,
        hint="log in again: aws sso login",
    ),
    Case(
        "sso-taken-away",
        SSO,
        code=4,
        message="this login no longer has the role that the AWS profile names",
        hint="choose another account or role: aws configure sso --profile sso",
        profile="sso",
        setup=write_sso,
        refusals=FORBIDDEN,
    ),
    Case(
        "sso-session-missing",
        SSO.replace("sso-session corp", "sso-session other"),
        code=3,
        message=INVALID,
        hint="see: aws configure list-profiles",
        profile="sso",
    ),
    Case(
        "process-fails",
        "[profile bad]\ncredential_process = false\n",
        code=4,
        message=PROGRAM,
        hint="aws configure get credential_process --profile bad",
        profile="bad",
    ),
    *(
        Case(
            f"process-{name}",
            f"[profile bad]\ncredential_process = {command}\n",
            code=4,
            message=PROGRAM,
            hint="aws configure get credential_process --profile bad",
            profile="bad",
            why=why,
        )
        for name, command, why in (
            ("missing", "/nowhere/program", "profile bad: /nowhere/program: [Errno 2] No such file"),
            (
                "says-why",
                "sh -c 'echo a >&2; echo denied >&2; exit 3'",
                "profile bad: sh: exit code 3: denied",
            ),
            ("no-json", "echo hello", "profile bad: echo: JSON is malformed"),
            ("no-text", "printf '\\\\377'", "profile bad: printf: "),
            ("unbalanced", "sh -c 'unbalanced", "profile bad: sh: No closing quotation"),
            ("empty", "", "profile bad: it is empty"),
            ("list", "echo '[1,2]'", "profile bad: echo: Expected `object`, got `array`"),
            (
                "other-types",
                """echo '{"Version":1,"AccessKeyId":5,"SecretAccessKey":null}'""",
                "profile bad: echo: Expected `str`, got `int`",
            ),
            ("other-version", "echo '" + PRINTED.replace("1", "2") + "'", "profile bad: echo: Invalid enum"),
            ("soon", _until("soon"), "profile bad: echo: Invalid timestamp"),
            ("no-zone", _until("2999-01-01T00:00:00"), "profile bad: echo: Expiration has no time zone"),
            (
                "past",
                _until("1999-01-01T00:00:00Z"),
                "profile bad: echo: the credentials that it prints expired",
            ),
        )
    ),
    Case(
        "process-of-a-source",
        f"[profile bad]\ncredential_process = echo '[1,2]'\n[profile gpu]\n{_SOURCE} bad\n",
        code=4,
        message=PROGRAM,
        hint="aws configure get credential_process --profile bad",
        profile="gpu",
    ),
    Case(
        "process-until",
        f"[profile p]\ncredential_process = {_until(f'{LATER:%FT%TZ}')}\n",
        "AKIAPROCESS",
        profile="p",
    ),
    Case(
        "keys-empty",
        "[profile bad]\naws_access_key_id =\naws_secret_access_key =\n",
        code=4,
        message=LOAD,
        hint="log in again: aws configure --profile bad",
        profile="bad",
    ),
    Case(
        "endpoint-of-the-profile",
        f"[profile bad]\nendpoint_url = notaurl\n{KEYS}",
        code=3,
        message="endpoint_url of profile bad is not a URL: 'notaurl'",
        hint="write it as https://HOST or https://HOST:PORT, or remove it",
        profile="bad",
        environ={"AWS_ENDPOINT_URL": ""},
    ),
    Case(
        "endpoint-of-a-service",
        f"[profile bad]\nservices = own\n{KEYS}[services own]\nsts =\n  endpoint_url = //host\n",
        code=3,
        message="endpoint_url of sts in services own is not a URL: '//host'",
        hint="write it as https://HOST or https://HOST:PORT, or remove it",
        profile="bad",
        environ={"AWS_ENDPOINT_URL": ""},
    ),
    *(
        Case(
            f"endpoint-of-a-variable-{name}",
            SSO,
            code=3,
            message=f"{name} is not a URL: {url!r}",
            hint="write it as https://HOST or https://HOST:PORT, or remove it",
            profile="sso",
            environ={name: url},
            setup=write_sso,
        )
        for name, url in (("AWS_ENDPOINT_URL", "localhost:1"), ("AWS_ENDPOINT_URL_STS", "http://h:port"))
    ),
    Case(
        "file-unreadable",
        "[profile bad\n",
        code=3,
        message=INVALID,
        hint="correct that file: ",
        profile="bad",
        why="Unable to parse config file: /",
    ),
    Case(
        "source-missing",
        f"[profile gpu]\n{_SOURCE} nobody\n",
        code=3,
        message=INVALID,
        hint="see: aws configure list-profiles",
        profile="gpu",
    ),
    Case(
        "profile-missing",
        f"[default]\n{KEYS}",
        code=3,
        message=INVALID,
        hint="see: aws configure list-profiles",
        profile="nobody",
    ),
    Case("none", "", code=4, message="no AWS credentials found", hint="configure them: aws login, aws"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_profile_logs_in_or_is_an_error_with_a_next_step(
    case: Case, configured: Callable[[str], object], isolated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(case.config)
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value)
    case.setup(isolated)
    LoginHandler.refusals = case.refusals
    target = Target(region="eu-west-1", profile=case.profile)
    if case.key:
        assert AwsClient(target).identity().user_id == case.key
        return
    with pytest.raises(AwsddpError) as refused:
        AwsClient(target).identity()
    assert (refused.value.exit_code, refused.value.message) == (case.code, case.message)
    assert refused.value.next.startswith(case.hint)
    assert refused.value.why.startswith(case.why)
    assert "--profile" in case.hint or "--profile" not in refused.value.next


def test_a_login_without_its_package_names_the_pip_command(
    configured: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(LOGIN)
    monkeypatch.setattr("botocore.credentials.EC", None)
    with pytest.raises(AwsddpError) as refused:
        AwsClient(Target(region="eu-west-1", profile="console")).identity()
    assert refused.value.exit_code == 3
    assert refused.value.next == f"{sys.executable} -m pip install 'botocore[crt]'"


@pytest.mark.parametrize("begun", [datetime.now(UTC) - timedelta(hours=3), None])
def test_a_console_login_ends_twelve_hours_after_it_began(
    begun: datetime | None, configured: Callable[[str], object], isolated: Path
) -> None:
    configured(LOGIN)
    write_login(isolated, begun=begun or LATER)
    if begun is None:  # as a login that has no such token
        [path] = (isolated / ".aws/login/cache").iterdir()
        path.write_text(path.read_text().replace("e30.", ""))
    ends = AwsClient(Target(region="eu-west-1", profile="console")).credentials_end()
    assert ends == (begun.replace(microsecond=0) + timedelta(hours=12) if begun else None)


def test_an_empty_region_variable_counts_as_unset(
    configured: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured("[default]\nregion = eu-north-1\n")
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.setenv(name, "")
    assert AwsClient(Target()).region == "eu-north-1"


def test_mfa_without_a_terminal_is_a_usage_error_without_a_prompt(
    configured: Callable[[str], dict[str, str]],
) -> None:
    serial = "mfa_serial = arn:aws:iam::123456789012:mfa/ann\n"
    config = f"[profile mine]\n{KEYS}[profile gpu]\n{_SOURCE} mine\n{serial}"
    environ = os.environ | configured(config)
    command = [sys.executable, "-m", "awsddp", "--profile", "gpu", "--region", "eu-west-1", "status"]
    began = time.monotonic()
    shown = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True
    )
    assert time.monotonic() - began < 60
    assert shown.returncode == 2
    assert shown.stderr.startswith("error: an MFA code is needed, and there is no terminal to ask for it\n")
    assert "next: awsddp --profile gpu --region eu-west-1 status   # in a terminal" in shown.stderr
    assert "getpass" not in shown.stderr.lower()


@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION", "region of the AWS profile"])
def test_an_error_for_an_unknown_region_names_its_source(
    name: str, configured: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    configured("[default]\nregion = US-EAST-1\n")
    if name.isupper():
        monkeypatch.setenv(name, "US-EAST-1")
    with pytest.raises(ConfigError) as refused:
        AwsClient(Target())
    assert refused.value.message == f"{name}: unknown AWS region 'US-EAST-1'"
    assert refused.value.next == "--region: did you mean us-east-1?"


@pytest.mark.parametrize("config", ["[profile bad\n", SSO.replace("sso-session corp", "sso-session other")])
def test_doctor_has_the_exit_code_of_other_verbs_for_an_invalid_configuration(
    config: str, configured: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    environ = os.environ | configured(config)
    command = [sys.executable, "-m", "awsddp", "--profile", "sso", "--region", "eu-west-1", "doctor"]
    shown = subprocess.run(command, env=environ, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True)
    assert b"FAILED  configuration: invalid AWS configuration" in shown.stdout
    assert shown.returncode == 3
