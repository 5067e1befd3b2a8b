"""A moto server on loopback that records its requests, and fails the calls that a test names."""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl

from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.ssm.models import Parameter, ssm_backends

from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import find_clusters
from awsddp.aws.instances import launch
from awsddp.aws.launch_resources import ensure_launch_resources
from awsddp.aws.plan_facts import gather_facts
from awsddp.local import operations, request_checks
from awsddp.local.ec2_http import Refusal, dry_run_error, make_response, read_request
from awsddp.local.offers import OWNER, Call
from awsddp.model.events import Event
from awsddp.model.records import ClusterListing, LaunchIntent, Node, Target
from awsddp.plan.launch_plan import make_plan
from awsddp.plan.records import LaunchPlan, resource_names
from awsddp.plan.requests import RequestValues
from awsddp.settings.spec import ClusterSection, ClusterSpec

REGION = "us-east-1"
USER_ID = "AKIAIOSFODNN7EXAMPLE"
NOW = datetime(2026, 11, 21, 8, 45, tzinfo=UTC)
SECRETS = {
    "user_data": "#cloud-config\n{}\n",
    "public_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIzv1Tq0QkZ1mYJ8b3hRzj8n8l0Xo9o3c1kqk5m2m7aN awsddp",
}
IDS = resource_names("demo", "0a1b2c3d")


def find_cluster(aws: AwsClient, name: str, owner: str) -> ClusterListing | None:
    """Return the cluster of this name and owner, or None."""
    return next(iter(find_clusters(aws, name, owner)), None)


@dataclass
class Fault:
    """An error response, before the call takes effect or after it; only to calls with the parameter `to`."""

    code: str
    message: str = "on purpose"
    status: int = 400
    after: bool = False
    to: str = ""


@dataclass
class Cloud:
    """The requests of the server (operation, form), and the faults of its operations, in order."""

    endpoint: str = ""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, bytes] = field(default_factory=dict)
    quotas: dict[str, float] = field(default_factory=dict)
    requested_quotas: dict[str, float] = field(default_factory=dict)
    prices: dict[str, float] = field(default_factory=dict)
    supports_any_of: bool = True
    price_filters: list[str] = field(default_factory=list)

    @property
    def target(self) -> Target:
        return Target(
            name="local",
            region=REGION,
            endpoint=self.endpoint,
            access_key_id="testing",
            secret_access_key="testing",
            caller_address="10.77.0.1",
        )

    @property
    def backend(self) -> Any:
        return self.backend_of(REGION)

    def backend_of(self, region: str) -> Any:
        return ec2_backends[DEFAULT_ACCOUNT_ID][region]

    def fail(self, operation: str, *codes: str, **settings: Any) -> None:
        self.faults[operation].extend(Fault(code, **settings) for code in codes)

    def requests_of(self, operation: str) -> list[dict[str, str]]:
        return [form for name, form in self.requests if name == operation]

    def add_image(
        self,
        name: str,
        *,
        parameter: str | None = None,
        tags: dict[str, str] | None = None,
        region: str = REGION,
    ) -> str:
        image = self.backend_of(region).register_image(name=name)
        image.architecture = "x86_64"
        if name.startswith("Deep Learning"):
            image.owner_id, image.owner_alias = OWNER, "amazon"
        image.creation_date = NOW + timedelta(minutes=len(self.backend.amis))
        image.add_tags(tags or {})
        if parameter:
            ssm = ssm_backends[DEFAULT_ACCOUNT_ID][region]
            value = Parameter(
                DEFAULT_ACCOUNT_ID, parameter, image.id, "String", None, None, None, NOW, 1, "text"
            )
            ssm._parameters[parameter].append(value)
        return str(image.id)


