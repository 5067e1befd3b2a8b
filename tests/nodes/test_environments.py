"""Environments on real SSH hosts: built on all nodes at once over the image's packages, reused, refused."""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awsddp.errors import ConfigError, NodeError
from awsddp.model.events import Event
from awsddp.model.node_answers import Environment
from awsddp.nodes import environments
from awsddp.nodes.environments import ensure_environments
from awsddp.plan.environment import EnvironmentPlan, make_environment_plan
from awsddp.plan.indexes import Indexes
from awsddp.plan.project import Project
from awsddp.settings.spec import EnvSection
from awsddp.util.parallel import run_in_thread
from awsddp.util.shipped_files import template
from tests.support.servers import BUILT_BY, PASSWORD, make_repository, serve_folder, serve_git, serve_index
from tests.support.ssh_hosts import Lab
from tests.support.waiting import until
from tests.support.wheels import add_package, make_image, write_installed_wheel, write_wheel

MakeLab = Callable[[int], Lab]
PLAN = EnvironmentPlan(name="requirements.txt", lines=("small",), packages_from="client")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only packages that pip finds. `small` needs torch, which must not be installed from here."""
    folder = tmp_path / "index"
    write_wheel(folder, "small", requires=("torch>=2", "tiny"))
    write_wheel(folder, "tiny")
    write_wheel(folder, "torch", "2.13.0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_image(tmp_path_factory.mktemp("image") / "pytorch"))


def build_envs(
    lab: Lab, plan: EnvironmentPlan, python: str, *, events: list[Event] | None = None
) -> dict[int, Environment]:
    with lab.fleet(on_event=(events if events is not None else []).append) as fleet:
        return ensure_environments(
            fleet, plan, pythons=dict.fromkeys(fleet.nodes, python), cache=lab.folder / "packages"
        )


def run_python(python: str | None, code: str) -> str:
    """Return the output of a program, with its errors."""
    result = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return result.stdout.strip() + result.stderr


def test_environment_has_its_packages_and_the_torch_of_the_image_and_is_built_once(
    make_lab: MakeLab, index: Path, python: str
) -> None:
    lab, events = make_lab(2), list[Event]()
    envs = build_envs(lab, PLAN, python, events=events)
    texts = [event.text for event in events]
    assert "packages come through this machine" in texts
    assert "importing torch, to compare the nodes" in texts
    for env in envs.values():
        assert run_python(env.python, "import small, tiny, torch; print(torch.__version__)") == "2.13.0+cpu"
        torchrun = Path(str(env.python)).with_name("torchrun").read_text()
        assert torchrun.startswith(f"#!{env.python}\n") and "torch.distributed.run" in torchrun
    events.clear()
    assert build_envs(lab, PLAN, python, events=events) == envs and not events


def test_requirement_for_another_torch_is_refused_with_both_versions(
    make_lab: MakeLab, index: Path, python: str
) -> None:
    plan = dataclasses.replace(PLAN, lines=("torch==2.5.1",))
    write_wheel(index, "torch", "2.5.1")
    with pytest.raises(ConfigError) as error:
        build_envs(make_lab(1), plan, python)
    reason = "torch==2.5.1 needs another torch than the image's 2.13.0+cpu"
    assert error.value.message == f"env.file: requirements.txt: {reason}"
    assert "torch==2.5.1" in error.value.why


def test_metadata_programs_and_plugins_of_the_project_are_installed(
    make_lab: MakeLab, index: Path, python: str
) -> None:
    """Its code stays in the project folder: no build runs, and nothing else is installed."""
    lab = make_lab(1)
    host = lab.hosts[0]
    project = Project(
        info="mine-1.2.dist-info",
        metadata="Metadata-Version: 2.1\nName: mine\nVersion: 1.2\n",
        entry_points="[console_scripts]\nmine-train = mine:main\n[plugins]\none = mine:main\n",
        sources=("src",),
    )
    package = host.work / "src/mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import sys\nfrom importlib.metadata import version\n__version__ = version('mine')\n"
        "def main():\n    print(__version__, sys.executable)\n"
    )
    env = build_envs(lab, EnvironmentPlan(name="pyproject.toml", projects=(project,)), python)[0]
    code = "import mine; print(mine.__version__)"
    assert run_python(env.python, code) == "1.2"
    plugin_code = "from importlib import metadata as m; m.entry_points(group='plugins')['one'].load()()"
    assert run_python(env.python, plugin_code) == f"1.2 {env.python}"
    program = Path(str(env.python)).with_name("mine-train")
    result = subprocess.run([program], capture_output=True, text=True, cwd="/")
    assert (result.stdout, result.stderr) == (f"1.2 {env.python}\n", "")


def test_unknown_version_of_the_project_is_reported_with_the_variable_that_sets_it(
    make_lab: MakeLab, index: Path, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SETUPTOOLS_SCM_PRETEND_VERSION", raising=False)
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'my.proj'\ndynamic = ['version']\nscripts = {mine-train = 'mine:main'}\n"
    )
    lab, events = make_lab(1), list[Event]()
    section = EnvSection(file=str(tmp_path / "pyproject.toml"))

    def build() -> Environment:
        plan = make_environment_plan(section, internet=False, driver=None, workdir=tmp_path)
        events.clear()
        return build_envs(lab, plan, python, events=events)[0]

    code = "from importlib.metadata import version; print(version('my.proj'))"
    env = build()
    assert run_python(env.python, code) == "0+unknown"
    assert Path(str(env.python)).with_name("mine-train").is_file()
    [warning] = [event.text for event in events if "0+unknown" in event.text]
    before, _, advice = warning.partition(": ")
    assert before == "my_proj has version 0+unknown on the nodes"
    setting = re.search(r"export (\w+)=(\S+)", advice)
    assert setting
    monkeypatch.setenv(setting[1], setting[2])
    assert run_python(build().python, code) == "1.0"
    assert not [event for event in events if "0+unknown" in event.text]


@pytest.mark.prove
def test_changed_file_gets_a_new_environment_and_an_interrupted_build_continues(
    make_lab: MakeLab, index: Path, python: str
) -> None:
    lab = make_lab(1)
    first = build_envs(lab, PLAN, python)[0]
    write_wheel(index, "more")
    changed = dataclasses.replace(PLAN, lines=("small", "more"))
    second = build_envs(lab, changed, python)[0]
    assert first.python != second.python and run_python(first.python, "import small") == ""
    ready = Path(str(second.python)).parents[1] / "ready.json"
    ready.unlink()  # as after a build that was killed at its end
    config = ready.parent / "pyvenv.cfg"
    written_ns = config.stat().st_mtime_ns
    assert build_envs(lab, changed, python)[0].python == second.python
    assert config.stat().st_mtime_ns == written_ns and run_python(second.python, "import more, small") == ""


def test_requirement_replaces_a_package_of_the_image(make_lab: MakeLab, index: Path, tmp_path: Path) -> None:
    python = make_image(tmp_path / "own")
    add_package(tmp_path / "own", "numbers2", "2.0")
    write_wheel(index, "numbers2", "1.5")
    write_wheel(index, "numbers2", "3.0")
    env = build_envs(make_lab(1), dataclasses.replace(PLAN, lines=("small", "numbers2<2")), str(python))[0]
    assert run_python(env.python, "import numbers2; print(numbers2.VERSION)") == "1.5"


@pytest.mark.prove
def test_extra_of_a_package_of_the_image_installs_only_what_the_extra_needs(
    make_lab: MakeLab, index: Path, tmp_path: Path
) -> None:
    """For example Lightning needs fsspec[http], and fsspec came with torch."""
    python = make_image(tmp_path / "own")
    add_package(
        tmp_path / "own", "Files", "2.0", needs="Requires-Dist: web; extra == 'http'\nProvides-Extra: http\n"
    )
    write_wheel(index, "files", "2.0", requires=("web; extra == 'http'",), extras=("http",))
    write_wheel(index, "files", "3.0")
    write_wheel(index, "web")
    write_wheel(index, "light", requires=("files[http,typo]", "torch[typo]"))
    env = build_envs(make_lab(1), dataclasses.replace(PLAN, lines=("light",)), str(python))[0]
    assert run_python(env.python, "import light, web") == ""
    packages = Path(str(env.python)).parents[1].glob("lib/python3*/site-packages/*.dist-info")
    assert sorted(path.name for path in packages) == ["light-1.0.dist-info", "web-1.0.dist-info"]


@pytest.mark.prove
def test_transitive_requirement_for_another_torch_is_named(
    make_lab: MakeLab, index: Path, python: str
) -> None:
    write_wheel(index, "greedy", requires=("torch<2.6",))
    write_wheel(index, "torch", "2.5.1")
    with pytest.raises(ConfigError, match="needs another torch than the image") as error:
        build_envs(make_lab(1), dataclasses.replace(PLAN, lines=("greedy",)), python)
    assert "greedy depend on torch<2.6" in error.value.why


@pytest.mark.prove
def test_package_without_a_wheel_is_built_on_the_node_also_from_a_url_or_git(
    make_lab: MakeLab, index: Path, python: str, tmp_path: Path
) -> None:
    """A release newer than all wheels, a package that is not pure Python, and a transitive requirement."""
    write_installed_wheel(index, "setuptools")
    compiled = "distclass=type('D', (Distribution,), {'has_ext_modules': lambda s: True}),"
    make_sdist(index, tmp_path, "deep_speed", compiled)
    write_wheel(index, "deep_speed", "0.3")
    make_sdist(index, tmp_path, "deep_down", "")
    write_wheel(index, "above", "2.0", requires=("deep_down",))
    write_wheel(index, "above")
    make_sdist(tmp_path / "elsewhere", tmp_path, "pure", "")
    write_wheel(tmp_path / "elsewhere", "tiny", "2.0")
    make_repository(tmp_path / "repositories", "gitted")
    with serve_folder(tmp_path / "elsewhere") as server, serve_git(tmp_path / "repositories") as git:
        lines = (
            "Deep.Speed>=0.1",
            "above",
            f"{server.url}/pure-1.0.tar.gz",
            f"tiny @ {server.url}/tiny-2.0-py3-none-any.whl ; python_version > '3'",
            f"git+{git.url}/gitted.git",
        )
        envs = build_envs(make_lab(2), dataclasses.replace(PLAN, lines=lines), python)
    names = "deep_speed, above, deep_down, pure, tiny, gitted"
    code = f"import {names}; print(*(x.VERSION for x in ({names})))"
    for env in envs.values():
        assert run_python(env.python, code) == "1.0 2.0 1.0 1.0 2.0 1.0 of git"
    assert server.pip_requests.count("GET /pure-1.0.tar.gz") == 2, (
        "once per node; uv here may request it, too"
    )


def make_sdist(index: Path, folder: Path, name: str, arguments: str) -> None:
    """Write a source distribution that builds without an index, with the setuptools of this machine."""
    import tarfile

    source = folder / f"{name}-1.0"
    source.mkdir()
    index.mkdir(exist_ok=True)
    (source / "setup.py").write_text(
        "from setuptools import Distribution, setup\n"
        f"setup(name={name!r}, version='1.0', py_modules=[{name!r}], {arguments})\n"
    )
    (source / "pyproject.toml").write_text(BUILT_BY)
    (source / f"{name}.py").write_text("VERSION = '1.0'\n")
    with tarfile.open(index / f"{name}-1.0.tar.gz", "w:gz") as file:
        file.add(source, f"{name}-1.0")


def test_setup_runs_once_in_the_project_folder_and_resumes_at_the_failed_command(
    make_lab: MakeLab, python: str
) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    host.work.mkdir(parents=True, exist_ok=True)
    plan = EnvironmentPlan(name="image", setup=("echo first >> log", "test -e allowed", "echo last >> log"))
    with pytest.raises(NodeError) as error:
        build_envs(lab, plan, python)
    assert error.value.exit_code == 6 and "'test -e allowed' failed" in error.value.message
    (host.work / "allowed").touch()
    for _ in range(2):
        assert build_envs(lab, plan, python)[0].python == python
    assert (host.work / "log").read_text() == "first\nlast\n"


def is_running(pid: str) -> bool:
    """Return True if a process runs and is not a zombie."""
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{int(pid)}/status").read_text()
    return False


def test_setup_command_ends_although_its_background_process_still_writes(
    make_lab: MakeLab, python: str
) -> None:
    lab = make_lab(1)
    work = lab.hosts[0].work
    work.mkdir(parents=True, exist_ok=True)
    loop = "while test ! -e go; do sleep 0.05; done; seq 100000 && touch wrote; exec sleep 400"
    plan = EnvironmentPlan(name="image", setup=(f"nohup sh -c '{loop}' & echo $! > pid",))
    build_envs(lab, plan, python)
    pid = (work / "pid").read_text()
    assert is_running(pid)
    (work / "go").touch()
    until((work / "wrote").exists)
    os.kill(int(pid), signal.SIGKILL)


def test_build_ends_with_its_client_and_releases_its_lock(make_lab: MakeLab, python: str) -> None:
    lab = make_lab(1)
    work = lab.hosts[0].work
    work.mkdir(parents=True, exist_ok=True)
    plan = EnvironmentPlan(name="image", setup=("echo $$ > pid; sleep 400 & echo $! > child; wait",))

    def on_event(event: Event) -> None:
        if event.text.startswith("echo"):
            until(lambda: (work / "child").exists() and (work / "child").read_text() != "")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), lab.fleet(on_event=on_event) as fleet:
        ensure_environments(fleet, plan, pythons={0: python}, cache=lab.folder)
    for name in ("pid", "child"):
        until(lambda name=name: not is_running((work / name).read_text()))  # type: ignore[misc]
    build_envs(lab, EnvironmentPlan(name="image", setup=("true",)), python)


def test_waiting_client_reports_whose_build_it_waits_for(make_lab: MakeLab, python: str) -> None:
    lab, texts = make_lab(1), list[str]()
    work = lab.hosts[0].work
    work.mkdir(parents=True, exist_ok=True)
    command = "touch began; while test ! -e go; do sleep 0.05; done"
    first = run_in_thread(build_envs, lab, EnvironmentPlan(name="image", setup=(command,)), python)
    until((work / "began").exists)

    def on_event(event: Event) -> None:
        if event.text.startswith("waiting for a build"):
            texts.append(event.text)
            (work / "go").touch()

    with lab.fleet(on_event=on_event) as fleet:
        ensure_environments(
            fleet, EnvironmentPlan(name="image", setup=("true",)), pythons={0: python}, cache=lab.folder
        )
    first.result(60)
    prefix = r"waiting for a build of \S+@\S+ on this node, since \d\d:\d\d UTC, process \d+: "
    assert re.fullmatch(prefix + re.escape(command), texts[0])


def test_build_that_does_not_end_is_reported_with_the_command_that_ends_it() -> None:
    reason = "waiting for a build of ann@laptop on this node, since 10:02 UTC, process 4711: sleep\n9"
    answer = Environment(failed=reason, said="the build has not ended after 1800 s")
    error = environments._outcome(PLAN, 1, answer, str)
    assert isinstance(error, NodeError) and error.message == f"node1: {reason}"
    assert error.next.startswith("awsddp exec --node 1 -- kill 4711 ")


def test_terminated_build_ends_its_command_and_removes_the_files_with_passwords(tmp_path: Path) -> None:
    conda = tmp_path / "bin/conda"
    conda.parent.mkdir()
    conda.write_text(f"#!/bin/sh\nsleep 400 & echo $! > {tmp_path}/child\necho $$ > {tmp_path}/pid\nwait\n")
    conda.chmod(0o755)
    request = {"do": "build", "client": "ann@laptop", "stamp": "s", "setup_stamp": "t", "kind": "conda"}
    request |= {"image": sys.executable, "conda": "{}", "ca": "", "environ": {}, "install": {}, "setup": []}
    program = subprocess.Popen(
        [sys.executable, "-I", "-c", template("environment.py")],
        env={"HOME": str(tmp_path), "PATH": f"{conda.parent}:{os.environ['PATH']}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdin
    program.stdin.write(json.dumps(request))
    program.stdin.close()
    program.stdin = None
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    assert (tmp_path / "awsddp/env/environment.yml").exists()
    program.terminate()
    _, output = program.communicate(timeout=30)
    running = [name for name in ("pid", "child") if is_running((tmp_path / name).read_text())]
    for name in running:
        os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)
    assert not running and not (tmp_path / "awsddp/env/environment.yml").exists()
    assert program.returncode == 1 and "SIGTERM ended this build" in output


@pytest.mark.parametrize(("free_share", "remaining"), [(0.0, {"a", "b", "c", "d"}), (1.0, {"a", "c", "d"})])
def test_oldest_unused_environments_are_removed_when_the_disk_is_full(
    tmp_path: Path, free_share: float, remaining: set[str]
) -> None:
    """An environment in which a program runs stays, too."""
    program: dict[str, Any] = {"__name__": "environment"}
    exec(template("environment.py"), program)
    program.update(ENVIRONMENTS=tmp_path, FREE_SHARE=free_share)
    for number, name in enumerate("abcd"):
        ready = tmp_path / name / "ready.json"
        ready.parent.mkdir()
        ready.touch()
        os.utime(ready, (number, number))
    process = subprocess.Popen([tmp_path / "a/bin/python", "400"], executable=shutil.which("sleep"))
    until(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes() != b"")
    try:
        program["remove_old"](tmp_path / "d")
        assert {path.parent.name for path in tmp_path.glob("*/ready.json")} == remaining
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="the lock needs root")
def test_setup_waits_for_the_package_lock(make_lab: MakeLab, python: str) -> None:
    path = Path("/var/lib/dpkg/lock-frontend")
    if not path.exists():
        pytest.skip("dpkg is not installed")
    lab = make_lab(1)
    lock = path.open("r+b")
    fcntl.lockf(lock, fcntl.LOCK_EX)
    texts: list[str] = []

    def on_event(event: Event) -> None:
        texts.append(event.text)
        if event.text.startswith("waiting for the packages"):
            assert not (lab.hosts[0].work / "log").exists()
            lock.close()

    with lab.fleet(on_event=on_event) as fleet:
        ensure_environments(
            fleet,
            EnvironmentPlan(name="image", setup=("echo done > log",)),
            pythons={0: python},
            cache=lab.folder,
        )
    assert lock.closed and (lab.hosts[0].work / "log").read_text() == "done\n"
    assert texts.index("waiting for the packages of the first boot") < texts.index("echo done > log")


CONDA = """\
#!/bin/sh
echo "$@" >> '{home}/conda.log'
for argument; do
  [ "$last" = --prefix ] && prefix=$argument
  [ "$last" = --file ] && cp -p "$argument" '{home}/environment.yml'
  last=$argument
