"""uv resolves a project's file before a launch, here from a small local index."""

import functools
import http.server
import subprocess
import threading
from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.plan.environment import EnvironmentPlan
from awsddp.plan.requirements import parse_name, read_requirements
from awsddp.plan.resolve import check_packages, choose_packages, make_target
from tests.support.resolving import IMAGE, PROJECT, choose, lock, make_plan
from tests.support.servers import make_repository, serve_folder
from tests.support.wheels import write_sdist, write_wheel


def check(plan: EnvironmentPlan, image_torch: str | None = "2.12") -> str:
    return check_packages(plan, image_torch=image_torch, machine="x86_64", cache=Path("cache"))


@pytest.mark.parametrize(
    ("text", "message", "why"),
    [
        (
            "tiny\nnumbers2==1.5\n-r more.txt\n",
            "requirements.txt, line 2, more.txt, line 1: numbers2==1.5 and numbers2>=3 exclude each other",
            "you require numbers2==1.5 and numbers2>=3",
        ),
        (
            "numbers2<2\n-c pins.txt\n",
            "requirements.txt, line 1, pins.txt, line 1: numbers2<2 and numbers2==3.0 exclude each other",
            "you require numbers2<2 and numbers2==3.0",
        ),
        (
            "small\n\nnumbers2 \\\n  ==99\n",
            "requirements.txt, line 3: numbers2 ==99 cannot be met",
            "there is no version of numbers2==99 and you require numbers2==99",
        ),
        (
            "future\n",
            "requirements.txt, line 1: future cannot be met",
            "future==1.0 requires Python >=3.99 and only future==1.0 is available",
        ),
        (
            "elsewhere\n",
            "requirements.txt, line 1: elsewhere cannot be met",
            "no wheels with a matching platform tag",
        ),
        ("torch==2.5.1\n", "needs another torch than the image's 2.12", "torch==2.5.1"),
        ("torch==2.5.1+cu121\n", "needs another torch than the image's 2.12", "torch==2.5.1"),
        ("small\ngreedy\n", "needs another torch than the image's 2.12", "greedy depend on torch<2.6"),
        ("numpy=1.26\n", "line 1: 'numpy=1.26' is not a requirement", 'no such comparison operator "="'),
        ("tiny\n# all\n@EXPLICIT\n", "line 3: '@EXPLICIT' is not a requirement", "start of a requirement"),
        ("from setuptools import setup\n", "line 1: 'from setuptools import setup' is not a req", ""),
    ],
)
def test_an_unmet_requirement_is_refused_by_its_line(index: Path, text: str, message: str, why: str) -> None:
    Path("more.txt").write_text("numbers2>=3\n")
    Path("pins.txt").write_text("numbers2==3.0\n")
    with pytest.raises(ConfigError) as refused:
        check(make_plan(text))
    assert message in refused.value.message and why in refused.value.why
    assert refused.value.exit_code == 3 and refused.value.next and "asked" not in refused.value.why


@pytest.mark.parametrize(
    "text",
    [
        "small[none]\nnumbers2==1.*\nnumbers2==1.5\n",
        "numbers2==1.5 ; python_version < '3'\nnumbers2==2.0 ; python_version >= '3'\n",
        "torch==2.12.3+cu126\ntorch>=2.1\ntorch!=2.12.0\nsmall\n",
        "modern\n",
        "tiny @ https://nowhere.invalid/tiny-1.0-py3-none-any.whl\n",
        "tiny @ git+https://nowhere.invalid/tiny\n",
        "only-the-image-has-it\n",
    ],
)
def test_a_requirement_that_a_node_may_resolve_is_accepted(index: Path, text: str) -> None:
    assert check(make_plan(text)) == ""


def test_the_python_of_a_venv_decides_the_resolution(index: Path) -> None:
    assert check(make_plan("modern\n", kind="venv", python="3.13")) == ""
    with pytest.raises(ConfigError, match=r"modern cannot be met") as refused:
        check(make_plan("modern\n", kind="venv", python="3.12"))
    assert "requires Python >=3.13" in refused.value.why
    with pytest.raises(ConfigError, match=r"greedy cannot be met"):
        check(make_plan("greedy\n", kind="venv", python="3.12"))


