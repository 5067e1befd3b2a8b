"""Environments on real SSH hosts: made on all at once, over the image's packages, stamped, refused."""

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
from tests.support.wheels import add, image, installed_wheel, wheel

PLAN = EnvironmentPlan(name="requirements.txt", lines=("small",), packages_from="client")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All there is to install from. `small` needs torch, which it must not get from there."""
    folder = tmp_path / "index"
    wheel(folder, "small", requires=("torch>=2", "tiny"))
    wheel(folder, "tiny")
    wheel(folder, "torch", "2.13.0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(image(tmp_path_factory.mktemp("image") / "pytorch"))


def made(
    here: Lab, plan: EnvironmentPlan, python: str, *, events: list[Event] | None = None
) -> dict[int, Environment]:
    with here.fleet(on_event=(events if events is not None else []).append) as fleet:
        return ensure_environments(
            fleet, plan, pythons=dict.fromkeys(fleet.nodes, python), cache=here.folder / "packages"
        )


def imported(python: str | None, words: str) -> str:
    done = subprocess.run([str(python), "-c", words], capture_output=True, text=True)
    return done.stdout.strip() + done.stderr


def test_an_environment_has_its_packages_and_the_images_torch_and_a_second_run_makes_nothing(
    lab: Callable[[int], Lab], index: Path, python: str
) -> None:
    here, said = lab(2), list[Event]()
    found = made(here, PLAN, python, events=said)
    texts = [event.text for event in said]
    assert "packages come through this machine" in texts
    assert "importing torch, to compare the nodes" in texts
    for one in found.values():
        assert imported(one.python, "import small, tiny, torch; print(torch.__version__)") == "2.13.0+cpu"
        torchrun = Path(str(one.python)).with_name("torchrun").read_text()
        assert torchrun.startswith(f"#!{one.python}\n") and "torch.distributed.run" in torchrun
    events: list[Event] = []
    assert made(here, PLAN, python, events=events) == found and not events


def test_a_requirement_for_another_torch_is_refused_with_both_versions(
    lab: Callable[[int], Lab], index: Path, python: str
) -> None:
    plan = dataclasses.replace(PLAN, lines=("torch==2.5.1",))
    wheel(index, "torch", "2.5.1")
    with pytest.raises(ConfigError) as refused:
        made(lab(1), plan, python)
    words = "torch==2.5.1 needs another torch than the image's 2.13.0+cpu"
    assert refused.value.message == f"env.file: requirements.txt: {words}"
    assert "torch==2.5.1" in refused.value.why


def test_the_projects_own_metadata_programs_and_plugins_are_there(
    lab: Callable[[int], Lab], index: Path, python: str
) -> None:
    """Its code is in the project folder; no build of it runs. Nothing else is installed."""
    here = lab(1)
    host = here.hosts[0]
    own = Project(
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
    found = made(here, EnvironmentPlan(name="pyproject.toml", projects=(own,)), python)[0]
    words = "import mine; print(mine.__version__)"
    assert imported(found.python, words) == "1.2"
    loaded = "from importlib import metadata as m; m.entry_points(group='plugins')['one'].load()()"
    assert imported(found.python, loaded) == f"1.2 {found.python}"
    program = Path(str(found.python)).with_name("mine-train")
    done = subprocess.run([program], capture_output=True, text=True, cwd="/")
    assert (done.stdout, done.stderr) == (f"1.2 {found.python}\n", "")


def test_a_version_that_only_a_build_knows_is_unknown_on_the_nodes_which_the_build_says(
    lab: Callable[[int], Lab], index: Path, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SETUPTOOLS_SCM_PRETEND_VERSION", raising=False)
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'my.proj'\ndynamic = ['version']\nscripts = {mine-train = 'mine:main'}\n"
    )
    here, said = lab(1), list[Event]()
    env = EnvSection(file=str(tmp_path / "pyproject.toml"))

    def build() -> Environment:
        plan = make_environment_plan(env, internet=False, driver=None, workdir=tmp_path)
        said.clear()
        return made(here, plan, python, events=said)[0]

    words = "from importlib.metadata import version; print(version('my.proj'))"
    found = build()
    assert imported(found.python, words) == "0+unknown"
    assert Path(str(found.python)).with_name("mine-train").is_file()
    [warning] = [event.text for event in said if "0+unknown" in event.text]
    before, _, advice = warning.partition(": ")
    assert before == "my_proj has version 0+unknown on the nodes"
    typed = re.search(r"export (\w+)=(\S+)", advice)
    assert typed
    monkeypatch.setenv(typed[1], typed[2])
    assert imported(build().python, words) == "1.0"
    assert not [event for event in said if "0+unknown" in event.text]


@pytest.mark.prove
def test_a_changed_file_is_built_beside_the_old_and_an_interrupted_build_is_continued(
    lab: Callable[[int], Lab], index: Path, python: str
) -> None:
    here = lab(1)
    first = made(here, PLAN, python)[0]
    wheel(index, "more")
    changed = dataclasses.replace(PLAN, lines=("small", "more"))
    second = made(here, changed, python)[0]
    assert first.python != second.python and imported(first.python, "import small") == ""
    ready = Path(str(second.python)).parents[1] / "ready.json"
    ready.unlink()  # as a build leaves it that was cut off at its very end
    kept = ready.parent / "pyvenv.cfg"
    before = kept.stat().st_mtime_ns
    assert made(here, changed, python)[0].python == second.python
    assert kept.stat().st_mtime_ns == before and imported(second.python, "import more, small") == ""


def test_the_images_packages_give_way_where_a_project_needs_others_and_its_torch_never_does(
    lab: Callable[[int], Lab], index: Path, tmp_path: Path
) -> None:
    own = image(tmp_path / "own")
    add(tmp_path / "own", "numbers2", "2.0")
    wheel(index, "numbers2", "1.5")
    wheel(index, "numbers2", "3.0")
    found = made(lab(1), dataclasses.replace(PLAN, lines=("small", "numbers2<2")), str(own))[0]
    assert imported(found.python, "import numbers2; print(numbers2.VERSION)") == "1.5"


@pytest.mark.prove
def test_what_an_extra_of_the_images_package_needs_is_installed_and_the_package_is_not(
    lab: Callable[[int], Lab], index: Path, tmp_path: Path
) -> None:
    """As Lightning needs fsspec[http], and torch has brought fsspec."""
    own = image(tmp_path / "own")
    add(tmp_path / "own", "Files", "2.0", needs="Requires-Dist: web; extra == 'http'\nProvides-Extra: http\n")
    wheel(index, "files", "2.0", requires=("web; extra == 'http'",), extras=("http",))
    wheel(index, "files", "3.0")
    wheel(index, "web")
    wheel(index, "light", requires=("files[http,typo]", "torch[typo]"))
    found = made(lab(1), dataclasses.replace(PLAN, lines=("light",)), str(own))[0]
    assert imported(found.python, "import light, web") == ""
    packages = Path(str(found.python)).parents[1].glob("lib/python3*/site-packages/*.dist-info")
    assert sorted(path.name for path in packages) == ["light-1.0.dist-info", "web-1.0.dist-info"]


@pytest.mark.prove
def test_what_needs_another_torch_deep_down_is_named(
    lab: Callable[[int], Lab], index: Path, python: str
) -> None:
    wheel(index, "greedy", requires=("torch<2.6",))
    wheel(index, "torch", "2.5.1")
    with pytest.raises(ConfigError, match="needs another torch than the image") as refused:
        made(lab(1), dataclasses.replace(PLAN, lines=("greedy",)), python)
    assert "greedy depend on torch<2.6" in refused.value.why


@pytest.mark.prove
def test_a_package_without_a_wheel_is_built_on_the_node_also_one_of_a_url_or_of_git(
    lab: Callable[[int], Lab], index: Path, python: str, tmp_path: Path
) -> None:
    """The newest release, where only an old one has a wheel; one that is not pure Python; one deep down."""
    installed_wheel(index, "setuptools")
    compiled = "distclass=type('D', (Distribution,), {'has_ext_modules': lambda s: True}),"
    sdist(index, tmp_path, "deep_speed", compiled)
    wheel(index, "deep_speed", "0.3")
    sdist(index, tmp_path, "deep_down", "")
    wheel(index, "above", "2.0", requires=("deep_down",))
    wheel(index, "above")
    sdist(tmp_path / "elsewhere", tmp_path, "pure", "")
    wheel(tmp_path / "elsewhere", "tiny", "2.0")
    make_repository(tmp_path / "repositories", "gitted")
    with serve_folder(tmp_path / "elsewhere") as server, serve_git(tmp_path / "repositories") as git:
        lines = (
            "Deep.Speed>=0.1",
            "above",
            f"{server.url}/pure-1.0.tar.gz",
            f"tiny @ {server.url}/tiny-2.0-py3-none-any.whl ; python_version > '3'",
            f"git+{git.url}/gitted.git",
        )
        found = made(lab(2), dataclasses.replace(PLAN, lines=lines), python)
    names = "deep_speed, above, deep_down, pure, tiny, gitted"
    words = f"import {names}; print(*(x.VERSION for x in ({names})))"
    for one in found.values():
        assert imported(one.python, words) == "1.0 2.0 1.0 1.0 2.0 1.0 of git"
    assert server.by_pip.count("GET /pure-1.0.tar.gz") == 2, "once for each node; uv here may look at it, too"


def sdist(index: Path, folder: Path, name: str, words: str) -> None:
    """Write the source of a package; it is built without an index, by the setuptools that are here."""
    import tarfile

    place = folder / f"{name}-1.0"
    place.mkdir()
    index.mkdir(exist_ok=True)
    (place / "setup.py").write_text(
        "from setuptools import Distribution, setup\n"
        f"setup(name={name!r}, version='1.0', py_modules=[{name!r}], {words})\n"
    )
    (place / "pyproject.toml").write_text(BUILT_BY)
    (place / f"{name}.py").write_text("VERSION = '1.0'\n")
    with tarfile.open(index / f"{name}-1.0.tar.gz", "w:gz") as file:
        file.add(place, f"{name}-1.0")


def test_setup_runs_once_in_the_synced_folder_and_goes_on_where_it_failed(
    lab: Callable[[int], Lab], python: str
) -> None:
    here = lab(1)
    host = here.hosts[0]
    host.work.mkdir(parents=True, exist_ok=True)
    plan = EnvironmentPlan(name="image", setup=("echo first >> log", "test -e allowed", "echo last >> log"))
    with pytest.raises(NodeError) as refused:
        made(here, plan, python)
    assert refused.value.exit_code == 6 and "'test -e allowed' failed" in refused.value.message
    (host.work / "allowed").touch()
    for _ in range(2):
        assert made(here, plan, python)[0].python == python
    assert (host.work / "log").read_text() == "first\nlast\n"


def runs(pid: str) -> bool:
    """Return whether a process runs, and is not only waited for."""
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{int(pid)}/status").read_text()
    return False


def test_a_command_ends_though_what_it_started_goes_on_and_writes(
    lab: Callable[[int], Lab], python: str
) -> None:
    here = lab(1)
    work = here.hosts[0].work
    work.mkdir(parents=True, exist_ok=True)
    loop = "while test ! -e go; do sleep 0.05; done; seq 100000 && touch wrote; exec sleep 400"
    plan = EnvironmentPlan(name="image", setup=(f"nohup sh -c '{loop}' & echo $! > pid",))
    made(here, plan, python)
    pid = (work / "pid").read_text()
    assert runs(pid)
    (work / "go").touch()
    until((work / "wrote").exists)
    os.kill(int(pid), signal.SIGKILL)


def test_a_build_ends_with_its_client_and_its_lock_is_free(lab: Callable[[int], Lab], python: str) -> None:
    here = lab(1)
    work = here.hosts[0].work
    work.mkdir(parents=True, exist_ok=True)
    plan = EnvironmentPlan(name="image", setup=("echo $$ > pid; sleep 400 & echo $! > child; wait",))

    def on_event(event: Event) -> None:
        if event.text.startswith("echo"):
            until(lambda: (work / "child").exists() and (work / "child").read_text() != "")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), here.fleet(on_event=on_event) as fleet:
        ensure_environments(fleet, plan, pythons={0: python}, cache=here.folder)
    for name in ("pid", "child"):
        until(lambda name=name: not runs((work / name).read_text()))  # type: ignore[misc]
    made(here, EnvironmentPlan(name="image", setup=("true",)), python)


def test_who_waits_for_a_build_is_told_for_whom(lab: Callable[[int], Lab], python: str) -> None:
    here, said = lab(1), list[str]()
    work = here.hosts[0].work
    work.mkdir(parents=True, exist_ok=True)
    command = "touch began; while test ! -e go; do sleep 0.05; done"
    first = run_in_thread(made, here, EnvironmentPlan(name="image", setup=(command,)), python)
    until((work / "began").exists)

    def on_event(event: Event) -> None:
        if event.text.startswith("waiting for a build"):
            said.append(event.text)
            (work / "go").touch()

    with here.fleet(on_event=on_event) as fleet:
        ensure_environments(
            fleet, EnvironmentPlan(name="image", setup=("true",)), pythons={0: python}, cache=here.folder
        )
    first.result(60)
    who = r"waiting for a build of \S+@\S+ on this node, since \d\d:\d\d UTC, process \d+: "
    assert re.fullmatch(who + re.escape(command), said[0])


def test_a_build_that_does_not_end_is_named_with_the_command_that_ends_it() -> None:
    waited = "waiting for a build of ann@laptop on this node, since 10:02 UTC, process 4711: sleep\n9"
    answer = Environment(failed=waited, said="it has no end after 1800 s")
    error = environments._outcome(PLAN, 1, answer, str)
    assert isinstance(error, NodeError) and error.message == f"node1: {waited}"
    assert error.next.startswith("awsddp exec --node 1 -- kill 4711 ")


def test_a_build_that_is_terminated_ends_its_command_and_removes_the_files_with_passwords(
    tmp_path: Path,
) -> None:
    conda = tmp_path / "bin/conda"
    conda.parent.mkdir()
    conda.write_text(f"#!/bin/sh\nsleep 400 & echo $! > {tmp_path}/child\necho $$ > {tmp_path}/pid\nwait\n")
    conda.chmod(0o755)
    asked = {"do": "build", "client": "ann@laptop", "stamp": "s", "setup_stamp": "t", "kind": "conda"}
    asked |= {"image": sys.executable, "conda": "{}", "ca": "", "environ": {}, "install": {}, "setup": []}
    program = subprocess.Popen(
        [sys.executable, "-I", "-c", template("environment.py")],
        env={"HOME": str(tmp_path), "PATH": f"{conda.parent}:{os.environ['PATH']}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdin
    program.stdin.write(json.dumps(asked))
    program.stdin.close()
    program.stdin = None
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    assert (tmp_path / "awsddp/env/environment.yml").exists()
    program.terminate()
    _, said = program.communicate(timeout=30)
    still = [name for name in ("pid", "child") if runs((tmp_path / name).read_text())]
    for name in still:
        os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)
    assert not still and not (tmp_path / "awsddp/env/environment.yml").exists()
    assert program.returncode == 1 and "SIGTERM ended this build" in said


@pytest.mark.parametrize(("room", "left"), [(0.0, {"a", "b", "c", "d"}), (1.0, {"a", "c", "d"})])
def test_environments_stay_while_the_disk_has_room_and_the_oldest_goes(
    tmp_path: Path, room: float, left: set[str]
) -> None:
    """One in which a program runs stays, too."""
    program: dict[str, Any] = {"__name__": "environment"}
    exec(template("environment.py"), program)
    program.update(ENVIRONMENTS=tmp_path, FREE_SHARE=room)
    for number, name in enumerate("abcd"):
        ready = tmp_path / name / "ready.json"
        ready.parent.mkdir()
        ready.touch()
        os.utime(ready, (number, number))
    used = subprocess.Popen([tmp_path / "a/bin/python", "400"], executable=shutil.which("sleep"))
    until(lambda: Path(f"/proc/{used.pid}/cmdline").read_bytes() != b"")
    try:
        program["remove_old"](tmp_path / "d")
        assert {path.parent.name for path in tmp_path.glob("*/ready.json")} == left
    finally:
        used.kill()
        used.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="the lock is root's")
def test_setup_waits_for_the_package_lock(lab: Callable[[int], Lab], python: str) -> None:
    path = Path("/var/lib/dpkg/lock-frontend")
    if not path.exists():
        pytest.skip("no dpkg here")
    here = lab(1)
    held = path.open("r+b")
    fcntl.lockf(held, fcntl.LOCK_EX)
    order: list[str] = []

    def on_event(event: Event) -> None:
        order.append(event.text)
        if event.text.startswith("waiting for the packages"):
            assert not (here.hosts[0].work / "log").exists()
            held.close()

    with here.fleet(on_event=on_event) as fleet:
        ensure_environments(
            fleet,
            EnvironmentPlan(name="image", setup=("echo done > log",)),
            pythons={0: python},
            cache=here.folder,
        )
    assert held.closed and (here.hosts[0].work / "log").read_text() == "done\n"
    assert order.index("waiting for the packages of the first boot") < order.index("echo done > log")


CONDA = """\
#!/bin/sh
echo "$@" >> '{home}/conda.log'
for word; do
  [ "$last" = --prefix ] && place=$word
  [ "$last" = --file ] && cp -p "$word" '{home}/environment.yml'
  last=$word
