"""The packages, images and setup commands of a project on two real local nodes without internet."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.campaigns import projects
from tests.support.lab import Lab
from tests.support.seed import SEED, draw_cases
from tests.support.wheels import write_wheel

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


@pytest.fixture(params=draw_cases(["on the CPU", "with rehearsed GPUs"], 1, label="GPUs of a project"))
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    from PIL import Image

    lab = Lab(tmp_path)
    lab.environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    for version in ("1.0", "2.0"):
        write_wheel(tmp_path / "wheels", "small", version, requires=("torch>=2", "pillow"))
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
    assert "installing" not in first.stderr  # `up` installed them
    assert list(project.project.glob("runs/*/node0/model.pt"))
    needs = project.project / "requirements.txt"
    needs.write_text(needs.read_text().replace("1.0", "2.0"))
    second = project.run("train", "train.py", "--nproc-per-node", "1", timeout=300)
    assert second.stdout.count("trained with 2.0") == 2, second.stderr
    assert "installing" in second.stderr and "was-set-up" not in second.stderr
    which = project.run("exec", "--", "sh", "-c", "which python; which torchrun; head -1 $(which torchrun)")
    assert which.stdout.count("/awsddp/env/") == 6, which.stdout


def test_each_kind_of_project_gets_its_packages_from_each_source_of_this_machine() -> None:
    """An environment.yml, a lock of git and URL sources, and another kind, each on two nodes at once."""
    kinds = list(projects.KINDS)
    cases = range(len(kinds) * len(projects.PLACES))
    by_kind = {kind: [number for number in cases if kinds[number % len(kinds)] == kind] for kind in kinds}
    always = by_kind.pop("environment.yml"), by_kind.pop("uv.lock, git and URL")
    others = [number for numbers in by_kind.values() for number in numbers]
    with projects.laboratory() as world:
        for numbers in (*always, others):
            for number in draw_cases(numbers, 1, label="projects"):
                row = projects.train(world, number)
                assert row["ok"], row
        for number in draw_cases(range(len(projects.FAULTS)), 3, label="projects that cannot be met"):
            row = projects.refuse(world, number, random.Random(f"{SEED}/{number}"))
            assert row["ok"], row
