"""docs/networks.md's commands on two local nodes: forwarded ports, and the user's own ssh, scp and rsync."""

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
NOT_HERE = ("nvidia-smi", "code", "tensorboard", "jupyter")


def examples(program: str) -> list[list[str]]:
    """Return the page's commands of a program, without those that need what local nodes lack."""
    lines = re.findall(r"^    (\S.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in lines]
    return [words for words in commands if words[0] == program and not set(words) & set(NOT_HERE)]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_a_port_of_a_node_is_a_port_here(cluster: Lab) -> None:
    (words,) = [words for words in examples("awsddp") if "-L" in words]
    port = str(free_ports())
    words = [word.replace("8000", port) for word in words[1:]]
    master, slave = pty.openpty()  # as a terminal ends: with it the program on the node
    shell = subprocess.Popen(
        [sys.executable, "-m", "awsddp", *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=cluster.project,
        env=cluster.environ,
        start_new_session=True,
    )
    os.close(slave)
    try:
        until(lambda: answers(f"http://localhost:{port}/"), seconds=120)
        taken = cluster.run("ssh", "-L", f"{port}:localhost:1", "--", "true")
        assert (taken.returncode, "in use" in taken.stderr) == (255, True)
    finally:
        shell.terminate()
        shell.wait(60)
        os.close(master)


# What a user may have set for all hosts; the first value that ssh reads counts.
OWN = """\
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


def test_the_users_own_programs_reach_the_nodes_by_the_common_ssh_config(
    cluster: Lab, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text(f"Include {cluster.home}/ssh_config\nHost elsewhere\n    User somebody\n{OWN}")
    (tmp_path / "train.py").write_text("print('here')\n")
    commands = [*examples("ssh"), *examples("scp"), *examples("rsync")]
    assert len(commands) == 3
    for program, *words in commands:
        own = ["-e", shlex.join(["ssh", "-F", str(config)])] if program == "rsync" else ["-F", str(config)]
        shown = subprocess.run(
            [program, *own, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert (shown.returncode, "connected" in shown.stdout) == (0, False), shown.stderr
    asked = ["ssh", "-F", str(config), "-G"]
    for name, user in (("default-node1", "ubuntu"), ("elsewhere", "somebody")):
        shown = subprocess.run([*asked, name], capture_output=True, text=True, check=True)
        assert f"user {user}\n" in shown.stdout
        assert ("identitiesonly yes\n" in shown.stdout) == (name == "default-node1")
        assert ("proxyjump bastion.invalid\n" in shown.stdout) == (name == "elsewhere")
