"""A cloud and a client that start fast, for the matrices of kills and faults.

The cloud is the local cloud's daemon without hosts, forked with its imports done. A command is a forked
process, too, so that it loses at SIGKILL what the real one loses: everything but the disk. Both can be
restored to a saved state, as their state is in their folders. All share one clock, which only `sleep` moves:
a wait of two minutes takes a second.
"""

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import parse_qs

import botocore.session
import pytest
from botocore.config import Config
from botocore.httpsession import URLLib3Session
from botocore.loaders import Loader
from moto.core.utils import get_service_model
from moto.iam import access_control
from moto.moto_api._internal import mock_random
from moto.sts.models import sts_backends

from awsddp import state
from awsddp.aws import clusters, instances, launch_resources, plan_facts, power, teardown, waits
from awsddp.aws.client import Call, Trail
from awsddp.cli.command_line import COMMAND
from awsddp.cluster import doctor, down, inventory, launch, plan, reconcile, status
from awsddp.errors import AwsddpError, Terminated
from awsddp.job import registry, submit
from awsddp.local import control, daemon, ec2_http, emulator, faults, http_server, lifecycle, operations
from awsddp.local.machine import CloudPaths, write_json
from awsddp.nodes import provision
from awsddp.session import cost
from awsddp.session.context import Session
from awsddp.settings.loader import load
from tests.support import iam
from tests.support.clock import SLEEP, Clock
from tests.support.local_cloud import add_fault, clear_fault

REGION = "us-east-1"
PATIENCE_S = 120
PRELOADED = (
    launch_resources,
    plan_facts,
    instances,
    lifecycle,
    power,
    provision,
    teardown,
)  # for all children
Phase = Literal["before it is sent", "before the reply", "before it is written down"]
PHASES: tuple[Phase, ...] = ("before it is sent", "before the reply", "before it is written down")
# The resources of an account that cost or block something: the operation, the key of its response.
KINDS = {
    "describe_instances": "Reservations",
    "describe_volumes": "Volumes",
    "describe_network_interfaces": "NetworkInterfaces",
    "describe_security_groups": "SecurityGroups",
    "describe_placement_groups": "PlacementGroups",
    "describe_key_pairs": "KeyPairs",
}


def agree(_: object) -> None:
    """Confirm everything."""


