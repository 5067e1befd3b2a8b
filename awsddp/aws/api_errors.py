"""Translate botocore's errors into awsddp's errors, which say what failed, why, and what to do next.

Codes: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
"""

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from awsddp.errors import AwsddpError, CapacityError, CloudError, ConfigError

T = TypeVar("T")
MOST_SKEW_S = 240
WITHOUT_AWS = """\
awsddp plan --local   # without AWS: shows what would be launched, and the price on EC2
awsddp run --local   # without AWS: rehearses the job with nodes on this machine"""
"""Next steps for a user without AWS credentials."""


@dataclass(frozen=True)
class _Row:
    """The parts of awsddp's error for some AWS error codes (without the suffix Exception) or botocore
    exceptions.

    `message` may contain {operation}, {where} and {who}; `next` may contain {login}, the command to log in,
    and {sso}, the command to configure the login. `login` is True if the user has to log in.
    """

    kind: str = "aws"
    message: str = "AWS refused {operation} in {where}"
    next: str = ""
    login: bool = False


_SKEWED = _Row(
    "credentials",
    "AWS refused the credentials because this machine's clock is wrong",
    "set the clock: sudo timedatectl set-ntp true",
)
_ROWS = {
    (
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientCapacity",
        "InsufficientReservedInstanceCapacity",
        "UnfulfillableCapacity",
        "ReservationCapacityExceeded",
        "SpotMaxPriceTooLow",
    ): _Row(
        "capacity",
        "AWS has no capacity for this request in {where} now",
        "try again later, or another --instance-type or --region",
    ),
    ("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded"): _Row(
        "quota",
        "the account's quota is too small for this request",
        "awsddp doctor --request-quota   # asks AWS for more; or try fewer --nodes",
    ),
    ("ExpiredToken", "RequestExpired"): _Row(
        "credentials",
        "the AWS credentials have expired",
        "log in again: {login}",
        login=True,
    ),
    (
        "AuthFailure",
        "InvalidClientTokenId",
        "UnrecognizedClient",
        "SignatureDoesNotMatch",
        "InvalidSignature",
    ): _Row("credentials", "AWS rejected the credentials", "check them: aws sts get-caller-identity"),
    ("UnauthorizedOperation", "AccessDenied", "Client.UnauthorizedOperation"): _Row(
        "permission",
        "permission denied: {operation} in {where}",
        "ask an AWS administrator for the permission, or use another --profile",
    ),
    ("RequestLimitExceeded", "Throttling", "TooManyRequests", "EC2Throttled", "SlowDown"): _Row(
        "throttled", "AWS throttles {operation} in {where}", "wait a minute and try again"
    ),
    ("InternalError", "InternalFailure", "RequestTimeout"): _Row(
        "unavailable", "AWS failed at {operation} in {where}", "try again in a minute"
    ),
    ("RequestTimeTooSkewed",): _SKEWED,
    ("OptInRequired",): _Row(next="enable the region, or accept the image's terms, in the AWS console"),
    ("PendingVerification",): _Row(
        next="AWS is verifying the account in this region: wait for its email, or use another --region"
    ),
    ("Blocked",): _Row(next="the account is blocked: contact AWS support"),
    ("AuthFailure.ServiceLinkedRoleCreationNotPermitted",): _Row(
        next="have the role AWSServiceRoleForEC2Spot created"
    ),
    ("InsufficientFreeAddressesInSubnet",): _Row(next="try fewer --nodes"),
    ("Unsupported",): _Row(next="try another --instance-type"),
    ("ClientError",): _Row(),
    ("NoCredentialsError", "PartialCredentialsError"): _Row(
        "credentials",
        "no AWS credentials found",
        f"configure them: aws login, aws configure sso or aws configure\n{WITHOUT_AWS}",
    ),
    ("ProfileNotFound", "InvalidConfigError"): _Row(
        "config", "invalid AWS configuration", "see: aws configure list-profiles"
    ),
    ("ConfigParseError",): _Row(  # the AWS CLI cannot read the file either
        "config",
        "invalid AWS configuration",
        "correct that file: write [profile NAME], and KEY = VALUE below it",
    ),
    ("OSError",): _Row("config", "invalid AWS configuration", "see: aws configure list"),
    ("ProgramFailed",): _Row(
        "credentials", "credential_process returned no credentials", "{login}", login=True
    ),
    ("MissingDependencyException",): _Row(
        "config",
        "this AWS login needs a Python package that is not installed",
        f"{shlex.quote(sys.executable)} -m pip install 'botocore[crt]'",
    ),
    ("TokenRetrievalError", "SSOError", "LoginError", "CredentialRetrievalError"): _Row(
        "credentials", "could not load AWS credentials", "log in again: {login}", login=True
    ),
    ("LoginInsufficientPermissions",): _Row(
        "permission",
        "permission denied: CreateOAuth2Token",
        "ask an AWS administrator for the policy SignInLocalDevelopmentAccess, or use another --profile",
    ),
    ("RefreshWithMFAUnsupportedError",): _Row(
        "credentials",
        "the AWS credentials have expired, and a new MFA code is needed",
        "run the command again and enter the code",
        login=True,
    ),
    ("ConnectionError",): _Row(
        "unavailable",
        "could not reach {who} for {operation} at {where}",
        "check the network and the proxy settings, and try again",
    ),
    ("HTTPClientError", "ResponseParserError", "IncompleteReadError", "RetriesExceededError"): _Row(
        "unavailable", "{who} did not answer {operation} at {where}", "try again in a minute"
    ),
    ("Exception",): _Row(message="invalid request: {operation}"),
}
_LIMIT = _Row(
    "quota",
    "a quota of the account is used up: {operation} in {where}",
    "aws service-quotas list-service-quotas --service-code ec2   # request more, or delete unused resources",
)
# An error in a call that gets credentials is about the login, not about the call that needs the credentials.
_NO_ROLE = _Row(
    "credentials",
    "this login no longer has the role that the AWS profile names",
    "choose another account or role: {sso}",
    login=True,
)
_OF_LOGIN = {
    ("GetRoleCredentials", "ForbiddenException"): _NO_ROLE,
    ("GetRoleCredentials", "ResourceNotFoundException"): _NO_ROLE,
    ("CreateOAuth2Token", "ValidationException"): _Row(
        "credentials", "could not load AWS credentials", "log in again: {login}", login=True
    ),
}
_BY_CODE = {code: row for codes, row in _ROWS.items() for code in codes}


