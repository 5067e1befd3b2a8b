"""A lab in records mode, and its environment."""

import os
from collections.abc import Iterator

import pytest

from tests.support.lab import Lab


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab whose local cloud keeps records only."""
    lab = Lab(tmp_path_factory.mktemp("api"))
    assert lab.run("local", "start", "--no-hosts").returncode == 0
    yield lab
    lab.close()


@pytest.fixture
def active_lab(records: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Return the lab, after this process took over its environment and project folder."""
    for key in [key for key in os.environ if key not in records.environ]:
        monkeypatch.delenv(key)
    for key, value in records.environ.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(records.project)
    return records