def tags(described: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a resource as EC2 describes it."""
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags") or described.get("TagSet", ())}


_MODELS = Loader()  # the models of the services are read once for all commands


@functools.cache
def _warm() -> None:
    """Load once what each daemon and each command would load for itself."""
    for service in ("ec2", "sts", "ssm", "service-quotas", "pricing"):
        get_service_model(service)
        _session().create_client(service, region_name=REGION)
    http_server.create_backend_app = functools.cache(http_server.create_backend_app)
    for service in ("ec2", "sts", "ssm"):
        http_server.create_backend_app(service)


class Cloud:
    """A local cloud without hosts, whose daemon is a child of the test."""

    def __init__(self, home: Path, clock: Clock) -> None:
        _warm()
        self.place, self.clock = CloudPaths(home), clock
        self.pid = 0
        self._ec2: Any = None

    def start(self, *, ahead_s: float = 0.0) -> None:
        """Start the daemon on its folder; its time of day is `ahead_s` ahead of the clients'."""
        self.place.folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "version": control.VERSION,
            "mode": "records",
            "why": "",
            "auto": False,
            "share": [],
            "patience_s": 0,
        }
        write_json(self.place.settings, settings)
        with self.place.daemon_lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.pid = os.fork()
            if self.pid == 0:
                self._serve(lock.fileno(), ahead_s)
        while json.loads(_text(self.place.report)).get("pid") != self.pid:
            assert os.waitpid(self.pid, os.WNOHANG) == (0, 0), self.place.log.read_text()
            SLEEP(0.002)

    def _serve(self, lock: int, ahead_s: float) -> None:
        try:
            _die_with_parent()
            for backends in emulator.BACKENDS.values():  # state that other tests left in this process
                backends.clear()
            mock_random.seed()  # else each daemon repeats the ids of the daemon before
            log = os.open(self.place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            http_server.EndpointApp._take_fault = iam.add_policy_check(
                http_server.EndpointApp._take_fault, self.place.home
            )  # type: ignore[method-assign]
            http_server.EndpointApp._stale_view = _of_account(http_server.EndpointApp._stale_view)  # type: ignore[method-assign]
            access_control.create_access_key = _with_roles(access_control.create_access_key)
            faults.time = emulator.time = SimpleNamespace(time=self.clock.read)  # type: ignore[assignment]
            lifecycle.BUSY_POLL_S = 0.001
            operations.OPERATIONS["ec2"] |= _LEAVING
            if ahead_s:
                right = time.time
                time.time = lambda: right() + ahead_s
            sys.argv = ["daemon", str(self.place.home), str(lock)]
            daemon.main()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def kill(self) -> None:
        """Kill the daemon with SIGKILL; the state of all its answers is on disk."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    @property
    def info(self) -> control.LocalInfo:
        info = control.find_cloud(self.place.home)
        assert info is not None
        return info

    @property
    def ec2(self) -> Any:
        """An EC2 client for checks, valid for all daemons of one folder."""
        if self._ec2 is None:
            self._ec2 = self.client("ec2")
        return self._ec2

    def client(self, service: str) -> Any:
        """Return a botocore client without code of awsddp."""
        info = self.info
        return _session().create_client(
            service,
            region_name=REGION,
            endpoint_url=info.endpoint,
            aws_access_key_id=info.access_key_id,
            aws_secret_access_key=info.secret_access_key,
            config=Config(retries={"total_max_attempts": 3}),
        )

    def fault(self, operation: str, effect: str, **choices: Any) -> None:
        """Add a fault, as `awsddp local fault add`."""
        add_fault(self.info, operation, effect, **choices)

    def instances(self) -> list[dict[str, Any]]:
        """Return every instance that was launched, as EC2 describes it."""
        pages = self.ec2.describe_instances()["Reservations"]
        return [instance for page in pages for instance in page["Instances"]]

    def clear_faults(self) -> None:
        """Clear all faults, as `awsddp local fault clear`."""
        clear_fault(self.info)

    def live_instances(self) -> list[dict[str, Any]]:
        return [row for row in self.instances() if row["State"]["Name"] not in clusters.ENDED_STATES]

    def expire(self) -> None:
        """Power off every instance whose expiry has passed, from inside, as the watchdog does."""
        now = self.clock.now()
        late = [
            row for row in self.live_instances() if datetime.fromisoformat(tags(row)["awsddp:expires"]) <= now
        ]
        self.power_off([row for row in late if row["State"]["Name"] == "running"])

    def power_off(self, instances: Iterable[Mapping[str, Any]]) -> None:
        """Power off instances from inside."""
        for instance in instances:
            stops = self.on_poweroff(instance["InstanceId"]) == "stop"
            end = self.ec2.stop_instances if stops else self.ec2.terminate_instances
            end(InstanceIds=[instance["InstanceId"]])

    def on_poweroff(self, instance_id: str) -> str:
        """Return the effect of a poweroff from inside an instance: "stop" or "terminate"."""
        attribute = self.ec2.describe_instance_attribute(
            InstanceId=instance_id, Attribute="instanceInitiatedShutdownBehavior"
        )
        return str(attribute["InstanceInitiatedShutdownBehavior"]["Value"])

    def find_leftovers(self) -> list[str]:
        """Return the resources of the account that a new account does not have."""
        leftovers = []
        for operation, key in KINDS.items():
            for item in getattr(self.ec2, operation)()[key]:
                ended = {row["State"]["Name"] for row in item.get("Instances", ())} == {"terminated"}
                if not ended and item.get("GroupName") != "default":
                    leftovers.append(f"{operation}: {item}")
        return leftovers


Fault = tuple[str, str, dict[str, Any]]
"""Operation, effect, and the options of `local fault add`."""
Login = Literal["key", "sso", "role", "unnamed", "another account"]
"""The caller: an access key of a user, the environment of an SSO login, a profile of a role with and without
a session name, a role of another account."""
_ROLES = "123456789012:role/gpu", "123456789012:role/AWSReservedSSO_gpu", "999999999999:role/gpu"
_PROFILES = """\
[profile key]
aws_access_key_id = {key}
aws_secret_access_key = {secret}
[profile role]
role_arn = arn:aws:iam::123456789012:role/gpu
source_profile = key
role_session_name = ann
[profile unnamed]
role_arn = arn:aws:iam::123456789012:role/gpu
source_profile = key
"""


# Operations for a disk and an interface without an instance, as an aborted launch leaves them.
_LEAVING = {
    "CreateVolume": operations.Operation(
        parameters=("AvailabilityZone", "Size", "ClientToken"), creates=("volume",)
    ),
    "CreateNetworkInterface": operations.Operation(
        parameters=("SubnetId", "ClientToken"), creates=("network-interface",)
    ),
}


def _role(access_key_id: str) -> Any:
    """Return the role session of an access key, or None."""
    backends = (backend for regions in sts_backends.values() for backend in regions.values())
    sessions = (backend.get_assumed_role_from_access_key(access_key_id) for backend in backends)
    return next(filter(None, sessions), None)


def _of_account(view: Callable[..., Any]) -> Callable[..., Any]:
    """Return the daemon's view of resources; a role of another account sees none."""

    @contextlib.contextmanager
    def look(self: Any, request: Any, fault: Any) -> Iterator[None]:
        role = _role(re.findall(ec2_http.SCOPE, request.environ["HTTP_AUTHORIZATION"])[0][0])
        with contextlib.ExitStack() as stack:
            stack.enter_context(view(self, request, fault))
            if role is not None and role.account_id != iam.ACCOUNT:
                stack.enter_context(faults.hide_new_resources(self._backend(request), younger_than_s=1e12))
            yield

    return look


def _with_roles(find: Callable[..., Any]) -> Callable[..., Any]:
    """Return moto's lookup of access keys, extended to roles of other accounts."""

    def look(account_id: str, partition: str, access_key_id: str, headers: Any) -> Any:
        role = _role(access_key_id)
        return find(account_id if role is None else role.account_id, partition, access_key_id, headers)

    return look


@dataclass(frozen=True)
class Kill:
    """A signal for the client at a phase of the `nth` call of an operation (`*`: of any)."""

    operation: str
    nth: int
    phase: Phase
    number: signal.Signals = signal.SIGKILL

    def __str__(self) -> str:
        return f"{self.operation} {self.nth}, {self.phase}, {self.number.name}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended. `code` is the exit code, None if it was killed; `calls` are its calls to AWS."""

    code: int | None = None
    document: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    calls: tuple[tuple[str, int], ...] = ()


class World:
    """A cloud, and a client with an awsddp home: `root` holds both, and their saved states."""

    def __init__(self, root: Path) -> None:
        self.clock = Clock()
        self.root = root
        self.home = root / "home"
        self.cloud = Cloud(root / "cloud", self.clock)

    def run(
        self,
        verb: Callable[..., dict[str, Any]],
        *,
        nodes: int = 2,
        home: Path | None = None,
        kill: Kill | None = None,
        overrides: Mapping[str, Any] | None = None,
        login: Login = "key",
        fault: Fault | None = None,
        **choices: Any,
    ) -> Outcome:
        """Run a verb in a separate process, as the command line does, and return how it ended.

        The fault is added after the login and cleared at the end.
        """
        context = self._context(nodes, home or self.home, overrides or {})
        environ = self._log_in(login)
        if fault is not None:
            operation, effect, how = fault
            self.cloud.fault(operation, effect, **how)
        try:
            return self._run(lambda: verb(context, **choices), verb.__name__, kill, environ)
        finally:
            if fault is not None:
                self.cloud.clear_faults()

    def _run(
        self, verb: Callable[[], dict[str, Any]], name: str, kill: Kill | None, environ: Mapping[str, str]
    ) -> Outcome:
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            _die_with_parent()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE_S)
            _run(self, verb, kill, environ, writes)
        os.close(writes)
        with os.fdopen(reads, "rb") as answer:
            pickled = answer.read()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL, f"{name} does not end"
            return Outcome()
        if not pickled:  # the signal came before any change: the command line exits at once
            assert os.waitstatus_to_exitcode(status) >= 128, status
            return Outcome(code=os.waitstatus_to_exitcode(status))
        outcome: Outcome = pickle.loads(pickled)
        assert outcome.code != 1, outcome.text
        return outcome

    def _log_in(self, login: Login) -> dict[str, str]:
        """Return the environment of a caller, with a home for the files of the AWS CLI."""
        info, folder = self.cloud.info, self.root / "home"
        environ = {"AWS_ENDPOINT_URL": info.endpoint, "HOME": str(folder)}
        if login in ("role", "unnamed"):
            folder.mkdir(exist_ok=True)
            config = folder / "aws-config"
            config.write_text(_PROFILES.format(key=info.access_key_id, secret=info.secret_access_key))
            return environ | {"AWS_CONFIG_FILE": str(config), "AWS_PROFILE": login}
        keys = {"AccessKeyId": info.access_key_id, "SecretAccessKey": info.secret_access_key}
        if login != "key":
            role = f"arn:aws:iam::{_ROLES[1 if login == 'sso' else 2]}"
            sts = self.cloud.client("sts")
            keys = sts.assume_role(RoleArn=role, RoleSessionName="ann@example.com")["Credentials"]
            environ["AWS_SESSION_TOKEN"] = keys["SessionToken"]
        return environ | {
            "AWS_ACCESS_KEY_ID": keys["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": keys["SecretAccessKey"],
        }

    def _context(self, nodes: int, home: Path, overrides: Mapping[str, Any]) -> Session:
        values = {
            "cluster.region": REGION,
            "cluster.nodes": nodes,
            "cluster.instance_type": "g5.xlarge",
            "network.ssh_cidr": "203.0.113.7/32",
            **overrides,
        }
        spec, job = load("demo", environ={}, overrides=values)
        return Session(name="demo", home=home, settings=(spec, job))

    def make_roles(self) -> None:
        """Create the roles of the account, so that the ids of their sessions are constant."""
        iam = self.cloud.client("iam")
        for role in _ROLES[:2]:
            iam.create_role(RoleName=role.rpartition("/")[2], AssumeRolePolicyDocument="{}")

    def save(self, name: str) -> None:
        """Save the state of the cloud and the client under a name; kills the daemon."""
        self.cloud.kill()
        folder = self.root / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.cloud.place.home, folder / "cloud")
        if self.home.exists():
            shutil.copytree(self.home, folder / "home")
        (folder / "clock").write_text(str(self.clock.read()))

    def restore(self, name: str, *, ahead_s: float = 0.0) -> None:
        """Restore a saved state of the cloud and the client, and start the daemon."""
        self.cloud.kill()
        self.clock.move(float((self.root / name / "clock").read_text()))
        for part in ("cloud", "home"):
            shutil.rmtree(self.root / part, ignore_errors=True)
            if (self.root / name / part).exists():
                shutil.copytree(self.root / name / part, self.root / part)
        shutil.rmtree(self.root / "elsewhere", ignore_errors=True)
        self.cloud.start(ahead_s=ahead_s)


