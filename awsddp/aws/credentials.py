"""Who asks AWS: the login of a target, with a name that is the same at every command."""

import contextlib
import getpass
import gzip
import os
import re
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import botocore.session
import msgspec
from botocore.configprovider import ConstantProvider
from botocore.loaders import JSONFileLoader
from botocore.utils import JSONFileCache

from awsddp.records import Target

# botocore's name for the session of a role, another one in each process.
_UNSTABLE = re.compile(r":botocore-session-\d+$")
# The AWS CLI keeps what STS gave it here, so that MFA is asked for once per hour and not once a command:
# https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-role.html#cli-configure-role-cache
CACHE = Path("~/.aws/cli/cache")
SESSION = "awsddp-"
"""How the name of a session begins that the user has not named."""
_CACHED = ("assume-role", "assume-role-with-web-identity")


class QuickReader(JSONFileLoader):
    """Reads botocore's descriptions of services: that of EC2, 5 MB, in a third of the time."""

    def load_file(self, file_path: str) -> Any:
        """Return what the file holds (`file_path` lacks its suffix), None where there is none."""
        plain, packed = Path(f"{file_path}.json"), Path(f"{file_path}.json.gz")
        if plain.is_file():
            return msgspec.json.decode(plain.read_bytes())
        return msgspec.json.decode(gzip.decompress(packed.read_bytes())) if packed.is_file() else None


class _Cache(JSONFileCache):
    """The AWS CLI's cache, where this user can write; a login that cannot be kept is good all the same."""

    def __setitem__(self, key: str, value: object) -> None:
        with contextlib.suppress(OSError):
            super().__setitem__(key, value)


def session_of(target: Target) -> botocore.session.Session:
    """Return the session that boto3's is made of; the rest of boto3 costs each command a tenth of its time.

    Roles without a session name get `session_name()`: STS makes it a part of UserId, which owns what is
    launched. Raises botocore's ProfileNotFound or ConfigParseError.
    """
    session = botocore.session.Session()
    if target.access_key_id:
        # With keys of its own a profile named in the environment has no say, not even a missing one.
        session.get_component("config_store").set_config_provider("profile", ConstantProvider(None))
        session.set_credentials(target.access_key_id, target.secret_access_key or "")
    else:
        if target.profile:
            session.set_config_variable("profile", target.profile)
        if region := target.region or os.environ.get("AWS_REGION"):
            session.set_config_variable("region", region)  # where a role is assumed, too
        _name_roles(session)
        _keep_credentials(session)
    session.get_component("data_loader").file_loader = QuickReader()
    return session


def session_name() -> str:
    """Return the name of this user's sessions on this host: 2 to 64 letters, digits and =,.@-

    https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRole.html
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        user = str(os.getuid())
    return re.sub(r"[^\w=,.@-]", "-", f"{SESSION}{user}@{socket.gethostname()}", flags=re.ASCII)[:64]


def is_stable(user_id: str) -> bool:
    """Tell whether the next command will have this UserId as well."""
    return _UNSTABLE.search(user_id) is None


def end_of(session: botocore.session.Session) -> datetime | None:
    """Return when the credentials end for good, in UTC; None where botocore renews them, or there are none.

    It renews a role's without asking, but never those that took an MFA code or came in the environment.
    """
    credentials = session.get_credentials()
    ends = getattr(credentials, "_expiry_time", None)  # botocore has no public name for it
    role = session.full_config["profiles"].get(session.profile or "default", {})
    final = getattr(credentials, "method", "") == "env" or "mfa_serial" in role
    return ends.astimezone(UTC) if final and isinstance(ends, datetime) else None


def _name_roles(session: botocore.session.Session) -> None:
    profiles = session.full_config["profiles"]
    roles = [profile for profile in profiles.values() if "role_arn" in profile]
    if "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ:  # a role without a profile, as in CI
        roles.append(profiles.setdefault(session.profile or "default", {}))
    for role in roles:
        role.setdefault("role_session_name", session_name())


def _keep_credentials(session: botocore.session.Session) -> None:
    chain = session.get_component("credential_provider")
    cache = _Cache(str(CACHE.expanduser()))
    for name in _CACHED:
        chain.get_provider(name).cache = cache
