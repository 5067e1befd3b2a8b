"""A user's own project on two local nodes: from a clone to its fetched model, with a secret."""

import os
import re
import secrets
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.settings.test_loader_secrets import find_files_with
from tests.support.fleet import all_processes
from tests.support.lab import Lab
from tests.support.waiting import until
from tests.support.wheels import write_installed_wheel, write_wheel

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

PYPROJECT = '[build-system]\nrequires = ["setuptools"]\n\n[project]\nname = "mypkg"\nversion = "0.1"\n'
TRAIN = """
import json, os, sys, time
import settings, shapes
from tqdm import tqdm, __version__
import torch
import torch.distributed as dist
from mypkg.model import make

CONFIG = json.loads(open("configs/small.json").read())
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(make(CONFIG["width"]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
points = torch.tensor([float(text) for text in open("data/points.txt")]).reshape(-1, CONFIG["width"])
for epoch in tqdm(range(CONFIG["epochs"])):
    time.sleep(0.2)
    loss = model(points).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        os.makedirs("checkpoints", exist_ok=True)
        torch.save(model.module.state_dict(), f"checkpoints/{epoch}.pt")
versions = __version__, settings.VERSION, shapes.VERSION
print("trained with", *versions, "and a token of", len(os.environ.get("OWN_TOKEN", "")))
while not os.path.exists(os.path.expanduser(f"~/searched-{sys.argv[1]}")):
    time.sleep(0.1)
dist.destroy_process_group()
"""
# The bar of tqdm, as it writes without a terminal: each state over the last one.
BAR = re.compile(
    r"\r  0%\|          \| 0/3 \[[^\r]*"
    r"\r 33%\|███▎      \| 1/3 \[[^\r]*"
    r"\r 67%\|██████▋   \| 2/3 \[[^\r]*"
    r"(\r100%\|██████████\| 3/3 \[[^\r\n]*)+\n"
)
TRAINED = f"trained with {metadata.version('tqdm')} 1.0 1.0 and a token of 36"
# The text to search for comes on stdin, so that the search does not find itself. Then the ranks may end.
SEARCH = "sudo grep -rlsF -f - /home /root /etc /opt /run /srv /tmp /usr/local /var; touch ~/searched-{}"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    made.environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    made.environ |= {"PIP_FIND_LINKS": str(tmp_path / "index")}
    write_installed_wheel(tmp_path / "index", "tqdm")
    for name in ("settings", "shapes"):
        write_wheel(tmp_path / "index", name)
    for path, text in {
        "pyproject.toml": PYPROJECT,
        "requirements.txt": "tqdm>=4.66\nsettings>=1\nshapes\n",
        ".gitignore": "data/\ncheckpoints/\nruns/\n",
        "configs/small.json": '{"width": 8, "epochs": 3}',
        "src/mypkg/__init__.py": "",
        "src/mypkg/model.py": "import torch\ndef make(width):\n    return torch.nn.Linear(width, 1)\n",
        "src/mypkg/train.py": TRAIN,
        "data/points.txt": "0.5\n" * 64,
        "awsddp.toml": '[sync]\nignore = ["!/data/"]\n\n[job]\nnproc_per_node = 1\n',
    }.items():
        made.script(path, text)
    try:
        yield made
    finally:
        made.close()


def test_a_cloned_project_trains_and_its_secret_is_in_no_file(lab: Lab) -> None:
    up = ("up", "--local", "--nodes", "2", "--instance-type", "g4dn.xlarge", "-y")
    launched = lab.run(*up, "--env", "requirements.txt", timeout=400)
    assert launched.returncode == 0, launched.stderr
    token = lab.environ["OWN_TOKEN"] = f"tok-{secrets.token_hex(16)}"
    for launcher in ("ssh", "torchrun"):
        args = ("-o", f"job.launcher={launcher}", "--env-var", "OWN_TOKEN", "--name", launcher)
        running = lab.start("train", "-m", "mypkg.train", *args, "--", launcher)
        logs = lab.project / "runs" / launcher / "logs"
        try:
            until(lambda: running.poll() is not None or _count_trained(logs) == 2, seconds=200)  # noqa: B023
            lines = [(environ, b" ".join(line)) for _, environ, line in all_processes()]
            assert [line for _, line in lines if token.encode() in line] == []
            assert any(token.encode() in environ and b"mypkg.train" in line for environ, line in lines)
        finally:
            leaks = _find_token(lab, token, launcher)
            out, err = running.communicate(timeout=200)
        assert (running.returncode, leaks) == (0, []), err.decode()
        assert token.encode() not in out + err
        for rank in (0, 1):
            assert f"[rank {rank} @ node{rank}] 100%|██████████| 3/3 [" in out.decode()
            assert BAR.search((logs / f"rank{rank}.log").read_bytes().decode())
        assert b"\r" not in out
        # `up` installed the packages, and the second run sends none.
        assert b"installing" not in err and (launcher == "ssh" or b"sending" not in err)
        assert (lab.project / "runs" / launcher / "node0/checkpoints/2.pt").is_file()
    assert _find_token(lab, token, "nothing") == []


def _count_trained(logs: Path) -> int:
    return sum(TRAINED in path.read_text() for path in logs.glob("rank*.log"))


def _find_token(lab: Lab, token: str, launcher: str) -> list[str]:
    """Return the files of this machine and the nodes that contain a token; let a launcher's ranks end."""
    result = lab.run("exec", "-i", "--", "bash", "-c", SEARCH.format(launcher), stdin=token)
    assert result.returncode == 0, result.stderr
    folders = (lab.project, *(lab.home / name for name in ("clusters", "packages", "history")))
    local = find_files_with(token, *folders)
    logs = [path for path in lab.home.rglob("*.log") if token.encode() in path.read_bytes()]
    return [*result.stdout.splitlines(), *map(str, (*local, *logs))]
