"""Where packages come from: [env], the file, this machine's pip, in that order."""

import os
from pathlib import Path

import pytest

from awsddp.plan.environment import make_environment_plan
from awsddp.plan.indexes import Indexes, read_pip_indexes
from awsddp.settings.spec import EnvSection

PIP = """
[global]
index-url = https://me:secret@x/simple
extra-index-url =
    https://y/simple
    https://z/simple
find-links = {folder}
no-index = no
pre = yes
[install]
trusted-host = y
    z
"""


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of this machine's pip, which no variable changes."""
    for name in [one for one in os.environ if one.startswith("PIP_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    return file


def test_this_machines_pip_says_where_packages_are(
    pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "ca.pem").write_text("certificates")
    pip.write_text(PIP.format(folder=tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://other/simple")
    found = read_pip_indexes()
    assert found == Indexes(
        index_url="https://other/simple",
        extra_index_urls=("https://y/simple", "https://z/simple"),
        find_links=("wheels",),
        trusted_hosts=("y", "z"),
        pre=True,
        ca="certificates",
    )
    assert "https://me:secret@x/simple" not in found.environ.values()


def test_settings_come_before_the_file_and_the_file_before_this_machine(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "-i https://one/simple\n--index-url=https://file/simple\n--extra-index-url https://more/simple\nsmall\n"
    )
    here = Indexes(index_url="https://here/simple", extra_index_urls=("https://far/simple",), no_index=True)
    file = str(tmp_path / "requirements.txt")
    by_file = make_environment_plan(EnvSection(file=file), internet=True, driver=None).indexes
    assert by_file.with_defaults(here).index_url == "https://file/simple"
    by_setting = make_environment_plan(
        EnvSection(file=file, index_url="https://set/simple"), internet=True, driver=None
    ).indexes
    every = by_setting.with_defaults(here)
    assert (every.index_url, every.no_index) == ("https://set/simple", False)
    assert every.environ["PIP_EXTRA_INDEX_URL"] == "https://more/simple https://far/simple"
    assert Indexes().with_defaults(here).environ["PIP_NO_INDEX"] == "1"
