"""What botocore raises, told as awsddp's errors: what failed, why, and what to type next.

Codes: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
"""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from botocore import exceptions
from botocore.parsers import ResponseParserError

from awsddp.errors import AwsddpError, CapacityError, CloudError, ConfigError

MOST_SKEW_S = 240

CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity",
        "InsufficientCapacity",
        "InsufficientCapacityOnOutpost",
        "UnfulfillableCapacity",
        "ReservationCapacityExceeded",
        "SpotMaxPriceTooLow",
    }
)
QUOTA = frozenset({"VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded"})
THROTTLED = frozenset(
    {
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
        "EC2ThrottledException",
    }
)
DENIED = frozenset(
    {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "Client.UnauthorizedOperation"}
)
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
UNKNOWN_KEYS = frozenset(
    {
        "AuthFailure",
        "InvalidClientTokenId",
        "UnrecognizedClientException",
        "SignatureDoesNotMatch",
        "InvalidSignatureException",
    }
)

_NEXT = {
    "OptInRequired": "enable the region, or accept the image's terms, in the AWS console",
    "PendingVerification": "AWS is verifying the account here: wait for its email, or use another --region",
    "Blocked": "the account is blocked: contact AWS support",
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": "have the role AWSServiceRoleForEC2Spot created",
    "InsufficientFreeAddressesInSubnet": "try fewer --nodes",
    "Unsupported": "try another --instance-type",
}


_KINDS = {
    code: kind
    for kind, codes in (
        ("quota", QUOTA),
        ("throttled", THROTTLED),
        ("permission", DENIED),
        ("credentials", EXPIRED | UNKNOWN_KEYS | {"NoCredentialsError", "PartialCredentialsError"}),
    )
    for code in codes
}


class Refused(CloudError):
    """AWS answered no. `code` is its error code, `operation` the call."""

    def __init__(
        self, message: str, why: str, next: str, *, code: str, operation: str, needs_login: bool = False
    ) -> None:
        super().__init__(message, why, next, kind="credentials" if needs_login else _KINDS.get(code, ""))
        self.code = code
        self.operation = operation
        self.needs_login = needs_login
        self.retryable = self.retryable or code in THROTTLED


class Unanswered(Refused):
    """No answer that tells whether it took effect: a timeout, a cut connection, a failure inside AWS."""

    kind = "unavailable"
    retryable = True


class OutOfCapacity(CapacityError):
    """AWS has no such machines there now. `code` is its error code."""

    def __init__(self, message: str, why: str, next: str, *, code: str) -> None:
        super().__init__(message, why, next)
        self.code = code


def translate(
    error: Exception, operation: str, *, where: str, is_local: bool = False, now: datetime | None = None
) -> AwsddpError:
    """Return the error of this product for one that botocore raised while it made the call `operation`.

    `where` is the region or the endpoint, for the message, `is_local` tells that it is the local cloud's;
    `now` is this machine's clock.
    """
    if isinstance(error, exceptions.ClientError):
        return _client_error(error, operation, where=where, now=now or datetime.now(UTC))
    return _local_error(error, operation, where=where, is_local=is_local)


