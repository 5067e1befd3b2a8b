"""The endpoint: every request passes here, before and after moto.

In this order: the signature, what EC2 refuses, what moto cannot do, moto itself; then, if the request changed
something, it is written down before the reply goes out, and the hosts are told.
"""

from __future__ import annotations

import base64
import json
import socket
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BytesIO
from typing import Any

from moto.core.exceptions import ServiceException
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.wrappers import Response

from awsddp.errors import AwsddpError
from awsddp.local import faults, launches, limits, node_faults, scope
from awsddp.local.emulator import Emulator
from awsddp.local.faults import Fault, Faults
from awsddp.local.lifecycle import Lifecycle
from awsddp.local.requests import (
    JSON,
    Refusal,
    Request,
    answered,
    check_signature,
    dry_run,
    internal_error,
    read,
    refuse,
    stamp,
)
from awsddp.local.store import Store
from awsddp.records import read_numbers

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
    asked_at: float = field(default_factory=time.monotonic)
    """When the API was last asked for something."""
    _moto: Any = field(default_factory=lambda: DomainDispatcherApplication(create_backend_app))

    def __post_init__(self) -> None:
        self.store.remember(self.faults.hold("stale"))

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        try:
            is_admin = environ.get("PATH_INFO", "").startswith(ADMIN)
            reply = self._admin(environ) if is_admin else self._api(environ)
        except ConnectionError:
            with suppress(OSError):
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
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
                self.store.remember(self.faults.hold("stale"))
        except AwsddpError as error:
            return Response(json.dumps(error.document()), 400, content_type=JSON)
        if length:
            self.lifecycle.settle()
        return Response(json.dumps({"instances": self._instances(), "faults": in_force}), content_type=JSON)

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
        if not node_faults.names_node(fault.get("operation", "")):
            return False
        instances = {one.id: one for one in self.emulator.instances()}
        node_faults.check(fault, instances, mode=self.mode)
        if fault["effect"] not in node_faults.ONCE:
            return False
        if fault["effect"] == "reclaim":
            notice_s = fault.get("notice_s", node_faults.NOTICE_S)
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
            request = read(environ)
            service = request.service
            target = target or (rest and service != "s3")
            with self.emulator.lock:
                check_signature(request, self.emulator.secret)
                fault = self._strike(request)
            if fault is not None and fault.effect == "delay":
                time.sleep(fault.seconds)
            reply = self._carry_out(request, fault)
            if fault is not None and fault.effect == "late":
                time.sleep(fault.seconds)
            if fault is not None and fault.effect == "lost":
                raise ConnectionResetError("a fault: the reply is lost")
        except ServiceException as refusal:  # ours, or moto's own
            reply = refuse(refusal, service=service, target=target)
        except ConnectionError:
            raise
        except Exception:
            traceback.print_exc()
            reply = refuse(internal_error("An internal error has occurred"), service=service, target=target)
        return stamp(reply)

    def _strike(self, request: Request) -> Fault | None:
        """The fault that hits this request.

        :raises Refusal: the fault refuses it.
        :raises ConnectionError: the fault cuts the connection.
        """
        zone = ""
        if request.service == "ec2" and request.action == "RunInstances":
            with suppress(ServiceException):
                zone = launches.subnet_of(request, self._backend(request)).availability_zone
        fault = self.faults.strike(request.action, (*request.parameters.values(), zone, request.region))
        if fault is None or fault.effect in ("delay", "late", "lost", "stale"):
            return fault
        if fault.effect == "cut":
            raise ConnectionResetError("a fault: the connection is cut")
        raise faults.refusal(
            fault, instance_type=request.parameters.get("InstanceType", "such"), zone=zone or "any zone"
        )

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
        row, backend = scope.find(request), self._backend(request)
        limits.check(request, backend)
        if row.check:
            row.check(request, backend)
        if request.changes and request.dry:
            raise dry_run()
        if request.action == "GetConsoleOutput":
            return self._console(request, backend)
        if row.answer is not None:
            return answered(request, row.answer(request, backend))
        again = {**request.environ, "wsgi.input": BytesIO(request.body)}
        return Response.from_app(self._moto, again, buffered=True)

    def _console(self, request: Request, backend: Any) -> Response:
        instance_id = backend.get_instance(request.asked.get("InstanceId", "")).id
        text = base64.b64encode(self.lifecycle.hosts.console(instance_id)[-65536:]).decode()
        return answered(request, {"InstanceId": instance_id, "Timestamp": datetime.now(UTC), "Output": text})


def _node(tags: dict[str, str], index: int) -> int | None:
    """The number that an instance has in its cluster; None where it is in none."""
    with suppress(KeyError, ValueError, IndexError):
        return int(read_numbers(tags["awsddp:nodes"])[index])
    return None
