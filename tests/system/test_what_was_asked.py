"""What was asked for, as it is typed: two nodes of 8 GPUs, 16 ranks, and nothing left afterwards.

The client is told of nothing local: the local cloud answers at the address where EC2 would.
"""

import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import fabric
import pytest
import torch

import awsddp
from awsddp.util.shipped_files import shipped_folder
from tests.support.channel import MINOR, VERSION, write_index, write_package
from tests.support.lab import Lab

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="security groups and NCCL's interface need real hosts"),
    pytest.mark.timeout(600),
]
SITE = f"lib/python{MINOR}/site-packages"
PROGRAM = Path(__file__).parents[1] / "support" / "conda_program.py"
# A conda whose own packages are this machine's; what it installs comes from the channel alone.
CONDA = f"""#!/bin/sh
export PYTHONPATH='{Path(sys.prefix) / SITE}' CONDA_CACHE="$HOME/conda" CONDA_MIRROR=http://127.0.0.1:9
echo "$@" >> "$HOME/conda.log"
exec /opt/pytorch/bin/python "$HOME/conda_program.py" "$@"
"""
# rsync, with a list of its calls.
RSYNC = """#!/bin/sh
echo "$@" >> '{log}'
exec '{rsync}' "$@"
"""
ENVIRONMENT = "channels: [{channel}, nodefaults]\ndependencies:\n  - python={minor}\n  - pytorch\n"
# The bundled program in its shortest form; each rank leaves its environment, each node its weights. It lies
# in the project beside some data, as less than 1 MB goes over an open connection instead of by rsync.
SETTINGS = """
[network]
ssh_cidr = ["{block}"]
[env]
kind = "conda"
file = "environment.yml"
packages_from = "node"
[job]
name = "asked"
script = "train/main.py"
args = ["--epochs", "1", "--global-batch", "512", "--export", "weights.pt"]
prefix = ["sh", "-c", 'env > environment.$RANK; exec "$@"', "rank"]
"""


