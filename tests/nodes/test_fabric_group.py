"""Nodes as a fabric.Group."""

from pathlib import Path

from awsddp.nodes.fabric_group import fabric_group
from awsddp.nodes.login import Endpoint, Login


def test_a_fabric_group_without_a_jump_host_has_no_gateway(tmp_path: Path) -> None:
    login = Login(key=tmp_path / "key", known_hosts=tmp_path / "known", ssh_config=tmp_path / "config")
    node = Endpoint(node=0, instance_id="i-1", host="10.0.0.1", port=2222, user="ubuntu")
    (member,) = fabric_group([node], login)
    assert (member.host, member.port, member.user, member.gateway) == ("10.0.0.1", 2222, "ubuntu", None)
