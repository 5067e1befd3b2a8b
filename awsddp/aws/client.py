"""The client for AWS: every call goes through `AwsClient.call`, with explicit timeouts and retries."""

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
    REGION_NOT_ENABLED_CODES,
    WITHOUT_AWS,
    AwsRefused,
    encoded_denial,
    none_if_refused,
    region_not_enabled,
    translate_error,
)
from awsddp.aws.login import credentials_end, login_command, session_of
from awsddp.aws.waits import CLOCK, growing_pauses
from awsddp.errors import AwsddpError, ConfigError, NoRegion
from awsddp.model.records import Target
from awsddp.state import make_folder, open_to_append
from awsddp.util.version import __version__

ATTEMPTS = 8
# The first call gets fewer attempts, because without a network eight attempts would take half a minute,
# without any output.
FIRST_ATTEMPTS = 3
# The Pricing API has endpoints in only a few regions; each endpoint has the prices of all regions:
# https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html
_PRICING_REGION = "us-east-1"
_REGION = re.compile(r"[a-z]{2,}(-[a-z]+)+-\d+")
OPEN_REGION = "us-east-1"
"""A region that is always enabled. Its API lists the regions that an account has to enable first."""
# The least-privilege policy depends on tags, and IAM may not see a new resource's tags at once. AWS does not
# document when IAM sees them:
# https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot.html#troubleshoot_general_eventual-consistency
_NEW_S = 15.0
_NEEDS_CAPACITY = ("RunInstances", "StartInstances")
_SECRET = ("UserData", "PublicKeyMaterial")
# botocore's default name for a role's session, which differs in each process
_UNSTABLE = re.compile(r":botocore-session-\d+$")
Reply = dict[str, Any]
"""The parameters of a boto3 call, or its reply."""


class Shape(msgspec.Struct, rename="pascal"):
    """A part of an AWS reply, with the fields that awsddp reads."""

    @classmethod
    def from_reply(cls, described: Reply) -> Self:
        """Return a reply converted to this type. Raises msgspec.ValidationError if a field is missing."""
        return msgspec.convert(described, cls, strict=False)


class Identity(Shape):
    """The credentials' AWS identity, as STS reports it. `user_id` is `${aws:userid}` in a policy."""

    user_id: str
    account: str
    arn: str


S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One completed call, for the audit trail.

    Secrets in `parameters` are redacted; `error` is an error code. `request_id` is the AWS request ID of the
    last of the `attempts`; `encoded` is the encoded message of a denial, which `aws sts
    decode-authorization-message` decodes.
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
    def may_change(self) -> bool:
        """True if the call may have changed something."""
        is_read = self.operation.startswith(("Describe", "Get", "List"))
        return not (is_read or self.parameters.get("DryRun", False))