def _client_error(error: exceptions.ClientError, operation: str, *, where: str, now: datetime) -> AwsddpError:
    reply: dict[str, Any] = dict(error.response)
    code = str(reply.get("Error", {}).get("Code", ""))
    text = str(reply.get("Error", {}).get("Message", "")) or code
    metadata = reply.get("ResponseMetadata", {})
    why = f"{code}: {text}"

    def refused(
        message: str,
        next: str,
        kind: type[Refused] = Refused,
        why: str = why,
        needs_login: bool = False,
    ) -> Refused:
        return kind(message, why, next, code=code, operation=operation, needs_login=needs_login)

    if code in CAPACITY:
        return OutOfCapacity(
            f"AWS has no capacity for this in {where} now",
            why,
            "try again later, or another --instance-type or --region",
            code=code,
        )
    if code in QUOTA:
        return refused(
            "the account's quota is too small for this",
            "awsddp doctor --request-quota   # asks AWS for more; or try fewer --nodes",
        )
    if code in EXPIRED | UNKNOWN_KEYS:
        skew = _skew_s(metadata, now)
        if abs(skew) > MOST_SKEW_S:
            side = "behind" if skew > 0 else "ahead of"
            return refused(
                "AWS refused the credentials because this machine's clock is wrong",
                "set the clock: sudo timedatectl set-ntp true",
                why=f"the clock is {abs(skew):.0f} s {side} AWS's ({why})",
            )
        if code in EXPIRED:
            return refused(
                "the AWS credentials have expired",
                "log in again: aws sso login, or new keys",
                needs_login=True,
            )
        return refused("AWS rejected the credentials", "check them: aws sts get-caller-identity")
    if code in DENIED:
        return refused(
            f"permission denied: {operation} in {where}",
            "ask for the permission, or use another --profile",
        )
    if code in THROTTLED:
        return refused(f"AWS throttles {operation} in {where}", "wait a minute and try again")
    if int(metadata.get("HTTPStatusCode", 0)) >= 500 or code in ("InternalError", "InternalFailure"):
        return refused(f"AWS failed at {operation} in {where}", "try again in a minute", kind=Unanswered)
    return refused(f"AWS refused {operation} in {where}", _NEXT.get(code, ""))


def _skew_s(metadata: dict[str, Any], now: datetime) -> float:
    """Return how many seconds AWS's clock, as its answer tells it, is ahead of this machine's."""
    date = metadata.get("HTTPHeaders", {}).get("date")
    try:
        return (parsedate_to_datetime(date) - now).total_seconds() if date else 0.0
    except (TypeError, ValueError):
        return 0.0


def _local_error(error: Exception, operation: str, *, where: str, is_local: bool) -> AwsddpError:
    who = "the local cloud" if is_local else "AWS"

    def unanswered(message: str, next: str) -> Unanswered:
        next = "awsddp local status   # whether it runs" if is_local else next
        return Unanswered(message, str(error), next, code=type(error).__name__, operation=operation)

    match error:
        case exceptions.NoCredentialsError() | exceptions.PartialCredentialsError():
            return Refused(
                "no AWS credentials found",
                str(error),
                "configure them: aws configure (or aws sso login); or try without AWS: awsddp --local up",
                code=type(error).__name__,
                operation=operation,
            )
        case exceptions.ProfileNotFound() | exceptions.ConfigParseError():
            return ConfigError("invalid AWS configuration", str(error), "see: aws configure list-profiles")
        case exceptions.NoRegionError() | exceptions.InvalidRegionError():
            return ConfigError(
                "no AWS region configured", str(error), "set one: awsddp --region us-east-1 ..."
            )
        case exceptions.TokenRetrievalError() | exceptions.SSOError() | exceptions.CredentialRetrievalError():
            return Refused(
                "could not load AWS credentials",
                str(error),
                "log in again: aws sso login",
                code=type(error).__name__,
                operation=operation,
                needs_login=True,
            )
        case exceptions.RefreshWithMFAUnsupportedError():
            return Refused(
                "the AWS credentials have expired, and a new MFA code is needed",
                str(error),
                "run the command again and enter the code",
                code=type(error).__name__,
                operation=operation,
                needs_login=True,
            )
        case exceptions.SSLError() | exceptions.ProxyConnectionError():
            return unanswered(f"could not reach {who} for {operation} in {where}", "check the proxy settings")
        case exceptions.EndpointConnectionError() | exceptions.ConnectTimeoutError():
            return unanswered(
                f"could not reach {who} for {operation} at {where}", "check the network, and try again"
            )
        case exceptions.HTTPClientError() | ResponseParserError():
            return unanswered(f"{who} did not answer {operation} at {where}", "try again in a minute")
    return Refused(
        f"invalid request: {operation}",
        str(error),
        "",
        code=type(error).__name__,
        operation=operation,
    )