done
mkdir -p "$prefix/bin" "$prefix/conda-meta"
ln -sf IMAGE "$prefix/bin/python"
"""


def test_conda_gets_the_file_of_the_project_or_else_pinned_packages(make_lab: MakeLab, python: str) -> None:
    """A stand-in for conda records the calls. Not covered, since it needs a network: real channels."""
    lab = make_lab(1)
    host = lab.hosts[0]
    host.script("conda", CONDA.replace("IMAGE", python))
    plan = EnvironmentPlan(kind="conda", name="environment.yml", conda='{"dependencies": ["python"]}')
    build_envs(lab, plan, python)
    folder = host.home / "awsddp/env"
    file = folder / "environment.yml"
    assert (host.home / "conda.log").read_text().splitlines() == [
        f"env create --prefix {folder / plan.stamp} --file {file} --yes"
    ]
    copy = host.home / "environment.yml"
    assert copy.read_text() == plan.conda and copy.stat().st_mode & 0o777 == 0o600
    assert not file.exists(), "its lines may hold passwords"
    pinned = EnvironmentPlan(kind="conda", name="conda", python="3.12")
    build_envs(lab, pinned, python)
    assert (host.home / "conda.log").read_text().splitlines()[1:] == [
        f"create --yes --prefix {folder / pinned.stamp} python=3.12 numpy pip"
    ]


def test_error_names_the_facts_in_which_nodes_differ(make_lab: MakeLab, python: str, tmp_path: Path) -> None:
    lab = make_lab(2)
    other = str(make_image(tmp_path / "other", torch="2.12.1+cpu"))
    plan = EnvironmentPlan(name="image", setup=("true",))
    with lab.fleet() as fleet, pytest.raises(NodeError, match="the nodes differ") as error:
        ensure_environments(fleet, plan, pythons={0: python, 1: other}, cache=lab.folder)
    assert "torch: node0 2.13.0+cpu, node1 2.12.1+cpu" in error.value.why


def read_homes(lab: Lab) -> str:
    """Return the text of all files in the home folders of the nodes."""
    files = [path for host in lab.hosts for path in host.home.rglob("*") if path.is_file()]
    return "".join(path.read_bytes().decode(errors="replace") for path in files)


@pytest.fixture
def hidden_index(monkeypatch: pytest.MonkeyPatch, index: Path) -> Path:
    """The folder of packages, which no setting of pip names."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    return index


