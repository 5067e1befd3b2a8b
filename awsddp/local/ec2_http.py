"""Requests to the endpoint: parsing, signature check, responses and error responses in EC2's format."""

from __future__ import annotations

import json
import math
import re
import time
import uuid
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl

from botocore.utils import parse_timestamp
from moto.core.exceptions import AuthFailureError, ServiceException, SignatureDoesNotMatchError
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.core.parse import EC2QueryParser, QueryParser
from moto.core.serialize import XFormedAttributePicker, get_serializer_class
from moto.core.utils import get_service_model, utcnow
from moto.ec2.responses._base_response import EC2BaseResponse
from moto.ec2.utils import generic_filter
from moto.iam.access_control import IAMRequest, IAMRequestBase
from moto.sts.models import sts_backends
from werkzeug.datastructures import EnvironHeaders
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

SCOPE = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d{8}/([^/]+)/([^/]+)/aws4_request,\s*"
    r"SignedHeaders=([^,]+),\s*Signature=([0-9a-f]{64})"
)

# botocore warns about the local cloud's error codes, which are in no service model.
warnings.filterwarnings("ignore", message="Exception.* does not match an error shape")

JSON = "application/x-amz-json-1.1"
SIGNED_FOR_S = 900  # how far a signature's time can differ from now


class Refusal(ServiceException):
    """An error response as EC2 sends it, with its code, message and HTTP status."""

    def __init__(self, code: str, message: str, *, status: str = "400 Bad Request") -> None:
        super().__init__(code, message)
        self.status = status


@dataclass(frozen=True)
class Request:
    """One API call. `parameters` are the unparsed parameters that the client sent in a GET query, a POST form
    or JSON."""

    service: str
    region: str
    action: str
    parameters: dict[str, Any]
    body: bytes
    environ: dict[str, Any] = field(repr=False)

    @property
    def is_mutating(self) -> bool:
        """Return True if the call changes something."""
        return not self.action.startswith(("Describe", "Get", "List", "Simulate"))

    @property
    def is_dry_run(self) -> bool:
        """Return True if the call only checks whether it is permitted."""
        return str(self.parameters.get("DryRun")).lower() == "true"

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The parsed parameters, named as in boto3, with numbers and lists in place of strings.

        :raises Refusal: a parameter is invalid.
        """
        if "HTTP_X_AMZ_TARGET" in self.environ:
            return self.parameters
        try:
            operation = get_service_model(self.service).operation_model(self.action)
            parser: Any = EC2QueryParser if self.service == "ec2" else QueryParser
            parse = parser(operation, timestamp_parser=parse_timestamp).parse
            return dict(parse({"values": self.parameters}))
        except (ValueError, TypeError) as error:
            raise Refusal("InvalidParameterValue", f"Invalid value: {error}") from None

    def tags(self, kind: str) -> dict[str, str]:
        """Return the tags that the call sets on new resources of one kind."""
        specs = [spec for spec in self.arguments.get("TagSpecifications", ()) if spec["ResourceType"] == kind]
        return {tag["Key"]: tag.get("Value", "") for spec in specs for tag in spec.get("Tags", ())}

    def select(self, resources: list[Any]) -> list[Any]:
        """Return moto's resources that match the call's filters."""
        filters = self.arguments.get("Filters", ())
        return generic_filter({row["Name"]: row.get("Values", []) for row in filters}, resources)


def get_records(backend: Any, name: str) -> dict[str, Any]:
    """Return a region's records of the kind `name`, by id. moto does not have these records, but they are
    saved with the region's back end."""
    records: dict[str, Any] = backend.__dict__.setdefault(name, {})
    return records


def read_request(environ: dict[str, Any]) -> Request:
    """Parse a request and read its body.

    :raises Refusal: the request is not signed, or is not an API call.
    """
    length = int(environ.get("CONTENT_LENGTH") or 0)
    body = environ["wsgi.input"].read(length) if length else b""
    match = SCOPE.fullmatch(environ.get("HTTP_AUTHORIZATION", ""))
    if match is None:
        raise Refusal(
            "MissingAuthenticationToken",
            "Request is missing Authentication Token",
            status="403 Forbidden",
        )
    _, region, service, _, _ = match.groups()
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    text = environ.get("QUERY_STRING") or body.decode("utf-8", "replace")
    parameters = json.loads(text or "{}") if target else dict(parse_qsl(text, keep_blank_values=True))
    action = target.rpartition(".")[2] or parameters.get("Action", "")
    return Request(service, region, action, parameters, body, environ)


