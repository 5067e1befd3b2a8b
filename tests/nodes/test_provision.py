import ast
import shutil
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from awsddp.model.events import Event, OnEvent
from awsddp.model.records import Node, PreparedNode
from awsddp.nodes import hostkeys
from awsddp.nodes.provision import prepare
from awsddp.util.parallel import NodesFailed, ignore_event
from awsddp.util.shipped_files import template
from tests.support.ssh_hosts import Host, Lab

MakeLab = Callable[[int], Lab]


@pytest.fixture
def lab_with_torch(lab: MakeLab, environment: Path) -> MakeLab:
    def make(count: int) -> Lab:
        made = lab(count)
        for host in made.hosts:
            (host.root / "opt").mkdir()
            (host.root / "opt/pytorch").symlink_to(environment)
        return made

    return make


def nodes_of(lab: Lab) -> list[Node]:
    return [
        Node(
            node=host.node,
            instance_id=host.endpoint.instance_id,
            state="running",
            instance_type="g4dn.xlarge",
            zone="us-east-1a",
            image_id="ami-0",
            private_ip=host.host,
        )
        for host in lab.hosts
    ]


def ready(lab: Lab, *, on_event: OnEvent = ignore_event, **settings: object) -> tuple[PreparedNode, ...]:
    with lab.fleet() as fleet:
        fleet.on_event = on_event
        return prepare(fleet, nodes_of(lab), **settings)  # type: ignore[arg-type]


def shown(host: Host) -> str:
    """The host key that sshd shows to anybody."""
    scan = subprocess.run(
        ["ssh-keyscan", "-t", "ed25519", "-p", str(host.port), host.host], capture_output=True, text=True
    )
    return scan.stdout.split(maxsplit=1)[1].strip()


def accepted(lab: Lab, node: int) -> tuple[str, ...]:
    return hostkeys.load_keys(lab.known_hosts)[lab.hosts[node].endpoint.instance_id]


def test_what_a_node_has_is_found(lab_with_torch: MakeLab) -> None:
    two = lab_with_torch(2)
    said: list[Event] = []
    found = ready(two, on_event=said.append)
    assert found == tuple(
        PreparedNode(
            node=host.node,
            instance_id=host.endpoint.instance_id,
            home=str(host.home),
            python=str(host.root / "opt/pytorch/bin/python"),
            nic="lo",
            gpus=0,
            torch="2.13.0+cu130",
            cuda="13.0",
            driver=None,
        )
        for host in two.hosts
    )
    assert Event("ready: torch 2.13.0+cu130, lo", who="node1", fraction=1.0) in said
    assert all(host.work.is_dir() for host in two.hosts)


def test_interactive_shells_know_the_interface(lab_with_torch: MakeLab) -> None:
    one = lab_with_torch(1)
    ready(one)
    profile = one.hosts[0].root / "etc/profile.d/awsddp.sh"
    shell = f". '{profile}'; echo $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $TP_SOCKET_IFNAME"
    assert subprocess.run(["sh", "-c", shell], capture_output=True, text=True).stdout == "=lo lo lo\n"


def test_each_node_gets_a_host_key_of_its_own_and_the_seed_is_dropped(lab_with_torch: MakeLab) -> None:
    two = lab_with_torch(2)
    ready(two)
    for host in two.hosts:
        key = shown(host)
        assert key != hostkeys.strip_comment(host.seed.public)
        assert accepted(two, host.node) == (key,)
        assert (host.root / "etc/awsddp/host_key").stat().st_mode & 0o777 == 0o600
        assert (host.root / "etc/ssh/ssh_host_ed25519_key").stat().st_mode & 0o777 == 0o600
    assert accepted(two, 0) != accepted(two, 1)


def test_prepared_again_nothing_changes(lab_with_torch: MakeLab) -> None:
    two = lab_with_torch(2)
    first = ready(two)
    keys = two.known_hosts.read_bytes()
    for host in two.hosts:
        host.script("systemctl", "#!/bin/sh\n[ $1 = is-active ] && echo active\n")  # a reload would fail
    assert ready(two) == first
    assert two.known_hosts.read_bytes() == keys


def test_the_final_key_is_recorded_before_sshd_uses_it_and_a_kill_there_locks_nobody_out(
    lab_with_torch: MakeLab,
) -> None:
    one = lab_with_torch(1)
    host = one.hosts[0]
    host.script("systemctl", "#!/bin/sh\n[ $1 = is-active ] && echo active && exit 0\nexit 9\n")
    with pytest.raises(NodesFailed, match="preparation failed"):
        ready(one)
    assert len(accepted(one, 0)) == 2
    host.stop()
    host.start()  # it now shows the final key, which no connection has verified yet
    assert shown(host) == accepted(one, 0)[1]
    ready(one)
    assert accepted(one, 0) == (shown(host),)


