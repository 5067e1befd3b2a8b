"""Run projects of several kinds, some with unsatisfiable requirements, on two nodes without internet.

    python -m benchmarks.campaigns.projects [--seed N] [--runs N] [--state FILE]

Needs root for its two nodes of the local cloud. Every even run trains a project of one kind on both nodes,
with one command and with packages from one kind of source: 9 even runs cover each kind of project once, and
36 cover each kind of project with each source. No password may be left on a node or in the output. Every odd
run calls one command in a project with unsatisfiable requirements: the command must exit with 3, name the
file and the line, and launch nothing. 20 odd runs cover each fault once.

The nodes' conda is tests/support/conda_program.py, which uses rattler to solve and install from a channel
with the layout of a conda channel.
"""

import contextlib
import hashlib
import json
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

from awsddp.local import image
from benchmarks._rehearsal import Rehearsal
from benchmarks.campaigns._campaign import Row, arguments, campaign, cluster
from tests.support import channel
from tests.support.servers import PASSWORD, make_repository, serve_folder, serve_git, serve_index, serve_proxy
from tests.support.wheels import write_installed_wheel, write_wheel

CONDA = """#!/bin/sh
export CONDA_MIRROR=http://elsewhere.example CONDA_CACHE=$HOME/.conda-cache PYTHONPATH=$HOME/miniforge3/lib
exec /opt/pytorch/bin/python $HOME/miniforge3/conda_program.py "$@"
"""
PROJECT = '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = {}\n'
SHOWS = "import small, tiny\nprint('runs with', small.VERSION, tiny.VERSION)\n"
PRIVATE = ("private index", "private, behind a proxy")
PLACES = ("public index", "private index", "behind a proxy", "private, behind a proxy")