@pytest.mark.parametrize("packages_from", ["client", pytest.param(None, marks=pytest.mark.prove)])
def test_password_of_an_index_does_not_reach_a_node(
    make_lab: MakeLab, hidden_index: Path, python: str, packages_from: str | None
) -> None:
    lab, events = make_lab(2), list[Event]()
    with serve_index(hidden_index, password=PASSWORD, hold="tiny-1.0") as server:
        indexes = Indexes(index_url=f"http://reader:{PASSWORD}@127.0.0.1:{server.port}/simple")
        plan = dataclasses.replace(PLAN, indexes=indexes, packages_from=packages_from)
        build = run_in_thread(build_envs, lab, plan, python, events=events)
        assert server.is_held.wait(60)
        running = [Path(f"/proc/{pid}/cmdline") for host in lab.hosts for pid in host.sessions()]
        argv = "".join(path.read_bytes().decode(errors="replace") for path in running if path.exists())
        assert "pip\0" in argv and "127.0.0.1" not in argv
        passwords = re.findall(r"awsddp:(\w{32})@", read_environs(lab))
        assert passwords, "the installing process knows the proxy"
        for text in (argv, read_homes(lab)):
            assert PASSWORD not in text and passwords[0] not in text
        server.release.set()
        envs = build.result()
    assert run_python(envs[1].python, "import small, tiny") == ""
    texts = "".join(f"{event}" for event in events)
    for text in (read_homes(lab), texts, repr(envs)):
        assert PASSWORD not in text and passwords[0] not in text


