"""Requirements of a project, resolved for the nodes."""

import subprocess
import sys
from pathlib import Path

from uv import find_uv_bin

from awsddp.model.node_answers import Platform
from awsddp.plan.environment import EnvironmentPlan, make_environment_plan
from awsddp.plan.resolve import choose_packages, make_target
from awsddp.settings.spec import EnvSection

IMAGE = Platform(
    version="3.12.3",
    machine="x86_64",
    libc="2.35",
    packages={"torch": "2.12.1+cu130", "numbers2": "2.0", "Files": "2.0", "nvidia-nccl": "2.29"},
)


def make_plan(text: str = "", **keys: object) -> EnvironmentPlan:
    if text:
        Path("requirements.txt").write_text(text)
    env = EnvSection(**{"file": "requirements.txt", **keys})  # type: ignore[arg-type]
    return make_environment_plan(env, internet=True, driver=None)


def choose(text: str) -> tuple[tuple[str, ...] | None, str]:
    plan = make_plan(text)
    return choose_packages(plan, make_target(plan, IMAGE), cache=Path("cache"))


PROJECT = """
[project]
name = "mine"
version = "0.1"
requires-python = ">=3.10"
dependencies = ["torch", "files[http] ; sys_platform == 'linux'", "lib", "numbers2<2"]
[dependency-groups]
dev = ["small"]
[tool.uv.sources]
lib = { workspace = true }
[tool.uv.workspace]
members = ["lib"]
"""


LIB = "[project]\nname = 'lib'\nversion = '1'\nrequires-python = '>=3.10'\ndependencies = ['tiny']\n"


def lock(index: Path, project: str = PROJECT) -> Path:
    """Write a project of two, and have uv lock it."""
    Path("lib").mkdir()
    Path("lib/pyproject.toml").write_text(LIB)
    Path("pyproject.toml").write_text(project)
    words = ["lock", "--no-config", "--no-index", "--find-links", str(index), "--python", sys.executable]
    subprocess.run([find_uv_bin(), *words], check=True, capture_output=True)
    return Path("uv.lock").absolute()