def _run(
    world: World,
    verb: Callable[[], dict[str, Any]],
    kill: Kill | None,
    environ: Mapping[str, str],
    writes: int,
) -> None:
    """In the child: run a verb, send its outcome, and exit."""
    calls: list[tuple[str, int]] = []
    try:
        ended = _run_verb(world, verb, kill, environ, calls)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:  # a signal arrived when the verb ended
        ended = {"code": 130}
    try:
        with os.fdopen(writes, "wb") as answer:
            pickle.dump(Outcome(**ended, calls=tuple(calls)), answer)
    finally:
        os._exit(0)


def _run_verb(
    world: World,
    verb: Callable[[], dict[str, Any]],
    kill: Kill | None,
    environ: Mapping[str, str],
    calls: list[tuple[str, int]],
) -> dict[str, Any]:
    """Run a verb and return the fields of its outcome; adds its calls to AWS to `calls`."""
    try:
        _patch_process(world, environ)
        COMMAND.finishes = COMMAND.ends_cluster = True  # as for `run`
        COMMAND.install_handlers(lambda error: None)
        _count_and_kill(calls, kill)
        return {"code": 0, "document": verb()}
    except AwsddpError as error:
        if not error.message or not (error.why or error.next):
            return {"code": 1, "text": f"an error that explains nothing: {error!r}"}
        return {"code": error.exit_code, "text": str(error)}
    except KeyboardInterrupt as stop:
        return {"code": 128 + stop.signal_number if isinstance(stop, Terminated) else 130}
    except BaseException:
        return {"code": 1, "text": traceback.format_exc()}