done
mkdir -p "$place/bin" "$place/conda-meta"
ln -sf IMAGE "$place/bin/python"
"""


def test_conda_is_called_with_the_projects_file_and_with_pins_where_there_is_none(
    lab: Callable[[int], Lab], python: str
) -> None:
    """A stand-in records the calls. That real channels answer them, only a network shows."""
    here = lab(1)
    host = here.hosts[0]
    host.script("conda", CONDA.replace("IMAGE", python))
    plan = EnvironmentPlan(kind="conda", name="environment.yml", conda='{"dependencies": ["python"]}')
    made(here, plan, python)
    place = host.home / "awsddp/env"
    file = place / "environment.yml"
    assert (host.home / "conda.log").read_text().splitlines() == [
        f"env create --prefix {place / plan.stamp} --file {file} --yes"
    ]
    given = host.home / "environment.yml"
    assert given.read_text() == plan.conda and given.stat().st_mode & 0o777 == 0o600
    assert not file.exists(), "its lines may hold passwords"
    pinned = EnvironmentPlan(kind="conda", name="conda", python="3.12")
    made(here, pinned, python)
    assert (host.home / "conda.log").read_text().splitlines()[1:] == [
        f"create --yes --prefix {place / pinned.stamp} python=3.12 numpy pip"
    ]


def test_nodes_that_differ_are_told_by_fact(lab: Callable[[int], Lab], python: str, tmp_path: Path) -> None:
    here = lab(2)
    other = str(image(tmp_path / "other", torch="2.12.1+cpu"))
    plan = EnvironmentPlan(name="image", setup=("true",))
    with here.fleet() as fleet, pytest.raises(NodeError, match="the nodes differ") as refused:
        ensure_environments(fleet, plan, pythons={0: python, 1: other}, cache=here.folder)
    assert "torch: node0 2.13.0+cpu, node1 2.12.1+cpu" in refused.value.why


def dump(here: Lab) -> str:
    """Return all that the homes of the nodes hold."""
    files = [path for host in here.hosts for path in host.home.rglob("*") if path.is_file()]
    return "".join(path.read_bytes().decode(errors="replace") for path in files)


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch, index: Path) -> Path:
    """This machine's pip is set to nothing."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    return index


