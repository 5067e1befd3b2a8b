"""The one gateway to AWS: every call goes through `Aws.call`, with explicit time limits and retries."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import botocore.session
import msgspec
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from awsddp.aws.api_errors import (
    CLOSED,
    WITHOUT_AWS,
    Refused,
    closed,
    encoded_denial,
    translate,
    unless_refused,
)
from awsddp.aws.login import credentials_end, login_command, session_of
from awsddp.aws.waits import CLOCK, growing
from awsddp.errors import AwsddpError, ConfigError, NoRegion
from awsddp.model.records import Target
from awsddp.state import make_folder, open_to_append
from awsddp.util.version import __version__

ATTEMPTS = 8
# The first contact fails fast: with no network eight attempts would be half a minute of silence.
FIRST_ATTEMPTS = 3
# The Pricing API answers in a few regions only, for the prices of all:
# https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html
_PRICING_REGION = "us-east-1"
_REGION = re.compile(r"[a-z]{2,}(-[a-z]+)+-\d+")
OPEN_REGION = "us-east-1"
"""A region of every account: it tells of those that an account has to enable first."""
# How long IAM may not see the tags of what was just made, which the least policy decides by: no source says,
# https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot.html#troubleshoot_general_eventual-consistency
_NEW_S = 15.0
_NEEDS_CAPACITY = ("RunInstances", "StartInstances")
_SECRET = ("UserData", "PublicKeyMaterial")
# botocore's name for the session of a role, another one in each process.
_UNSTABLE = re.compile(r":botocore-session-\d+$")
Reply = dict[str, Any]
"""What boto3 takes as the parameters of a call, and what it answers."""


class Shape(msgspec.Struct, rename="pascal"):
    """What AWS describes, with those of its fields that are read."""

    @classmethod
    def of(cls, described: Reply) -> Self:
        """Return it by attributes. Raises msgspec.ValidationError where AWS left out what it always tells."""
        return msgspec.convert(described, cls, strict=False)


class Identity(Shape):
    """The caller, from STS. `user_id` is what `${aws:userid}` is in a policy."""

    user_id: str
    account: str
    arn: str


S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call that was made, for the audit trail. Secrets in `parameters` are redacted; `error` is a code.

    `request_id` is AWS's, of the last of the `attempts`; `encoded` is AWS's message of a denial, which
    `aws sts decode-authorization-message` explains.
    """

    service: str
    operation: str
    region: str
    parameters: Reply = field(repr=False)
    request_id: str | None
    error: str | None
    at: datetime
    seconds: float
    attempts: int = 1
    encoded: str | None = None

    @property
    def changes(self) -> bool:
        """Whether it may have changed something."""
        asks = self.operation.startswith(("Describe", "Get", "List"))
        return not (asks or self.parameters.get("DryRun", False))


class Trail:
    """The audit trail: hears of calls and writes them down in a folder, a line each; secrets were redacted.

    What is asked before a cluster has its folder is kept, and written once there is one; a call that may have
    changed something makes it. Of a cluster that never comes to be nothing is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> None:
        """Write one call down: when, how long, what, with which parameters, AWS's request id, its error."""
        with self._lock, contextlib.suppress(OSError):  # a folder that cannot be written holds no call up
            self._waiting.append(msgspec.json.encode(call, enc_hook=str) + b"\n")
            if call.changes:
                make_folder(self._folder)
            elif not self._folder.is_dir():
                return
            with open_to_append(self._folder / "calls.jsonl") as stream:
                stream.write(b"".join(self._waiting))
            self._waiting.clear()


