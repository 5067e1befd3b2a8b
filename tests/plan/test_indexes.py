"""Package indexes come from [env], the file and the client's pip, in that order."""

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
def pip_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration file of the client's pip, without PIP_ variables."""
    for name in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    return file


def test_indexes_are_read_from_the_pip_of_the_client(
    pip_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "ca.pem").write_text("certificates")
    pip_config.write_text(PIP.format(folder=tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://other/simple")
    indexes = read_pip_indexes()
    assert indexes == Indexes(
        index_url="https://other/simple",
        extra_index_urls=("https://y/simple", "https://z/simple"),
        find_links=("wheels",),
        trusted_hosts=("y", "z"),
        pre=True,
        ca="certificates",
    )
    assert "https://me:secret@x/simple" not in indexes.environ.values()


def test_settings_override_the_file_and_the_file_overrides_the_client(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "-i https://one/simple\n--index-url=https://file/simple\n--extra-index-url https://more/simple\nsmall\n"
    )
    client = Indexes(index_url="https://here/simple", extra_index_urls=("https://far/simple",), no_index=True)
    file = str(tmp_path / "requirements.txt")
    by_file = make_environment_plan(EnvSection(file=file), internet=True, driver=None).indexes
    assert by_file.with_defaults(client).index_url == "https://file/simple"
    by_setting = make_environment_plan(
        EnvSection(file=file, index_url="https://set/simple"), internet=True, driver=None
    ).indexes
    merged = by_setting.with_defaults(client)
    assert (merged.index_url, merged.no_index) == ("https://set/simple", False)
    assert merged.environ["PIP_EXTRA_INDEX_URL"] == "https://more/simple https://far/simple"
    assert Indexes().with_defaults(client).environ["PIP_NO_INDEX"] == "1"