class Laptop:
    """A terminal in a project folder, beside an EC2 that is watched."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.home = lab, lab.project / "runs" / "asked"
        found = lab.json("local", "status")
        self.keys = {
            "AWS_ENDPOINT_URL": found["endpoint"],
            "AWS_DEFAULT_REGION": found["region"],
            "AWS_ACCESS_KEY_ID": found["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": found["secret_access_key"],
        }
        programs = lab.root / "bin"
        programs.mkdir()
        (programs / "rsync").write_text(RSYNC.format(log=lab.root / "rsync.log", rsync=shutil.which("rsync")))
        (programs / "rsync").chmod(0o755)
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        lab.environ |= self.keys | {"PATH": path}
        self.ec2 = boto3.client(
            "ec2",
            endpoint_url=found["endpoint"],
            region_name=found["region"],
            aws_access_key_id=found["access_key_id"],
            aws_secret_access_key=found["secret_access_key"],
        )

    def type(self, line: str, *, code: int = 0) -> str:
        """Type a line at a terminal, answer yes to what it asks, and return all that was shown."""
        terminal, theirs = os.openpty()
        process = subprocess.Popen(
            shlex.split(line),
            cwd=self.lab.project,
            env=self.lab.environ,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        shown, deadline = "", time.monotonic() + 400
        try:
            while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")
                if re.search(r"\[y/N\][: ]*$", shown):
                    os.write(terminal, b"y\n")
                    shown += "\n"
        except OSError:  # the other end is closed
            pass
        finally:
            os.close(terminal)
            if time.monotonic() > deadline:
                process.kill()
        assert process.wait(60) == code, shown
        return shown

    def instances(self) -> list[dict[str, Any]]:
        pages = self.ec2.describe_instances()["Reservations"]
        return [one for page in pages for one in page["Instances"] if one["State"]["Name"] != "terminated"]

    def groups(self) -> list[dict[str, Any]]:
        found = self.ec2.describe_security_groups()["SecurityGroups"]
        return [group for group in found if group["GroupName"] != "default"]


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    lab = Lab(tmp_path_factory.mktemp("asked"))
    channel = lab.root / "channel"
    config = f"home = /opt/python/bin\ninclude-system-site-packages = false\nversion = {VERSION}\n"
    write_package(
        channel,
        "python",
        VERSION,
        files={"pyvenv.cfg": config},
        links={"bin/python": f"/opt/python/bin/python{MINOR}"},
    )
    write_package(
        channel, "pytorch", depends=("python",), files={f"{SITE}/image.pth": f"/opt/pytorch/{SITE}\n"}
    )
    write_index(channel)
    try:
        shared = ("--share", str(channel), "--share", str(Path(sys.prefix) / SITE))
        assert lab.run("local", "start", *shared).returncode == 0
        made = Laptop(lab)
        lab.script("environment.yml", ENVIRONMENT.format(channel=channel.as_uri(), minor=MINOR))
        shutil.copytree(
            shipped_folder("train"), lab.project / "train", ignore=shutil.ignore_patterns("__pycache__")
        )
        (lab.project / "data.bin").write_bytes(bytes(2 << 20))
        block = made.ec2.describe_vpcs()["Vpcs"][0]["CidrBlock"]
        lab.script("awsddp.toml", f'[network]\nssh_cidr = ["{block}"]\n')
        yield made
        lab.script("awsddp.toml", "")
    finally:
        lab.close()


def test_p2_is_refused_with_since_when_and_its_successor(laptop: Laptop) -> None:
    shown = laptop.type("awsddp up --nodes 2 --instance-type p2.8xlarge", code=4)
    assert "AWS does not offer p2.8xlarge" in shown
    assert "since 2025-03-30" in " ".join(shown.split())
    assert "--instance-type g6.48xlarge" in shown
    assert laptop.instances() == laptop.groups() == []


def test_two_nodes_16_ranks_and_nothing_left(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = laptop.lab
    laptop.type("awsddp up --nodes 2")
    _sees_the_cluster(laptop)

    for name, value in lab.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(lab.project)
    _installs_conda_by_fabric(awsddp.Cluster(), lab.root)
    lab.script("awsddp.toml", SETTINGS.format(block=laptop.ec2.describe_vpcs()["Vpcs"][0]["CidrBlock"]))

    shown = laptop.type("awsddp train --world-size 16")
    assert "succeeded" in shown
    _sees_the_ranks(laptop)

    laptop.type("awsddp down")
    assert laptop.instances() == laptop.groups() == []
    assert laptop.ec2.describe_key_pairs()["KeyPairs"] == []
    assert laptop.ec2.describe_placement_groups()["PlacementGroups"] == []
    assert laptop.ec2.describe_volumes()["Volumes"] == []


def _sees_the_cluster(laptop: Laptop) -> None:
    first, second = laptop.instances()
    for instance in (first, second):
        (kind,) = laptop.ec2.describe_instance_types(InstanceTypes=[instance["InstanceType"]])[
            "InstanceTypes"
        ]
        assert sum(gpu["Count"] for gpu in kind["GpuInfo"]["Gpus"]) == 8
        (image,) = laptop.ec2.describe_images(ImageIds=[instance["ImageId"]])["Images"]
        assert image["Name"].startswith("Deep Learning OSS Nvidia Driver AMI GPU PyTorch")
    (group,) = laptop.groups()
    inside = [rule for rule in group["IpPermissions"] if rule["IpProtocol"] == "-1"]
    assert [pair["GroupId"] for rule in inside for pair in rule["UserIdGroupPairs"]] == [group["GroupId"]]


def _installs_conda_by_fabric(cluster: awsddp.Cluster, folder: Path) -> None:
    """Install the stand-in for conda on every node, by a task as Fabric's users write them."""
    (folder / "conda").write_text(CONDA)

    @fabric.task
    def install(connection: fabric.Connection) -> str:
        connection.run("mkdir -p miniconda3/bin", hide=True)
        connection.put(str(folder / "conda"), "miniconda3/bin/conda")
        connection.put(str(PROGRAM), "conda_program.py")
        return str(connection.run("chmod +x miniconda3/bin/conda && hostname", hide=True).stdout)

    with cluster:
        assert len({install(connection) for connection in cluster.fabric()}) == 2


def _sees_the_ranks(laptop: Laptop) -> None:
    home = laptop.home
    ranks = {}
    for path in home.glob("node*/environment.*"):
        lines = path.read_text().splitlines()
        ranks[int(path.suffix[1:])] = dict(line.split("=", 1) for line in lines if "=" in line)
    assert sorted(ranks) == list(range(16))
    for rank, environ in ranks.items():
        assert (environ["RANK"], environ["LOCAL_RANK"]) == (str(rank), str(rank % 8))
        assert "/awsddp/env/" in environ["PATH"].partition(":")[0]
        assert (environ["WORLD_SIZE"], environ["NCCL_SOCKET_IFNAME"]) == ("16", "=ens5")
    said = [(home / f"logs/rank{rank}.log").read_text() for rank in range(16)]
    assert all(f"rank {rank} of 16 on cuda:{rank % 8}" in text for rank, text in enumerate(said))
    weights = [
        torch.load(path, map_location="cpu", weights_only=True)
        for path in sorted(home.glob("node*/weights.pt"))
    ]
    assert len(weights) == 2
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    conda = laptop.lab.run("exec", "--", "sh", "-c", "cat ~/conda.log").stdout.splitlines()
    assert len([line for line in conda if "env create" in line and "environment.yml" in line]) == 2
    sent = (laptop.lab.root / "rsync.log").read_text()
    assert all(f"{laptop.lab.project}/ node{node}:awsddp/work/\n" in sent for node in (0, 1)), sent
