"""What [env] and a project's files mean, before anything is installed."""

from dataclasses import replace
from pathlib import Path

import pytest

from awsddp.compat.releases import RELEASES
from awsddp.errors import ConfigError, NodeError
from awsddp.plan.environment import (
    explain,
    image_constraints,
    make_environment_plan,
    refuse_unlike,
    source_folders,
)
from awsddp.plan.indexes import Indexes
from awsddp.plan.requirements import read_requirements
from awsddp.spec import EnvSection


def test_a_requirements_file_is_read_with_what_it_includes(tmp_path: Path) -> None:
    (tmp_path / "base.txt").write_text("-r requirements.txt\nnumpy  # an array\n")
    (tmp_path / "pins.txt").write_text("numpy==2.1\n")
    file = tmp_path / "requirements.txt"
    file.write_text(
        "-r base.txt\n-c pins.txt\n--extra-index-url https://x/simple\n"
        "-e .[dev]\n-e '.[dev]'\n-e ./\n.\n\n# nothing\n"
        "tqdm>=4 ;\\\npython_version > '3'\nplain==1 --hash=sha256:ab\nraw @ https://x/a#sub\n"
    )
    found = read_requirements(file)
    assert found.lines == ("numpy", "tqdm>=4 ; python_version > '3'", "plain==1", "raw @ https://x/a#sub")
    assert found.constraints == ("numpy==2.1",)
    assert found.indexes == Indexes(extra_index_urls=("https://x/simple",))


def test_a_requirements_file_as_powershell_writes_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_bytes("tqdm ;\\\r\npython_version > '3'\r\n".encode("utf-16"))
    assert read_requirements(file).lines == ("tqdm ; python_version > '3'",)


def test_a_variable_in_a_requirements_file_is_one_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDEX_TOKEN", "t")
    file = tmp_path / "requirements.txt"
    file.write_text("--index-url https://${INDEX_TOKEN}@x/simple\nmine @ git+https://x/mine@${NOT_SET}\n")
    found = read_requirements(file)
    assert found.indexes == Indexes(index_url="https://t@x/simple")
    assert found.lines == ("mine @ git+https://x/mine@${NOT_SET}",)


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
def test_every_kind_of_requirement_is_taken_as_it_is(tmp_path: Path, line: str) -> None:
    (tmp_path / "requirements.txt").write_text(line + "\n")
    assert read_requirements(tmp_path / "requirements.txt").lines == (line.strip(),)


