"""Environment plans from [env] and the files of a project."""

from dataclasses import replace
from pathlib import Path

import pytest

from awsddp.compat.releases import RELEASES
from awsddp.errors import ConfigError, NodeError
from awsddp.plan.environment import (
    EnvironmentPlan,
    check_identical_nodes,
    explain_failure,
    make_environment_plan,
    pin_image_packages,
)
from awsddp.plan.indexes import Indexes
from awsddp.plan.requirements import read_requirements
from awsddp.settings.spec import EnvSection


def test_a_requirements_file_is_read_with_the_files_that_it_includes(tmp_path: Path) -> None:
    (tmp_path / "base.txt").write_text("-r requirements.txt\nnumpy  # an array\n")
    (tmp_path / "pins.txt").write_text("numpy==2.1\n")
    file = tmp_path / "requirements.txt"
    file.write_text(
        "-r base.txt\n-c pins.txt\n--extra-index-url https://x/simple\n"
        "-e .[dev]\n-e '.[dev]'\n-e ./\n.\n\n# nothing\n"
        "tqdm>=4 ;\\\npython_version > '3'\nplain==1 --hash=sha256:ab\nraw @ https://x/a#sub\n"
    )
    parsed = read_requirements(file)
    assert parsed.lines == ("numpy", "tqdm>=4 ; python_version > '3'", "plain==1", "raw @ https://x/a#sub")
    assert parsed.constraints == ("numpy==2.1",)
    assert parsed.indexes == Indexes(extra_index_urls=("https://x/simple",))


