"""Make botocore's session for a target, name its role sessions, and find the command to log in again."""

import base64
import contextlib
import getpass
import gzip
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.session
import msgspec
from botocore.configprovider import ConstantProvider
from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError
from botocore.loaders import JSONFileLoader
from botocore.utils import (
    JSONFileCache,
    generate_login_cache_key,
    get_login_token_cache_directory,
    is_valid_endpoint_url,
    is_valid_ipv6_endpoint_url,
)

from awsddp.aws.api_errors import translate_error
from awsddp.aws.credential_process import Failures, ProgramProvider
from awsddp.errors import AwsddpError, ConfigError, NotFoundError, UsageError
from awsddp.model.records import Target

# The AWS CLI caches the credentials from STS here, so that an MFA code is needed once an hour, not for each
# command:
# https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-role.html#cli-configure-role-cache
CACHE = Path("~/.aws/cli/cache")
SESSION = "awsddp-"
"""The prefix of the role session names that awsddp sets where the user has not set one."""
# https://docs.aws.amazon.com/sdkref/latest/guide/feature-login-credentials.html
_CONSOLE_SESSION = timedelta(hours=12)
_PROFILES = ("AWS_DEFAULT_PROFILE", "AWS_PROFILE")  # in the order in which botocore reads them
_SSO = ("sso_session", "sso_start_url")
# The services that awsddp calls, as AWS settings name them.
_LOGIN_SERVICES = ("sso", "sso_oidc", "signin")
_SERVICES = ("ec2", "sts", "s3", "ssm", "iam", "kms", "pricing", "service_quotas", *_LOGIN_SERVICES)


class _Session(botocore.session.Session):
    """Botocore's session, which checks its credentials once and raises an error if they cannot be used."""

    _are_checked = False

    def __init__(self) -> None:
        super().__init__()
        self.failures: Failures = {}

    def get_credentials(self) -> Any:
        """Return the credentials, or None.

        Raises botocore's errors, OSError and AwsddpError. Any other exception in botocore is raised as
        CredentialRetrievalError, because the user's settings cause it.
        """
        try:
            credentials = super().get_credentials()
            if credentials is None or self._are_checked:
                return credentials
            self._are_checked = True  # set now, because getting a role's credentials calls this method again
            keys = credentials.get_frozen_credentials()
            if not (keys.access_key and keys.secret_key):
                raise ValueError("a key is empty")
        except (BotoCoreError, ClientError, OSError, AwsddpError):
            self._are_checked = False
            raise
        except Exception as error:
            self._are_checked = False
            profile = self.profile or "default"
            raise CredentialRetrievalError(provider=f"profile {profile}", error_msg=error) from error
        return credentials


class QuickReader(JSONFileLoader):
    """Loads botocore's service descriptions; EC2's description (5 MB) takes a third of the usual time."""

    def load_file(self, file_path: str) -> Any:
        """Return the content of the file (`file_path` has no suffix), or None if it does not exist."""
        plain, packed = Path(f"{file_path}.json"), Path(f"{file_path}.json.gz")
        if plain.is_file():
            return msgspec.json.decode(plain.read_bytes())
        return msgspec.json.decode(gzip.decompress(packed.read_bytes())) if packed.is_file() else None


class _Cache(JSONFileCache):
    """The AWS CLI's cache; a write that fails is ignored, since the credentials are still valid."""

    def __setitem__(self, key: str, value: object) -> None:
        with contextlib.suppress(OSError):
            super().__setitem__(key, value)


