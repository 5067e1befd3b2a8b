"""`network.jump = "ssm"`: a stand-in takes the words of `aws ssm start-session` and carries real SSH."""

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
from tests.support.ssm import StandIn

MakeLab = Callable[[int], Lab]


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(tmp_path / "ssm")
    monkeypatch.setenv("PATH", str(made.bin), prepend=os.pathsep)
    return made


def words(instance_id: str, port: int) -> list[str]:
    return [
        *("ssm", "start-session", "--target", instance_id, "--document-name", "AWS-StartSSHSession"),
        *("--parameters", f"portNumber={port}", "--region", "eu-north-1", "--profile", "50% off"),
    ]


def ssm(folder: Path) -> Ssm:
    return Ssm(name="ssm", folder=folder, region="eu-north-1", profile="50% off")


def test_commands_and_ssh_itself_go_through_a_session_with_each_node(
    lab: MakeLab, aws: StandIn, tmp_path: Path
) -> None:
    two, jump = lab(2), ssm(tmp_path)
    endpoints = two.endpoints(jump)
    aws.know({host.endpoint.instance_id: (host.host, "") for host in two.hosts})
    with two.fleet(jump=jump, deadline_s=60) as fleet:
        results = fleet.run(["sh", "-c", "cat; exit 3"], stdin=b"x" * 2**20, timeout_s=60)
        assert [(one.exit_code, len(one.stdout)) for one in results.values()] == [(3, 2**20)] * 2
    assert two.ssh(1, "echo there", jump=jump) == "there\n"
    expected = [words(one.instance_id, one.port) for one in (*endpoints, endpoints[1])]
    assert sorted(aws.calls) == sorted(expected)


def test_a_node_whose_agent_has_not_reported_yet_is_waited_for_and_then_told(
    lab: MakeLab, aws: StandIn, tmp_path: Path
) -> None:
    with pytest.raises(NodesFailed) as caught, lab(1).fleet(jump=ssm(tmp_path), deadline_s=1):
        pass
    assert "TargetNotConnected" in caught.value.why
    assert "AmazonSSMManagedInstanceCore" in caught.value.next


def test_a_right_that_is_missing_is_not_waited_for(lab: MakeLab, aws: StandIn, tmp_path: Path) -> None:
    aws.know({}, refusal="An error occurred (AccessDeniedException) when calling the StartSession operation")
    one, jump = lab(1), ssm(tmp_path)
    with pytest.raises((JumpFailure, NodesFailed)) as caught, one.fleet(jump=jump, deadline_s=3600):
        pass
    assert (caught.value.exit_code, "AccessDenied" in caught.value.why) == (6, True)
    assert "--iam-policy" in caught.value.next
    assert len(aws.calls) == 1


@pytest.mark.parametrize(
    ("program", "line"),
    [("aws", "pip install awscli"), ("session-manager-plugin", "session-manager-plugin.deb")],
)
def test_a_missing_program_is_named_with_the_line_that_installs_it(
    aws: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, line: str
) -> None:
    (aws.bin / program).unlink()
    (aws.bin / "dpkg").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(aws.bin))
    with pytest.raises(ConfigError, match=f"{program} not found") as caught:
        Ssm(name="ssm", folder=tmp_path).ensure_connected()
    assert (caught.value.exit_code, line in caught.value.next) == (3, True)


@pytest.mark.parametrize("manager", ["dpkg", "yum"])
@pytest.mark.parametrize("signed", [True, False])
def test_the_plugin_is_installed_from_a_private_folder_and_only_with_its_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: str, signed: bool
) -> None:
    programs = {
        "aws": "",
        manager: "",
        "curl": 'for one; do case $one in http*) touch "$(basename "$one")";; esac; done',
        "gpg": f'[ -f "$2" ] && [ -f "$3" ] && [ "$1 $2" = "--verify $3.sig" ] && {str(signed).lower()}',
        "sudo": 'stat -c %a . > "$HERE"/mode; for one; do [ ! -f "$one" ] || echo > "$HERE"/installed; done',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("sh", "mktemp", "basename", "touch", "stat", "env"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HERE", str(tmp_path))
    with pytest.raises(ConfigError, match="session-manager-plugin not found") as caught:
        Ssm(name="ssm", folder=tmp_path).ensure_connected()
    line, _, note = caught.value.next.partition("\n")
    subprocess.run(["sh", "-c", line], cwd=tmp_path)
    assert (tmp_path / "installed").exists() is signed
    assert not signed or (tmp_path / "mode").read_text() == "700\n"
    assert "install-plugin-linux-verify-signature" in note