def test_a_kill_before_sshd_uses_the_final_key_locks_nobody_out(lab_with_torch: MakeLab) -> None:
    one = lab_with_torch(1)
    host = one.hosts[0]
    ready(one)
    final = accepted(one, 0)[0]
    key = host.root / "etc/ssh/ssh_host_ed25519_key"
    key.write_text(host.seed.private)
    host.stop()
    host.start()
    hostkeys.set_keys(one.known_hosts, {host.endpoint.instance_id: host.seed.public})
    hostkeys.add_keys(one.known_hosts, {host.endpoint.instance_id: final})
    ready(one)
    assert accepted(one, 0) == (final,)
    assert shown(host) == final


def test_a_host_key_cut_in_half_is_made_anew(lab_with_torch: MakeLab) -> None:
    one = lab_with_torch(1)
    path = one.hosts[0].root / "etc/awsddp/host_key"
    path.parent.mkdir()
    path.write_text("-----BEGIN OPENSSH PRIV")
    (path.parent / "host_key.new").write_text("left by a kill")
    ready(one)
    assert accepted(one, 0) == (shown(one.hosts[0]),)


def test_the_expiry_is_moved_where_that_is_asked_for(lab_with_torch: MakeLab) -> None:
    one = lab_with_torch(1)
    ready(one, expires_at=datetime(2026, 11, 22, 8, 0, tzinfo=UTC))
    assert (one.hosts[0].root / "etc/awsddp/expires").read_text() == "1795334400 2026-11-22T08:00:00Z\n"


def test_what_is_wrong_is_said_of_every_node(lab_with_torch: MakeLab) -> None:
    five = lab_with_torch(5)
    (five.hosts[0].root / "opt/pytorch").unlink()
    five.hosts[1].script("systemctl", "#!/bin/sh\n[ $2 = ssh.service ] && echo active || echo failed\n")
    five.hosts[2].script("python3", "#!/bin/sh\necho no python >&2; exit 126\n")
    five.hosts[3].script("ip", "#!/bin/sh\nexit 1\n")
    with pytest.raises(NodesFailed) as caught:
        ready(five)
    text = str(caught.value)
    for part in (
        "4 of 5 nodes failed",
        "node0: no Python with torch",
        "node1: its expiry watchdog is not running",
        "node2: preparation failed",
        "no python",
        "node3: no network interface",
    ):
        assert part in text
    assert list(caught.value.results) == [4]
    assert len(accepted(five, 4)) == 1


def test_cloud_init_that_complains_is_heard_but_ends_nothing(lab_with_torch: MakeLab) -> None:
    one = lab_with_torch(1)
    one.hosts[0].script(
        "cloud-init", '#!/bin/sh\n[ "$2" = --wait ] && exit 1\necho "status: error - vendor data"\n'
    )
    said: list[Event] = []
    ready(one, on_event=said.append)
    assert "cloud-init reports: status: error - vendor data" in said[-1].text


def test_cloud_inits_own_result_is_read(lab_with_torch: MakeLab) -> None:
    one = lab_with_torch(1)
    one.hosts[0].script("cloud-init", "#!/bin/sh\nexec sleep 600\n")
    result = one.hosts[0].root / "run/cloud-init/result.json"
    result.parent.mkdir(parents=True)
    result.write_text('{"v1": {"datasource": "DataSourceEc2", "errors": ["a", "b"]}}')
    said: list[Event] = []
    ready(one, on_event=said.append)
    assert "cloud-init reports: a; b" in said[-1].text


def test_a_boot_without_an_end_is_not_waited_for_forever(lab_with_torch: MakeLab) -> None:
    one = lab_with_torch(1)
    one.hosts[0].script("cloud-init", "#!/bin/sh\nexec sleep 600\n")
    said: list[Event] = []
    ready(one, deadline_s=0.5, on_event=said.append)
    assert "the boot has no end after 0.5 s" in said[-1].text


# Each question takes a word of the list: how many GPUs torch finds, or the number of CUDA's error.
CUDA = """
from pathlib import Path
words = Path({words!r}).read_text().split()
Path({words!r}).write_text(" ".join(words[1:]))
def is_available():
    return words[0] not in ("0", "802")
def device_count():
    return int(words[0])
def init():
    if words[0] == "802":
        raise RuntimeError("cudaGetDeviceCount(): Error 802: system not yet initialized")
    raise RuntimeError("No CUDA GPUs are available")
"""
SMI = "#!/bin/sh\n[ $1 = -L ] && echo 'GPU 0: NVIDIA A100' || echo 580.95.05\n"


