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
def make_torch_lab(make_lab: MakeLab, environment: Path) -> MakeLab:
    def make(count: int) -> Lab:
        lab = make_lab(count)
        for host in lab.hosts:
            (host.root / "opt").mkdir()
            (host.root / "opt/pytorch").symlink_to(environment)
        return lab

    return make


def list_nodes(lab: Lab) -> list[Node]:
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


def prepare_nodes(
    lab: Lab, *, on_event: OnEvent = ignore_event, **settings: object
) -> tuple[PreparedNode, ...]:
    with lab.fleet() as fleet:
        fleet.on_event = on_event
        return prepare(fleet, list_nodes(lab), **settings)  # type: ignore[arg-type]


def scan_host_key(host: Host) -> str:
    """Return the host key that sshd presents."""
    result = subprocess.run(
        ["ssh-keyscan", "-t", "ed25519", "-p", str(host.port), host.host], capture_output=True, text=True
    )
    return result.stdout.split(maxsplit=1)[1].strip()


def load_accepted(lab: Lab, node: int) -> tuple[str, ...]:
    return hostkeys.load_keys(lab.known_hosts)[lab.hosts[node].endpoint.instance_id]


def test_prepare_reports_what_a_node_has(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(2)
    events: list[Event] = []
    prepared = prepare_nodes(lab, on_event=events.append)
    assert prepared == tuple(
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
        for host in lab.hosts
    )
    assert Event("ready: torch 2.13.0+cu130, lo", who="node1", fraction=1.0) in events
    assert all(host.work.is_dir() for host in lab.hosts)


def test_interactive_shells_set_the_network_interface(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(1)
    prepare_nodes(lab)
    profile = lab.hosts[0].root / "etc/profile.d/awsddp.sh"
    shell = f". '{profile}'; echo $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $TP_SOCKET_IFNAME"
    assert subprocess.run(["sh", "-c", shell], capture_output=True, text=True).stdout == "=lo lo lo\n"


def test_each_node_gets_its_own_host_key_and_the_seed_is_dropped(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(2)
    prepare_nodes(lab)
    for host in lab.hosts:
        key = scan_host_key(host)
        assert key != hostkeys.strip_comment(host.seed.public)
        assert load_accepted(lab, host.node) == (key,)
        assert (host.root / "etc/awsddp/host_key").stat().st_mode & 0o777 == 0o600
        assert (host.root / "etc/ssh/ssh_host_ed25519_key").stat().st_mode & 0o777 == 0o600
    assert load_accepted(lab, 0) != load_accepted(lab, 1)


def test_second_preparation_changes_nothing(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(2)
    first = prepare_nodes(lab)
    keys = lab.known_hosts.read_bytes()
    for host in lab.hosts:
        host.script("systemctl", "#!/bin/sh\n[ $1 = is-active ] && echo active\n")  # a reload would fail
    assert prepare_nodes(lab) == first
    assert lab.known_hosts.read_bytes() == keys


def test_final_key_is_recorded_before_sshd_uses_it_so_that_logins_succeed(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(1)
    host = lab.hosts[0]
    host.script("systemctl", "#!/bin/sh\n[ $1 = is-active ] && echo active && exit 0\nexit 9\n")
    with pytest.raises(NodesFailed, match="preparation failed"):
        prepare_nodes(lab)
    assert len(load_accepted(lab, 0)) == 2
    host.stop()
    host.start()  # it now presents the final key, which no connection has verified yet
    assert scan_host_key(host) == load_accepted(lab, 0)[1]
    prepare_nodes(lab)
    assert load_accepted(lab, 0) == (scan_host_key(host),)


def test_login_succeeds_after_a_kill_before_sshd_uses_the_final_key(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(1)
    host = lab.hosts[0]
    prepare_nodes(lab)
    final = load_accepted(lab, 0)[0]
    key = host.root / "etc/ssh/ssh_host_ed25519_key"
    key.write_text(host.seed.private)
    host.stop()
    host.start()
    hostkeys.set_keys(lab.known_hosts, {host.endpoint.instance_id: host.seed.public})
    hostkeys.add_keys(lab.known_hosts, {host.endpoint.instance_id: final})
    prepare_nodes(lab)
    assert load_accepted(lab, 0) == (final,)
    assert scan_host_key(host) == final


def test_truncated_host_key_is_created_again(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(1)
    path = lab.hosts[0].root / "etc/awsddp/host_key"
    path.parent.mkdir()
    path.write_text("-----BEGIN OPENSSH PRIV")
    (path.parent / "host_key.new").write_text("left by a kill")
    prepare_nodes(lab)
    assert load_accepted(lab, 0) == (scan_host_key(lab.hosts[0]),)


def test_prepare_sets_the_expiry(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(1)
    prepare_nodes(lab, expires_at=datetime(2026, 11, 22, 8, 0, tzinfo=UTC))
    assert (lab.hosts[0].root / "etc/awsddp/expires").read_text() == "1795334400 2026-11-22T08:00:00Z\n"


def test_errors_of_all_nodes_are_reported(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(5)
    (lab.hosts[0].root / "opt/pytorch").unlink()
    lab.hosts[1].script("systemctl", "#!/bin/sh\n[ $2 = ssh.service ] && echo active || echo failed\n")
    lab.hosts[2].script("python3", "#!/bin/sh\necho no python >&2; exit 126\n")
    lab.hosts[3].script("ip", "#!/bin/sh\nexit 1\n")
    with pytest.raises(NodesFailed) as error:
        prepare_nodes(lab)
    text = str(error.value)
    for part in (
        "4 of 5 nodes failed",
        "node0: no Python with torch",
        "node1: its expiry watchdog is not running",
        "node2: preparation failed",
        "no python",
        "node3: no network interface",
    ):
        assert part in text
    assert list(error.value.results) == [4]
    assert len(load_accepted(lab, 4)) == 1


def test_error_of_cloud_init_is_reported_and_not_fatal(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(1)
    lab.hosts[0].script(
        "cloud-init", '#!/bin/sh\n[ "$2" = --wait ] && exit 1\necho "status: error - vendor data"\n'
    )
    events: list[Event] = []
    prepare_nodes(lab, on_event=events.append)
    assert "cloud-init reports: status: error - vendor data" in events[-1].text


def test_result_file_of_cloud_init_is_read(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(1)
    lab.hosts[0].script("cloud-init", "#!/bin/sh\nexec sleep 600\n")
    result = lab.hosts[0].root / "run/cloud-init/result.json"
    result.parent.mkdir(parents=True)
    result.write_text('{"v1": {"datasource": "DataSourceEc2", "errors": ["a", "b"]}}')
    events: list[Event] = []
    prepare_nodes(lab, on_event=events.append)
    assert "cloud-init reports: a; b" in events[-1].text


def test_wait_for_the_boot_ends_at_the_deadline(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(1)
    lab.hosts[0].script("cloud-init", "#!/bin/sh\nexec sleep 600\n")
    events: list[Event] = []
    prepare_nodes(lab, deadline_s=0.5, on_event=events.append)
    assert "the boot has not ended after 0.5 s" in events[-1].text


# Each call uses the next answer: how many GPUs torch finds, or the number of CUDA's error.
CUDA = """
from pathlib import Path
answers = Path({answers!r}).read_text().split()
Path({answers!r}).write_text(" ".join(answers[1:]))
def is_available():
    return answers[0] not in ("0", "802")
def device_count():
    return int(answers[0])
def init():
    if answers[0] == "802":
        raise RuntimeError("cudaGetDeviceCount(): Error 802: system not yet initialized")
    raise RuntimeError("No CUDA GPUs are available")
"""
SMI = "#!/bin/sh\n[ $1 = -L ] && echo 'GPU 0: NVIDIA A100' || echo 580.95.05\n"


@pytest.fixture
def make_gpu_lab(make_lab: MakeLab, environment: Path) -> Callable[..., Lab]:
    """A function that starts a host whose torch gives these answers."""

    def make(answers: str) -> Lab:
        lab = make_lab(1)
        (host,) = lab.hosts
        shutil.copytree(environment, host.root / "opt/pytorch", symlinks=True)
        (torch,) = (host.root / "opt/pytorch").glob("lib/*/site-packages/torch")
        (host.root / "answers").write_text(answers)
        (torch / "__init__.py").write_text("from . import cuda\n")
        (torch / "cuda.py").write_text(CUDA.format(answers=str(host.root / "answers")))
        host.script("nvidia-smi", SMI)
        return lab

    return make


def test_available_gpus_are_counted(make_gpu_lab: Callable[..., Lab]) -> None:
    (prepared,) = prepare_nodes(make_gpu_lab("4"), gpus=4)
    assert (prepared.gpus, prepared.driver) == (4, "580.95.05")


def test_gpus_are_counted_after_the_boot(make_gpu_lab: Callable[..., Lab]) -> None:
    lab = make_gpu_lab("0")
    result = lab.hosts[0].root / "run/cloud-init/result.json"
    boot = f"echo 4 > {lab.hosts[0].root}/answers; mkdir -p {result.parent}; "
    boot += f'echo "{{{{\\"v1\\": {{{{\\"errors\\": []}}}}}}}}" > {result}'
    lab.hosts[0].script("cloud-init", f"#!/bin/sh\n{boot}\n")
    assert prepare_nodes(lab, gpus=4)[0].gpus == 4


def test_cuda_that_is_not_ready_yet_is_waited_for(make_gpu_lab: Callable[..., Lab]) -> None:
    assert prepare_nodes(make_gpu_lab("802 8"), gpus=8)[0].gpus == 8


@pytest.mark.parametrize(
    ("answers", "fabric", "reason"),
    [
        ("3", None, "node0: torch sees 3 of 8 GPUs"),
        ("0", None, "torch.cuda: No CUDA GPUs are available"),
        ("802 802 802", None, "torch.cuda: cudaGetDeviceCount(): Error 802: system not yet initialized"),
        ("broken", None, "ValueError: invalid literal"),
        ("802", "failed", "nvidia-fabricmanager: failed"),
        ("0 0 0", "activating", "nvidia-fabricmanager: activating"),
    ],
)
def test_missing_gpus_are_reported_with_the_output_of_the_driver_and_torch(
    make_gpu_lab: Callable[..., Lab], answers: str, fabric: str | None, reason: str
) -> None:
    lab = make_gpu_lab(answers)
    if fabric:
        (lab.hosts[0].root / "dev").mkdir()
        (lab.hosts[0].root / "dev/nvidia-nvswitch0").touch()
        state = f"[ $2 = nvidia-fabricmanager ] && echo {fabric} || echo active"
        lab.hosts[0].script("systemctl", f"#!/bin/sh\n{state}\n")
    with pytest.raises(NodesFailed) as error:
        prepare_nodes(lab, gpus=8, gpus_deadline_s=0.1)
    text = str(error.value)
    assert reason in text
    assert "nvidia-smi -L: GPU 0: NVIDIA A100" in text
    assert "awsddp up" in text
    assert error.value.exit_code == 6


def test_output_of_a_login_shell_is_ignored(make_torch_lab: MakeLab) -> None:
    lab = make_torch_lab(1)
    enter = lab.hosts[0].root / "enter"
    enter.write_text(enter.read_text().replace("exec ", "echo '{\"welcome\": 1}'; exec "))
    assert prepare_nodes(lab)[0].nic == "lo"


INSTALLER = """#!/bin/sh
new=$(dirname "$0")/rsync
case "$*" in *install*) echo >"$new"; chmod +x "$new";; esac
"""


@pytest.mark.parametrize(
    ("manager", "script", "is_installed", "expected"),
    [
        ("dnf", INSTALLER, True, "dnf -y install rsync: "),
        ("apt-get", INSTALLER, True, "apt-get -y -o DPkg::Lock::Timeout=60 install rsync: "),
        (
            "dnf",
            "#!/bin/sh\necho Cannot reach the repository\nexit 1\n",
            False,
            "Cannot reach the repository",
        ),
        (None, "", False, "no dnf, yum, apt-get to install it with"),
    ],
)
def test_missing_rsync_is_installed_or_the_reason_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    manager: str | None,
    script: str,
    is_installed: bool,
    expected: str,
) -> None:
    for tool in ("dirname", "chmod", "sh"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    if manager:
        (tmp_path / manager).write_text(script)
        (tmp_path / manager).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))  # no other package manager is within reach
    names: dict[str, Any] = {"__name__": "prepare"}
    exec(compile(template("prepare.py"), "prepare.py", "exec"), names)
    installed, output = names["install_rsync"]()
    assert (installed, expected in output) == (is_installed, True), output
    assert names["install_rsync"]()[0] is is_installed


@pytest.mark.parametrize("name", ["prepare.py", "work_folder.py"])
def test_programs_for_nodes_are_valid_python_3_8(name: str) -> None:
    ast.parse(template(name), feature_version=(3, 8))