def test_a_pyproject_gives_its_dependencies(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\ndependencies = ['tqdm>=4']\n")
    assert read_requirements(tmp_path / "pyproject.toml").lines == ("tqdm>=4",)


@pytest.mark.parametrize(
    ("name", "text", "words"),
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
def test_a_file_that_cannot_be_meant_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_requirements(tmp_path / name)
    assert words in refused.value.message and str(tmp_path) in refused.value.message


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("-e .", ("tqdm>=4", "x ; os_name == 'posix'")),
        (".", ("tqdm>=4", "x ; os_name == 'posix'")),
        ('-e ".[all, nope]"', ("tqdm>=4", "x ; os_name == 'posix'", "y", "z==1")),
        ("--editable=./[test]", ("tqdm>=4", "x ; os_name == 'posix'", "y")),
    ],
)
def test_the_project_itself_stands_for_its_dependencies(
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
    for text in ("[project]\nname = 'mine'\ndynamic = ['dependencies']\n", "[tool.ruff]\n"):
        (tmp_path / "pyproject.toml").write_text(text)
        assert read_requirements(tmp_path / "requirements.txt").lines == ("last",)


def test_an_editable_url_is_installed(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("-e git+https://x/lib.git@v1#egg=lib\n--editable=git+ssh://git@x/other\n")
    assert read_requirements(file).lines == ("git+https://x/lib.git@v1#egg=lib", "git+ssh://git@x/other")


def test_a_folder_of_wheels_is_relative_to_the_file_that_names_it_and_needs_packages_from_here(
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
def test_torch_comes_from_the_newest_index_that_the_driver_runs(
    tmp_path: Path, driver: str | None, torch: str | None, index: str
) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(f"tqdm\ntorch=={torch}  # as we have it\n" if torch else "torch>=2\ntorchmetrics==1.2\n")
    env = EnvSection(kind="venv", file=str(file), python="3.12" if torch != "2.4.1" else "3.11")
    plan = make_environment_plan(env, internet=True, driver=driver)
    assert plan.torch[-1] == f"https://download.pytorch.org/whl/{index}"
    assert plan.torch[0] == ("torch==2.4.1" if torch == "2.4.1" else "torch==2.13.*")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (EnvSection(kind="venv", python="3.7"), "no wheel for Python 3.7"),
        (EnvSection(kind="venv", python="three"), "invalid Python version 'three'"),
        (EnvSection(python="3.12"), 'not for env.kind = "image"'),
        (EnvSection(file="none.txt"), "none.txt cannot be read"),
        (EnvSection(ca_bundle="/none.pem"), "env.ca_bundle"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_before_anything_is_made(
    env: EnvSection, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_environment_plan(env, internet=True, driver="580.1")
    assert words in refused.value.message


def test_a_torch_that_is_unknown_is_refused_and_one_from_a_folder_of_wheels_has_no_index(
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


def test_the_stamp_follows_what_is_installed_and_no_password(tmp_path: Path) -> None:
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


def test_nodes_without_internet_get_their_packages_through_this_machine() -> None:
    for internet, where in ((False, "client"), (True, None)):
        assert make_environment_plan(EnvSection(), internet=internet, driver=None).packages_from == where
        own = make_environment_plan(EnvSection(packages_from="node"), internet=internet, driver=None)
        assert own.packages_from == "node"


def test_only_what_torch_is_made_of_is_pinned() -> None:
    has = {"torch": "2.13.0+cpu", "numpy": "2.4", "nvidia-nccl-cu13": "2.29", "nvidia_cudnn": "9"}
    assert image_constraints(has) == ("nvidia-nccl-cu13==2.29", "nvidia_cudnn==9", "torch==2.13.0+cpu")


@pytest.mark.parametrize(
    ("said", "words"),
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
def test_the_last_words_of_pip_are_explained(said: str, words: str) -> None:
    for internet in (None, False, True):
        explained = explain(said, name="requirements.txt", internet=internet)
        assert words in explained.message and "{" not in explained.next
        assert internet is not False or "packages_from=node" not in explained.next


def test_nodes_that_differ_are_refused_by_what_differs() -> None:
    facts = {0: {"torch": "2.13", "NCCL": None}, 1: {"torch": "2.13", "NCCL": "2.29"}}
    with pytest.raises(NodeError) as refused:
        refuse_unlike(facts)
    assert refused.value.why == "NCCL: node0 none, node1 2.29"
    refuse_unlike({0: facts[0], 1: facts[0]})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[project]\nname = "x"', ("src",)),
        ('[build-system]\nrequires = ["setuptools"]', ("src",)),
        ('[tool.setuptools.packages.find]\nwhere = ["python"]', ("python", "src")),
        ('[tool.setuptools.package-dir]\n"" = "python"', ("python", "src")),
        ('[tool.poetry]\npackages = [{include = "pkg", from = "python"}]', ("python", "src")),
        ('[project]\n[tool.hatch.build.targets.wheel]\npackages = ["python/pkg"]', ("python", "src")),
        ('[project]\n[tool.setuptools]\npackages = ["pkg"]\n[tool.poetry]\npackages = 3', ("src",)),
        ('[project]\n[tool.setuptools.packages.find]\nwhere = ["..", ".", "/tmp"]', ("src",)),
        ("[tool.ruff]\nline-length = 80", ()),
        ("not toml", ()),
    ],
)
def test_folders_of_a_projects_packages(tmp_path: Path, text: str, found: tuple[str, ...]) -> None:
    for folder in ("src", "python"):
        (tmp_path / folder / "pkg").mkdir(parents=True)
        (tmp_path / folder / "pkg" / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(text)
    assert source_folders(tmp_path) == found


def test_a_src_that_is_a_package_or_empty_is_no_folder_of_packages(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert source_folders(tmp_path) == ()
    (tmp_path / "src").mkdir()
    assert source_folders(tmp_path) == ()
    (tmp_path / "src" / "__init__.py").touch()
    assert source_folders(tmp_path) == ()
