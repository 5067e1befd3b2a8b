"""The HTTP services of an AWS login: SSO, sign-in, STS."""

import json
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs


class LoginHandler(BaseHTTPRequestHandler):
    """STS, SSO and sign-in. GetCallerIdentity answers with the access key of the caller as its UserId."""

    refusals: dict[str, tuple[int, dict[str, str]]] = {}

    def do_GET(self) -> None:
        self._answer(
            "SSO",
            {"roleCredentials": {**make_keys("ASIASSO"), "expiration": int(LATER.timestamp() * 1000)}},
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path.startswith("/v1/token"):
            assert self.headers["DPoP"].count(".") == 2
            token = {"accessToken": make_keys("ASIAREFRESHED"), "refreshToken": "next", "expiresIn": 900}
            self._answer("signin", token | {"tokenType": "aws_sigv4"})
            return
        operation = parse_qs(body)["Action"][0]
        caller = self.headers["Authorization"].partition("Credential=")[2].partition("/")[0]
        user = "<AssumedRoleUser><Arn>arn</Arn><AssumedRoleId>AROA:x</AssumedRoleId></AssumedRoleUser>"
        answers = {
            "GetCallerIdentity": f"<UserId>{caller}</UserId><Account>123456789012</Account><Arn>arn</Arn>",
            "AssumeRole": user + role_answer(),
        }
        result = f"<{operation}Result>{answers[operation]}</{operation}Result>"
        self._send(200, f"<{operation}Response>{result}</{operation}Response>", "text/xml")

    def _answer(self, service: str, good: dict[str, Any]) -> None:
        status, refusal = self.refusals.get(service, (200, None))
        self._send(status, json.dumps(refusal or good), "application/json", (refusal or {}).get("code", ""))

    def _send(self, status: int, text: str, kind: str, code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if code:
            self.send_header("x-amzn-ErrorType", code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


PROGRAM = "credential_process returned no credentials"

LATER = datetime.now(UTC) + timedelta(minutes=14)


def make_keys(key: str) -> dict[str, str]:
    return {"accessKeyId": key, "secretAccessKey": "secret", "sessionToken": "token"}


def role_answer() -> str:
    keys = "<AccessKeyId>ASIAROLE</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"
    ends = f"<SessionToken>t</SessionToken><Expiration>{LATER:%FT%TZ}</Expiration>"
    return f"<Credentials>{keys}{ends}</Credentials>"
