"""Environments on real SSH hosts: made on all at once, over the image's packages, stamped, refused."""

import dataclasses
import fcntl
import functools
import http.server
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from awsddp.answers import Environment
from awsddp.errors import ConfigError, NodeError
from awsddp.nodes.environments import ensure
from awsddp.nodes.packages import on_its_way
from awsddp.plan.environment import EnvironmentPlan
from awsddp.report import Event
from tests.nodes.ssh_hosts import Lab
from tests.nodes.wheels import add, image, wheel

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
        return ensure(
            fleet,
            plan,
            pythons=dict.fromkeys(fleet.nodes, python),
            cache=here.folder / "packages",
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
    assert "fetching packages for requirements.txt" in texts
    assert "importing torch, to compare the nodes" in texts
    for one in found.values():
        assert imported(one.python, "import small, tiny, torch; print(torch.__version__)") == "2.13.0+cpu"
        torchrun = Path(str(one.python)).with_name("torchrun").read_text()
        assert torchrun.startswith(f"#!{one.python}\n") and "torch.distributed.run" in torchrun
    assert [path.name.split("-")[0] for path in sorted(here.folder.glob("packages/*/*.whl"))] == [
        "small",
        "tiny",
    ]
    events: list[Event] = []
    assert made(here, PLAN, python, events=events) == found and not events


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Collecting grpcio>=1.48.2 (from tensorboard)", "grpcio"),
        (
            "  Downloading grpcio-1.66.1-cp312-cp312-manylinux_2_17_x86_64.whl (6.1 MB)",
            "grpcio 1.66.1 (6.1 MB)",
        ),
        (
            "  Downloading https://u:secret@host/simple/a_b-2.0-py3-none-any.whl (800 bytes)",
            "a_b 2.0 (800 bytes)",
        ),
        ("Using cached numpy-2.1.0-cp312-cp312-linux_x86_64.whl (16.0 MB)", "numpy 2.1.0 (16.0 MB)"),
        ("Collecting mine@ https://u:secret@host/mine.zip", "mine"),
        ("  Downloading grpcio-1.66.1-cp312.whl.metadata (3.9 kB)", ""),
        ("Successfully downloaded grpcio", ""),
    ],
)
def test_what_pip_is_at_is_told_by_name_and_size_and_without_a_password(line: str, said: str) -> None:
    assert on_its_way(line) == said


def test_a_requirement_for_another_torch_is_refused_with_both_versions(
    lab: Callable[[int], Lab], index: Path, python: str
) -> None:
    plan = dataclasses.replace(PLAN, lines=("torch==2.5.1",))
    wheel(index, "torch", "2.5.1")
    with pytest.raises(ConfigError) as refused:
        made(lab(1), plan, python)
    assert refused.value.message == "requirements.txt needs another torch than the image's 2.13.0+cpu"
    assert "torch==2.5.1" in refused.value.why


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
def test_what_an_extra_of_the_images_package_needs_is_sent_and_the_package_is_not(
    lab: Callable[[int], Lab], index: Path, tmp_path: Path
) -> None:
    """As Lightning needs fsspec[http], and torch has brought fsspec."""
    own = image(tmp_path / "own")
    add(tmp_path / "own", "Files", "2.0", needs="Requires-Dist: web; extra == 'http'\nProvides-Extra: http\n")
    wheel(index, "files", "2.0", requires=("web; extra == 'http'",), extras=("http",))
    wheel(index, "files", "3.0")
    wheel(index, "web")
    wheel(index, "light", requires=("files[http,typo]", "torch[typo]"))
    here = lab(1)
    found = made(here, dataclasses.replace(PLAN, lines=("light",)), str(own))[0]
    assert imported(found.python, "import light, web") == ""
    assert [path.name for path in sorted(here.folder.glob("packages/*/*.whl"))] == [
        "light-1.0-py3-none-any.whl",
        "web-1.0-py3-none-any.whl",
    ]


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
def test_a_package_without_a_wheel_is_built_here_when_it_is_pure_and_named_when_it_is_not(
    lab: Callable[[int], Lab], index: Path, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # the setuptools that is here; "0" turns it off
    sdist(index, tmp_path, "pure", "")
    found = made(here := lab(1), dataclasses.replace(PLAN, lines=("pure",)), python)[0]
    assert imported(found.python, "import pure; print(pure.VERSION)") == "1.0"
    sdist(
        index,
        tmp_path,
        "compiled",
        "distclass=type('D', (Distribution,), {'has_ext_modules': lambda s: True}),",
    )
    with pytest.raises(NodeError, match="compiled has no wheel for the nodes") as refused:
        made(here, dataclasses.replace(PLAN, lines=("compiled",)), python)
    assert refused.value.exit_code == 6


@pytest.mark.prove
def test_the_newest_release_is_built_here_where_only_an_old_one_has_a_wheel(
    lab: Callable[[int], Lab], index: Path, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of deepspeed, whose one wheel in the index is of 2020."""
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    for name in ("Deep.Speed", "held"):
        sdist(index, tmp_path, name.replace(".", "_").lower(), "")
        wheel(index, name.replace(".", "_").lower(), "0.3")
    wheel(index, "both", "0.9")
    found = made(lab(1), dataclasses.replace(PLAN, lines=("Deep.Speed>=0.1", "held<1", "both")), python)[0]
    versions = "import deep_speed, held, both; print(deep_speed.VERSION, held.VERSION, both.VERSION)"
    assert imported(found.python, versions) == "1.0 0.3 0.9"


@pytest.mark.prove
def test_a_package_named_by_a_url_is_fetched_or_built_here_and_no_node_asks_for_it(
    lab: Callable[[int], Lab], index: Path, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    sdist(index, tmp_path, "pure", "")
    wheel(index, "tiny", "2.0")
    asked: list[str] = []

    class Listed(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Listed, directory=str(index))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            lines = (
                f"{url}/pure-1.0.tar.gz",
                f"tiny @ {url}/tiny-1.0-py3-none-any.whl ; python_version > '3'",
            )
            found = made(lab(2), dataclasses.replace(PLAN, lines=lines), python)
        finally:
            server.shutdown()
    for one in found.values():
        assert imported(one.python, "import pure, tiny; print(pure.VERSION, tiny.VERSION)") == "1.0 1.0"
    assert set(asked) == {"/pure-1.0.tar.gz", "/tiny-1.0-py3-none-any.whl"}


def sdist(index: Path, folder: Path, name: str, words: str) -> None:
    """Write the source of a package; it is built without an index, by the setuptools that are here."""
    import tarfile

    place = folder / f"{name}-1.0"
    place.mkdir()
    (place / "setup.py").write_text(
        "from setuptools import Distribution, setup\n"
        f"setup(name={name!r}, version='1.0', py_modules=[{name!r}], {words})\n"
    )
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
        ensure(
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
for word; do [ "$last" = --prefix ] && place=$word; last=$word; done
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
    plan = EnvironmentPlan(kind="conda", name="environment.yml", conda="dependencies:\n- python\n")
    made(here, plan, python)
    place = host.home / "awsddp/env"
    file = place / "environment.yml"
    assert (host.home / "conda.log").read_text().splitlines() == [
        f"env create --prefix {place / plan.stamp} --file {file} --yes"
    ]
    assert file.read_text() == plan.conda
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
        ensure(fleet, plan, pythons={0: python, 1: other}, cache=here.folder)
    assert "torch: node0 2.13.0+cpu, node1 2.12.1+cpu" in refused.value.why