@dataclass
class World:
    """A cluster, and the sources of its packages; `index` is the index that this machine's pip uses."""

    lab: Rehearsal
    wheels: Path
    channels: Path
    public: str
    private: str
    git: str
    files: str
    proxy: str
    index: str = ""

    @property
    def project(self) -> Path:
        """The folder of the current project."""
        return self.lab.project

    def write(self, name: str, text: str) -> str:
        """Write a file of the project, and return its name."""
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def begin(self, source: str) -> None:
        """Empty the project, and configure this machine's source of packages."""
        for path in self.project.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.index = self.private if source in PRIVATE else self.public
        (self.lab.root / "pip.conf").write_text(f"[global]\nindex-url = {self.index}\n")
        for name in ("http_proxy", "https_proxy"):
            self.lab.environ.pop(name, None)
            if "proxy" in source:
                self.lab.environ[name] = self.proxy
        self.write("train.py", SHOWS)

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run `awsddp`, and return its output and exit code."""
        argv = [sys.executable, "-m", "awsddp", *words]
        return subprocess.run(
            argv, cwd=self.project, env=self.lab.environ, capture_output=True, text=True, timeout=400
        )

    def lock(self, dependencies: list[str], sources: str = "") -> str:
        """Write a project locked by uv, and return the name of its lock."""
        self.write("pyproject.toml", PROJECT.format(json.dumps(dependencies)) + sources)
        environ = {**self.lab.environ, "UV_DEFAULT_INDEX": self.index, "UV_PYTHON_DOWNLOADS": "never"}
        words = [find_uv_bin(), "lock", "--quiet", "--no-config", "--python", sys.executable]
        subprocess.run(words, cwd=self.project, env=environ, check=True)
        return "uv.lock"


Kind = Callable[[World, str], str]
"""Writes a project that needs `tiny` and a given version of `small`; returns the file for --env."""


def included(world: World, version: str) -> str:
    """Write requirements that include another file, and the constraints that decide the versions."""
    world.write("needs/base.txt", "small  # the newest would be another\n")
    world.write("needs/pins.txt", f"small=={version}\ntiny==1.0\n")
    return world.write("requirements.txt", "-r needs/base.txt\n-c needs/pins.txt\n")


def extras(world: World, version: str) -> str:
    """Write requirements with an extra of the project; this extra requires an extra of `small`."""
    table = f'\n[project.optional-dependencies]\ndev = ["small[more]=={version}"]\n'
    world.write("pyproject.toml", PROJECT.format("[]") + table)
    return world.write("requirements.txt", "-e .[dev]\n")


def hashes(world: World, version: str) -> str:
    """Write requirements with the hash of each wheel, in the format of pip-compile."""
    text = ""
    for name, of_version in (("small", version), ("tiny", "1.0")):
        data = (world.wheels / f"{name}-{of_version}-py3-none-any.whl").read_bytes()
        text += f"{name}=={of_version} \\\n    --hash=sha256:{hashlib.sha256(data).hexdigest()}\n"
    return world.write("requirements.txt", text)


def repository(world: World, version: str) -> str:
    """Write requirements with a package from a git repository."""
    return world.write("requirements.txt", f"small=={version}\ntiny @ git+{world.git}/tiny.git\n")


def folder(world: World, version: str) -> str:
    """Write requirements that name a folder of wheels."""
    for name in (f"small-{version}", "tiny-1.0"):
        (world.project / "wheels").mkdir(exist_ok=True)
        shutil.copy(world.wheels / f"{name}-py3-none-any.whl", world.project / "wheels")
    return world.write("requirements.txt", f"--no-index\n--find-links ./wheels\nsmall=={version}\n")


def pyproject(world: World, version: str) -> str:
    """Write a pyproject.toml."""
    return world.write("pyproject.toml", PROJECT.format(json.dumps([f"small=={version}"])))


def lock(world: World, version: str) -> str:
    """Write a lock whose packages come from an index."""
    return world.lock([f"small=={version}"])


def lock_of_sources(world: World, version: str) -> str:
    """Write a lock that has a wheel from a URL and a package from a git repository."""
    url = f"{world.files}/small-{version}-py3-none-any.whl"
    sources = f'small = {{ url = "{url}" }}\ntiny = {{ git = "{world.git}/tiny.git" }}\n'
    return world.lock(["small", "tiny"], f"[tool.uv.sources]\n{sources}")


def environment(world: World, version: str) -> str:
    """Write an environment.yml with packages from a channel and from pip."""
    lines = f"- python={channel.MINOR}\n- numpy<2\n- pip:\n  - small=={version}\n"
    return world.write(
        "environment.yml", f"name: mine\nchannels: [{world.files}/channels/forge]\ndependencies:\n{lines}"
    )


KINDS: dict[str, Kind] = {
    "-r and -c": included,
    "extras": extras,
    "hashes": hashes,
    "git URL": repository,
    "folder of wheels": folder,
    "pyproject.toml": pyproject,
    "uv.lock": lock,
    "uv.lock, git and URL": lock_of_sources,
    "environment.yml": environment,
}


def train(world: World, number: int) -> Row:
    """Train with a project whose requirements can be met."""
    kind, source = list(KINDS)[number % 9], PLACES[number % 4]
    world.begin(source)
    version = f"1.{number}"
    for of in (version, f"{version}.1"):
        write_wheel(world.wheels, "small", of, requires=("tiny",), extras=("more",))
    file = KINDS[kind](world, version)
    began = time.monotonic()
    done = world.run("train", "train.py", "--env", file, "--nproc-per-node", "1")
    took = time.monotonic() - began
    shown = done.stdout.count(f"runs with {version} 1.0")
    words = "sudo grep -rlE '{}|{}' /home /tmp /var/tmp /root; true"
    secrets = world.run("exec", "--", words.format(PASSWORD, "reader:")).stdout
    is_told = PASSWORD in done.stdout + done.stderr + _read_client_files(world.lab.root / "home")
    ok = done.returncode == 0 and shown == 2 and not is_told and not secrets
    row = {"kind": kind, "place": source, "nodes": shown, "s": f"{took:.1f}", "ok": ok}
    return row if ok else row | {"secrets": secrets, "said": done.stdout[-800:] + done.stderr[-2000:]}


def _read_client_files(home: Path) -> str:
    """Return the content of the files that this machine has about its clusters, except the nodes' disks."""
    files = [path for path in home.rglob("*") if path.is_file() and "nodes" not in path.parts]
    return "".join(path.read_bytes().decode(errors="replace") for path in files)


BAD = {
    "conflict": (["small==1.0", "small>1.0"], "small==1.0 and small>1.0 exclude each other"),
    "no such version": (["tiny", "small==99"], "small==99 cannot be met"),
    "another Python": (["tiny", "future"], "future cannot be met"),
    "another torch": (["tiny", "greedy"], "needs another torch than the image's"),
    "no wheel": (["tiny", "elsewhere"], "elsewhere cannot be met"),
    "bad line": (["tiny", "numpy=1.26"], "'numpy=1.26' is not a requirement"),
}
"""For each fault, the requirements of the project and the text of the error."""
IN_FILES = ("requirements.txt", "included", "pyproject.toml")
OTHERS = {
    "unknown key": ("environment.yml", "dependencies: [python=3.11]\nchanels: [x]\n", "key 'chanels'"),
    "no lock": ("uv.lock", "version = 1\n", "uv.lock cannot be read"),
}
FAULTS = [(fault, file) for file in IN_FILES for fault in BAD] + [
    (fault, of[0]) for fault, of in OTHERS.items()
]