TIMED = (
    cost,
    doctor,
    down,
    inventory,
    launch,
    plan,
    reconcile,
    registry,
    state,
    status,
    submit,
)
"""The modules that read the time, which is replaced by that of the world."""


def _patch_process(world: World, environ: Mapping[str, str]) -> None:
    """In the child: use the cloud as AWS, and the clock of the world."""
    clock = world.clock
    os.environ.update(environ)
    botocore.session.create_loader = lambda path=None: _MODELS
    time.sleep = clock.sleep
    shifted = SimpleNamespace(now=clock.now, fromisoformat=datetime.fromisoformat)
    for module in TIMED:
        assert module.datetime is datetime, module  # type: ignore[attr-defined]
        module.datetime = shifted  # type: ignore[attr-defined]
    for name in ("monotonic", "sleep", "now"):
        object.__setattr__(waits.CLOCK, name, getattr(clock, {"monotonic": "read"}.get(name, name)))


def _count_and_kill(calls: list[tuple[str, int]], kill: Kill | None) -> None:
    """In the child: count the calls, and send the signal at the call of `kill`."""
    counted: Counter[str] = Counter()
    send, record = URLLib3Session.send, Trail.__call__
    local = threading.local()

    def kill_in(*phases: Phase) -> None:
        if kill is not None and (kill.operation, kill.nth) in local.call and kill.phase in phases:
            os.kill(os.getpid(), kill.number)

    def sent(self: URLLib3Session, request: Any) -> Any:
        operation = _operation(request)
        counted.update((operation, "*"))
        local.call = tuple((name, counted[name]) for name in (operation, "*"))
        calls.append(local.call[0])
        kill_in(PHASES[0])
        reply = send(self, request)
        kill_in(PHASES[1])
        return reply

    def recorded(self: Trail, call: Call) -> None:
        kill_in(PHASES[2])
        record(self, call)

    URLLib3Session.send = sent
    Trail.__call__ = recorded  # type: ignore[method-assign]


def _operation(request: Any) -> str:
    target = request.headers.get("X-Amz-Target", b"")
    if target:
        return str(target.decode() if isinstance(target, bytes) else target).rpartition(".")[2]
    body = request.body.decode() if isinstance(request.body, bytes) else request.body
    return parse_qs(body or "").get("Action", [request.method])[0]  # S3 requests have only a method


def _session() -> Any:
    session = botocore.session.Session()
    session.register_component("data_loader", _MODELS)
    return session


def _die_with_parent() -> None:
    """In a child: get SIGKILL when the parent ends, whatever the reason."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else "{}"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The world of a test module."""
    made = World(tmp_path_factory.mktemp("world"))
    made.cloud.start()
    made.make_roles()
    made.save("empty")
    yield made
    made.cloud.kill()


@pytest.fixture
def world(ground: World) -> World:
    """A world with an empty account and an empty awsddp home."""
    ground.restore("empty")
    return ground