def test_a_utf_16_requirements_file_of_powershell_is_read(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_bytes("tqdm ;\\\r\npython_version > '3'\r\n".encode("utf-16"))
    assert read_requirements(file).lines == ("tqdm ; python_version > '3'",)


@pytest.mark.parametrize("head", ["# -*- coding: latin-1 -*-\n", "\n# vim: set fileencoding=cp1252 :\n"])
def test_a_requirements_file_is_read_in_the_encoding_that_it_names(tmp_path: Path, head: str) -> None:
    file = tmp_path / "requirements.txt"
    file.write_bytes(f"{head}tqdm  # für Müller\n".encode("latin-1"))
    assert read_requirements(file).lines == ("tqdm",)


def test_a_file_that_cannot_be_decoded_is_refused_with_advice_to_save_it_as_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    for head in ("", "# coding: klingon\n"):
        file.write_bytes(f"{head}tqdm  # für\n".encode("latin-1"))
        with pytest.raises(ConfigError, match="cannot be read") as refused:
            read_requirements(file)
        assert refused.value.next == f"save {file} as UTF-8"


def test_a_variable_in_a_requirements_file_is_expanded_on_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDEX_TOKEN", "t")
    file = tmp_path / "requirements.txt"
    file.write_text("--index-url https://${INDEX_TOKEN}@x/simple\nmine @ git+https://x/mine@${NOT_SET}\n")
    parsed = read_requirements(file)
    assert parsed.indexes == Indexes(index_url="https://t@x/simple")
    assert parsed.lines == ("mine @ git+https://x/mine@${NOT_SET}",)


@pytest.mark.parametrize(
    "line",
    [
        "torch",
        "Tqdm[a, b] >=4,<5 ; python_version > '3'",
        "ruamel.yaml~=0.18",
        "zope-interface===1 ",
        "a!=1",
        "mine (>=2)",
        "mine@git+ssh://git@x/mine.git@v1#subdirectory=lib",
        "git+https://x/y",
        "https://x/a-1-py3-none-any.whl",
    ],
)
def test_every_kind_of_requirement_stays_unchanged(tmp_path: Path, line: str) -> None:
    (tmp_path / "requirements.txt").write_text(line + "\n")
    assert read_requirements(tmp_path / "requirements.txt").lines == (line.strip(),)


def test_dependencies_are_read_from_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\ndependencies = ['tqdm>=4']\n")
    assert read_requirements(tmp_path / "pyproject.toml").lines == ("tqdm>=4",)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("requirements.txt", "./wheels/x.whl\n", "line 1: './wheels/x.whl' does not work on a node"),
        (
            "requirements.txt",
            "tqdm\n--use-feature x\n",
            "line 2: '--use-feature x' is an option that is not",
        ),
        ("requirements.txt", "-e ../lib\n", "line 1: '-e ../lib' does not work on a node"),
        ("requirements.txt", "-e file:///x/lib\n", "does not work on a node"),
        ("requirements.txt", "numpy @ file:///croot/numpy_1\n", "does not work on a node"),
        ("requirements.txt", "-r none.txt\n", "none.txt cannot be read"),
        ("requirements.txt", "x\n-c https://x/pins.txt\n", "pins.txt cannot be read"),
        ("pyproject.toml", "[project\n", "not valid TOML"),
        ("pyproject.toml", "[tool.poetry]\n", "no [project] dependencies"),
        ("uv.lock", "version = 1\n", "uv.lock cannot be read"),
    ],
)
def test_an_invalid_file_is_refused_by_its_path(tmp_path: Path, name: str, text: str, part: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_requirements(tmp_path / name)
    assert part in refused.value.message and str(tmp_path) in refused.value.message


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("-e .", ("tqdm>=4", "x ; os_name == 'posix'")),
        (".", ("tqdm>=4", "x ; os_name == 'posix'")),
        ('-e ".[all, nope]"', ("tqdm>=4", "x ; os_name == 'posix'", "y", "z==1")),
        ("--editable=./[test]", ("tqdm>=4", "x ; os_name == 'posix'", "y")),
    ],
)
def test_a_line_for_the_project_itself_adds_its_dependencies(
    tmp_path: Path, line: str, lines: tuple[str, ...]
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'mine'\ndependencies = ['tqdm>=4', \"x ; os_name == 'posix'\"]\n"
        "[project.optional-dependencies]\ntest = ['y']\nall = ['Mine[test, all]', 'z==1', 'y']\n"
    )
    (tmp_path / "requirements.txt").write_text(line + "\nlast\n")
    assert read_requirements(tmp_path / "requirements.txt").lines == (*lines, "last")


def test_a_project_that_names_no_dependencies_adds_none(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("-e .[dev]\nlast\n")
    (tmp_path / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='mine', packages=['mine'])\n"
    )
    for text in ("", "[project]\nname = 'mine'\ndynamic = ['version']\n", "[tool.ruff]\n"):
        (tmp_path / "pyproject.toml").write_text(text)
        assert read_requirements(tmp_path / "requirements.txt").lines == ("last",)


@pytest.mark.parametrize("file", ["requirements.txt", "pyproject.toml"])
@pytest.mark.parametrize(
    ("name", "text", "source"),
    [
        ("setup.py", "setup(name='mine', install_requires=['six==1.16.0'])", "setup.py"),
        ("setup.cfg", "[options]\ninstall_requires =\n  six\n", "setup.cfg"),
        ("pyproject.toml", "[tool.poetry.dependencies]\nsix = '*'\n", "[tool.poetry.dependencies]"),
        ("pyproject.toml", "[tool.flit.metadata]\nrequires = ['six']\n", "[tool.flit.metadata.requires]"),
        ("pyproject.toml", "[project]\ndynamic = ['dependencies']\n", "`dynamic = ['dependencies']`"),
    ],
)
def test_dependencies_that_only_a_build_knows_are_refused(
    tmp_path: Path, file: str, name: str, text: str, source: str
) -> None:
    (tmp_path / "requirements.txt").write_text("last\n-e .\n")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_requirements(tmp_path / file)
    location = f"{tmp_path / file}{', line 2' if file == 'requirements.txt' else ''}"
    assert refused.value.message == f"env.file: {location}: {source} decides what the project needs"
    assert "requirements.txt" in refused.value.next


def test_extras_that_only_a_build_knows_are_refused_if_requested(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\ndynamic = ['optional-dependencies']\n")
    (tmp_path / "requirements.txt").write_text("-e .\n")
    assert read_requirements(tmp_path / "requirements.txt").lines == ()
    (tmp_path / "requirements.txt").write_text("-e .[dev]\n")
    with pytest.raises(ConfigError, match="dynamic = "):
        read_requirements(tmp_path / "requirements.txt")


PROJECT = """
[project]
name = "My.Project"
{version}
dependencies = ["six"]
[project.scripts]
mine-train = "mine.cli:main"
[project.gui-scripts]
mine-show = "mine.cli:show"
[project.entry-points."mine.plugins"]
one = "mine.plugins:One"
"""

SCM_VERSION = "SETUPTOOLS_SCM_PRETEND_VERSION"
COMPUTED = 'MAJOR = 1\nNUMBER = "1.4"  # the release\nPUT = f"{MAJOR}.5"\nSUM = "1" + ".5"\n'


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ('version = "1.2"', "1.2"),
        ('dynamic = ["version"]\n[tool.setuptools.dynamic]\nversion = {attr = "mine.__version__"}', "1.3"),
        ('dynamic = ["version"]\n[tool.setuptools.dynamic]\nversion = {attr = "mine.about.NUMBER"}', "1.4"),
        ('dynamic = ["version"]\n[tool.setuptools.dynamic]\nversion = {file = "VERSION"}', "1.5"),
        ('dynamic = ["version"]\n[tool.hatch.version]\npath = "src/mine/__init__.py"', "1.3"),
        ('dynamic = ["version"]\n[tool.setuptools_scm]', "0+unknown"),
        ('dynamic = ["version"]\n[tool.hatch.version]\npath = "/etc/hostname"', "0+unknown"),
        (
            'dynamic = ["version"]\n[tool.setuptools.dynamic]\nversion = {attr = "mine.about.PUT"}',
            "0+unknown",
        ),
        (
            'dynamic = ["version"]\n[tool.setuptools.dynamic]\nversion = {attr = "mine.about.SUM"}',
            "0+unknown",
        ),
    ],
)
@pytest.mark.parametrize("file", ["pyproject.toml", "requirements.txt", "environment.yml"])
def test_the_metadata_of_the_project_is_installed_with_its_version_and_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, expected: str, file: str
) -> None:
    monkeypatch.delenv(SCM_VERSION, raising=False)
    (tmp_path / "code/src/mine").mkdir(parents=True)
    (tmp_path / "code/src/mine/__init__.py").write_text("import x\n__version__: str = '1.3'\n")
    (tmp_path / "code/src/mine/about.py").write_text(COMPUTED)
    (tmp_path / "code/VERSION").write_text("1.5\n")
    key, _, table = version.partition("\n")
    (tmp_path / "code/pyproject.toml").write_text(PROJECT.format(version=key) + table)
    (tmp_path / "code/requirements.txt").write_text("-e .\n-e .\n")
    (tmp_path / "code/environment.yml").write_text("dependencies: [python, pip: ['-e .']]\n")
    env = EnvSection(file=str(tmp_path / "code" / file))
    plan = make_environment_plan(env, internet=True, driver=None, workdir=tmp_path)
    [project] = plan.projects
    assert project.info == f"my_project-{expected}.dist-info" and project.sources == ("code/src",)
    assert f"Name: My.Project\nVersion: {expected}\nRequires-Dist: six\n" in project.metadata
    assert "[console_scripts]\nmine-train = mine.cli:main\n" in project.entry_points
    assert "[gui_scripts]\nmine-show = mine.cli:show\n" in project.entry_points
    assert "[mine.plugins]\none = mine.plugins:One\n" in project.entry_points
    elsewhere = make_environment_plan(env, internet=True, driver=None, workdir=tmp_path / "other")
    assert elsewhere.projects == (), "no node has its code"


