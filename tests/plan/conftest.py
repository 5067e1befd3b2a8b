"""An index of packages in a folder."""

from pathlib import Path

import pytest

from awsddp.plan import resolve
from awsddp.plan.indexes import Indexes
from tests.support.wheels import write_wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only source of the client's pip; the current folder is the project."""
    folder = tmp_path / "index"
    write_wheel(folder, "small", requires=("torch>=2", "tiny"))
    write_wheel(folder, "tiny")
    for version in ("1.5", "2.0", "3.0"):
        write_wheel(folder, "numbers2", version)
    write_wheel(folder, "greedy", requires=("torch<2.6",))
    write_wheel(folder, "modern", python=">=3.13")
    write_wheel(folder, "future", python=">=3.99")
    write_wheel(folder, "elsewhere", tag="macosx_11_0_arm64")
    write_wheel(folder, "files", "2.0", requires=("web; extra == 'http'",), extras=("http",))
    write_wheel(folder, "web")
    write_wheel(folder, "torch", "2.12.1", requires=("nvidia_nccl",))
    write_wheel(folder, "nvidia_nccl", "2.29")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.chdir(tmp_path)
    indexes = Indexes(no_index=True, find_links=("index",))  # of `pip config`, which takes half a second
    monkeypatch.setattr(resolve, "read_pip_indexes", lambda: indexes)
    return folder
