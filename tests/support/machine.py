"""The real verbs on one client, in an account of moto, where no instance boots."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from awsddp.aws.client import AwsClient
from awsddp.cluster.up import up
from awsddp.model.records import ClusterListing
from awsddp.plan.records import LaunchPlan
from awsddp.session.context import Session
from awsddp.settings.loader import load
from awsddp.state import ClusterFolder
from tests.support.moto_cloud import Cloud, find_cluster


class Machine:
    """A client in an account of moto, where no instance boots."""

    def __init__(self, home: Path, aws: AwsClient, cloud: Cloud) -> None:
        self.home, self.aws, self.cloud = home, aws, cloud
        self.folder = ClusterFolder(home, "demo")
        self.file = home / "awsddp.toml"
        self.messages: list[str] = []
        self.questions: list[LaunchPlan | str] = []

    def context(self, **keys: Any) -> Session:
        overrides = {"cluster.region": "us-east-1"} | {
            key.replace("__", "."): value for key, value in keys.items()
        }
        spec, job = load("demo", file=self.file, environ={}, overrides=overrides)
        return Session(
            name="demo",
            home=self.home,
            settings=(spec, job),
            on_event=lambda event: self.messages.append(event.text),
        )

    def up(self, **keys: Any) -> dict[str, Any]:
        self.questions.clear()
        self.cloud.requests.clear()
        return up(self.context(**keys), confirm=self.questions.append)

    def launch_two_nodes(self, **keys: Any) -> ClusterListing:
        """Launch two nodes."""
        usual = {"cluster__nodes": 2, "cluster__instance_type": "g5.xlarge", "network__ssh_cidr": "10.0.0.7"}
        self.up(**(usual | keys))
        return self.cluster

    @property
    def cluster(self) -> ClusterListing:
        cluster = find_cluster(self.aws, "demo", self.aws.identity().user_id)
        assert cluster is not None
        return cluster


On = Callable[[str], Machine]