@pytest.mark.parametrize("packages_from", ["client", pytest.param(None, marks=pytest.mark.prove)])
def test_the_password_of_an_index_does_not_reach_a_node(
    lab: Callable[[int], Lab], no_settings: Path, python: str, packages_from: str | None
) -> None:
    here, said = lab(2), list[Event]()
    with serve_index(no_settings, password=PASSWORD, hold="tiny-1.0") as server:
        indexes = Indexes(index_url=f"http://reader:{PASSWORD}@127.0.0.1:{server.port}/simple")
        plan = dataclasses.replace(PLAN, indexes=indexes, packages_from=packages_from)
        making = run_in_thread(made, here, plan, python, events=said)
        assert server.is_held.wait(60)
        running = [Path(f"/proc/{pid}/cmdline") for host in here.hosts for pid in host.sessions()]
        argv = "".join(path.read_bytes().decode(errors="replace") for path in running if path.exists())
        assert "pip\0" in argv and "127.0.0.1" not in argv
        lent = re.findall(r"awsddp:(\w{32})@", environments_of(here))
        assert lent, "the installing process knows the proxy"
        for text in (argv, dump(here)):
            assert PASSWORD not in text and lent[0] not in text
        server.release.set()
        found = making.result()
    assert imported(found[1].python, "import small, tiny") == ""
    texts = "".join(f"{event}" for event in said)
    for text in (dump(here), texts, repr(found)):
        assert PASSWORD not in text and lent[0] not in text