def refuse(world: World, number: int, dice: random.Random) -> Row:
    """Launch another cluster, or start a job on this one, with unsatisfiable requirements; return the row."""
    fault, file = FAULTS[number % len(FAULTS)]
    world.begin("public index")
    if fault in OTHERS:
        name, text, words = OTHERS[fault]
        world.write("pyproject.toml", PROJECT.format('["small"]'))
        world.write(name, text)
        location = name
    else:
        lines, words = BAD[fault]
        named = "requirements.txt" if file == "included" else file
        location = {"included": "needs.txt, line 2", "pyproject.toml": file}.get(file, f"{file}, line 2")
        text = "".join(f"{line}\n" for line in lines)
        world.write("needs.txt", text)
        texts = {"included": "-r needs.txt\n", "pyproject.toml": PROJECT.format(json.dumps(lines))}
        name = world.write(named, texts.get(file, text))
    # Only the nodes know the packages of a rehearsed image.
    verb = "train" if fault == "another torch" else dice.choice(("up", "train", "run"))
    launch = ("-c", "other", verb, "--local", "--nodes", "2", "-y")
    argv = {"up": launch, "run": (*launch, "train.py"), "train": ("train", "train.py")}[verb]
    before = list_nodes_and_jobs(world)
    began = time.monotonic()
    done = world.run(*argv, "--env", name)
    took = time.monotonic() - began
    error = " ".join(done.stderr.split())
    is_refused = done.returncode == 3 and words in error and location in error
    ok = is_refused and list_nodes_and_jobs(world) == before
    row = {"fault": fault, "file": file, "verb": verb, "s": f"{took:.1f}", "ok": ok}
    return row if ok else row | {"said": done.stdout[-500:] + done.stderr[-2000:], "code": done.returncode}


def list_nodes_and_jobs(world: World) -> list[str]:
    """Return the nodes of the local cloud, and the jobs of the cluster."""
    nodes = [path.name for path in (world.lab.root / "home/local/nodes").iterdir()]
    jobs = json.loads(world.lab.run("jobs", "--json"))["jobs"]
    return sorted(nodes) + [job["job"] for job in jobs]


@contextlib.contextmanager
def laboratory() -> Iterator[World]:
    """Yield a cluster and all sources of packages, without this machine's own settings."""
    with cluster(2, {}) as lab, contextlib.ExitStack() as stack:
        for name in list(lab.environ):
            if name.startswith(("PIP_", "UV_", "GIT_", "SSL_")) or name.lower().endswith("_proxy"):
                del lab.environ[name]
        lab.environ |= {
            "HOME": str(lab.root),
            "PIP_CONFIG_FILE": str(lab.root / "pip.conf"),
            "no_proxy": "169.254.169.254",
        }
        wheels = lab.root / "wheels"
        _packages(lab.root, wheels)
        open_index = stack.enter_context(serve_index(wheels))
        private = stack.enter_context(serve_index(wheels, password=PASSWORD))
        git = stack.enter_context(serve_git(lab.root / "repositories"))
        files = stack.enter_context(serve_folder(wheels))
        proxy = stack.enter_context(serve_proxy(password=PASSWORD))
        _conda_on_nodes(lab)
        yield World(
            lab=lab,
            wheels=wheels,
            channels=wheels / "channels",
            public=f"{open_index.url}/simple",
            private=f"http://reader:{PASSWORD}@127.0.0.1:{private.port}/simple",
            git=git.url,
            files=files.url,
            proxy=f"http://staff:{PASSWORD}@127.0.0.1:{proxy.port}",
        )


def _packages(root: Path, wheels: Path) -> None:
    write_wheel(wheels, "small", requires=("tiny",))
    write_wheel(wheels, "tiny")
    write_wheel(wheels, "future", python=">=3.99")
    write_wheel(wheels, "elsewhere", tag="macosx_11_0_arm64")
    write_wheel(wheels, "greedy", requires=("torch<2.6",))
    write_installed_wheel(wheels, "setuptools")
    make_repository(root / "repositories", "tiny")
    channel.make_channel(
        wheels / "channels/forge",
        base=image.BASE_IN_NODE / "bin" / image.PYTHON,
        pip_folder=Path("/opt/pytorch", image.PACKAGES, "pip"),
    )


def _conda_on_nodes(lab: Rehearsal) -> None:
    """Copy the conda program to the nodes, into the folder where users install miniforge."""
    conda = lab.root / "miniforge3"
    (conda / "bin").mkdir(parents=True)
    (conda / "bin/conda").write_text(CONDA)
    (conda / "bin/conda").chmod(0o755)
    shutil.copy(Path(channel.__file__).with_name("conda_program.py"), conda)
    for name in ("rattler", "yaml"):
        (conda / "lib").mkdir(exist_ok=True)
        (conda / "lib" / name).symlink_to(Path(sysconfig.get_path("platlib"), name))
    config = lab.root / "home/clusters/default/ssh_config"
    for node in ("node0", "node1"):
        rsync = ["rsync", "-a", "--copy-unsafe-links", "-e", f"ssh -F {config}", conda, f"{node}:"]
        subprocess.run(rsync, check=True)


def run(world: World, number: int, dice: random.Random) -> Row:
    """Run one case, and return its row; only an even case has requirements that can be met."""
    return refuse(world, number // 2, dice) if number % 2 else train(world, number // 2)


def main() -> int:
    args = arguments(str(__doc__).splitlines()[0], runs=72).parse_args()
    with laboratory() as world:
        return campaign(args, lambda number, dice: run(world, number, dice))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