class Aws:
    """The calls of one target. Thread-safe; clients are built when they are first used.

    `on_call` hears of every call that was made, on the thread that made it. With `login` the credentials of
    another gateway are used, so that MFA is asked for once. `say` hears of a wait for a program that logs in.
    Raises ConfigError where there is no region, its name is none, or the AWS configuration is invalid.
    """

    def __init__(
        self,
        target: Target,
        *,
        on_call: Callable[[Call], None] = lambda call: None,
        login: "Aws | None" = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._target = target
        self._say = say
        self._on_call = on_call
        self._clients: dict[tuple[str, int], Any] = {}
        self._login = login
        self._lock: threading.Lock = login._lock if login else threading.Lock()  # a session has one user
        self._asking = threading.Lock()
        self._made: dict[str, float] = {}  # when this gateway made what, by id or name
        self.region = self._region()
        self._where = target.endpoint or self.region

    def call(self, operation: str, parameters: Reply, *, service: str = "ec2") -> Reply:
        """Make one call and return its answer. Raises CloudError, CapacityError or ConfigError.

        A launch or a start is sent once, as botocore takes a lack of capacity for a failure to be repeated
        (it is an HTTP 500); every other call, one with DryRun too, is repeated as botocore's standard mode
        does. A call that is denied is repeated while it names what was made within seconds: IAM may not see
        its tags yet.
        """
        for pause in growing(1.0, 4.0):
            try:
                return self._call(operation, parameters, service)
            except Refused as refusal:
                if refusal.code != "UnauthorizedOperation" or not self._is_new(parameters):
                    raise
            CLOCK.sleep(pause)
        raise AssertionError("growing() never ends")

    def _call(self, operation: str, parameters: Reply, service: str) -> Reply:
        at, started = datetime.now(UTC), time.monotonic()
        reply: Reply = {}
        code: str | None = None
        encoded: str | None = None
        try:
            is_sent_once = operation in _NEEDS_CAPACITY and not parameters.get("DryRun")
            client = self._client(service, 1 if is_sent_once else ATTEMPTS)
            reply = getattr(client, xform_name(operation))(**parameters)
            made = made_by(operation, parameters, reply)
            self._made |= dict.fromkeys(made, CLOCK.monotonic())
        except ClientError as error:
            reply = dict(error.response)
            code = str(reply.get("Error", {}).get("Code", ""))
            encoded = encoded_denial(error)
            if code in CLOSED and self._is_closed():
                raise closed(self.region, str(error)) from error
            raise self._translated(error, error.operation_name) from error
        except (BotoCoreError, ResponseParserError, OSError) as error:
            code = type(error).__name__
            told = self._translated(error, operation)
            if ".amazonaws.com" in told.why and self.region not in known_regions():
                told = self._no_region(self.region, told.why)  # that is why AWS was not reached there
            raise told from error
        finally:
            metadata = reply.get("ResponseMetadata", {})
            self._on_call(
                Call(
                    service=service,
                    operation=operation,
                    region=self.region,
                    parameters={k: "[REDACTED]" if k in _SECRET else v for k, v in parameters.items()},
                    request_id=metadata.get("RequestId"),
                    error=code,
                    at=at,
                    seconds=time.monotonic() - started,
                    attempts=1 + metadata.get("RetryAttempts", 0),
                    encoded=encoded,
                )
            )
        return reply

    def _translated(self, error: Exception, operation: str) -> AwsddpError:
        is_local, login = self._target.name == "local", ""
        with contextlib.suppress(BotoCoreError):  # of a profile that is not there
            login = login_command(self._session, self._target)
        return translate(error, operation, where=self._where, is_local=is_local, login=login)

    def _is_new(self, parameters: Reply) -> bool:
        """Whether a call names what this gateway made within seconds."""
        now = CLOCK.monotonic()
        return any(0 <= now - self._made.get(text, -_NEW_S) < _NEW_S for text in _texts(parameters))

    def _is_closed(self) -> bool:
        """Whether the account has not enabled the region, as far as EC2 says."""
        if self._target.endpoint or self.region == OPEN_REGION:
            return False
        there = Aws(replace(self._target, region=OPEN_REGION), login=self)
        asked = {"AllRegions": True, "RegionNames": [self.region]}
        regions = unless_refused(lambda: there.pages("DescribeRegions", asked))
        return any(one.get("OptInStatus") == "not-opted-in" for one in regions or ())

    def pages(self, operation: str, parameters: Reply, key: str = "", *, service: str = "ec2") -> list[Reply]:
        """Make a call until its last page and return what all pages hold under `key`.

        Without it that is the operation's own name: "Volumes" of DescribeVolumes.
        """
        found: list[Reply] = []
        page = parameters
        while True:
            reply = self.call(operation, page, service=service)
            found.extend(reply.get(key or operation.removeprefix("Describe"), []))
            if not (token := reply.get("NextToken")):
                return found
            page = {**parameters, "NextToken": token}

    def read(self, shape: type[S], operation: str, parameters: Reply, key: str = "") -> list[S]:
        """Make a call of EC2 as `pages` does and return what it describes."""
        found = self.pages(operation, parameters, key)
        return [msgspec.convert(described, shape, strict=False) for described in found]

    def identity(self) -> Identity:
        """Return who is calling; asked once. Raises CloudError where AWS does not know the credentials.

        Raises ConfigError for a UserId that the next command would not have, which nothing can be found by.
        """
        if self._login is not None:
            return self._login.identity()
        with self._asking:
            return self._identity

    def credentials_end(self) -> datetime | None:
        """Return when a person has to log in again, in UTC; None where that is never, or not known."""
        return credentials_end(self._session)

    @cached_property
    def _identity(self) -> Identity:
        caller = Identity.of(self.call("GetCallerIdentity", {}, service="sts"))
        if _UNSTABLE.search(caller.user_id):
            raise ConfigError(
                f"the role's session name is not stable: {caller.arn}",
                "awsddp finds its instances by this name, and the next login would have another",
                "set role_session_name in the AWS profile, or AWS_ROLE_SESSION_NAME, and log in again",
            )
        return caller

    @cached_property
    def _session(self) -> botocore.session.Session:
        if self._login is not None:
            return self._login._session
        return session_of(self._target, say=self._say)

    def _region(self) -> str:
        try:
            region = self._target.region or self._session.get_config_variable("region")
        except BotoCoreError as error:
            raise translate(error, "", where="") from error
        if not region:
            raise NoRegion(
                "no AWS region configured",
                "neither --region, nor cluster.region, nor the AWS configuration names one",
                f"set one: aws configure set region us-east-1   # or type --region us-east-1\n{WITHOUT_AWS}",
            )
        if not _REGION.fullmatch(region):
            raise self._no_region(region)
        return region

    def _no_region(self, region: str, why: str = "") -> ConfigError:
        import difflib

        variables = ("AWS_REGION", "AWS_DEFAULT_REGION")  # in the order in which they count
        named = next(filter(os.environ.get, variables), "region of the AWS profile")
        setting = "cluster.region" if self._target.region else named
        near = difflib.get_close_matches(region.lower(), known_regions(), n=2)
        if region.lower() in near:
            near = [region.lower()]
        hint = f"did you mean {' or '.join(near)}?" if near else "name one such as us-east-1 or eu-central-1"
        return ConfigError(f"{setting}: unknown AWS region {region!r}", why, f"--region: {hint}")

    def _client(self, service: str, attempts: int) -> Any:
        attempts = {"sts": FIRST_ATTEMPTS, "pricing": 1}.get(service, attempts)  # of prices there is a table
        with self._lock:
            if (service, attempts) not in self._clients:
                self._clients[service, attempts] = self._build(service, attempts)
            return self._clients[service, attempts]

    def _build(self, service: str, attempts: int) -> Any:
        here = urlsplit(self._target.endpoint or "").hostname in ("127.0.0.1", "::1", "localhost")
        config = Config(
            connect_timeout=5,
            read_timeout=30,
            retries={"mode": "standard", "total_max_attempts": attempts},
            user_agent_extra=f"awsddp/{__version__}",
            max_pool_connections=32,
            proxies={} if here else None,  # no proxy leads back to this machine
        )
        return self._session.create_client(
            service,
            region_name=self.region if service != "pricing" else _PRICING_REGION,
            endpoint_url=self._target.endpoint,
            config=config,
        )


def made_by(operation: str, parameters: Reply, reply: Reply) -> list[str]:
    """Return the ids or names, as later calls have them, of what a call made."""
    match operation:
        case "CreateSecurityGroup":
            return [reply["GroupId"]] if "GroupId" in reply else []
        case "ImportKeyPair":
            return [parameters["KeyName"]]
        case "CreatePlacementGroup":
            return [parameters["GroupName"]]
        case "RunInstances":
            return [instance["InstanceId"] for instance in reply.get("Instances", ())]
    return []


def known_regions() -> list[str]:
    """Return the regions that this botocore knows, of all partitions; AWS is not asked."""
    session = botocore.session.get_session()
    partitions = session.get_available_partitions()
    return [name for one in partitions for name in session.get_available_regions("ec2", one)]


def known_types() -> list[str]:
    """Return the instance types that this botocore knows; AWS is not asked."""
    model = botocore.session.get_session().get_service_model("ec2")
    return list(model.shape_for("InstanceType").metadata["enum"])


def _texts(part: object) -> Iterator[str]:
    """Yield every text of the parameters of a call."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, Mapping):
        yield from _texts(list(part.values()))
    elif isinstance(part, list | tuple):
        for item in part:
            yield from _texts(item)
