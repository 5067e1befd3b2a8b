"""A project's own packages, pictures and commands on two real local nodes, which have no internet."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Lab
from tests.nodes.servers import PASSWORD, make_repository, serve_folder, serve_index, serve_proxy
from tests.nodes.wheels import installed_wheel, wheel
from tests.seed import drawn

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

TRAINS = """
import os, sys
import small, torch, torchvision
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchvision import transforms
CUDA = torch.cuda.is_available()
dist.init_process_group("nccl" if CUDA else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
pictures = torchvision.datasets.ImageFolder("pictures", transforms.ToTensor())
loader = torch.utils.data.DataLoader(pictures, batch_size=4)
model = DistributedDataParallel(torchvision.models.resnet18(num_classes=2).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for images, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
print("trained with", small.VERSION, torch.__file__, os.path.exists("/tmp/was-set-up"), sys.executable)
dist.destroy_process_group()
"""


@pytest.fixture(params=drawn(["on the CPU", "with rehearsed GPUs"], 1, what="GPUs of a project"))
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    from PIL import Image

    lab = Lab(tmp_path)
    lab.environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    for version in ("1.0", "2.0"):
        wheel(tmp_path / "wheels", "small", version, requires=("torch>=2", "pillow"))
    for number in range(8):
        folder = lab.project / "pictures" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number * 30, 0, 99)).save(folder / f"{number}.png")
    (lab.project / "requirements.txt").write_text(f"--find-links {tmp_path / 'wheels'}\nsmall==1.0\n")
    (lab.project / "awsddp.toml").write_text('[env]\nsetup = ["sudo touch /tmp/was-set-up"]\n')
    lab.script("train.py", TRAINS)
    try:
        gpus = ("-o", "local.gpus=off") if request.param == "on the CPU" else ()
        up = ("up", "--local", "--nodes", "2", "--instance-type", "g4dn.12xlarge", "-y", *gpus)
        assert lab.run(*up, "--env", "requirements.txt", timeout=400).returncode == 0
        yield lab
    finally:
        lab.close()


def test_a_project_trains_with_its_packages_and_a_changed_file_is_installed(project: Lab) -> None:
    first = project.run("train", "train.py", "--nproc-per-node", "1", timeout=300)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("trained with 1.0 /opt/pytorch/") == 2 and first.stdout.count(" True ") == 2
    assert "installing" not in first.stderr  # `up` has
    assert list(project.project.glob("runs/*/node0/model.pt"))
    needs = project.project / "requirements.txt"
    needs.write_text(needs.read_text().replace("1.0", "2.0"))
    second = project.run("train", "train.py", "--nproc-per-node", "1", timeout=300)
    assert second.stdout.count("trained with 2.0") == 2, second.stderr
    assert "installing" in second.stderr and "was-set-up" not in second.stderr
    which = project.run("exec", "--", "sh", "-c", "which python; which torchrun; head -1 $(which torchrun)")
    assert which.stdout.count("/awsddp/env/") == 6, which.stdout


SHOWS = "import small, tiny\nprint('runs with', small.VERSION, tiny.VERSION)\n"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Lab]:
    """Two nodes without internet. This machine's pip finds nothing but by a setting of a test."""
    lab = Lab(tmp_path)
    lab.environ |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "no_proxy": "169.254.169.254"}
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "http_proxy", "https_proxy"):
        lab.environ.pop(name, None)
    lab.script("train.py", SHOWS)
    try:
        up = ("up", "--local", "--nodes", "2", "--instance-type", "c5.2xlarge", "-y")
        assert lab.run(*up, timeout=400).returncode == 0
        yield lab
    finally:
        lab.close()


def test_packages_come_from_wherever_this_machine_has_them(nodes: Lab, tmp_path: Path) -> None:
    """In one command each, by two nodes at once."""
    wheels, needs, settings = tmp_path / "wheels", nodes.project / "requirements.txt", tmp_path / "pip.conf"
    for version in ("1.0", "2.0", "3.0", "4.0"):
        wheel(wheels, "small", version, requires=("tiny",))
    wheel(wheels, "tiny")
    installed_wheel(wheels, "setuptools")
    make_repository(tmp_path / "repositories", "tiny")

    def trains(version: str, tiny: str = "1.0") -> None:
        words = ("--env", "requirements.txt", "--nproc-per-node", "1")
        shown = nodes.run("train", "train.py", *words, timeout=300)
        assert shown.stdout.count(f"runs with {version} {tiny}") == 2, shown.stderr + shown.stdout
        assert PASSWORD not in shown.stdout + shown.stderr

    with (
        serve_index(wheels) as public,
        serve_index(wheels, password=PASSWORD) as private,
        serve_folder(tmp_path / "repositories") as git,
        serve_proxy(password=PASSWORD) as upstream,
    ):
        settings.write_text(f"[global]\nindex-url = {public.url}/simple\n")
        needs.write_text("small==1.0\n")
        trains("1.0")
        assert "GET /small-1.0-py3-none-any.whl" in public.asked

        needs.write_text(f"small==2.0\ntiny @ git+{git.url}/tiny.git\n")
        trains("2.0", "1.0 of git")

        private_url = f"http://reader:{PASSWORD}@127.0.0.1:{private.port}/simple"
        settings.write_text(f"[global]\nindex-url = {private_url}\n")
        needs.write_text("small==3.0\n")
        trains("3.0")
        assert "GET /small-3.0-py3-none-any.whl" in private.asked

        for name in ("http_proxy", "https_proxy"):
            nodes.environ[name] = f"http://staff:{PASSWORD}@127.0.0.1:{upstream.port}"
        settings.write_text(f"[global]\nindex-url = {public.url}/simple\n")
        needs.write_text("small==4.0\n")
        trains("4.0")
        assert f"GET {public.url}/simple/small/" in upstream.asked
    everywhere = ("exec", "--", "sh", "-c", f"sudo grep -rl {PASSWORD} /home /tmp /var/tmp /root; true")
    assert nodes.run(*everywhere).stdout == ""
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path not in (settings, needs)]
    kept = [
        path for path in kept if path.stat().st_size < 10_000_000
    ]  # the disks of the nodes are looked into
    assert not [path for path in kept if PASSWORD.encode() in path.read_bytes()]
