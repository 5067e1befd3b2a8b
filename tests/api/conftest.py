"""A cluster of records, in the folder of its file."""

import os
from collections.abc import Iterator

import pytest

from tests.support.lab import Lab


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab whose local cloud keeps records only."""
    made = Lab(tmp_path_factory.mktemp("api"))
    assert made.run("local", "start", "--no-hosts").returncode == 0
    yield made
    made.close()


@pytest.fixture
def here(records: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """This process in the lab's home and project."""
    for key in [key for key in os.environ if key not in records.environ]:
        monkeypatch.delenv(key)
    for key, value in records.environ.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(records.project)
    return records