def read_environs(lab: Lab) -> str:
    """Return the environment variables of all processes on the nodes."""
    text = b""
    for pid in (pid for host in lab.hosts for pid in host.sessions()):
        with contextlib.suppress(OSError):  # it has ended
            text += Path(f"/proc/{pid}/environ").read_bytes()
    return text.decode(errors="replace")


def test_requirements_with_passwords_are_private_on_a_node_and_removed_after_the_build(
    make_lab: MakeLab, hidden_index: Path, python: str
) -> None:
    """Nodes that fetch packages themselves get the passwords."""
    lab = make_lab(1)
    with serve_index(hidden_index, password=PASSWORD, hold="tiny-1.0") as server:
        url = f"http://reader:{PASSWORD}@127.0.0.1:{server.port}"
        lines = (f"tiny @ {url}/tiny-1.0-py3-none-any.whl",)
        build = run_in_thread(
            build_envs, lab, dataclasses.replace(PLAN, lines=lines, packages_from="node"), python
        )
        assert server.is_held.wait(60)
        files = [path for path in lab.hosts[0].home.rglob("*.txt") if PASSWORD in path.read_text()]
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600]
        server.release.set()
        env = build.result(120)[0]
    assert run_python(env.python, "import tiny") == "" and PASSWORD not in read_homes(lab)