def session_of(
    target: Target, *, report_wait: Callable[[str], None] = lambda text: None
) -> botocore.session.Session:
    """Return a botocore session for the target.

    boto3 is not used, because importing it would take a tenth of a command's time. Roles without a session
    name get `session_name()`. That name is the same in every process, and the UserId from STS contains it.
    The UserId identifies a cluster's owner. An empty environment variable counts as unset. `report_wait` is
    called with a text while a login program runs. Raises botocore's ProfileNotFound or ConfigParseError, or
    ConfigError for an invalid endpoint URL.
    """
    session = _Session()
    config = session.get_component("config_store")
    if any(name in os.environ for name in _PROFILES):
        profile = next(filter(None, map(os.environ.get, _PROFILES)), None)
        config.set_config_provider("profile", ConstantProvider(profile))
    if region := target.region or os.environ.get("AWS_REGION"):
        session.set_config_variable("region", region)  # assuming a role needs the region as well
    if target.access_key_id:
        # The target has its own keys, so a profile in the environment is ignored, even if it does not exist.
        config.set_config_provider("profile", ConstantProvider(None))
        session.set_credentials(target.access_key_id, target.secret_access_key or "")
    else:
        if target.profile:
            session.set_config_variable("profile", target.profile)
        if os.environ.get("AWS_DEFAULT_REGION") == "":
            config.set_config_provider("region", ConstantProvider(session.get_scoped_config().get("region")))
        _name_roles(session)
        chain, cache = session.get_component("credential_provider"), _Cache(str(CACHE.expanduser()))
        for name in ("assume-role", "assume-role-with-web-identity"):
            chain.get_provider(name).cache = cache
        # botocore has no public name for the prompter; getpass prints warnings if there is no terminal.
        roles = chain.get_provider("assume-role")
        roles._prompter = _prompt_mfa_code
        # The provider is inserted before botocore's own provider, which is then not used. Botocore has no
        # public hook for the credential_process of a source_profile, so a private method is replaced.
        chain.insert_before(
            "custom-process",
            ProgramProvider(session.profile or "default", session, session.failures, report_wait),
        )
        roles._profile_provider_builder._create_process_provider = partial(
            ProgramProvider, session=session, failures=session.failures, report_wait=report_wait
        )
    session.get_component("data_loader").file_loader = QuickReader()
    if not target.endpoint:
        _check_endpoints(session)
    return session


def _check_endpoints(session: botocore.session.Session) -> None:
    """Raise ConfigError if an endpoint that botocore would use is not a URL.

    https://docs.aws.amazon.com/sdkref/latest/guide/feature-ss-endpoints.html
    """
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return
    names = ("AWS_ENDPOINT_URL", *(f"AWS_ENDPOINT_URL_{service.upper()}" for service in _SERVICES))
    endpoints = {name: os.environ.get(name) for name in names}
    if not endpoints["AWS_ENDPOINT_URL"]:  # the variable takes precedence over the profile
        profile = session.get_scoped_config()
        endpoints[f"endpoint_url of profile {session.profile or 'default'}"] = profile.get("endpoint_url")
        name = str(profile.get("services", ""))
        of_services = session.full_config.get("services", {}).get(name, {})
        for service in _SERVICES:
            if isinstance(of_service := of_services.get(service), dict):
                endpoints[f"endpoint_url of {service} in services {name}"] = of_service.get("endpoint_url")
    for setting, url in endpoints.items():
        if url and not _is_url(url):
            raise ConfigError(
                f"{setting} is not a URL: {url!r}",
                "",
                "write it as https://HOST or https://HOST:PORT, or remove it",
            )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    is_host = is_valid_endpoint_url(text) or is_valid_ipv6_endpoint_url(text)
    return parts.scheme in ("http", "https") and is_host


