"""conda environments on a real SSH host: rattler solves and installs from a channel like conda-forge.

Not covered, since it needs a network: the installation of miniforge, and public channels.
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
from tests.nodes.test_environments import build_envs, python, run_python
from tests.support.channel import MINOR, SUBDIR, VERSION, make_channel, serve_channels
from tests.support.ssh_hosts import Lab
from tests.support.wheels import torch_text, write_wheel

__all__ = ["python"]
MakeLab = Callable[[int], Lab]

prove_case = partial(pytest.param, marks=pytest.mark.prove)
PROGRAM = Path(__file__).parents[1] / "support" / "conda_program.py"
BUILD = f"py{MINOR.replace('.', '')}h64a7726_0"


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("channels")
    make_channel(folder / "conda-forge")
    return folder


@pytest.fixture(scope="module")
def mirror(channels: Path) -> Iterator[str]:
    with serve_channels(channels) as url:
        yield url


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The only packages that pip finds."""
    folder = tmp_path / "index"
    write_wheel(folder, "small", requires=("tiny",))
    write_wheel(folder, "tiny")
    write_wheel(folder, "torch", "2.13.0", text=torch_text("2.13.0"))
    write_wheel(folder, "torchvision", "0.28.0", requires=("torch",))
    return folder


@pytest.fixture
def conda_lab(make_lab: MakeLab, mirror: str) -> Lab:
    """A host with conda, whose pip uses no index."""
    lab = make_lab(1)
    host = lab.hosts[0]
    host.script(
        "conda",
        "#!/bin/sh\necho \"$@\" >> '{home}/conda.log'\n"
        "export no_proxy=127.0.0.1 NO_PROXY=127.0.0.1\n"  # as for the real mirror, whose URL is https
        f"export CONDA_MIRROR='{mirror}' CONDA_CACHE='{{home}}/cache'\n"
        f"exec '{sys.executable}' '{PROGRAM}' \"$@\"\n",
    )
    (host.home / ".config/pip").mkdir(parents=True)
    (host.home / ".config/pip/pip.conf").write_text("[global]\nno-index = true\n")
    return lab


def make_plan(**keys: object) -> EnvironmentPlan:
    return make_environment_plan(EnvSection(kind="conda", **keys), internet=True, driver=None)  # type: ignore[arg-type]


def read_installed(prefix: Path) -> dict[str, tuple[str, str]]:
    """Return the packages that conda recorded, each with its version and where it came from."""
    records = [json.loads(path.read_text()) for path in (prefix / "conda-meta").glob("*.json")]
    return {record["name"]: (record["version"], record["url"].rpartition("/")[0]) for record in records}


FORGE = "https://conda.anaconda.org/conda-forge"