@pytest.fixture
def lab_with_gpus(lab: MakeLab, environment: Path) -> Callable[..., Lab]:
    """A host whose torch, when it is asked, finds what the words say."""

    def make(words: str) -> Lab:
        made = lab(1)
        (host,) = made.hosts
        shutil.copytree(environment, host.root / "opt/pytorch", symlinks=True)
        (torch,) = (host.root / "opt/pytorch").glob("lib/*/site-packages/torch")
        (host.root / "words").write_text(words)
        (torch / "__init__.py").write_text("from . import cuda\n")
        (torch / "cuda.py").write_text(CUDA.format(words=str(host.root / "words")))
        host.script("nvidia-smi", SMI)
        return made

    return make


def test_gpus_that_are_all_there_are_counted(lab_with_gpus: Callable[..., Lab]) -> None:
    (found,) = ready(lab_with_gpus("4"), gpus=4)
    assert (found.gpus, found.driver) == (4, "580.95.05")


def test_gpus_are_counted_after_the_boot(lab_with_gpus: Callable[..., Lab]) -> None:
    one = lab_with_gpus("0")
    result = one.hosts[0].root / "run/cloud-init/result.json"
    boot = f"echo 4 > {one.hosts[0].root}/words; mkdir -p {result.parent}; "
    boot += f'echo "{{{{\\"v1\\": {{{{\\"errors\\": []}}}}}}}}" > {result}'
    one.hosts[0].script("cloud-init", f"#!/bin/sh\n{boot}\n")
    assert ready(one, gpus=4)[0].gpus == 4


def test_cuda_that_is_not_ready_yet_is_waited_for(lab_with_gpus: Callable[..., Lab]) -> None:
    assert ready(lab_with_gpus("802 8"), gpus=8)[0].gpus == 8


@pytest.mark.parametrize(
    ("words", "fabric", "said"),
    [
        ("3", None, "node0: torch sees 3 of 8 GPUs"),
        ("0", None, "torch.cuda: No CUDA GPUs are available"),
        ("802 802 802", None, "torch.cuda: cudaGetDeviceCount(): Error 802: system not yet initialized"),
        ("broken", None, "ValueError: invalid literal"),
        ("802", "failed", "nvidia-fabricmanager: failed"),
        ("0 0 0", "activating", "nvidia-fabricmanager: activating"),
    ],
)
def test_too_few_gpus_are_told_with_what_the_driver_and_torch_say(
    lab_with_gpus: Callable[..., Lab], words: str, fabric: str | None, said: str
) -> None:
    one = lab_with_gpus(words)
    if fabric:
        (one.hosts[0].root / "dev").mkdir()
        (one.hosts[0].root / "dev/nvidia-nvswitch0").touch()
        state = f"[ $2 = nvidia-fabricmanager ] && echo {fabric} || echo active"
        one.hosts[0].script("systemctl", f"#!/bin/sh\n{state}\n")
    with pytest.raises(NodesFailed) as caught:
        ready(one, gpus=8, gpus_deadline_s=0.1)
    text = str(caught.value)
    assert said in text
    assert "nvidia-smi -L: GPU 0: NVIDIA A100" in text
    assert "awsddp up" in text
    assert caught.value.exit_code == 6


def test_a_talkative_login_shell_does_not_disturb(lab_with_torch: MakeLab) -> None:
    one = lab_with_torch(1)
    enter = one.hosts[0].root / "enter"
    enter.write_text(enter.read_text().replace("exec ", "echo '{\"welcome\": 1}'; exec "))
    assert ready(one)[0].nic == "lo"


FAKE = """#!/bin/sh
new=$(dirname "$0")/rsync
case "$*" in *install*) echo >"$new"; chmod +x "$new";; esac
"""


@pytest.mark.parametrize(
    ("manager", "script", "is_there", "told"),
    [
        ("dnf", FAKE, True, "dnf -y install rsync: "),
        ("apt-get", FAKE, True, "apt-get -y -o DPkg::Lock::Timeout=60 install rsync: "),
        (
            "dnf",
            "#!/bin/sh\necho Cannot reach the repository\nexit 1\n",
            False,
            "Cannot reach the repository",
        ),
        (None, "", False, "no dnf, yum, apt-get to install it with"),
    ],
)
def test_an_image_without_rsync_gets_it_by_its_package_manager_or_says_why_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    manager: str | None,
    script: str,
    is_there: bool,
    told: str,
) -> None:
    for tool in ("dirname", "chmod", "sh"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    if manager:
        (tmp_path / manager).write_text(script)
        (tmp_path / manager).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))  # no other package manager is within reach
    names: dict[str, Any] = {"__name__": "prepare"}
    exec(compile(template("prepare.py"), "prepare.py", "exec"), names)
    there, said = names["install_rsync"]()
    assert (there, told in said) == (is_there, True), said
    assert names["install_rsync"]()[0] is is_there


@pytest.mark.parametrize("name", ["prepare.py", "work_folder.py"])
def test_what_runs_on_a_node_is_python_3_8(name: str) -> None:
    ast.parse(template(name), feature_version=(3, 8))
