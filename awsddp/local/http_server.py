"""The daemon's HTTP services: the endpoint, and the instances' metadata service.

A request to the endpoint passes these stages in order: the signature check, the check that the operation is
supported, the checks that EC2 has and moto lacks, the local cloud's handlers, and moto. If the request
changed something, the state is saved before the response is sent, and `Lifecycle` is woken.
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
from awsddp.local.ec2_http import Refusal, Request, internal_error, make_response
from awsddp.local.emulator import Emulator, Store
from awsddp.local.faults import Faults
from awsddp.local.lifecycle import Lifecycle
from awsddp.local.network import METADATA_ADDRESS, NAMESPACES
from awsddp.local.offers import Call
from awsddp.local.s3_api import S3App, close_connection
from awsddp.local.serving import KeepAliveHandler
from awsddp.model.documents import Fault
from awsddp.model.records import parse_node_numbers

ADMIN = "/_awsddp/"


@dataclass(eq=False)
class EndpointApp:
    """The endpoint's WSGI application: EC2 and other APIs, S3, and the commands of `awsddp local`."""

    emulator: Emulator
    store: Store
    lifecycle: Lifecycle
    faults: Faults
    secret: str = field(repr=False)
    mode: str
    buckets: S3App
    last_call_at: float = field(default_factory=time.monotonic)
    """The monotonic time when the last API call was received."""
    _moto: Any = field(default_factory=lambda: DomainDispatcherApplication(create_backend_app))

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if _is_s3(environ):
            self.last_call_at = time.monotonic()
            return self.buckets(environ, start_response)
        try:
            is_admin = environ.get("PATH_INFO", "").startswith(ADMIN)
            response = self._respond_to_admin(environ) if is_admin else self._respond_to_call(environ)
        except ConnectionError:
            close_connection(environ)
            raise
        return response(environ, start_response)

    def _respond_to_admin(self, environ: dict[str, Any]) -> Response:
        """Run a command that `awsddp local` sent. The request must contain the secret, which can be read only
        from the daemon's folder."""
        if environ.get("HTTP_X_AWSDDP_SECRET") != self.secret:
            return Response("invalid secret\n", 403)
        length = int(environ.get("CONTENT_LENGTH") or 0)
        command = json.loads(environ["wsgi.input"].read(length) if length else b"{}")
        try:
            with self.emulator.lock:
                if self._run_one_time_fault(command.get("add", {})):
                    del command["add"]
                active_faults = self.faults.apply_command(command)
        except AwsddpError as error:
            return Response(json.dumps(error.document()), 400, content_type=ec2_http.JSON)
        if length:
            self.lifecycle.settle()
        document = {"instances": self._describe_instances(), "faults": active_faults}
        return Response(json.dumps(document), content_type=ec2_http.JSON)

    def _describe_instances(self) -> list[dict[str, Any]]:
        """Return the instances as the rows that `local status` shows."""
        with self.emulator.lock:
            return [
                {
                    "instance_id": instance.id,
                    "state": instance.state,
                    "instance_type": instance.instance_type,
                    "region": instance.region_name,
                    "private_ip": instance.private_ip if instance.state != "terminated" else None,
                    "name": (tags := {tag["key"]: tag["value"] for tag in instance.get_tags()}).get("Name"),
                    "cluster": tags.get("awsddp:cluster"),
                    "node": _node_number(tags, instance.ami_launch_index),
                    "reason": instance.state_reason.message,
                }
                for instance in self.emulator.instances()
            ]

    def _run_one_time_fault(self, fault: dict[str, Any]) -> bool:
        """Check a node fault. If the fault's effect happens only once, cause the effect and return True.

        :raises UsageError: the fault is invalid.
        """
        if not faults.is_instance_id(fault.get("operation", "")):
            return False
        instances = {instance.id: instance for instance in self.emulator.instances()}
        faults.check_node_fault(fault, instances, mode=self.mode)
        if fault["effect"] not in faults.ONE_TIME_EFFECTS:
            return False
        if fault["effect"] == "reclaim":
            notice_s = fault.get("notice_s", faults.NOTICE_S)
            instances[fault["operation"]].reclaimed_at = time.time() + notice_s
            self.store.save()
        elif fault["effect"] == "xid":
            self.lifecycle.hosts.fail_gpu(fault["operation"])
        else:
            self.lifecycle.hosts.shut_down(fault["operation"], reboot=fault["effect"] == "reboot")
        return True

    def _respond_to_call(self, environ: dict[str, Any]) -> Response:
        service, target = "", "HTTP_X_AMZ_TARGET" in environ
        # A request with a path is for a service that is not supported. The error response is in JSON, because
        # services with paths respond in JSON.
        is_rest = environ.get("PATH_INFO", "/") != "/"
        self.last_call_at = time.monotonic()
        try:
            request = ec2_http.read_request(environ)
            service = request.service
            target = target or is_rest
            with self.emulator.lock:
                ec2_http.check_signature(request)
                fault = self._take_fault(request)
            if fault is not None and fault.effect == "delay":
                time.sleep(fault.seconds)
            response = self._carry_out(request, fault)
            if fault is not None and fault.effect == "late":
                time.sleep(fault.seconds)
            if fault is not None and fault.effect == "lost":
                raise ConnectionResetError("a fault: the response is lost")
        except ConnectionError:
            raise
        except Exception as error:
            refusal = error if isinstance(error, ServiceException) else None  # from the local cloud or moto
            if refusal is None:
                traceback.print_exc()
                refusal = internal_error("An internal error has occurred")
            response = ec2_http.make_error_response(refusal, service=service, target=target)
        return ec2_http.finish_response(response)

    def _take_fault(self, request: Request) -> Fault | None:
        """Return the fault that affects this request, or None.

        :raises Refusal: the fault's effect is an error code.
        :raises ConnectionError: the fault cuts the connection.
        """
        details, values = {}, [*request.parameters.values(), request.region]
        if request.service == "ec2" and request.action in ("RunInstances", "StartInstances"):
            with suppress(ServiceException):
                instance_type, zone, grouped = Call(request, self._backend(request)).requested_machines
                details = {"instance_type": instance_type, "zone": zone}
                values += [instance_type, zone, *([faults.PLACEMENT_GROUP] if grouped else [])]
        fault = self.faults.take_fault(request.action, tuple(values))
        if fault is None or fault.effect in ("delay", "late", "lost", "stale"):
            return fault
        if fault.effect == "cut":
            raise ConnectionResetError("a fault: the connection is cut")
        raise faults.make_refusal(fault, **details)

    def _carry_out(self, request: Request, fault: Fault | None) -> Response:
        """Carry out a request and save the changed state; return the response."""
        with self.emulator.lock:
            backend_count = self.store.count_backends()
            with self._stale_view(request, fault):
                response = self._handle(request)
            if request.is_mutating and request.service == "ec2":
                faults.set_creation_times(self._backend(request))
            if request.is_mutating or self.store.count_backends() != backend_count:
                self._save()
        if request.is_mutating and request.service == "ec2":
            self.lifecycle.wake()
        return response

    @contextmanager
    def _stale_view(self, request: Request, fault: Fault | None) -> Iterator[None]:
        """Within the context, if the fault is "stale", hide new resources and answer read calls from an
        earlier state."""
        if fault is None or fault.effect != "stale" or request.service != "ec2":
            yield
            return
        region, seconds = request.region, fault.seconds
        earlier = nullcontext() if request.is_mutating else self.store.show_past(region, seconds=seconds)
        with earlier, faults.hide_new_resources(self._backend(request), younger_than_s=seconds):
            yield

    def _save(self) -> None:
        """Save the state; if that fails, restore the last saved state.

        :raises Refusal: the state was not saved; the code is InternalError, and the text has the reason.
        """
        try:
            self.store.save()
        except OSError as error:
            self.store.load()
            raise internal_error(f"The local cloud cannot save its state: {error}") from error

    def _backend(self, request: Request) -> Any:
        try:
            return self.emulator.backend(request.region)
        except KeyError:
            raise Refusal("AuthFailure", f"Unknown region {request.region}") from None

    def _handle(self, request: Request) -> Response:
        row, call = operations.find_operation(request), Call(request, self._backend(request))
        request_checks.check_call(call)
        if request.is_mutating and request.is_dry_run:
            raise ec2_http.dry_run_error()
        if row.handler is not None:
            return make_response(request, row.handler(call))
        environ = {**request.environ, "wsgi.input": BytesIO(request.body)}
        return Response.from_app(self._moto, environ, buffered=True)

    def respond_metadata(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Respond to an instance's metadata request; the client's address identifies the instance."""
        with self.emulator.lock:
            alive = (row for row in self.emulator.instances() if row.state != "terminated")
            instance = next((row for row in alive if row.private_ip == environ["REMOTE_ADDR"]), None)
            session = getattr(instance, "role_session", None)
            status, body = read_metadata(instance, environ, secret=self.secret) if instance else (404, b"")
            if getattr(instance, "role_session", None) is not session:
                self.store.save()
        return Response(body, status, mimetype="text/plain")(environ, start_response)


def _is_s3(environ: Mapping[str, Any]) -> bool:
    """Return True if a request is for S3. Requests to public buckets can be unsigned."""
    signature, path = environ.get("HTTP_AUTHORIZATION"), environ.get("PATH_INFO", "/")
    if signature is None:
        return path != "/" and not path.startswith(ADMIN) and "HTTP_X_AMZ_TARGET" not in environ
    return "/s3/aws4_request" in signature


def _node_number(tags: dict[str, str], index: int) -> int | None:
    """Return an instance's number in its cluster, or None if it is in no cluster."""
    with suppress(KeyError, ValueError, IndexError):
        return int(parse_node_numbers(tags["awsddp:nodes"])[index])
    return None


MAX_TOKEN_S = 21600
SESSION_S = 21600
RENEWED_S = 3600  # credentials are replaced this many seconds before they expire
TOKEN = "HTTP_X_AWS_EC2_METADATA_TOKEN"
TTL = "HTTP_X_AWS_EC2_METADATA_TOKEN_TTL_SECONDS"
CLONE_NEWNET = 0x40000000

StatusAndBody = tuple[int, bytes]


def read_metadata(instance: Any, environ: Mapping[str, Any], *, secret: str) -> StatusAndBody:
    """Return the metadata service's response to an instance: the HTTP status and the body.

    If this function sets a new `role_session` for the instance, the caller must save the session.

    :param environ: the WSGI environment.
    :param secret: the key that signs tokens. The key does not change when the daemon restarts, so that tokens
        stay valid.
    """
    options, method, path = instance.metadata_options, environ["REQUEST_METHOD"], environ["PATH_INFO"]
    if options.http_endpoint == "disabled":
        return 403, b""
    if path == "/latest/api/token":
        return _create_token(instance.id, environ, secret)
    if method not in ("GET", "HEAD"):
        return 405, b""
    token = environ.get(TOKEN, "" if options.http_tokens == "required" else None)
    if token is not None and not _is_valid(token, instance.id, secret):
        return 401, b""
    if path.rstrip("/") == "/latest/user-data":
        data = base64.b64decode(str(instance.user_data or ""))
        return (200, data) if data else (404, b"")
    return _read_path(_build_tree(instance), path)


def _create_token(instance_id: str, environ: Mapping[str, Any], secret: str) -> StatusAndBody:
    if environ["REQUEST_METHOD"] != "PUT":
        return 405, b""
    lifetime = environ.get(TTL, "")
    if not lifetime.isdigit() or not 1 <= int(lifetime) <= MAX_TOKEN_S:
        return 400, b""
    expiry = str(int(time.time()) + int(lifetime))
    return 200, f"{expiry}.{_sign(expiry, instance_id, secret)}".encode()


def _is_valid(token: str, instance_id: str, secret: str) -> bool:
    expiry, _, signature = token.partition(".")
    is_signed = hmac.compare_digest(signature.encode(), _sign(expiry, instance_id, secret).encode())
    return is_signed and int(expiry) > time.time()


def _sign(expiry: str, instance_id: str, secret: str) -> str:
    return hmac.digest(secret.encode(), f"{instance_id} {expiry}".encode(), "sha256").hex()


def _read_path(tree: dict[str, Any], path: str) -> StatusAndBody:
    """Return the text at `path`, or the names below it if it is a folder. Folder names end with a slash."""
    entry: Any = tree
    for name in [part for part in path.split("/") if part]:
        if not isinstance(entry, dict) or name not in entry:
            return 404, b""
        entry = entry[name]
    if isinstance(entry, dict):
        return 200, "\n".join(f"{k}/" if isinstance(v, dict) else k for k, v in entry.items()).encode()
    return 200, str(entry).encode()


def _build_tree(instance: Any) -> dict[str, Any]:
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
        "iam": _role_credentials(instance),
        "spot": _spot_notice(instance),
    }
    return {"latest": {"meta-data": {name: value for name, value in facts.items() if value}}}