class Server:
    """moto's application, wrapped: it records requests, implements ClientToken, and returns faults."""

    def __init__(self) -> None:
        self.cloud = Cloud()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._alone = threading.Lock()  # moto's backends are not thread-safe

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = BytesIO(body)
        form = dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
        operation = form.get("Action") or environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]
        self.cloud.requests.append((operation, form))
        self.cloud.agents.append(environ.get("HTTP_USER_AGENT", ""))
        pending = self.cloud.faults[operation]
        fault = pending.pop(0) if pending and (not pending[0].to or pending[0].to in form) else None
        if fault is not None and not fault.after:
            return _answer(fault, start)
        token = form.get("ClientToken", "") if operation == "RunInstances" else ""
        if token in self.cloud.tokens:
            start("200 OK", [("Content-Type", "text/xml")])
            return [self.cloud.tokens[token]]
        if operation.endswith(("PlacementGroup", "PlacementGroups")):
            return self._placement(environ, body, start)
        if operation.endswith("ServiceQuota") or operation.startswith("RequestServiceQuota"):
            return self._quota(operation, body, start)
        if operation == "GetProducts":
            return self._products(body, start)
        status: list[Any] = []
        with self._alone:
            reply = b"".join(self._app(environ, lambda *words: status.append(words) or start))
        if token and status[0][0].startswith("200"):
            self.cloud.tokens[token] = reply
        if fault is not None:
            return _answer(fault, start)
        start(*status[0])
        return [reply]

    def _quota(self, operation: str, body: bytes, start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer requests about EC2's quotas, which moto lacks."""
        parameters = json.loads(body)
        value = self.cloud.quotas.get(parameters["QuotaCode"])
        is_known = operation.startswith("Request") or value is not None
        start("200 OK" if is_known else "400 Bad Request", [("Content-Type", "application/x-amz-json-1.1")])
        if not is_known:
            return [b'{"__type": "NoSuchResourceException", "message": "no such quota"}']
        key = "RequestedQuota" if operation.startswith("Request") else "Quota"
        if key == "RequestedQuota":
            self.cloud.requested_quotas[parameters["QuotaCode"]] = parameters["DesiredValue"]
        return [json.dumps({key: {"Id": "request-1", "Value": value}}).encode()]

    def _products(self, body: bytes, start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer as the Pricing API, which moto lacks."""
        kind = next(row["Type"] for row in json.loads(body)["Filters"] if row["Field"] == "instanceType")
        self.cloud.price_filters.append(kind)
        products = [
            {
                "product": {"attributes": {"instanceType": name, "tenancy": tenancy}},
                "terms": {"OnDemand": {"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": str(usd)}}}}}},
            }
            for name, price in self.cloud.prices.items()
            if kind == "TERM_MATCH" or self.cloud.supports_any_of
            for tenancy, usd in (("Shared", price), ("Host", 0.0))
        ]
        start("200 OK", [("Content-Type", "application/x-amz-json-1.1")])
        return [json.dumps({"PriceList": [json.dumps(product) for product in products]}).encode()]

    def _placement(self, environ: dict[str, Any], body: bytes, start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer requests about placement groups, which moto lacks, as the local cloud does."""
        try:
            request = read_request({**environ, "wsgi.input": BytesIO(body)})
            call, row = (
                Call(request, self.cloud.backend_of(request.region)),
                operations.find_operation(request),
            )
            request_checks.check_call(call)
            if request.is_dry_run:
                raise dry_run_error()
            assert row.handler is not None
            reply = make_response(request, row.handler(call))
        except Refusal as refusal:
            return _answer(Fault(refusal.code, refusal.message), start)
        return reply(environ, start)


def _answer(fault: Fault, start: Callable[..., Any]) -> Iterable[bytes]:
    error = f"<Error><Code>{fault.code}</Code><Message>{fault.message}</Message></Error>"
    start(f"{fault.status} Fault", [("Content-Type", "text/xml")])
    return [f"<Response><Errors>{error}</Errors><RequestID>r-1</RequestID></Response>".encode()]


def values(ids: dict[str, str] = IDS) -> RequestValues:
    return RequestValues(ids=ids, secrets=SECRETS, now=NOW)


def spec(**cluster: Any) -> ClusterSpec:
    return ClusterSpec(name="demo", cluster=ClusterSection(**cluster))


def plan_for(aws: AwsClient, **cluster: Any) -> LaunchPlan:
    return make_plan(
        spec(**cluster), gather_facts(aws, spec(**cluster), caller_address="10.77.0.1", target="local")
    )


@dataclass
class Launcher:
    """Carries out a plan as `up` does, and records its intents and events."""

    aws: AwsClient
    intents: list[LaunchIntent] = field(default_factory=list)
    on_intent: Callable[[LaunchIntent], None] = lambda intent: None
    events: list[Event] = field(default_factory=list)

    def __call__(self, plan: LaunchPlan, *, ids: dict[str, str] = IDS) -> tuple[Node, ...]:
        group = self.access(plan, ids=ids)
        return launch(
            self.aws,
            plan,
            values({**ids, "security_group": group}),
            write_intent=self._write,
            on_event=self.events.append,
        )

    def access(self, plan: LaunchPlan, *, ids: dict[str, str] = IDS) -> str:
        return ensure_launch_resources(self.aws, plan, values(ids), on_event=self.events.append)

    def _write(self, intent: LaunchIntent) -> None:
        self.intents.append(intent)
        self.on_intent(intent)


def keep_zones(plan: LaunchPlan, count: int) -> LaunchPlan:
    """Return the plan with only its first `count` zones."""
    return replace(plan, subnets=plan.subnets[:count])
