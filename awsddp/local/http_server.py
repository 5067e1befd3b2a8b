"""The services of the daemon: the endpoint, and the metadata of the instances.

Every request to the endpoint passes here, before and after moto. In this order: the signature, what EC2
refuses, what moto cannot do, moto itself; then, if the request changed something, it is written down before
the reply goes out, and the hosts are told.
"""

from __future__ import annotations

import base64
import ctypes
import hmac
import json
import socket
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from io import BytesIO
from typing import Any

from moto.core.exceptions import ServiceException
from moto.core.utils import utcnow
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.sts.models import sts_backends
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from awsddp.errors import AwsddpError
from awsddp.local import ec2_http, faults, operations, request_checks
from awsddp.local.ec2_http import Refusal, Request, answered, internal_error
from awsddp.local.emulator import Emulator, Store
from awsddp.local.faults import Faults
from awsddp.local.lifecycle import Lifecycle
from awsddp.local.network import METADATA_ADDRESS, NAMESPACES
from awsddp.local.offers import Call
from awsddp.local.s3_api import Buckets, hang_up
from awsddp.local.serving import Handler
from awsddp.model.documents import Fault
from awsddp.model.records import read_numbers

ADMIN = "/_awsddp/"


@dataclass(eq=False)
class Front:
    """The WSGI application."""

    emulator: Emulator
    store: Store
    lifecycle: Lifecycle
    faults: Faults
    secret: str = field(repr=False)
    mode: str
    buckets: Buckets
    asked_at: float = field(default_factory=time.monotonic)
    """When the API was last asked for something."""
    _moto: Any = field(default_factory=lambda: DomainDispatcherApplication(create_backend_app))

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if _is_s3(environ):
            self.asked_at = time.monotonic()
            return self.buckets(environ, start_response)
        try:
            is_admin = environ.get("PATH_INFO", "").startswith(ADMIN)
            reply = self._admin(environ) if is_admin else self._api(environ)
        except ConnectionError:
            hang_up(environ)
            raise
        return reply(environ, start_response)

    def _admin(self, environ: dict[str, Any]) -> Response:
        """What the `local` verb asks; only who can read the daemon's folder knows the secret."""
        if environ.get("HTTP_X_AWSDDP_SECRET") != self.secret:
            return Response("no\n", 403)
        length = int(environ.get("CONTENT_LENGTH") or 0)
        asked = json.loads(environ["wsgi.input"].read(length) if length else b"{}")
        try:
            with self.emulator.lock:
                if self._orders(asked.get("add", {})):
                    del asked["add"]
                in_force = self.faults.act(asked)
        except AwsddpError as error:
            return Response(json.dumps(error.document()), 400, content_type=ec2_http.JSON)
        if length:
            self.lifecycle.settle()
        return Response(
            json.dumps({"instances": self._instances(), "faults": in_force}), content_type=ec2_http.JSON
        )

    def _instances(self) -> list[dict[str, Any]]:
        """What `local status` shows of the instances."""
        with self.emulator.lock:
            return [
                {
                    "instance_id": one.id,
                    "state": one.state,
                    "instance_type": one.instance_type,
                    "region": one.region_name,
                    "private_ip": one.private_ip if one.state != "terminated" else None,
                    "name": (tags := {tag["key"]: tag["value"] for tag in one.get_tags()}).get("Name"),
                    "cluster": tags.get("awsddp:cluster"),
                    "node": _node(tags, one.ami_launch_index),
                    "reason": one.state_reason.message,
                }
                for one in self.emulator.instances()
            ]

    def _orders(self, fault: dict[str, Any]) -> bool:
        """Checks a fault of a node; one that does not last is carried out, and true is returned.

        :raises UsageError: it cannot be.
        """
        if not faults.names_node(fault.get("operation", "")):
            return False
        instances = {one.id: one for one in self.emulator.instances()}
        faults.check_node(fault, instances, mode=self.mode)
        if fault["effect"] not in faults.ONCE:
            return False
        if fault["effect"] == "reclaim":
            notice_s = fault.get("notice_s", faults.NOTICE_S)
            instances[fault["operation"]].reclaimed_at = time.time() + notice_s
            self.store.save()
        else:
            self.lifecycle.hosts.shut_down(fault["operation"], reboot=fault["effect"] == "reboot")
        return True

    def _api(self, environ: dict[str, Any]) -> Response:
        service, target = "", "HTTP_X_AMZ_TARGET" in environ
        rest = environ.get("PATH_INFO", "/") != "/"  # of the services that are not here: those answer in JSON
        self.asked_at = time.monotonic()
        try:
            request = ec2_http.read(environ)
            service = request.service
            target = target or rest
            with self.emulator.lock:
                ec2_http.check_signature(request)
                fault = self._strike(request)
            if fault is not None and fault.effect == "delay":
                time.sleep(fault.seconds)
            reply = self._carry_out(request, fault)
            if fault is not None and fault.effect == "late":
                time.sleep(fault.seconds)
            if fault is not None and fault.effect == "lost":
                raise ConnectionResetError("a fault: the reply is lost")
        except ConnectionError:
            raise
        except Exception as error:
            refusal = error if isinstance(error, ServiceException) else None  # ours, or moto's own
            if refusal is None:
                traceback.print_exc()
                refusal = internal_error("An internal error has occurred")
            reply = ec2_http.refuse(refusal, service=service, target=target)
        return ec2_http.stamp(reply)

    def _strike(self, request: Request) -> Fault | None:
        """The fault that hits this request.

        :raises Refusal: the fault refuses it.
        :raises ConnectionError: the fault cuts the connection.
        """
        asked, words = {}, [*request.parameters.values(), request.region]
        if request.service == "ec2" and request.action in ("RunInstances", "StartInstances"):
            with suppress(ServiceException):
                instance_type, zone, grouped = Call(request, self._backend(request)).machines
                asked = {"instance_type": instance_type, "zone": zone}
                words += [instance_type, zone, *([faults.PLACEMENT_GROUP] if grouped else [])]
        fault = self.faults.strike(request.action, tuple(words))
        if fault is None or fault.effect in ("delay", "late", "lost", "stale"):
            return fault
        if fault.effect == "cut":
            raise ConnectionResetError("a fault: the connection is cut")
        raise faults.refusal(fault, **asked)

    def _carry_out(self, request: Request, fault: Fault | None) -> Response:
        """What the request asks for; written down before the reply."""
        with self.emulator.lock:
            before = self.store.size()
            with self._view(request, fault):
                reply = self._answer(request)
            if request.changes and request.service == "ec2":
                faults.mark(self._backend(request))
            if request.changes or self.store.size() != before:
                self._write_down()
        if request.changes and request.service == "ec2":
            self.lifecycle.wake()
        return reply

    @contextmanager
    def _view(self, request: Request, fault: Fault | None) -> Iterator[None]:
        """Within it a question is answered by what was, and a change made to what is, less what is new."""
        if fault is None or fault.effect != "stale" or request.service != "ec2":
            yield
            return
        region, seconds = request.region, fault.seconds
        earlier = nullcontext() if request.changes else self.store.as_it_was(region, seconds=seconds)
        with earlier, faults.unaware(self._backend(request), younger_than_s=seconds):
            yield

    def _write_down(self) -> None:
        """Saves what changed; where that fails the change is taken back.

        :raises Refusal: InternalError, which says why.
        """
        try:
            self.store.save()
        except OSError as error:
            self.store.load()
            raise internal_error(f"The local cloud cannot write its state down: {error}") from error

    def _backend(self, request: Request) -> Any:
        try:
            return self.emulator.backend(request.region)
        except KeyError:
            raise Refusal("AuthFailure", f"Unknown region {request.region}") from None

    def _answer(self, request: Request) -> Response:
        row, call = operations.find(request), Call(request, self._backend(request))
        request_checks.check(call)
        if request.changes and request.dry:
            raise ec2_http.dry_run()
        if row.answer is not None:
            return answered(request, row.answer(call))
        again = {**request.environ, "wsgi.input": BytesIO(request.body)}
        return Response.from_app(self._moto, again, buffered=True)

    def respond_metadata(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer a metadata request of the instance that it comes from."""
        with self.emulator.lock:
            alive = (one for one in self.emulator.instances() if one.state != "terminated")
            found = next((one for one in alive if one.private_ip == environ["REMOTE_ADDR"]), None)
            before = getattr(found, "role_session", None)
            status, body = metadata(found, environ, secret=self.secret) if found else (404, b"")
            if getattr(found, "role_session", None) is not before:
                self.store.save()
        return Response(body, status, mimetype="text/plain")(environ, start_response)


def _is_s3(environ: Mapping[str, Any]) -> bool:
    """Whether a request is for S3, which nobody signs who reads a public bucket."""
    signed, path = environ.get("HTTP_AUTHORIZATION"), environ.get("PATH_INFO", "/")
    if signed is None:
        return path != "/" and not path.startswith(ADMIN) and "HTTP_X_AMZ_TARGET" not in environ
    return "/s3/aws4_request" in signed


def _node(tags: dict[str, str], index: int) -> int | None:
    """The number that an instance has in its cluster; None where it is in none."""
    with suppress(KeyError, ValueError, IndexError):
        return int(read_numbers(tags["awsddp:nodes"])[index])
    return None


LONGEST_S = 21600
SESSION_S = 21600
RENEWED_S = 3600  # before credentials expire, new ones are handed out
TOKEN = "HTTP_X_AWS_EC2_METADATA_TOKEN"
TTL = "HTTP_X_AWS_EC2_METADATA_TOKEN_TTL_SECONDS"
CLONE_NEWNET = 0x40000000

Answer = tuple[int, bytes]


def metadata(instance: Any, environ: Mapping[str, Any], *, secret: str) -> Answer:
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
    given = environ.get(TOKEN, "" if options.http_tokens == "required" else None)
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
            instance.region_name, instance.id, role.arn, policy="", duration=SESSION_S, external_id=""
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


def serve_nodes(application: Any, namespace: str, port: int) -> None:
    """Serve a WSGI application in the switch's namespace, beside the nodes, until this process ends.

    The ports of the nodes themselves stay free. A socket belongs to the namespace in which it was made,
    whoever accepts from it later; a node is known by its address.

    :raises OSError: the address cannot be bound there.
    """
    with ThreadPoolExecutor(1) as alone:  # a thread that ends in the namespace
        listening = alone.submit(_listen, namespace, port).result()
    server = make_server(
        METADATA_ADDRESS, port, application, threaded=True, request_handler=Handler, fd=listening.detach()
    )
    threading.Thread(target=server.serve_forever, name=f"port-{port}", daemon=True).start()


def _listen(namespace: str, port: int) -> socket.socket:
    with (NAMESPACES / namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    return socket.create_server((METADATA_ADDRESS, port))