REGION_NOT_ENABLED_CODES = ("AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException")
"""The error codes for a region that the account has not enabled. AWS returns the same codes for invalid
credentials.

https://docs.aws.amazon.com/general/latest/gr/rande-manage.html
"""
_ENCODED = re.compile(r"\s*Encoded authorization failure message: *(\S*)")


class AwsRefused(CloudError):
    """AWS returned an error or no response. If the kind is `unavailable`, the call may have taken effect.

    `code` is AWS's error code, or the name of botocore's exception.
    """

    def __init__(
        self, message: str, why: str, next_step: str, *, code: str, kind: str = "", needs_login: bool = False
    ) -> None:
        super().__init__(message, why, next_step, kind=kind)
        self.code = code
        self.needs_login = needs_login
        self.retryable = kind in ("throttled", "unavailable")


def none_if_refused(
    act: Callable[[], T], expected: Callable[[AwsRefused], bool] = lambda refusal: True
) -> T | None:
    """Return the result of `act`, or None if it raises an AwsRefused that is `expected` (default: any).

    Any other AwsRefused is raised.
    """
    try:
        return act()
    except AwsRefused as refusal:
        if expected(refusal):
            return None
        raise


def region_not_enabled(region: str, why: str) -> AwsRefused:
    """Return the error for a region that the account has not enabled."""
    return AwsRefused(
        f"region {region} is not enabled for this account",
        why,
        f"aws account enable-region --region-name {region}   # takes minutes to hours; or another --region",
        code="OptInRequired",
        kind="aws",
    )


def encoded_denial(error: ClientError) -> str | None:
    """Return the encoded authorization failure message in a denial, or None."""
    match = _ENCODED.search(str(error.response.get("Error", {}).get("Message", "")))
    return match[1] if match else None


def translate_error(
    error: Exception,
    operation: str,
    *,
    location: str,
    is_local: bool = False,
    login: str = "",
    now: datetime | None = None,
) -> AwsddpError:
    """Return awsddp's error for an error that botocore raised in the call `operation`.

    `location` is the region or the endpoint that the message names; `is_local` is True for the local cloud.
    `login` is the command to log in again, and `now` is the time by this machine's clock.
    """
    if isinstance(error, ClientError):
        row, code, why = _row_of_reply(operation, dict(error.response), now or datetime.now(UTC))
    else:
        names = [kind.__name__ for kind in type(error).__mro__]
        row, code, why = next(_BY_CODE[name] for name in names if name in _BY_CODE), names[0], str(error)
    who = "the local cloud" if is_local else "AWS"
    message = row.message.format(operation=operation, where=location, who=who)
    login = login or "aws login or aws sso login"
    advice = row.next.format(login=login, sso=login.replace("sso login", "configure sso"))
    if row.kind == "capacity":
        return CapacityError(message, why, advice)
    if row.kind == "config":
        return ConfigError(message, why, advice)
    if is_local and row.kind == "unavailable":
        advice = "awsddp local status   # shows whether the local cloud runs"
    return AwsRefused(message, why, advice, code=code, kind=row.kind, needs_login=row.login)


def _row_of_reply(operation: str, reply: dict[str, Any], now: datetime) -> tuple[_Row, str, str]:
    """Return an error reply's row, code and text. The text does not contain the encoded message."""
    code = str(reply.get("Error", {}).get("Code", ""))
    why = _ENCODED.sub("", f"{code}: {reply.get('Error', {}).get('Message', '') or code}")
    metadata = reply.get("ResponseMetadata", {})
    failed = int(metadata.get("HTTPStatusCode", 0)) >= 500
    default = (
        _LIMIT if code.endswith("LimitExceeded") else _BY_CODE["InternalError" if failed else "ClientError"]
    )
    row = _OF_LOGIN.get((operation, code)) or _BY_CODE.get(code.removesuffix("Exception"), default)
    skew = clock_skew_s(metadata, now) or 0.0
    if row.kind == "credentials" and abs(skew) > MOST_SKEW_S:
        side = "behind" if skew > 0 else "ahead of"
        row, why = _SKEWED, f"the clock is {abs(skew):.0f} s {side} AWS's ({why})"
    return row, code, why


def clock_skew_s(metadata: dict[str, Any], now: datetime) -> float | None:
    """Return how many seconds AWS's clock is ahead of this machine's, or None if the reply has no date."""
    try:
        return (parsedate_to_datetime(metadata["HTTPHeaders"]["date"]) - now).total_seconds()
    except (KeyError, TypeError, ValueError):
        return None