def check_signature(request: Request) -> None:
    """Check that a request is signed with the credentials, because any user on the machine can connect to the
    endpoint.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html

    :raises Refusal: the key is unknown, or the signature is wrong or expired.
    """
    environ, age_s = request.environ, signature_age_s(request.environ)
    if age_s > SIGNED_FOR_S and request.service == "ec2":
        raise Refusal("RequestExpired", "Request has expired.")
    url = f"http://local{environ.get('PATH_INFO') or '/'}?{environ.get('QUERY_STRING', '')}"
    try:
        if abs(age_s) > SIGNED_FOR_S:
            raise AuthFailureError if request.service == "ec2" else SignatureDoesNotMatchError
        find_signer(environ, IAMRequest, url=url, body=request.body, action=request.action)
    except HTTPException as error:
        moto_error: Any = error
        raise Refusal(moto_error.error_type, moto_error.message, status=str(moto_error.code)) from None


def signature_age_s(environ: Mapping[str, Any]) -> float:
    """Return how many seconds ago a request was signed, or minus infinity if it has no date."""
    with suppress(ValueError):
        signed_at = datetime.strptime(environ.get("HTTP_X_AMZ_DATE", ""), "%Y%m%dT%H%M%S%z")
        return time.time() - signed_at.timestamp()
    return -math.inf


def find_signer(
    environ: dict[str, Any], kind: type[IAMRequestBase], *, url: str, body: bytes = b"", action: str = ""
) -> Any:
    """Return moto's record of the access key that signed a request.

    :param kind: moto's class for requests to this service.
    :raises Exception: that class's error for an unknown key or a wrong signature.
    """
    sts = sts_backends[DEFAULT_ACCOUNT_ID]["aws"]
    sts.assumed_roles = [role for role in sts.assumed_roles if role.expiration > utcnow()]
    headers: Any = EnvironHeaders(environ)
    method = environ["REQUEST_METHOD"]
    signed: Any = kind(DEFAULT_ACCOUNT_ID, method, url, dict[str, str](), body, headers, action)
    signed.check_signature()
    return signed._access_key


def unsupported_error(feature: str, *, service: str = "ec2") -> Refusal:
    """Return the error for a feature of `service` that the local cloud does not have."""
    if service != "ec2":
        message = f"The local cloud does not carry out {service}:{feature}."
        return Refusal("UnknownOperationException", message)
    return Refusal("UnsupportedOperation", f"The local cloud does not carry out {feature}.")


def invalid_value_error(value: object, name: str, why: str) -> Refusal:
    """Return the error for an invalid value of a parameter."""
    text = f"Value ({str(value)[:300]}) for parameter {name} is invalid. {why}"
    return Refusal("InvalidParameterValue", text)


def dry_run_error() -> Refusal:
    """Return EC2's response to a DryRun call that would otherwise have succeeded."""
    text = "Request would have succeeded, but DryRun flag is set."
    return Refusal("DryRunOperation", text, status="412 Precondition Failed")


def internal_error(message: str) -> Refusal:
    """Return the error for a failure inside EC2."""
    return Refusal("InternalError", message, status="500 Internal Server Error")


def make_response(request: Request, result: object) -> Response:
    """Return the JSON or XML response for a result. The result is a dict as in boto3, or moto's resources."""
    if request.service not in ("ec2", "iam"):
        return Response(json.dumps(result), content_type=JSON)
    return _as_xml(request.service, request.action, result)


def finish_response(response: Response) -> Response:
    """Make moto's XML like EC2's: add a trailing slash to the namespace, and set a new request id."""
    body = re.sub(rb'(xmlns="http://ec2\.amazonaws\.com/doc/[0-9-]+)"', rb'\1/"', response.data, count=1)
    request_id = str(uuid.uuid4()).encode()
    response.data = re.sub(rb"(<[rR]equestI[dD]>)[^<]*", rb"\g<1>" + request_id, body, count=1)
    return response


def make_error_response(refusal: ServiceException, *, service: str, target: bool) -> Response:
    """Return the error response in the service's format: JSON if `target` is True, or else the XML of EC2 or
    STS."""
    status = getattr(refusal, "status", "400 Bad Request")
    if target:
        body = json.dumps({"__type": refusal.code, "message": refusal.message})
        return Response(body, status, {"x-amzn-ErrorType": refusal.code}, content_type=JSON)
    operation = ("ec2", "RunInstances") if service in ("ec2", "") else ("sts", "GetCallerIdentity")
    return _as_xml(*operation, refusal, status=status)


def _as_xml(service: str, action: str, result: object, *, status: str = "200 OK") -> Response:
    """Return a result, or a refusal, in an operation's XML format."""
    operation: Any = get_service_model(service).operation_model(action)
    serializer = get_serializer_class(service, operation.service_model.protocol)
    picker = XFormedAttributePicker(response_transformers=EC2BaseResponse.RESPONSE_KEY_PATH_TO_TRANSFORMER)
    serialized = serializer(operation_model=operation, value_picker=picker).serialize(result)
    return Response(str(serialized["body"]), status, serialized["headers"])
