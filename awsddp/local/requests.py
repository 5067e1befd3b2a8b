"""Requests to the endpoint: parsing, signature check, replies and error replies in EC2's format."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode
from xml.sax.saxutils import escape

Reply = tuple[str, list[tuple[str, str]], bytes]
"""Status line, headers, body."""

SCOPE = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request,\s*"
    r"SignedHeaders=([^,]+),\s*Signature=([0-9a-f]{64})"
)

NOTHING_ELSE = re.compile(
    rb"(doc/[0-9-]+/\">\s*<requestId>[^<]*</requestId>)(\s*</(?!Describe|Get)\w+Response>)"
)
SIGNED_FOR_S = 900  # a request is refused that was signed so long ago, or so long from now


class Refusal(Exception):
    """What EC2 would refuse, with its code, its message and its HTTP status."""

    def __init__(self, code: str, message: str, *, status: str = "400 Bad Request") -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status


@dataclass(frozen=True)
class Request:
    """One API call. `parameters` are the same whether it came as GET or POST; JSON services have none."""

    service: str
    region: str
    action: str
    parameters: dict[str, str]
    body: bytes
    access_key_id: str
    signed_headers: str
    date: str
    signature: str
    environ: dict[str, Any] = field(repr=False)

    @property
    def changes(self) -> bool:
        return not self.action.startswith(("Describe", "Get", "List"))

    @property
    def dry(self) -> bool:
        """Whether the caller only checks for permission."""
        return self.parameters.get("DryRun", "").lower() == "true"

    def wsgi_environ(self) -> dict[str, Any]:
        """Return the WSGI environment of this call as a POST, however it was encoded."""
        if "HTTP_X_AMZ_TARGET" in self.environ:
            body, changes = self.body, {}
        else:
            body = urlencode(self.parameters).encode()
            changes = {
                "REQUEST_METHOD": "POST",
                "QUERY_STRING": "",
                "CONTENT_TYPE": "application/x-www-form-urlencoded; charset=utf-8",
            }
        length = {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        return {**self.environ, **changes, **length}

    def listed(self, name: str) -> list[str]:
        """The values of `Name.1`, `Name.2` and so on, in order."""
        found = {}
        for key, value in self.parameters.items():
            stem, _, number = key.rpartition(".")
            if stem == name and number.isdigit():
                found[int(number)] = value
        return [found[number] for number in sorted(found)]

    def tags(self) -> dict[str, str]:
        """The tags for the one thing that the call makes."""
        stem = "TagSpecification"
        stem = stem if f"{stem}.1.ResourceType" in self.parameters else f"{stem}s"
        keys = [name for name in self.parameters if re.fullmatch(rf"{stem}\.1\.Tag\.\d+\.Key", name)]
        return {self.parameters[key]: self.parameters.get(f"{key[:-3]}Value", "") for key in keys}

    def picks(self, tags: dict[str, str], **have: str) -> bool:
        """Whether its filters let something pass, that has these tags and, by the filters' names, this."""
        number = 1
        while name := self.parameters.get(f"Filter.{number}.Name"):
            if name == "tag-key":
                found: set[str | None] = set(tags)
            elif name.startswith("tag:"):
                found = {tags.get(name[4:])}
            else:
                found = {have.get(name.replace("-", "_"))}
            if not found & set(self.listed(f"Filter.{number}.Value")):
                return False
            number += 1
        return True


