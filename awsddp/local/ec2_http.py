"""Requests to the endpoint: parsing, signature check, replies and error replies in EC2's format."""

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

# Codes of ours are in no model of a service.
warnings.filterwarnings("ignore", message="Exception.* does not match an error shape")

JSON = "application/x-amz-json-1.1"
SIGNED_FOR_S = 900  # a request is refused that was signed so long ago, or so long from now


class Refusal(ServiceException):
    """What EC2 would refuse, with its code, its message and its HTTP status."""

    def __init__(self, code: str, message: str, *, status: str = "400 Bad Request") -> None:
        super().__init__(code, message)
        self.status = status


@dataclass(frozen=True)
class Request:
    """One API call. `parameters` are as they were sent, whether it came as GET, POST or JSON."""

    service: str
    region: str
    action: str
    parameters: dict[str, Any]
    body: bytes
    environ: dict[str, Any] = field(repr=False)

    @property
    def changes(self) -> bool:
        return not self.action.startswith(("Describe", "Get", "List", "Simulate"))

    @property
    def dry(self) -> bool:
        """Whether the caller only checks for permission."""
        return str(self.parameters.get("DryRun")).lower() == "true"

    @cached_property
    def asked(self) -> dict[str, Any]:
        """Its parameters as boto3 names them, numbers and lists as such.

        :raises Refusal: ones that cannot be read.
        """
        if "HTTP_X_AMZ_TARGET" in self.environ:
            return self.parameters
        try:
            operation = get_service_model(self.service).operation_model(self.action)
            parser: Any = EC2QueryParser if self.service == "ec2" else QueryParser
            reads = parser(operation, timestamp_parser=parse_timestamp)
            return dict(reads.parse({"values": self.parameters}))
        except (ValueError, TypeError) as error:
            raise Refusal("InvalidParameterValue", f"Invalid value: {error}") from None

    def tags(self, kind: str) -> dict[str, str]:
        """The tags for the things of one kind that the call makes."""
        given = [one for one in self.asked.get("TagSpecifications", ()) if one["ResourceType"] == kind]
        return {tag["Key"]: tag.get("Value", "") for one in given for tag in one.get("Tags", ())}

    def select(self, resources: list[Any]) -> list[Any]:
        """Return those of moto's resources that its filters let pass."""
        filters = {one["Name"]: one.get("Values", []) for one in self.asked.get("Filters", ())}
        return generic_filter(filters, resources)


def kept(backend: Any, name: str) -> dict[str, Any]:
    """What moto lacks of a region, by what it is called; kept and saved with its back end."""
    found: dict[str, Any] = backend.__dict__.setdefault(name, {})
    return found


def read(environ: dict[str, Any]) -> Request:
    """Parse a request and consume its body.

    :raises Refusal: it is not signed, or not an API call.
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
    """Accept only holders of the credentials: nodes run as root, and any user of the machine can connect.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html

    :raises Refusal: unknown key, wrong or expired signature.
    """
    environ, late_s = request.environ, seconds_late(request.environ)
    if late_s > SIGNED_FOR_S and request.service == "ec2":
        raise Refusal("RequestExpired", "Request has expired.")
    url = f"http://local{environ.get('PATH_INFO') or '/'}?{environ.get('QUERY_STRING', '')}"
    try:
        if abs(late_s) > SIGNED_FOR_S:
            raise AuthFailureError if request.service == "ec2" else SignatureDoesNotMatchError
        find_signer(environ, IAMRequest, url=url, body=request.body, action=request.action)
    except HTTPException as error:
        known: Any = error
        raise Refusal(known.error_type, known.message, status=str(known.code)) from None


def seconds_late(environ: Mapping[str, Any]) -> float:
    """How long ago a request was signed; minus infinity where it does not say."""
    with suppress(ValueError):
        made = datetime.strptime(environ.get("HTTP_X_AMZ_DATE", ""), "%Y%m%dT%H%M%S%z")
        return time.time() - made.timestamp()
    return -math.inf


def find_signer(
    environ: dict[str, Any], form: type[IAMRequestBase], *, url: str, body: bytes = b"", action: str = ""
) -> Any:
    """Return moto's record of the access key that a request is signed with, in a service's form.

    :raises Exception: moto's error of that form: an unknown key, a wrong signature.
    """
    sts = sts_backends[DEFAULT_ACCOUNT_ID]["aws"]
    sts.assumed_roles = [role for role in sts.assumed_roles if role.expiration > utcnow()]
    headers: Any = EnvironHeaders(environ)
    method = environ["REQUEST_METHOD"]
    signed: Any = form(DEFAULT_ACCOUNT_ID, method, url, dict[str, str](), body, headers, action)
    signed.check_signature()
    return signed._access_key


def lacking(what: str, *, service: str = "ec2") -> Refusal:
    """The refusal of something that EC2 or another service knows and that has no effect here."""
    if service != "ec2":
        message = f"The local cloud does not carry out {service}:{what}."
        return Refusal("UnknownOperationException", message)
    return Refusal("UnsupportedOperation", f"The local cloud does not carry out {what}.")


def invalid(value: object, name: str, why: str) -> Refusal:
    """The refusal of a parameter's value."""
    text = f"Value ({str(value)[:300]}) for parameter {name} is invalid. {why}"
    return Refusal("InvalidParameterValue", text)


def dry_run() -> Refusal:
    """What EC2 answers when it is only asked, and would do it."""
    text = "Request would have succeeded, but DryRun flag is set."
    return Refusal("DryRunOperation", text, status="412 Precondition Failed")


def internal_error(message: str) -> Refusal:
    """What EC2 answers when it fails itself."""
    return Refusal("InternalError", message, status="500 Internal Server Error")


def answered(request: Request, result: object) -> Response:
    """The reply with what boto3 is to show: JSON, or XML. Resources of moto stand for themselves."""
    if request.service not in ("ec2", "iam"):
        return Response(json.dumps(result), content_type=JSON)
    return _as_xml(request.service, request.action, result)


def stamp(reply: Response) -> Response:
    """Return moto's XML as EC2 sends it: with the namespace's trailing slash, and a request id of its own."""
    body = re.sub(rb'(xmlns="http://ec2\.amazonaws\.com/doc/[0-9-]+)"', rb'\1/"', reply.data, count=1)
    request_id = str(uuid.uuid4()).encode()
    reply.data = re.sub(rb"(<[rR]equestI[dD]>)[^<]*", rb"\g<1>" + request_id, body, count=1)
    return reply


def refuse(refusal: ServiceException, *, service: str, target: bool) -> Response:
    """A refusal as the service would word it: JSON, or the XML of EC2 or of the query services."""
    status = getattr(refusal, "status", "400 Bad Request")
    if target:
        body = json.dumps({"__type": refusal.code, "message": refusal.message})
        return Response(body, status, {"x-amzn-ErrorType": refusal.code}, content_type=JSON)
    form = ("ec2", "RunInstances") if service in ("ec2", "") else ("sts", "GetCallerIdentity")
    return _as_xml(*form, refusal, status=status)


def _as_xml(service: str, action: str, result: object, *, status: str = "200 OK") -> Response:
    """An answer, or a refusal, in the form of an operation."""
    operation: Any = get_service_model(service).operation_model(action)
    serializer = get_serializer_class(service, operation.service_model.protocol)
    picker = XFormedAttributePicker(response_transformers=EC2BaseResponse.RESPONSE_KEY_PATH_TO_TRANSFORMER)
    made = serializer(operation_model=operation, value_picker=picker).serialize(result)
    return Response(str(made["body"]), status, made["headers"])