class Trail:
    """The audit trail: appends each call to `calls.jsonl` in a folder, one line per call.

    Calls are buffered while the folder does not exist; a call that may have changed something creates the
    folder. As a result, nothing is written for a cluster that is never created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buffered: list[bytes] = []
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> None:
        """Append one call. Does nothing if the folder cannot be written."""
        with self._lock, contextlib.suppress(OSError):
            self._buffered.append(msgspec.json.encode(call, enc_hook=str) + b"\n")
            if call.may_change:
                make_folder(self._folder)
            elif not self._folder.is_dir():
                return
            with open_to_append(self._folder / "calls.jsonl") as stream:
                stream.write(b"".join(self._buffered))
            self._buffered.clear()


class AwsClient:
    """Makes the AWS calls for one target. It is thread-safe; boto clients are built when they are first used.

    `on_call` is called with every completed call, on the thread that made it. If another client is given as
    `login`, that client's credentials are used, so that the user enters an MFA code only once. `report_wait`
    is called with a text while a login program runs. Raises ConfigError if no region is configured, or if the
    region or the AWS configuration is invalid.
    """

    def __init__(
        self,
        target: Target,
        *,
        on_call: Callable[[Call], None] = lambda call: None,
        login: "AwsClient | None" = None,
        report_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._target = target
        self._report_wait = report_wait
        self._on_call = on_call
        self._clients: dict[tuple[str, int], Any] = {}
        self._login = login
        self._lock: threading.Lock = login._lock if login else threading.Lock()  # one thread per session
        self._identity_lock = threading.Lock()
        self._created: dict[str, float] = {}  # when each resource was created, by id or name
        self.region = self._region()
        self._where = target.endpoint or self.region

    def call(self, operation: str, parameters: Reply, *, service: str = "ec2") -> Reply:
        """Make one call and return its reply. Raises CloudError, CapacityError or ConfigError.

        A call that launches or starts instances is sent only once, since botocore would also retry it if AWS
        has no capacity (an HTTP 500). Every other call, including one with DryRun, is retried in botocore's
        standard mode. A denied call is also retried if it names a resource that this client created a few
        seconds ago, because IAM may not see the resource's tags yet.
        """
        for pause in growing_pauses(1.0, 4.0):
            try:
                return self._call(operation, parameters, service)
            except AwsRefused as refusal:
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
            self._created |= dict.fromkeys(created_ids(operation, parameters, reply), CLOCK.monotonic())
        except ClientError as error:
            reply = dict(error.response)
            code = str(reply.get("Error", {}).get("Code", ""))
            encoded = encoded_denial(error)
            if code in REGION_NOT_ENABLED_CODES and self._is_region_disabled():
                raise region_not_enabled(self.region, str(error)) from error
            raise self._translate(error, error.operation_name) from error
        except (BotoCoreError, ResponseParserError, OSError) as error:
            code = type(error).__name__
            translated = self._translate(error, operation)
            if ".amazonaws.com" in translated.why and self.region not in list_known_regions():
                # The endpoint was not reached because there is no such region.
                translated = self._unknown_region(self.region, translated.why)
            raise translated from error
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

    def _translate(self, error: Exception, operation: str) -> AwsddpError:
        is_local, login = self._target.name == "local", ""
        with contextlib.suppress(BotoCoreError):  # raised if the profile does not exist
            login = login_command(self._session, self._target)
        return translate_error(error, operation, location=self._where, is_local=is_local, login=login)

    def _is_new(self, parameters: Reply) -> bool:
        """Return True if a call names a resource that this client created a few seconds ago."""
        now = CLOCK.monotonic()
        return any(0 <= now - self._created.get(text, -_NEW_S) < _NEW_S for text in _strings(parameters))

    def _is_region_disabled(self) -> bool:
        """Return True if EC2 lists the region as not enabled for the account."""
        if self._target.endpoint or self.region == OPEN_REGION:
            return False
        open_region = AwsClient(replace(self._target, region=OPEN_REGION), login=self)
        request = {"AllRegions": True, "RegionNames": [self.region]}
        regions = none_if_refused(lambda: open_region.paginate("DescribeRegions", request))
        return any(region.get("OptInStatus") == "not-opted-in" for region in regions or ())

    def paginate(
        self, operation: str, parameters: Reply, key: str = "", *, service: str = "ec2"
    ) -> list[Reply]:
        """Repeat a call until its last page, and return the items that all pages have under `key`.

        The default `key` is the operation's name without "Describe": "Volumes" for DescribeVolumes.
        """
        items: list[Reply] = []
        page = parameters
        while True:
            reply = self.call(operation, page, service=service)
            items.extend(reply.get(key or operation.removeprefix("Describe"), []))
            if not (token := reply.get("NextToken")):
                return items
            page = {**parameters, "NextToken": token}

    def read(self, shape: type[S], operation: str, parameters: Reply, key: str = "") -> list[S]:
        """Make a paginated EC2 call and return its items as `shape`."""
        items = self.paginate(operation, parameters, key)
        return [msgspec.convert(described, shape, strict=False) for described in items]

    def identity(self) -> Identity:
        """Return the AWS caller identity; STS is called only once. Raises CloudError if AWS rejects the
        credentials.

        Raises ConfigError if each process would get a different UserId, because later commands could then not
        find the nodes.
        """
        if self._login is not None:
            return self._login.identity()
        with self._identity_lock:
            return self._identity

    def credentials_end(self) -> datetime | None:
        """Return the time (UTC) when the user has to log in again, or None if that is unknown or never."""
        return credentials_end(self._session)

    @cached_property
    def _identity(self) -> Identity:
        caller = Identity.from_reply(self.call("GetCallerIdentity", {}, service="sts"))
        if _UNSTABLE.search(caller.user_id):
            raise ConfigError(
                f"the role's session name is not stable: {caller.arn}",
                "awsddp finds its instances by this name, and the next login would have another name",
                "set role_session_name in the AWS profile, or AWS_ROLE_SESSION_NAME, and log in again",
            )
        return caller

    @cached_property
    def _session(self) -> botocore.session.Session:
        if self._login is not None:
            return self._login._session
        return session_of(self._target, report_wait=self._report_wait)

    def _region(self) -> str:
        try:
            region = self._target.region or self._session.get_config_variable("region")
        except BotoCoreError as error:
            raise translate_error(error, "", location="") from error
        if not region:
            raise NoRegion(
                "no AWS region configured",
                "neither --region, nor cluster.region, nor the AWS configuration names a region",
                f"set one: aws configure set region us-east-1   # or type --region us-east-1\n{WITHOUT_AWS}",
            )
        if not _REGION.fullmatch(region):
            raise self._unknown_region(region)
        return region

    def _unknown_region(self, region: str, why: str = "") -> ConfigError:
        import difflib

        variables = ("AWS_REGION", "AWS_DEFAULT_REGION")  # the error names the first one that is set
        named = next(filter(os.environ.get, variables), "region of the AWS profile")
        setting = "cluster.region" if self._target.region else named
        matches = difflib.get_close_matches(region.lower(), list_known_regions(), n=2)
        if region.lower() in matches:
            matches = [region.lower()]
        hint = "name a region such as us-east-1 or eu-central-1"
        if matches:
            hint = f"did you mean {' or '.join(matches)}?"
        return ConfigError(f"{setting}: unknown AWS region {region!r}", why, f"--region: {hint}")

    def _client(self, service: str, attempts: int) -> Any:
        # Prices are read in one attempt, because awsddp also ships a table of prices.
        attempts = {"sts": FIRST_ATTEMPTS, "pricing": 1}.get(service, attempts)
        with self._lock:
            if (service, attempts) not in self._clients:
                self._clients[service, attempts] = self._build(service, attempts)
            return self._clients[service, attempts]

    def _build(self, service: str, attempts: int) -> Any:
        is_loopback = urlsplit(self._target.endpoint or "").hostname in ("127.0.0.1", "::1", "localhost")
        config = Config(
            connect_timeout=5,
            read_timeout=30,
            retries={"mode": "standard", "total_max_attempts": attempts},
            user_agent_extra=f"awsddp/{__version__}",
            max_pool_connections=32,
            proxies={} if is_loopback else None,  # a proxy cannot connect back to this machine
        )
        return self._session.create_client(
            service,
            region_name=self.region if service != "pricing" else _PRICING_REGION,
            endpoint_url=self._target.endpoint,
            config=config,
        )


def created_ids(operation: str, parameters: Reply, reply: Reply) -> list[str]:
    """Return the ids or names of the resources that a call created, in the form that later calls use."""
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


def list_known_regions() -> list[str]:
    """Return every region in every partition that botocore lists, without a call."""
    session = botocore.session.get_session()
    partitions = session.get_available_partitions()
    return [name for partition in partitions for name in session.get_available_regions("ec2", partition)]


def list_known_types() -> list[str]:
    """Return the instance types that botocore lists, without a call."""
    model = botocore.session.get_session().get_service_model("ec2")
    return list(model.shape_for("InstanceType").metadata["enum"])


def _strings(part: object) -> Iterator[str]:
    """Yield every string in the parameters of a call."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, Mapping):
        yield from _strings(list(part.values()))
    elif isinstance(part, list | tuple):
        for item in part:
            yield from _strings(item)