def test_any_torch_is_accepted_if_the_torch_of_the_image_is_unknown(index: Path) -> None:
    assert check(make_plan("greedy\nsmall\ntorch==2.5.1\n"), image_torch=None) == ""


def test_an_unreachable_index_does_not_refuse_a_launch(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    why = check(make_plan("-i http://me:secret@127.0.0.1:9/simple\nsmall\n"))
    assert "127.0.0.1:9" in why or "refused" in why
    assert "secret" not in why and not Path("cache").exists()


def test_versions_are_chosen_once_for_all_nodes_and_those_of_the_image_stay(index: Path) -> None:
    plan = make_plan("small\nnumbers2\nfiles[http]\n")
    target = make_target(plan, IMAGE)
    assert choose_packages(plan, target, cache=Path("cache")) == (("small==1.0", "tiny==1.0", "web==1.0"), "")
    write_wheel(index, "tiny", "2.0")
    (index / "small-1.0-py3-none-any.whl").unlink()
    assert choose_packages(plan, target, cache=Path("cache")) == (("small==1.0", "tiny==1.0", "web==1.0"), "")
    other = make_plan("numbers2>=3\ntiny\n")
    assert choose_packages(other, make_target(other, IMAGE), cache=Path("cache"))[0] == (
        "numbers2==3.0",
        "tiny==2.0",
    )
    assert choose_packages(make_plan("tiny<2\n"), target, cache=Path("cache"))[0] == ("tiny==1.0",)


OLD, DYNAMIC = "Metadata-Version: 1.0", "Metadata-Version: 2.2\nDynamic: Requires-Dist"


@pytest.mark.parametrize(
    ("line", "info"),
    [
        ("to_build", OLD),
        ("to_build[more]>0", DYNAMIC),
        ("small\nto_build", OLD),
        ("to_build @ {url}", OLD),
        ("new", OLD),
        ("new", DYNAMIC),
    ],
)
@pytest.mark.parametrize("has_old_wheel", [True, False])
def test_resolving_runs_no_package_code(index: Path, line: str, has_old_wheel: bool, info: str) -> None:
    """Its dependencies are known only after a build, at any depth of the tree."""
    write_sdist(index, "to_build", info=info)
    write_wheel(index, "new", "2.0", requires=("to_build>=1",))
    if has_old_wheel:  # an unrestricted resolver prefers the newer version, without a wheel
        write_wheel(index, "to_build", "0.3")
        write_wheel(index, "new", "1.0")
    with serve_folder(index) as server:
        requirement = line.format(url=f"{server.url}/to_build-1.0.tar.gz")
        pins, why = choose(f"tiny\n{requirement}\n")
        assert pins is None and why.replace("-", "_").startswith("a node must build to_build")
        assert check(make_plan(f"tiny\n{requirement}\n")) == ("" if "url" in line else why)
    assert not (index / "it-ran").exists()


@pytest.mark.parametrize(
    ("line", "pins"),
    [
        ("static", ("static==2.0", "tiny==1.0")),
        ("static<2", ("static==1.0",)),
        ("above", ("above==2.0", "static==2.0", "tiny==1.0")),
        ("above\nforeign", ("above==2.0", "foreign==1.0", "static==2.0", "tiny==1.0")),
        ("--prefer-binary\nabove", ("above==1.0",)),
    ],
)
def test_the_newest_version_is_chosen_even_if_it_or_a_dependency_has_no_wheel(
    index: Path, line: str, pins: tuple[str, ...]
) -> None:
    """hydra-core needs antlr4-python3-runtime 4.9.3, an sdist; with wheels alone it is years older."""
    write_wheel(index, "static")
    write_sdist(index, "static", "2.0", info="Metadata-Version: 2.2\nRequires-Dist: tiny")
    write_wheel(index, "above", "2.0", requires=("static>=2",))
    write_wheel(index, "above")
    write_wheel(index, "foreign", tag="macosx_11_0_arm64")
    write_sdist(index, "foreign")
    assert choose(line + "\n") == (pins, "")
    assert not (index / "it-ran").exists()


def test_a_conflict_with_a_package_without_a_wheel_is_refused(index: Path) -> None:
    write_sdist(index, "static", info="Metadata-Version: 2.2\nRequires-Dist: numbers2<2")
    with pytest.raises(ConfigError, match="static and numbers2>=2 exclude each other"):
        check(make_plan("static\nnumbers2>=2\n"))


def test_a_requirement_with_a_password_is_not_cached(index: Path) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(index))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://me:secret@127.0.0.1:{server.server_port}/tiny-1.0-py3-none-any.whl"
            plan = make_plan(f"tiny @ {url}\n")
            choice = choose_packages(plan, make_target(plan, IMAGE), cache=Path("cache"))
        finally:
            server.shutdown()
    assert choice == ((f"tiny @ {url}",), "") and not list(Path("cache").glob("*"))


