"""The one gateway to AWS: every call goes through `Aws.call`, with explicit time limits and retries."""

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import botocore.session
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from awsddp import __version__
from awsddp.aws.credentials import end_of, is_stable, session_of
from awsddp.aws.refusals import translate
from awsddp.errors import AwsddpError, ConfigError
from awsddp.records import Target

ATTEMPTS = 8
# The first contact fails fast: with no network eight attempts would be half a minute of silence.
FIRST_ATTEMPTS = 3
# The Pricing API answers in a few regions only, for the prices of all:
# https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html
_PRICING_REGION = "us-east-1"
_REGION = re.compile(r"[a-z]{2,}(-[a-z]+)+-\d+")
_SECRET = ("UserData", "PublicKeyMaterial")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The caller, from STS. `user_id` is what `${aws:userid}` is in a policy."""

    user_id: str
    account: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call that was made, for the audit trail. Secrets in `parameters` are redacted; `error` is a code.

    `request_id` is AWS's, of the last of the `attempts`.
    """

    service: str
    operation: str
    region: str
    parameters: dict[str, Any] = field(repr=False)
    request_id: str | None
    error: str | None
    at: datetime
    seconds: float
    attempts: int = 1

    @property
    def changes(self) -> bool:
        """Whether it may have changed something."""
        asks = self.operation.startswith(("Describe", "Get", "List"))
        return not (asks or self.parameters.get("DryRun", False))


class Aws:
    """The calls of one target. Thread-safe; clients are built when they are first used.

    `on_call` hears of every call that was made, on the thread that made it. With `login` the credentials of
    another gateway are used, so that MFA is asked for once. Raises ConfigError where there is no region or
    its name is none.
    """

    def __init__(
        self,
        target: Target,
        *,
        on_call: Callable[[Call], None] = lambda call: None,
        login: "Aws | None" = None,
    ) -> None:
        self._target = target
        self._on_call = on_call
        self._clients: dict[tuple[str, int], Any] = {}
        self._login = login
        self._lock: threading.Lock = login._lock if login else threading.Lock()  # a session has one user
        self._asking = threading.Lock()
        self.region = self._region()
        self._where = target.endpoint or self.region

    def call(self, operation: str, parameters: dict[str, Any], *, service: str = "ec2") -> dict[str, Any]:
        """Make one call and return its answer. Raises CloudError, CapacityError or ConfigError.

        A launch is sent once, as botocore takes a lack of capacity for a failure to be repeated (it is an
        HTTP 500); every other call, one with DryRun too, is repeated as botocore's standard mode does.
        """
        at, started = datetime.now(UTC), time.monotonic()
        reply: dict[str, Any] = {}
        code: str | None = None
        try:
            launches = operation == "RunInstances" and not parameters.get("DryRun")
            client = self._client(service, 1 if launches else ATTEMPTS)
            reply = getattr(client, xform_name(operation))(**parameters)
        except ClientError as error:
            reply = dict(error.response)
            code = str(reply.get("Error", {}).get("Code", ""))
            raise translate(error, operation, where=self._where) from error
        except (BotoCoreError, ResponseParserError) as error:
            code = type(error).__name__
            raise self._of_region(
                translate(error, operation, where=self._where, is_local=self._target.name == "local")
            ) from error
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
                )
            )
        return reply

    def pages(
        self, operation: str, parameters: dict[str, Any], key: str = "", *, service: str = "ec2"
    ) -> list[dict[str, Any]]:
        """Make a call until its last page and return what all pages hold under `key`.

        Without it that is the operation's own name: "Volumes" of DescribeVolumes.
        """
        found: list[dict[str, Any]] = []
        page = parameters
        while True:
            reply = self.call(operation, page, service=service)
            found.extend(reply.get(key or operation.removeprefix("Describe"), []))
            if not (token := reply.get("NextToken")):
                return found
            page = {**parameters, "NextToken": token}

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
        return end_of(self._session)

    @cached_property
    def _identity(self) -> Identity:
        reply = self.call("GetCallerIdentity", {}, service="sts")
        if not is_stable(reply["UserId"]):
            raise ConfigError(
                f"the role's session name is not stable: {reply['Arn']}",
                "awsddp finds its instances by this name, and the next login would have another",
                "set role_session_name in the AWS profile, or AWS_ROLE_SESSION_NAME, and log in again",
            )
        return Identity(user_id=reply["UserId"], account=reply["Account"])

    @cached_property
    def _session(self) -> botocore.session.Session:
        return self._login._session if self._login is not None else session_of(self._target)

    def _region(self) -> str:
        try:
            region = (
                self._target.region
                or os.environ.get("AWS_REGION")
                or self._session.get_config_variable("region")
            )
        except BotoCoreError as error:
            raise translate(error, "", where="") from error
        if not region:
            raise ConfigError(
                "no AWS region configured",
                "neither --region, nor cluster.region, nor the AWS configuration names one",
                "set one: awsddp --region us-east-1 ...\nor try without AWS: awsddp run --local",
            )
        if not _REGION.fullmatch(region):
            raise self._no_region(region)
        return region

    def _of_region(self, error: AwsddpError) -> AwsddpError:
        """Return the error of a call; a region that nobody knows is why AWS was not reached there."""
        if ".amazonaws.com" in error.why and self.region not in self._regions():
            return self._no_region(self.region, error.why)
        return error

    def _no_region(self, region: str, why: str = "") -> ConfigError:
        import difflib

        near = difflib.get_close_matches(region, self._regions(), n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else "name one such as us-east-1 or eu-central-1"
        return ConfigError(f"cluster.region: unknown AWS region {region!r}", why, f"--region: {hint}")

    def _regions(self) -> list[str]:
        """Return the regions that this botocore knows, of all partitions."""
        partitions = self._session.get_available_partitions()
        return [name for one in partitions for name in self._session.get_available_regions("ec2", one)]

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
