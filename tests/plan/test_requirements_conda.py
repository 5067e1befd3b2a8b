"""environment.yml: what conda receives, and what is refused before a launch."""

from pathlib import Path

import msgspec
import pytest

from awsddp.errors import ConfigError
from awsddp.plan.environment import EnvironmentPlan, make_environment_plan
from awsddp.plan.requirements import Requirements, read_requirements
from awsddp.settings.spec import EnvSection


def read(folder: Path, text: str) -> Requirements:
    (folder / "environment.yml").write_bytes(text.encode())
    return read_requirements(folder / "environment.yml")


def dependencies(folder: Path, text: str) -> list[object]:
    packages: list[object] = msgspec.yaml.decode(read(folder, text).conda)["dependencies"]
    return packages


@pytest.mark.parametrize(
    "text",
    [
        "dependencies:\n- python=3.10\n- numpy\n",
        "dependencies:\r\n- python=3.10\r\n- numpy\r\n",
        "\ufeffname: x\ndependencies:\n  - python=3.10\n  - numpy\n",
        "# mine\n\n--- # here\nname: 3.10\nprefix: /home/me/env\ndependencies: [python=3.10, numpy]\n...\n",
        "dependencies: [\n  python=3.10,\n  numpy\n]\n",
        '{"dependencies": ["python=3.10", "numpy"]}',
        '"dependencies" :\n- "python=3.10"\n- \'numpy\'\n',
        "x-own: &own python=3.10\ndependencies:\n- *own # pinned\n- numpy\n",
        "dependencies:\n- python=3.10\n- x # [osx or win64]\n- numpy  # [linux]\n- pywin32  # [win]\n",
        "dependencies:\n- python=3.10\n- numpy\n- pip:\n",
        "dependencies:\n- python=3.10\n- numpy\n- pip:\n  - .\n  - -e .[dev]\n",
    ],
)
def test_equivalent_files_give_conda_the_same_json(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).conda == '{"dependencies":["python=3.10","numpy"]}'


def test_channels_and_platforms_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    text = "channels:\n- https://x/t/${TOKEN}/mine\n- nodefaults\nplatforms: [linux-64]\n"
    assert msgspec.yaml.decode(read(tmp_path, text + "dependencies: [python]\n").conda) == {
        "channels": ["https://x/t/secret/mine", "nodefaults"],
        "platforms": ["linux-64"],
        "dependencies": ["python"],
    }


def test_requirements_under_pip_are_read_like_a_requirements_file(tmp_path: Path) -> None:
    (tmp_path / "req").mkdir()
    (tmp_path / "req/base.txt").write_bytes(
        b"tqdm>=4  # a bar\r\n--extra-index-url https://x/simple\r\n--pre\r\n"
    )
    text = "dependencies:\n- pip:\n  - -r req/base.txt\n  - -e git+https://x/lib.git#egg=lib\n  - -e .\n"
    assert dependencies(tmp_path, text) == [{"pip": ["tqdm>=4", "git+https://x/lib.git#egg=lib"]}]
    indexes = read(tmp_path, text).indexes
    assert (indexes.extra_index_urls, indexes.pre) == (("https://x/simple",), True)


def test_the_project_itself_under_pip_adds_its_dependencies(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mine'\ndependencies = ['tqdm>=4']\n")
    assert dependencies(tmp_path, "dependencies:\n- python\n- pip:\n  - -e .[dev]\n") == [
        "python",
        {"pip": ["tqdm>=4"]},
    ]


def test_variables_of_a_conda_file_are_in_the_plan_and_do_not_change_the_stamp(tmp_path: Path) -> None:
    text = "dependencies: [python]\nvariables:\n  MODE: fast\n  RATIO: 0.5\n  HERE: ${HOME}/x\n"
    plans = [
        make_environment_plan(
            EnvSection(kind="conda", file=str(tmp_path / "environment.yml")), internet=True, driver=None
        )
        for content in (text, "dependencies: [python]\n")
        if read(tmp_path, content)
    ]
    assert plans[0].variables == {"MODE": "fast", "RATIO": "0.5", "HERE": "${HOME}/x"}
    assert plans[0].stamp == plans[1].stamp and not plans[1].variables


def test_the_stamp_of_a_conda_file_has_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "channels:\n- https://me:${TOKEN}@x/mine\ndependencies:\n- pip:\n  - -i https://${TOKEN}@x/simple\n"
    )
    stamps = set()
    for token in ("one", "other"):
        monkeypatch.setenv("TOKEN", token)
        parsed = read(tmp_path, text)
        assert token in parsed.conda and token in parsed.indexes.index_url
        stamps.add(EnvironmentPlan(kind="conda", conda=parsed.conda, indexes=parsed.indexes).stamp)
    assert len(stamps) == 1


