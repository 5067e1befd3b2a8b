"""The record of a cluster that was launched."""

from datetime import UTC, datetime

from awsddp.model.records import PreparedNode, Target
from awsddp.state import Record

RECORD = Record(
    id="0a1b2c3d",
    owner="AIDAEXAMPLE",
    target=Target(region="eu-west-1", profile="work"),
    created=datetime(2026, 11, 22, tzinfo=UTC),
    expires=datetime(2026, 11, 23, tzinfo=UTC),
    instance_type="p4d.24xlarge",
    nodes=2,
    gpus_per_node=8,
    pretended=False,
    ssh_user="ubuntu",
    price_usd_per_hour=65.54,
    prepared=tuple(
        PreparedNode(node=n, instance_id=f"i-{n}", home="/home/ubuntu", python="python3", nic="ens5")
        for n in range(2)
    ),
)
