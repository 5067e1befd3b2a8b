"""The instance metadata service of each host, on its own 169.254.169.254, as version 2 asks for it.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-categories.html, and for the tokens
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-service.html
"""

from __future__ import annotations

import base64
import ctypes
import hmac
import json
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

from moto.core.utils import utcnow
from moto.sts.models import sts_backends
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from awsddp.local.network import METADATA_ADDRESS, NAMESPACES

LONGEST_S = 21600
SESSION_S = 21600
RENEWED_S = 3600  # before credentials expire, new ones are handed out
TOKEN = "HTTP_X_AWS_EC2_METADATA_TOKEN"
TTL = "HTTP_X_AWS_EC2_METADATA_TOKEN_TTL_SECONDS"
CLONE_NEWNET = 0x40000000

Answer = tuple[int, bytes]


def answer(instance: Any, environ: Mapping[str, Any], *, secret: str) -> Answer:
    """The reply to a request from inside an instance: HTTP status and body.

    It may give the instance another `role_session`, which is to be kept.

    :param environ: of WSGI.
    :param secret: signs the tokens, so that they outlive the daemon.
    """
    options, method, path = instance.metadata_options, environ["REQUEST_METHOD"], environ["PATH_INFO"]
    if options.http_endpoint == "disabled":
        return 403, b""
    if path == "/latest/api/token":
        return _token(instance.id, environ, secret)
    if method not in ("GET", "HEAD"):
        return 405, b""
    given = environ.get(TOKEN)
    if given is None and options.http_tokens == "required":
        return 401, b""
    if given is not None and not _valid(given, instance.id, secret):
        return 401, b""
    if path.rstrip("/") == "/latest/user-data":
        data = base64.b64decode(str(instance.user_data or ""))
        return (200, data) if data else (404, b"")
    return _read(_tree(instance), path)


def _token(instance_id: str, environ: Mapping[str, Any], secret: str) -> Answer:
    if environ["REQUEST_METHOD"] != "PUT":
        return 405, b""
    lifetime = environ.get(TTL, "")
    if not lifetime.isdigit() or not 1 <= int(lifetime) <= LONGEST_S:
        return 400, b""
    until = str(int(time.time()) + int(lifetime))
    return 200, f"{until}.{_sign(until, instance_id, secret)}".encode()


def _valid(token: str, instance_id: str, secret: str) -> bool:
    until, _, signature = token.partition(".")
    known = hmac.compare_digest(signature.encode(), _sign(until, instance_id, secret).encode())
    return known and int(until) > time.time()


def _sign(until: str, instance_id: str, secret: str) -> str:
    return hmac.digest(secret.encode(), f"{instance_id} {until}".encode(), "sha256").hex()


def _read(tree: dict[str, Any], path: str) -> Answer:
    """A leaf's text, or the names in a folder, those of folders with a slash."""
    found: Any = tree
    for name in [part for part in path.split("/") if part]:
        if not isinstance(found, dict) or name not in found:
            return 404, b""
        found = found[name]
    if isinstance(found, dict):
        return 200, "\n".join(f"{k}/" if isinstance(v, dict) else k for k, v in found.items()).encode()
    return 200, str(found).encode()


def _tree(instance: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "ami-id": instance.image_id,
        "hostname": instance.private_dns_name,
        "instance-id": instance.id,
        "instance-life-cycle": instance.lifecycle or "on-demand",
        "instance-type": instance.instance_type,
        "local-hostname": instance.private_dns_name,
        "local-ipv4": instance.private_ip,
        "placement": {
            "availability-zone": instance.placement.zone,
            "region": instance.region_name,
        },
        "public-ipv4": instance.public_ip,
        "iam": _role(instance),
        "spot": _notice(instance),
    }
    return {"latest": {"meta-data": {name: value for name, value in facts.items() if value}}}


def _notice(instance: Any) -> dict[str, str] | None:
    """When a spot instance will be taken back; None while nobody has said so.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """
    at = getattr(instance, "reclaimed_at", None)
    if at is None:
        return None
    moment = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {"instance-action": json.dumps({"action": "terminate", "time": moment})}


def _role(instance: Any) -> dict[str, Any] | None:
    """The credentials of the instance profile's role, made anew an hour before they expire; None without one.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-security-credentials.html
    """
    association = instance.ec2_backend.iam_instance_profile_associations.get(instance.id)
    if association is None or not association.iam_instance_profile.roles:
        return None
    role = association.iam_instance_profile.roles[0]
    session: Any = getattr(instance, "role_session", None)
    soon = utcnow() + timedelta(seconds=RENEWED_S)
    if session is None or session.role_arn != role.arn or session.expiration <= soon:
        session = instance.role_session = sts_backends[instance.owner_id]["aws"].assume_role(
            region_name=instance.region_name,
            role_session_name=instance.id,
            role_arn=role.arn,
            policy="",
            duration=SESSION_S,
            external_id="",
        )
    credentials = {
        "Code": "Success",
        "LastUpdated": f"{session.expiration - timedelta(seconds=SESSION_S):%Y-%m-%dT%H:%M:%SZ}",
        "Type": "AWS-HMAC",
        "AccessKeyId": session.access_key_id,
        "SecretAccessKey": session.secret_access_key,
        "Token": session.session_token,
        "Expiration": f"{session.expiration:%Y-%m-%dT%H:%M:%SZ}",
    }
    return {"security-credentials": {role.name: json.dumps(credentials, indent=2)}}


def serve(application: Any, namespace: str) -> None:
    """Serve a WSGI application in the switch's namespace, beside the nodes, until this process ends.

    Port 80 of the nodes themselves stays free. A socket belongs to the namespace in which it was made,
    whoever accepts from it later; a node is known by its address.

    :raises OSError: the address cannot be bound there.
    """
    with ThreadPoolExecutor(1) as alone:  # a thread that ends in the namespace
        listening = alone.submit(_listen, namespace).result()
    server = make_server(METADATA_ADDRESS, 80, application, threaded=True, fd=listening.detach())
    threading.Thread(target=server.serve_forever, name="metadata", daemon=True).start()


def _listen(namespace: str) -> socket.socket:
    with (NAMESPACES / namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    return socket.create_server((METADATA_ADDRESS, 80))


def respond(emulator: Any, store: Any, secret: str, environ: dict[str, Any], start_response: Any) -> Any:
    """Answer a metadata request of the instance that it comes from."""
    with emulator.lock:
        alive = (one for one in emulator.instances() if one.state != "terminated")
        found = next((one for one in alive if one.private_ip == environ["REMOTE_ADDR"]), None)
        before = getattr(found, "role_session", None)
        status, body = answer(found, environ, secret=secret) if found else (404, b"")
        if getattr(found, "role_session", None) is not before:
            store.save()
    return Response(body, status, mimetype="text/plain")(environ, start_response)
