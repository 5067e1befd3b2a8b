"""Fixtures: a new cloud for each test, and a clock that only `sleep` moves."""

import functools
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.client import ClientCreator
from botocore.loaders import Loader
from moto.backends import list_of_moto_modules
from moto.core.utils import method_names_from_class
from moto.ec2.models.instance_types import InstanceTypeOfferingBackend
from moto.ec2.models.vpcs import VPCBackend
from moto.moto_api._internal.models import moto_api_backend
from werkzeug.serving import make_server

from awsddp.aws.client import AwsClient
from awsddp.aws.waits import CLOCK, Clock
from awsddp.local.emulator import add_default_route
from tests.support.machine import Machine, On
from tests.support.moto_cloud import NOW, Cloud, Launcher, Server


def serve_moto() -> Iterator[Server]:
    """Yield moto's server; moto and botocore are patched once for all tests."""
    application = Server()
    listener = make_server("127.0.0.1", 0, application, threaded=True)
    application.cloud.endpoint = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # a thousand of them, for each test
        bare = VPCBackend.create_default_vpc

        def create_default_vpc(backend: Any) -> Any:
            vpc = bare(backend)
            add_default_route(backend, vpc)
            return vpc

        patch.setattr(VPCBackend, "create_default_vpc", create_default_vpc)
        folders = tuple(list_of_moto_modules())  # moto lists its folder for each request
        patch.setattr("moto.backends.list_of_moto_modules", lambda: folders)
        methods = functools.cache(method_names_from_class)
        patch.setattr("moto.core.responses.method_names_from_class", methods)
        offered = InstanceTypeOfferingBackend.describe_instance_type_offerings
        offers: dict[str, Any] = {}  # thousands of them, filtered for each plan

        def describe_offerings(backend: Any, location: Any = None, filters: Any = None) -> Any:
            key = f"{backend.region_name} {location} {filters}"
            if key not in offers:
                offers[key] = offered(backend, location, filters)
            return offers[key]

        patch.setattr(InstanceTypeOfferingBackend, "describe_instance_type_offerings", describe_offerings)
        models = Loader()  # the models of the services are read once for all gateways,
        patch.setattr("botocore.session.create_loader", lambda path=None: models)
        made = ClientCreator._create_client_class  # as are the classes of their clients
        classes: dict[str, Any] = {}

        def create_client_class(creator: Any, name: str, model: Any) -> Any:
            if name == "s3":  # boto3 adds methods to the S3 class, botocore sessions do not
                return made(creator, name, model)
            if name not in classes:
                classes[name] = made(creator, name, model)
            return classes[name]

        patch.setattr(ClientCreator, "_create_client_class", create_client_class)
        yield application
    listener.shutdown()
    thread.join()


@pytest.fixture
def cloud(server: Server) -> Cloud:
    """A new cloud with one Deep Learning AMI that pretends its GPUs."""
    moto_api_backend.reset()
    server.cloud = Cloud(endpoint=server.cloud.endpoint)
    server.cloud.add_image(
        "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Ubuntu 24.04) 20260822",
        tags={"awsddp:gpus": "pretended"},
    )
    return server.cloud


@pytest.fixture(scope="session")
def gateway(server: Server) -> AwsClient:
    """One gateway for all tests: building its clients takes longer than most of them."""
    return AwsClient(server.cloud.target)


@pytest.fixture
def aws(gateway: AwsClient, cloud: Cloud) -> AwsClient:
    return gateway


@pytest.fixture
def clock() -> Iterator[Clock]:
    """The clock of all waits, which only `sleep` moves."""
    passed = [0.0]

    def sleep(seconds: float) -> None:
        passed[0] += seconds

    moved = {
        "monotonic": lambda: passed[0],
        "sleep": sleep,
        "now": lambda: NOW + timedelta(seconds=passed[0]),
    }
    before = vars(CLOCK).copy()
    vars(CLOCK).update(moved)
    yield CLOCK
    vars(CLOCK).update(before)


@pytest.fixture
def launcher(aws: AwsClient, clock: Clock) -> Launcher:
    return Launcher(aws)


@pytest.fixture
def on(tmp_path: Path, aws: AwsClient, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[On]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    cloud.add_image(
        "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Ubuntu 24.04) 20260822",
        tags={"awsddp:gpus": "pretended", "awsddp:hosts": "none"},
    )
    passed = [0.0]
    before = CLOCK.monotonic, CLOCK.sleep
    object.__setattr__(CLOCK, "monotonic", lambda: passed[0])
    object.__setattr__(CLOCK, "sleep", lambda seconds: passed.__setitem__(0, passed[0] + seconds))
    yield lambda name: Machine(tmp_path / name, aws, cloud)
    object.__setattr__(CLOCK, "monotonic", before[0])
    object.__setattr__(CLOCK, "sleep", before[1])
