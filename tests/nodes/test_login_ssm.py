"""`network.jump = "ssm"`: a stand-in for `aws ssm start-session` forwards real SSH."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.nodes.login import JumpFailure, Ssm
from awsddp.util.parallel import NodesFailed
from tests.support.ssh_hosts import Lab
from tests.support.ssm import FakeAwsCli

MakeLab = Callable[[int], Lab]


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeAwsCli:
    stand_in = FakeAwsCli(tmp_path / "ssm")
    monkeypatch.setenv("PATH", str(stand_in.bin), prepend=os.pathsep)
    return stand_in


def make_arguments(instance_id: str, port: int) -> list[str]:
    return [
        *("ssm", "start-session", "--target", instance_id, "--document-name", "AWS-StartSSHSession"),
        *("--parameters", f"portNumber={port}", "--region", "eu-north-1", "--profile", "50% off"),
    ]


def make_ssm(folder: Path) -> Ssm:
    return Ssm(name="ssm", folder=folder, region="eu-north-1", profile="50% off")


def test_commands_and_ssh_reach_nodes_through_ssm_sessions(
    make_lab: MakeLab, aws: FakeAwsCli, tmp_path: Path
) -> None:
    lab, jump = make_lab(2), make_ssm(tmp_path)
    endpoints = lab.endpoints(jump)
    aws.set_targets({host.endpoint.instance_id: (host.host, "") for host in lab.hosts})
    with lab.fleet(jump=jump, deadline_s=60) as fleet:
        results = fleet.run(["sh", "-c", "cat; exit 3"], stdin=b"x" * 2**20, timeout_s=60)
        assert [(result.exit_code, len(result.stdout)) for result in results.values()] == [(3, 2**20)] * 2
    assert lab.ssh(1, "echo there", jump=jump) == "there\n"
    expected = [make_arguments(node.instance_id, node.port) for node in (*endpoints, endpoints[1])]
    assert sorted(aws.calls) == sorted(expected)


def test_node_without_a_connected_ssm_agent_is_reported_at_the_deadline(
    make_lab: MakeLab, aws: FakeAwsCli, tmp_path: Path
) -> None:
    with pytest.raises(NodesFailed) as error, make_lab(1).fleet(jump=make_ssm(tmp_path), deadline_s=1):
        pass
    assert "TargetNotConnected" in error.value.why
    assert "AmazonSSMManagedInstanceCore" in error.value.next


def test_missing_permission_is_not_retried(make_lab: MakeLab, aws: FakeAwsCli, tmp_path: Path) -> None:
    aws.set_targets(
        {}, refusal="An error occurred (AccessDeniedException) when calling the StartSession operation"
    )
    lab, jump = make_lab(1), make_ssm(tmp_path)
    with pytest.raises((JumpFailure, NodesFailed)) as error, lab.fleet(jump=jump, deadline_s=3600):
        pass
    assert (error.value.exit_code, "AccessDenied" in error.value.why) == (6, True)
    assert "--iam-policy" in error.value.next
    assert len(aws.calls) == 1


@pytest.mark.parametrize(
    ("program", "command"),
    [("aws", "pip install awscli"), ("session-manager-plugin", "session-manager-plugin.deb")],
)
def test_missing_program_is_named_with_the_command_that_installs_it(
    aws: FakeAwsCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, command: str
) -> None:
    (aws.bin / program).unlink()
    (aws.bin / "dpkg").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(aws.bin))
    with pytest.raises(ConfigError, match=f"{program} not found") as error:
        Ssm(name="ssm", folder=tmp_path).ensure_connected()
    assert (error.value.exit_code, command in error.value.next) == (3, True)


@pytest.mark.parametrize("manager", ["dpkg", "yum"])
@pytest.mark.parametrize("is_signed", [True, False])
def test_plugin_is_installed_from_a_private_folder_and_only_with_a_valid_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: str, is_signed: bool
) -> None:
    programs = {
        "aws": "",
        manager: "",
        "curl": 'for arg; do case $arg in http*) touch "$(basename "$arg")";; esac; done',
        "gpg": f'[ -f "$2" ] && [ -f "$3" ] && [ "$1 $2" = "--verify $3.sig" ] && {str(is_signed).lower()}',
        "sudo": 'stat -c %a . > "$HERE"/mode; for arg; do [ ! -f "$arg" ] || echo > "$HERE"/installed; done',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("sh", "mktemp", "basename", "touch", "stat", "env"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HERE", str(tmp_path))
    with pytest.raises(ConfigError, match="session-manager-plugin not found") as error:
        Ssm(name="ssm", folder=tmp_path).ensure_connected()
    command, _, note = error.value.next.partition("\n")
    subprocess.run(["sh", "-c", command], cwd=tmp_path)
    assert (tmp_path / "installed").exists() is is_signed
    assert not is_signed or (tmp_path / "mode").read_text() == "700\n"
    assert "install-plugin-linux-verify-signature" in note