def _spot_notice(instance: Any) -> dict[str, str] | None:
    """Return an instance's spot notice, or None if it has none.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """
    reclaimed_at = getattr(instance, "reclaimed_at", None)
    if reclaimed_at is None:
        return None
    time_text = f"{datetime.fromtimestamp(reclaimed_at, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {"instance-action": json.dumps({"action": "terminate", "time": time_text})}


def _role_credentials(instance: Any) -> dict[str, Any] | None:
    """Return the credentials of the instance profile's role, or None if there is no role.

    Credentials are replaced an hour before they expire.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-security-credentials.html
    """
    association = instance.ec2_backend.iam_instance_profile_associations.get(instance.id)
    if association is None or not association.iam_instance_profile.roles:
        return None
    role = association.iam_instance_profile.roles[0]
    session: Any = getattr(instance, "role_session", None)
    renewal_limit = utcnow() + timedelta(seconds=RENEWED_S)
    if session is None or session.role_arn != role.arn or session.expiration <= renewal_limit:
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
    """Serve a WSGI application to the nodes, in the bridge's namespace, until this process ends.

    The service takes no port in the nodes' namespaces. A socket belongs to the namespace in which it was
    created, even if a thread in another namespace accepts its connections.

    :raises OSError: the address cannot be bound in the namespace.
    """
    with ThreadPoolExecutor(1) as pool:  # an extra thread, which stays in the namespace
        listening = pool.submit(_listen, namespace, port).result()
    server = make_server(
        METADATA_ADDRESS,
        port,
        application,
        threaded=True,
        request_handler=KeepAliveHandler,
        fd=listening.detach(),
    )
    threading.Thread(target=server.serve_forever, name=f"port-{port}", daemon=True).start()


def _listen(namespace: str, port: int) -> socket.socket:
    with (NAMESPACES / namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    return socket.create_server((METADATA_ADDRESS, port))
