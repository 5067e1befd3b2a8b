"""conda's packages on a real SSH host: solved and installed by rattler, from a channel of the true layout.

That miniforge installs, and that the channels of the world answer, only a network shows.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from awsddp.errors import NodeError
from awsddp.plan.environment import EnvironmentPlan, make_environment_plan
from awsddp.settings.spec import EnvSection
from tests.nodes.test_environments import imported, made, python
from tests.support.channel import MINOR, SUBDIR, VERSION, make_channel, served
from tests.support.ssh_hosts import Lab
from tests.support.wheels import torch_text, wheel

__all__ = ["python"]

proved = partial(pytest.param, marks=pytest.mark.prove)
PROGRAM = Path(__file__).parents[1] / "support" / "conda_program.py"
BUILD = f"py{MINOR.replace('.', '')}h64a7726_0"


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("channels")
    make_channel(folder / "conda-forge")
    return folder


@pytest.fixture(scope="module")
def mirror(channels: Path) -> Iterator[str]:
    with served(channels) as url:
        yield url


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Where pip finds all that it finds."""
    folder = tmp_path / "index"
    wheel(folder, "small", requires=("tiny",))
    wheel(folder, "tiny")
    wheel(folder, "torch", "2.13.0", text=torch_text("2.13.0"))
    wheel(folder, "torchvision", "0.28.0", requires=("torch",))
    return folder


@pytest.fixture
def here(lab: Callable[[int], Lab], mirror: str) -> Lab:
    """A node with a conda, whose pip asks no index."""
    here = lab(1)
    host = here.hosts[0]
    host.script(
        "conda",
        "#!/bin/sh\necho \"$@\" >> '{home}/conda.log'\n"
        "export no_proxy=127.0.0.1 NO_PROXY=127.0.0.1\n"  # as for the true mirror, whose URL is https
        f"export CONDA_MIRROR='{mirror}' CONDA_CACHE='{{home}}/cache'\n"
        f"exec '{sys.executable}' '{PROGRAM}' \"$@\"\n",
    )
    (host.home / ".config/pip").mkdir(parents=True)
    (host.home / ".config/pip/pip.conf").write_text("[global]\nno-index = true\n")
    return here


def planned(**keys: object) -> EnvironmentPlan:
    return make_environment_plan(EnvSection(kind="conda", **keys), internet=True, driver=None)  # type: ignore[arg-type]


def installed(prefix: Path) -> dict[str, tuple[str, str]]:
    """Return the packages that conda recorded, each with its version and where it came from."""
    records = [json.loads(path.read_text()) for path in (prefix / "conda-meta").glob("*.json")]
    return {one["name"]: (one["version"], one["url"].rpartition("/")[0]) for one in records}


FORGE = "https://conda.anaconda.org/conda-forge"