def test_a_lock_gives_the_dependencies_without_those_of_torch(index: Path) -> None:
    file = lock(index)
    assert set(read_requirements(file).lines) == {
        "torch==2.12.1",
        "files==2.0 ; sys_platform == 'linux'",
        "web==1.0 ; sys_platform == 'linux'",
        "numbers2==1.5",
        "tiny==1.0",
    }
    assert check(make_plan(file=str(file))) == ""
    with pytest.raises(ConfigError, match=r"needs another torch than the image's 2\.11"):
        check(make_plan(file=str(file)), image_torch="2.11")


def test_a_lock_with_a_wheel_of_the_client_is_refused(index: Path) -> None:
    sources = '[tool.uv.sources]\nnumbers2 = { path = "index/numbers2-1.5-py3-none-any.whl" }\n'
    with pytest.raises(ConfigError, match=r"uv\.lock: './index/numbers2-1.5.* does not work on a node"):
        read_requirements(lock(index, PROJECT.replace("[tool.uv.sources]\n", sources)))


def test_a_lock_gives_the_urls_and_the_git_commits_of_its_sources(index: Path, tmp_path: Path) -> None:
    """The locked commit is used without a request; dependencies come from the index."""
    bare = make_repository(tmp_path / "served", "gitted")
    write_wheel(tmp_path / "served", "direct", requires=("tiny",))
    with serve_folder(tmp_path / "served") as server:
        wheel_name = "direct-1.0-py3-none-any.whl"
        sources = (
            f'[tool.uv.sources]\ndirect = {{ url = "{server.url}/{wheel_name}" }}\n'
            f'gitted = {{ git = "{server.url}/gitted.git" }}\n'
        )
        project = PROJECT.replace("[tool.uv.sources]\n", sources).replace(
            '"numbers2<2"', '"direct", "gitted"'
        )
        file = lock(index, project)
        requests = len(server.requests)
        lines = read_requirements(file).lines
        head = subprocess.run(["git", "-C", bare, "rev-parse", "HEAD"], capture_output=True, text=True)
        assert f"direct @ {server.url}/{wheel_name}" in lines
        assert f"gitted @ git+{server.url}/gitted.git@{head.stdout.strip()}" in lines
        assert "tiny==1.0" in lines and not [line for line in lines if line.startswith("numbers2")]
        assert check(make_plan(file=str(file))) == "" and len(server.requests) == requests
        plan = make_plan(file=str(file))
        pins, why = choose_packages(plan, make_target(plan, IMAGE), cache=Path("cache"))
    assert why == "" and pins is not None and {"direct", "gitted", "tiny"} <= set(map(parse_name, pins))


def test_the_index_of_a_lock_is_read(index: Path) -> None:
    file = lock(index)
    text = file.read_text().replace(f'registry = "{index}"', 'registry = "https://x/simple"')
    file.write_text(text.replace(f'path = "{index}', 'url = "https://x'))
    assert read_requirements(file).indexes.extra_index_urls == ("https://x/simple",)