def under(parameters: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the parameters whose names start with `prefix`, without it."""
    return {name[len(prefix) :]: value for name, value in parameters.items() if name.startswith(prefix)}


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
    key, date, region, service, signed, signature = match.groups()
    parameters: dict[str, str] = {}
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    if not target:
        for text in (environ.get("QUERY_STRING", ""), body.decode("utf-8", "replace")):
            parameters.update(parse_qsl(text, keep_blank_values=True))
    if service == "ec2":
        parameters = {name: value for name, value in parameters.items() if value or _may_be_empty(name)}
    return Request(
        service=service,
        region=region,
        action=target.rpartition(".")[2] or parameters.get("Action", ""),
        parameters=parameters,
        body=body,
        access_key_id=key,
        signed_headers=signed,
        date=date,
        signature=signature,
        environ=environ,
    )


def _may_be_empty(name: str) -> bool:
    """Whether an empty string is a value of this parameter: of a tag, a filter, an attribute."""
    return name.rstrip("0123456789.").endswith("Value")


def check_signature(request: Request, secret_of: Callable[[str, str], str | None]) -> None:
    """Accept only holders of the credentials: nodes run as root, and any user of the machine can connect.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html

    :param secret_of: returns the secret of an access key and session token, None if they are not valid.
    :raises Refusal: unknown key, wrong or expired signature.
    """
    environ = request.environ
    _check_time(request)
    secret = secret_of(request.access_key_id, environ.get("HTTP_X_AMZ_SECURITY_TOKEN", ""))
    if secret is None or not hmac.compare_digest(_signature(request, secret), request.signature):
        if request.service == "ec2":
            raise _unknown_to_ec2()
        if secret is None:
            code = "UnrecognizedClientException" if "HTTP_X_AMZ_TARGET" in environ else "InvalidClientTokenId"
            raise Refusal(
                code, "The security token included in the request is invalid.", status="403 Forbidden"
            )
        raise Refusal(
            "SignatureDoesNotMatch",
            "The request signature we calculated does not match the signature you provided.",
            status="403 Forbidden",
        )


def _check_time(request: Request) -> None:
    environ = request.environ
    made = environ.get("HTTP_X_AMZ_DATE", "")
    with suppress(ValueError):
        late_s = time.time() - datetime.strptime(made, "%Y%m%dT%H%M%S%z").timestamp()
        if abs(late_s) <= SIGNED_FOR_S:
            return
        if request.service == "ec2" and late_s > 0:
            raise Refusal("RequestExpired", "Request has expired.")
    if request.service == "ec2":
        raise _unknown_to_ec2()
    code = "InvalidSignatureException" if "HTTP_X_AMZ_TARGET" in environ else "SignatureDoesNotMatch"
    raise Refusal(
        code,
        f"Signature expired or not yet current: {made} is not within 15 minutes.",
        status="403 Forbidden",
    )


def _unknown_to_ec2() -> Refusal:
    return Refusal(
        "AuthFailure",
        "AWS was not able to validate the provided access credentials",
        status="401 Unauthorized",
    )


def _signature(request: Request, secret: str) -> str:
    environ = request.environ
    names = request.signed_headers.split(";")
    headers = "".join(f"{name}:{_header(environ, name)}\n" for name in names)
    query = "&".join(
        f"{quote(key, safe='-_.~')}={quote(value, safe='-_.~')}"
        for key, value in sorted(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
    )
    path = quote(environ.get("PATH_INFO") or "/", safe="/-_.~")
    digest = hashlib.sha256(request.body).hexdigest()
    canonical = "\n".join([environ["REQUEST_METHOD"], path, query, headers, request.signed_headers, digest])
    scope = f"{request.date}/{request.region}/{request.service}/aws4_request"
    to_sign = "\n".join(
        [
            "AWS4-HMAC-SHA256",
            environ.get("HTTP_X_AMZ_DATE", ""),
            scope,
            hashlib.sha256(canonical.encode()).hexdigest(),
        ]
    )
    key = f"AWS4{secret}".encode()
    for part in (request.date, request.region, request.service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, to_sign.encode(), "sha256").hex()


def _header(environ: dict[str, Any], name: str) -> str:
    key = name.upper().replace("-", "_")
    value = environ.get(key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}", "")
    return " ".join(str(value).split())


def dry_run() -> Refusal:
    """What EC2 answers when it is only asked, and would do it."""
    text = "Request would have succeeded, but DryRun flag is set."
    return Refusal("DryRunOperation", text, status="412 Precondition Failed")


def tag_set(tags: dict[str, str]) -> str:
    """Tags as EC2's XML shows them."""
    items = (
        f"<item><key>{escape(key)}</key><value>{escape(value)}</value></item>" for key, value in tags.items()
    )
    return f"<tagSet>{''.join(items)}</tagSet>"


def ec2_reply(request: Request, inside: str) -> Reply:
    """The XML with which EC2 answers a request."""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<{request.action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">'
        f"<requestId>{uuid.uuid4()}</requestId>{inside}</{request.action}Response>"
    )
    return "200 OK", [("Content-Type", "text/xml;charset=UTF-8")], body.encode()


def stamp(reply: Reply) -> Reply:
    """Return moto's XML as EC2 sends it.

    With the namespace's trailing slash, a request id of its own, and `return` where there is nothing else.
    """
    status, headers, body = reply
    body = re.sub(rb'(xmlns="http://ec2\.amazonaws\.com/doc/[0-9-]+)"', rb'\1/"', body, count=1)
    request_id = str(uuid.uuid4()).encode()
    body = re.sub(rb"(<[rR]equestI[dD]>)[^<]*", rb"\g<1>" + request_id, body, count=1)
    return status, headers, NOTHING_ELSE.sub(rb"\1<return>true</return>\2", body)


def refuse(refusal: Refusal, *, service: str, target: bool) -> Reply:
    """A refusal as the service would word it: JSON, or the XML of EC2 or of the query services."""
    request_id = str(uuid.uuid4())
    code, message = escape(refusal.code), escape(refusal.message)
    if target:
        body = json.dumps({"__type": refusal.code, "message": refusal.message})
        head = [("Content-Type", "application/x-amz-json-1.1"), ("x-amzn-ErrorType", refusal.code)]
        return refusal.status, head, body.encode()
    if service in ("ec2", ""):
        body = (
            f"<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>"
            f"<RequestID>{request_id}</RequestID></Response>"
        )
    else:
        body = (
            f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>"
            f"<RequestId>{request_id}</RequestId></ErrorResponse>"
        )
    prolog = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return refusal.status, [("Content-Type", "text/xml;charset=UTF-8")], (prolog + body).encode()