TABLES = {
    "git": "[tool.setuptools_scm]",
    "computed": "[tool.setuptools.dynamic]\nversion = {attr = 'mine.VERSION'}",
    "no version in its file": "[tool.setuptools.dynamic]\nversion = {file = 'LICENSE'}",
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    ("variables", "version"),
    [
        ({}, "2.0.dev3+g1"),
        ({"": "2.0.dev1"}, "2.0.dev1"),
        ({"_FOR_MY_LIB": "3.1"}, "3.1"),
        ({"_FOR_MY_LIB": "3.1", "": "2.0.dev1"}, "3.1"),
        ({"_FOR_OTHER": "3.1", "_FOR_MY_LIB": "", "": "2.0.dev1"}, "2.0.dev1"),
    ],
)
def test_a_dynamic_version_comes_from_setuptools_scm_variables_or_the_local_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, variables: dict[str, str], version: str
) -> None:
    monkeypatch.delenv(SCM_VERSION, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(SCM_VERSION + name, value)
    table = f"[project]\nname = 'My.-lib'\ndynamic = ['version']\n{TABLES[kind]}\n"
    (tmp_path / "pyproject.toml").write_text(table)
    (tmp_path / "mine.py").write_text("MAJOR = 1\nVERSION = f'{MAJOR}.5'\n")
    (tmp_path / "LICENSE").write_text("The license\n")
    for name, installed in (("other", "9"), ("my_lib", "2.0.dev3+g1")):
        (tmp_path / f"{name}.egg-info").mkdir()
        (tmp_path / f"{name}.egg-info/PKG-INFO").write_text(f"Metadata-Version: 2.1\nVersion: {installed}\n")
    [project] = read_requirements(tmp_path / "pyproject.toml").projects
    assert project.info == f"my_lib-{version}.dist-info"
    assert project.sources == (str(tmp_path.resolve()),)


def test_two_projects_are_installed_and_a_change_of_one_changes_the_stamp(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    for name, folder in (("mine", tmp_path), ("lib", tmp_path / "lib")):
        (folder / "pyproject.toml").write_text(f"[project]\nname = '{name}'\nversion = '1'\n")
        (folder / "requirements.txt").write_text("-e .\n")
    (tmp_path / "requirements.txt").write_text("-e .\n-r lib/requirements.txt\n")

    def plan() -> EnvironmentPlan:
        env = EnvSection(file=str(tmp_path / "requirements.txt"))
        return make_environment_plan(env, internet=True, driver=None, workdir=tmp_path)

    before = plan()
    assert [project.sources for project in before.projects] == [(".",), ("lib",)] and before.has_packages
    (tmp_path / "lib/pyproject.toml").write_text("[project]\nname = 'lib'\nversion = '2'\n")
    assert plan().stamp != before.stamp


def test_an_editable_url_is_installed(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("-e git+https://x/lib.git@v1#egg=lib\n--editable=git+ssh://git@x/other\n")
    assert read_requirements(file).lines == ("git+https://x/lib.git@v1#egg=lib", "git+ssh://git@x/other")


def test_a_wheel_folder_is_relative_to_its_file_and_requires_packages_from_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "req/wheels").mkdir(parents=True)
    (tmp_path / "req/base.txt").write_text("-f ./wheels\n--find-links https://x/wheels\n-f /shared\nsmall\n")
    (tmp_path / "requirements.txt").write_text("-r req/base.txt\n")
    env = EnvSection(file="requirements.txt")
    plan = make_environment_plan(env, internet=False, driver=None)
    assert set(plan.indexes.find_links) == {"req/wheels", "https://x/wheels", "/shared"}
    assert make_environment_plan(env, internet=None, driver=None).indexes == plan.indexes
    assert make_environment_plan(env, internet=True, driver=None).indexes == plan.indexes
    with pytest.raises(ConfigError, match="wheels' is a folder of this machine"):
        make_environment_plan(replace(env, packages_from="node"), internet=True, driver=None)


@pytest.mark.parametrize(
    ("driver", "torch", "index"),
    [
        ("595.91.07", "2.13", "cu132"),
        ("570.195.03", "2.13", "cu126"),
        ("570.195.03", "2.4.1", "cu124"),
        (None, None, "cpu"),
    ],
)
def test_torch_comes_from_the_newest_index_that_the_driver_supports(
    tmp_path: Path, driver: str | None, torch: str | None, index: str
) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(f"tqdm\ntorch=={torch}  # as we have it\n" if torch else "torch>=2\ntorchmetrics==1.2\n")
    env = EnvSection(kind="venv", file=str(file), python="3.12" if torch != "2.4.1" else "3.11")
    plan = make_environment_plan(env, internet=True, driver=driver)
    assert plan.torch[-1] == f"https://download.pytorch.org/whl/{index}"
    assert plan.torch[0] == ("torch==2.4.1" if torch == "2.4.1" else "torch==2.13.*")


@pytest.mark.parametrize(
    ("env", "fragment"),
    [
        (EnvSection(kind="venv", python="3.7"), "no wheel for Python 3.7"),
        (EnvSection(kind="venv", python="three"), "invalid Python version 'three'"),
        (EnvSection(python="3.12"), 'cannot be set with env.kind = "image"'),
        (EnvSection(file="none.txt"), "none.txt cannot be read"),
        (EnvSection(ca_bundle="/none.pem"), "env.ca_bundle"),
    ],
)
def test_an_invalid_environment_is_refused(env: EnvSection, fragment: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_environment_plan(env, internet=True, driver="580.1")
    assert fragment in refused.value.message


def test_an_unknown_torch_is_refused_and_torch_from_a_wheel_folder_has_no_index(
    tmp_path: Path,
) -> None:
    file = tmp_path / "requirements.txt"
    env = EnvSection(kind="venv", file=str(file))
    file.write_text("torch ~= 9.9\n")
    with pytest.raises(ConfigError, match=r"requirements.txt: unknown torch release '9\.9'") as refusal:
        make_environment_plan(env, internet=True, driver="580.1")
    assert refusal.value.why == f"the known releases are 1.7 to {RELEASES[0].torch}"
    file.write_text("torch==2.13.0 ; python_version > '3'\n--find-links /shared\n")
    plan = make_environment_plan(env, internet=True, driver="580.1")
    assert plan.torch == ("torch==2.13.0", "torchvision==0.28.*")


def test_the_stamp_depends_on_the_packages_and_not_on_passwords(tmp_path: Path) -> None:
    def stamp(**keys: object) -> str:
        plan = make_environment_plan(EnvSection(**keys), internet=True, driver=None)  # type: ignore[arg-type]
        return plan.stamp

    file = tmp_path / "requirements.txt"
    file.write_text("tqdm\n")
    before = stamp(file=str(file), index_url="https://a:b@x/simple")
    assert before == stamp(
        file=str(file), index_url="https://c:d@x/simple", proxy="http://p", setup=("true",)
    )
    assert before != stamp(file=str(file), index_url="https://y/simple")
    file.write_text("tqdm>4\n")
    assert before != stamp(file=str(file), index_url="https://a:b@x/simple")
    file.write_text("tqdm @ https://token@x/tqdm-4-py3-none-any.whl\n")
    direct = stamp(file=str(file))
    file.write_text("tqdm @ https://other@x/tqdm-4-py3-none-any.whl\n")
    assert direct == stamp(file=str(file))


def test_nodes_without_internet_get_their_packages_through_the_client() -> None:
    for internet, source in ((False, "client"), (True, None)):
        assert make_environment_plan(EnvSection(), internet=internet, driver=None).packages_from == source
        explicit = make_environment_plan(EnvSection(packages_from="node"), internet=internet, driver=None)
        assert explicit.packages_from == "node"


def test_only_torch_and_its_nvidia_packages_are_pinned() -> None:
    installed = {"torch": "2.13.0+cpu", "numpy": "2.4", "nvidia-nccl-cu13": "2.29", "nvidia_cudnn": "9"}
    assert pin_image_packages(installed) == ("nvidia-nccl-cu13==2.29", "nvidia_cudnn==9", "torch==2.13.0+cpu")


@pytest.mark.parametrize(
    ("output", "fragment"),
    [
        ("ERROR: No matching distribution found for nope", "no nope for this Python"),
        ("NewConnectionError(...)\nERROR: No matching distribution found for x", "index does not answer"),
        ("error sending request for url (http://x/)\noperation timed out", "index does not answer"),
        ("curl: (28) Operation too slow", "index does not answer"),
        ("OSError: [Errno 28] No space left on device", "a disk is full"),
        (
            "The following packages are not available from current channels:\n\n  - nope=7\n",
            "no channel has a nope that fits",
        ),
        ("Problem: nothing provides requested nope >=7", "no channel has a nope that fits"),
        ("- nothing provides deep >=9 needed by greedy-1.0-0", "no channel has a deep that fits"),
        ("└─ nope >=7 * does not exist (perhaps a typo)", "no channel has a nope that fits"),
        ("The following packages are incompatible\n├─ a", "its packages have conflicting versions"),
        ("h:443: no packages come from there", "a package needs h:443, where none of its indexes has files"),
        ("10.1.2.3:80: its address is not public", "leads to 10.1.2.3:80, whose address is not public"),
        ("h:80: no configuration names it, and a proxy resolves it", "whose address only the proxy knows"),
        ("https://h/x: only what the configuration names", "https://h/x, which no line, index or channel"),
        ("a compiler error", "could not be installed"),
    ],
)
def test_the_last_lines_of_an_installer_are_explained(output: str, fragment: str) -> None:
    for internet in (None, False, True):
        explained = explain_failure(output, name="requirements.txt", internet=internet)
        assert fragment in explained.message and "{" not in explained.next
        assert internet is not False or "packages_from=node" not in explained.next
        assert "\n" not in explained.why


LOG = """Looking in indexes: http://h/simple
WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError(...)': /simple/a/
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)': /simple/a/
Could not fetch URL http://h/simple/a/: connection error: NewConnectionError(...)
ERROR: No matching distribution found for a
exit code 1
"""


@pytest.mark.parametrize(
    ("internet", "packages_from", "advice"),
    [
        (True, None, ["-o env.packages_from=client   # where nodes have no internet"]),
        (False, "client", []),
        (False, "node", ["-o env.packages_from=client   # where nodes have no internet"]),
    ],
)
def test_pips_retries_are_one_line_with_advice_that_fits_the_nodes(
    internet: bool, packages_from: str | None, advice: list[str]
) -> None:
    explained = explain_failure(LOG, name="requirements.txt", internet=internet, packages_from=packages_from)
    assert (
        explained.why == "Could not fetch URL http://h/simple/a/: connection error: NewConnectionError(...)"
    )
    assert explained.next.split("\n") == ["check env.index_url, env.proxy and env.ca_bundle", *advice]


@pytest.mark.parametrize(
    ("output", "package"),
    [
        ("  ERROR: Failed building wheel for mpi4py\nexit code 1", "mpi4py"),
        ("ERROR: Failed to build 'flash-attn' when getting requirements to build wheel", "flash-attn"),
        ("error: Failed to build `apex==0.1`\n  cause: nvcc: not found", "apex"),
    ],
)
def test_a_package_whose_build_fails_is_named_with_its_last_lines(output: str, package: str) -> None:
    explained = explain_failure(f"gcc: no mpi.h\n{output}", name="requirements.txt")
    message = f"requirements.txt: {package} has no wheel that fits, and its build on the node failed"
    assert explained.message == message and "gcc: no mpi.h" in explained.why and "env.setup" in explained.next


def test_nodes_with_different_packages_are_refused_with_the_difference() -> None:
    facts = {0: {"torch": "2.13", "NCCL": None}, 1: {"torch": "2.13", "NCCL": "2.29"}}
    with pytest.raises(NodeError) as refused:
        check_identical_nodes(facts)
    assert refused.value.why == "NCCL: node0 none, node1 2.29"
    check_identical_nodes({0: facts[0], 1: facts[0]})