def test_a_conda_file_implies_the_kind_conda(tmp_path: Path) -> None:
    read(tmp_path, "dependencies: [python]\n")
    file = str(tmp_path / "environment.yml")
    assert make_environment_plan(EnvSection(file=file), internet=True, driver=None).kind == "conda"
    with pytest.raises(ConfigError, match=r'env\.kind = "venv": .* is a conda environment'):
        make_environment_plan(EnvSection(kind="venv", file=file), internet=True, driver=None)
    for internet, source in ((True, None), (False, "client")):  # in the local cloud as on AWS
        plan = make_environment_plan(EnvSection(file=file), internet=internet, driver=None)
        assert (plan.kind, plan.packages_from) == ("conda", source)


def test_a_conda_file_decides_its_python(tmp_path: Path) -> None:
    read(tmp_path, "dependencies: [python]\n")
    env = EnvSection(file=str(tmp_path / "environment.yml"), python="3.12")
    with pytest.raises(ConfigError, match=r"env\.python cannot be set for") as refused:
        make_environment_plan(env, internet=True, driver=None)
    assert "=3.12'" in refused.value.next


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("name: x\ndependancies:\n- python\n", "has no dependencies"),
        ("dependencies:\n- python\npip:\n- x\n", "unknown or repeated key 'pip'"),
        ("name: x\n", "has no dependencies"),
        ("name: x\ndependencies:\n", "has no dependencies"),
        ("", "has no dependencies"),
        ("- python\n", "has no dependencies"),
        ("dependencies: [python]\ndependencies: [numpy]\n", "unknown or repeated key 'dependencies'"),
        ("dependencies:\n\t- python\n", "is not valid YAML"),
        ("dependencies:\n- python\n numpy: [\n", "is not valid YAML"),
        ("dependencies:\n- 2024-99-99\n", "is not valid YAML"),
        pytest.param("dependencies: " + "[" * 5000, "is not valid YAML", id="nested"),
        ("dependencies: python\n", "has no dependencies"),
        ("dependencies:\n- numpy\n- python: 3.10\n", "dependencies that conda does not accept"),
        ("dependencies:\n- 3.10\n", "dependencies that conda does not accept"),
        ("dependencies:\n- numpy\n-\n", "dependencies that conda does not accept"),
        ("dependencies:\n- ./mine.conda\n", "'./mine.conda' does not work on a node"),
        ("dependencies:\n- file:///x/mine.conda\n", "does not work on a node"),
        ("dependencies:\n- pip: small\n", "dependencies that conda does not accept"),
        ("dependencies:\n- pip:\n  - ../lib\n", "'../lib' does not work on a node"),
        ("dependencies:\n- pip:\n  - -r none.txt\n", "none.txt cannot be read"),
        ("dependencies:\n- pip:\n  - -c pins.txt\n", "dependencies that conda does not accept"),
        ("dependencies: [python]\nvariables: [A]\n", "has no dependencies"),
        ("dependencies:\n- pip:\n  - -f ./wheels\n  - x\n", "'././wheels' does not work on a node"),
    ],
)
def test_a_file_that_conda_would_misread_is_refused(tmp_path: Path, text: str, fragment: str) -> None:
    (tmp_path / "pins.txt").write_text("numpy==2.1\n")
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert fragment in refused.value.message and str(tmp_path) in refused.value.message