@pytest.mark.prove
def test_default_conda_packages_are_solved_and_installed(
    conda_lab: Lab, index: Path, python: str, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text(f"--find-links {index}\n")
    plan = make_plan(python=MINOR, file=str(tmp_path / "requirements.txt"))
    env = build_envs(conda_lab, plan, python)[0]
    assert env.python and env.facts["torch"] == "2.13.0" and env.facts["python"] == VERSION
    packages = read_installed(Path(env.python).parents[1])
    assert packages["python"] == (VERSION, f"{FORGE}/{SUBDIR}")
    assert packages["numpy"] == ("2.1.0", f"{FORGE}/{SUBDIR}")
    assert packages["pip"][1] == f"{FORGE}/noarch"
    code = "import numpy, torchvision; print(numpy.VERSION, torchvision.VERSION)"
    assert run_python(env.python, code) == "2.1.0 0.28.0"


PROJECT_FILE = f"""\
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


def test_environment_yml_of_a_project_is_solved_and_installed(
    conda_lab: Lab, index: Path, python: str, tmp_path: Path
) -> None:
    file = tmp_path / "environment.yml"
    file.write_bytes(PROJECT_FILE.replace("\n", "\r\n").encode())
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/base.txt").write_text(f"small>=1  # brings tiny\n--find-links {index}\n")
    plan = make_plan(file=str(file))
    env = build_envs(conda_lab, plan, python)[0]
    assert env.python
    packages = read_installed(Path(env.python).parents[1])
    assert {name: version for name, (version, _) in packages.items() if name != "pip"} == {
        "python": VERSION,
        "numpy": "1.26.4",
        "tqdm": "4.66",
        "colorama": "4.66",
        "library": "1.0",
    }
    assert all(url.startswith(FORGE) for _, url in packages.values())
    assert run_python(env.python, "import small, tiny, numpy; print(numpy.VERSION)") == "1.26.4"
    assert plan.variables == {"RATIO": "0.5", "MODE": "on"}
    Path(env.python).parents[1].joinpath("ready.json").unlink()  # as an interrupted build leaves it
    assert build_envs(conda_lab, plan, python)[0].python == env.python
    calls = (conda_lab.hosts[0].home / "conda.log").read_text().splitlines()
    assert [call.split()[:2] for call in calls] == [["env", "create"], ["env", "update"]]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("- nope>=7", "environment.yml: no channel has a nope that fits"),
        prove_case(f"- python={MINOR}\n- numpy>=7", "environment.yml: no channel has a numpy that fits"),
        prove_case("- greedy", "environment.yml: no channel has a numpy that fits"),
        (f"- numpy=1.26.4={BUILD}\n- numpy>=2", "environment.yml: its packages have conflicting versions"),
        prove_case("- other::numpy", "environment.yml: its packages have conflicting versions"),
        prove_case("- library", "There is no Python: no package in environment.yml contains it"),
        (f"- python={MINOR}\n- pip:\n  - small>7", "environment.yml: no small>7 for this Python"),
    ],
)
def test_environment_that_no_channel_can_satisfy_is_refused_with_the_reason(
    conda_lab: Lab, index: Path, python: str, tmp_path: Path, lines: str, reason: str
) -> None:
    file = tmp_path / "environment.yml"
    lines = lines.replace("- pip:", f"- pip:\n  - --find-links {index}")
    file.write_text(f"channels: [conda-forge]\ndependencies:\n{lines}\n")
    with pytest.raises(NodeError) as error:
        build_envs(conda_lab, make_plan(file=str(file)), python)
    assert error.value.exit_code == 6
    text = f"{error.value.message}\n{error.value.why}".replace(f"{tmp_path}/", "")
    assert text.startswith("node0: making the environment by conda: environment.yml") and reason in text


@pytest.mark.parametrize("named_by", ["name", "URL"])
def test_nodes_without_internet_get_channels_through_this_machine(
    make_lab: MakeLab,
    mirror: str,
    index: Path,
    python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named_by: str,
) -> None:
    """conda and its pip reach only what the file names, as in the local cloud."""
    monkeypatch.setattr("awsddp.nodes.catalog._CONDA", mirror)
    lab = make_lab(1)
    command = f"export CONDA_CACHE='{{home}}/cache'\nexec '{sys.executable}' '{PROGRAM}' \"$@\"\n"
    lab.hosts[0].script("conda", f"#!/bin/sh\n{command}")
    channel = "conda-forge" if named_by == "name" else f"{mirror}/conda-forge"
    file = tmp_path / "environment.yml"
    lines = f"- python={MINOR}\n- {channel}::numpy<2\n- pip:\n  - --find-links {index}\n  - small\n"
    file.write_text(f"channels: [{channel}]\ndependencies:\n{lines}")
    plan = make_environment_plan(EnvSection(file=str(file)), internet=False, driver=None)
    assert plan.packages_from == "client"
    env = build_envs(lab, plan, python)[0]
    assert run_python(env.python, "import small, tiny, numpy; print(numpy.VERSION)") == "1.26.4"
    lab.hosts[0].script("conda", f"#!/bin/sh\nexport CONDA_CHANNEL_ALIAS={mirror}/conda-forge\n{command}")
    file.write_text("channels: [other]\ndependencies: [python]\n")
    with pytest.raises(NodeError, match=mirror.removeprefix("http://")):
        build_envs(
            lab, make_environment_plan(EnvSection(file=str(file)), internet=False, driver=None), python
        )


def test_channel_may_be_a_folder_on_the_nodes(
    conda_lab: Lab, channels: Path, python: str, tmp_path: Path
) -> None:
    """As on a shared file system."""
    file, shared = tmp_path / "environment.yml", (channels / "conda-forge").as_uri()
    file.write_text(f"channels: [{shared}, nodefaults]\ndependencies: [python={MINOR}, pip]\n")
    env = build_envs(conda_lab, make_plan(file=str(file)), python)[0]
    assert env.python
    assert read_installed(Path(env.python).parents[1])["python"] == (VERSION, f"{shared}/{SUBDIR}")


@pytest.fixture(autouse=True)
def unused_user_cache(isolated: Path) -> Iterator[None]:
    """Checks that rattler's caches are in the node's folder, not in the user's."""
    yield
    assert not (isolated / ".cache").exists() and os.environ["HOME"] == str(isolated)