@pytest.mark.prove
def test_what_awsddp_asks_for_by_itself_is_solved_and_installed(
    here: Lab, index: Path, python: str, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text(f"--find-links {index}\n")
    plan = planned(python=MINOR, file=str(tmp_path / "requirements.txt"))
    found = made(here, plan, python)[0]
    assert found.python and found.facts["torch"] == "2.13.0" and found.facts["python"] == VERSION
    packages = installed(Path(found.python).parents[1])
    assert packages["python"] == (VERSION, f"{FORGE}/{SUBDIR}")
    assert packages["numpy"] == ("2.1.0", f"{FORGE}/{SUBDIR}")
    assert packages["pip"][1] == f"{FORGE}/noarch"
    words = "import numpy, torchvision; print(numpy.VERSION, torchvision.VERSION)"
    assert imported(found.python, words) == "2.1.0 0.28.0"


OWN = f"""\
%YAML 1.1
--- # as many projects have it
name: mine
channels: [conda-forge, nodefaults]
prefix: /home/somebody/miniforge3/envs/mine
dependencies:
  - python={MINOR}   # [linux]
  - pywin32          # [win]
  - conda-forge::numpy >=1.24,<2
  - tqdm=4.66=pyhd8ed1ab_0
  - &lib library
  - "colorama[version='>=4']"
  - pip:
    - -e .
    - -r requirements/base.txt
variables: {{RATIO: 0.5, MODE: "on"}}
"""


def test_a_projects_own_environment_yml_is_solved_and_installed(
    here: Lab, index: Path, python: str, tmp_path: Path
) -> None:
    file = tmp_path / "environment.yml"
    file.write_bytes(OWN.replace("\n", "\r\n").encode())
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/base.txt").write_text(f"small>=1  # brings tiny\n--find-links {index}\n")
    plan = planned(file=str(file))
    found = made(here, plan, python)[0]
    assert found.python
    packages = installed(Path(found.python).parents[1])
    assert {name: version for name, (version, _) in packages.items() if name != "pip"} == {
        "python": VERSION,
        "numpy": "1.26.4",
        "tqdm": "4.66",
        "colorama": "4.66",
        "library": "1.0",
    }
    assert all(url.startswith(FORGE) for _, url in packages.values())
    assert imported(found.python, "import small, tiny, numpy; print(numpy.VERSION)") == "1.26.4"
    assert plan.variables == {"RATIO": "0.5", "MODE": "on"}
    Path(found.python).parents[1].joinpath("ready.json").unlink()  # as an interrupted build leaves it
    assert made(here, plan, python)[0].python == found.python
    calls = (here.hosts[0].home / "conda.log").read_text().splitlines()
    assert [call.split()[:2] for call in calls] == [["env", "create"], ["env", "update"]]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("- nope>=7", "environment.yml: no channel has a nope that fits"),
        proved(f"- python={MINOR}\n- numpy>=7", "environment.yml: no channel has a numpy that fits"),
        proved("- greedy", "environment.yml: no channel has a numpy that fits"),
        (f"- numpy=1.26.4={BUILD}\n- numpy>=2", "environment.yml: its packages have conflicting versions"),
        proved("- other::numpy", "environment.yml: its packages have conflicting versions"),
        proved("- library", "No python: environment.yml names no package with one"),
        (f"- python={MINOR}\n- pip:\n  - small>7", "environment.yml: no small>7 for this Python"),
    ],
)
def test_what_no_channel_can_meet_is_named(
    here: Lab, index: Path, python: str, tmp_path: Path, lines: str, words: str
) -> None:
    file = tmp_path / "environment.yml"
    lines = lines.replace("- pip:", f"- pip:\n  - --find-links {index}")
    file.write_text(f"channels: [conda-forge]\ndependencies:\n{lines}\n")
    with pytest.raises(NodeError) as refused:
        made(here, planned(file=str(file)), python)
    assert refused.value.exit_code == 6
    said = f"{refused.value.message}\n{refused.value.why}".replace(f"{tmp_path}/", "")
    assert said.startswith("node0: making the environment by conda: environment.yml") and words in said


@pytest.mark.parametrize("by", ["name", "URL"])
def test_nodes_without_internet_get_the_channels_through_this_machine(
    lab: Callable[[int], Lab],
    mirror: str,
    index: Path,
    python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    """As in the local cloud: conda and its pip find what the file names, and nothing else."""
    monkeypatch.setattr("awsddp.nodes.catalog._CONDA", mirror)
    here = lab(1)
    run = f"export CONDA_CACHE='{{home}}/cache'\nexec '{sys.executable}' '{PROGRAM}' \"$@\"\n"
    here.hosts[0].script("conda", f"#!/bin/sh\n{run}")
    channel = "conda-forge" if by == "name" else f"{mirror}/conda-forge"
    file = tmp_path / "environment.yml"
    lines = f"- python={MINOR}\n- {channel}::numpy<2\n- pip:\n  - --find-links {index}\n  - small\n"
    file.write_text(f"channels: [{channel}]\ndependencies:\n{lines}")
    plan = make_environment_plan(EnvSection(file=str(file)), internet=False, driver=None)
    assert plan.packages_from == "client"
    found = made(here, plan, python)[0]
    assert imported(found.python, "import small, tiny, numpy; print(numpy.VERSION)") == "1.26.4"
    here.hosts[0].script("conda", f"#!/bin/sh\nexport CONDA_CHANNEL_ALIAS={mirror}/conda-forge\n{run}")
    file.write_text("channels: [other]\ndependencies: [python]\n")
    with pytest.raises(NodeError, match=mirror.removeprefix("http://")):
        made(here, make_environment_plan(EnvSection(file=str(file)), internet=False, driver=None), python)


def test_a_channel_may_be_a_folder_of_the_nodes(
    here: Lab, channels: Path, python: str, tmp_path: Path
) -> None:
    """As on a shared file system."""
    file, shared = tmp_path / "environment.yml", (channels / "conda-forge").as_uri()
    file.write_text(f"channels: [{shared}, nodefaults]\ndependencies: [python={MINOR}, pip]\n")
    found = made(here, planned(file=str(file)), python)[0]
    assert found.python
    assert installed(Path(found.python).parents[1])["python"] == (VERSION, f"{shared}/{SUBDIR}")


@pytest.fixture(autouse=True)
def no_cache_of_the_users(isolated: Path) -> Iterator[None]:
    """Rattler's caches lie in the node's folder."""
    yield
    assert not (isolated / ".cache").exists() and os.environ["HOME"] == str(isolated)