def _prompt_mfa_code(question: str) -> str:
    """Prompt for an MFA code and return it. Raises UsageError if there is no terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))  # getpass prompts on this terminal
    except OSError:
        raise UsageError(
            "an MFA code is needed, and there is no terminal to ask for it",
            question.strip().rstrip(":"),
            "awsddp status   # in a terminal: enter the code; the login is then valid for an hour",
        ) from None
    return getpass.getpass(question)


@contextlib.contextmanager
def translate_aws_errors(target: Target, *, location: str) -> Iterator[None]:
    """Translate errors from botocore and s3transfer to CloudError, ConfigError or NotFoundError.

    `location` is the region or the S3 URI that the message names.
    """
    from s3transfer.exceptions import RetriesExceededError

    try:
        yield
    except (BotoCoreError, ClientError, RetriesExceededError) as error:
        if getattr(error, "response", {}).get("Error", {}).get("Code") == "NoSuchBucket":
            raise NotFoundError(f"{location}: there is no such bucket", "", "aws s3 ls   # yours") from error
        operation, login = getattr(error, "operation_name", "S3"), ""
        with contextlib.suppress(BotoCoreError):
            login = login_command(session_of(target), target)
        is_local = target.name == "local"
        raise translate_error(error, operation, location=location, is_local=is_local, login=login) from error


def session_name() -> str:
    """Return this user's role session name on this host: 2 to 64 letters, digits and =,.@-

    https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRole.html
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, for example in a container
        user = str(os.getuid())
    return re.sub(r"[^\w=,.@-]", "-", f"{SESSION}{user}@{socket.gethostname()}", flags=re.ASCII)[:64]


def _name_roles(session: botocore.session.Session) -> None:
    profiles = session.full_config["profiles"]
    roles = [profile for profile in profiles.values() if "role_arn" in profile]
    if "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ:  # a role without a profile, for example in CI
        roles.append(profiles.setdefault(session.profile or "default", {}))
    for role in roles:
        role.setdefault("role_session_name", session_name())


def _source(session: botocore.session.Session) -> tuple[str, dict[str, Any]]:
    """Return the name and settings of the profile that a profile's `source_profile` keys finally lead to."""
    profiles, name = session.full_config["profiles"], session.profile or "default"
    visited: list[str] = []
    while name not in visited and (above := profiles.get(name, {}).get("source_profile")) in profiles:
        visited.append(name)
        name = above
    return name, profiles.get(name, {})


def login_command(session: botocore.session.Session, target: Target) -> str:
    """Return the command that renews the session's login, or a text that names the variable to set again."""
    if not target.profile:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"):
            if os.environ.get(name):
                return f"renew {name} and the variables that belong to it"
    name, profile = _source(session)
    named = "" if name == "default" and not session.profile else f" --profile {shlex.quote(name)}"
    if "login_session" in profile:
        return f"aws login{named}"
    if any(key in profile for key in _SSO):
        return f"aws sso login{named}"
    if "credential_process" in profile:
        return (
            f"aws configure get credential_process{named}   # run the command that this prints: it shows why"
        )
    return f"aws configure{named}   # new keys"


def credentials_end(session: botocore.session.Session) -> datetime | None:
    """Return the time (UTC) when the user has to log in again, or None if that is unknown or never.

    Botocore renews a role's credentials automatically, unless they need an MFA code or are in the
    environment. It renews credentials from `aws login` only while the login session lasts, which is at most
    12 hours.
    """
    credentials = session.get_credentials()
    method = getattr(credentials, "method", "")
    if method == "login":
        return _console_end(_source(session)[1].get("login_session", ""))
    expiry = getattr(credentials, "_expiry_time", None)  # botocore has no public name for the expiry
    role = session.full_config["profiles"].get(session.profile or "default", {})
    is_final = method == "env" or "mfa_serial" in role
    return expiry.astimezone(UTC) if is_final and isinstance(expiry, datetime) else None


def _console_end(name: str) -> datetime | None:
    """Return the latest time when an `aws login` session ends, counted from the start time in its token.
    Returns None if the token cannot be read.
    """
    tokens = JSONFileCache(get_login_token_cache_directory())
    with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
        claims = str(tokens[generate_login_cache_key(name)]["idToken"]).split(".")[1]
        begun = msgspec.json.decode(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["iat"]
        return datetime.fromtimestamp(begun, UTC) + _CONSOLE_SESSION
    return None