def environments_of(here: Lab) -> str:
    """Return the variables of all that runs on the nodes."""
    found = b""
    for pid in (pid for host in here.hosts for pid in host.sessions()):
        with contextlib.suppress(OSError):  # it has ended
            found += Path(f"/proc/{pid}/environ").read_bytes()
    return found.decode(errors="replace")


def test_lines_with_passwords_are_for_one_user_of_a_node_and_go_when_they_are_installed(
    lab: Callable[[int], Lab], no_settings: Path, python: str
) -> None:
    """Nodes that fetch packages themselves get the passwords."""
    here = lab(1)
    with serve_index(no_settings, password=PASSWORD, hold="tiny-1.0") as server:
        url = f"http://reader:{PASSWORD}@127.0.0.1:{server.port}"
        lines = (f"tiny @ {url}/tiny-1.0-py3-none-any.whl",)
        making = run_in_thread(
            made, here, dataclasses.replace(PLAN, lines=lines, packages_from="node"), python
        )
        assert server.is_held.wait(60)
        files = [path for path in here.hosts[0].home.rglob("*.txt") if PASSWORD in path.read_text()]
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600]
        server.release.set()
        made_env = making.result(120)[0]
    assert imported(made_env.python, "import tiny") == "" and PASSWORD not in dump(here)
