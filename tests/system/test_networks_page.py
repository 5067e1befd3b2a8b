"""The commands of docs/networks.md on two local nodes: forwarded ports, the user's own ssh, scp and rsync."""

import os
import pty
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.support.fleet import free_ports
from tests.support.lab import Lab
from tests.support.local_cloud import until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "networks.md"
NOT_LOCAL = ("nvidia-smi", "code", "tensorboard", "jupyter")


def list_examples(program: str) -> list[list[str]]:
    """Return the page's commands of a program, without those that local nodes cannot run."""
    lines = re.findall(r"^    (\S.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in lines]
    return [args for args in commands if args[0] == program and not set(args) & set(NOT_LOCAL)]


def is_served(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_ssh_forwards_a_port_of_a_node_to_this_machine(cluster: Lab) -> None:
    (args,) = [args for args in list_examples("awsddp") if "-L" in args]
    port = str(free_ports())
    args = [arg.replace("8000", port) for arg in args[1:]]
    master, slave = pty.openpty()  # closing the terminal ends the program on the node
    shell = subprocess.Popen(
        [sys.executable, "-m", "awsddp", *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=cluster.project,
        env=cluster.environ,
        start_new_session=True,
    )
    os.close(slave)
    try:
        until(lambda: is_served(f"http://localhost:{port}/"), seconds=120)
        taken = cluster.run("ssh", "-L", f"{port}:localhost:1", "--", "true")
        assert (taken.returncode, "in use" in taken.stderr) == (255, True)
    finally:
        shell.terminate()
        shell.wait(60)
        os.close(master)


# Settings that a user may have for all hosts; ssh takes the first value of each.
USER_CONFIG = """\
Host *
    ProxyJump bastion.invalid
    ProxyUseFdpass yes
    RemoteCommand tmux attach
    RequestTTY force
    ControlMaster auto
    ControlPath /nonexistent/%C
    PermitLocalCommand yes
    LocalCommand echo connected
    PubkeyAuthentication no
    PubkeyAcceptedAlgorithms rsa-sha2-512
    HostKeyAlgorithms rsa-sha2-512
    AddressFamily inet6
"""


def test_ssh_scp_and_rsync_reach_the_nodes_by_the_common_ssh_config(cluster: Lab, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"Include {cluster.home}/ssh_config\nHost elsewhere\n    User somebody\n{USER_CONFIG}")
    (tmp_path / "train.py").write_text("print('here')\n")
    commands = [*list_examples("ssh"), *list_examples("scp"), *list_examples("rsync")]
    assert len(commands) == 3
    for program, *args in commands:
        flags = ["-e", shlex.join(["ssh", "-F", str(config)])] if program == "rsync" else ["-F", str(config)]
        result = subprocess.run(
            [program, *flags, *args], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert (result.returncode, "connected" in result.stdout) == (0, False), result.stderr
    query = ["ssh", "-F", str(config), "-G"]
    for name, user in (("default-node1", "ubuntu"), ("elsewhere", "somebody")):
        result = subprocess.run([*query, name], capture_output=True, text=True, check=True)
        assert f"user {user}\n" in result.stdout
        assert ("identitiesonly yes\n" in result.stdout) == (name == "default-node1")
        assert ("proxyjump bastion.invalid\n" in result.stdout) == (name == "elsewhere")
