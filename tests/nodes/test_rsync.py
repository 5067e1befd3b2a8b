"""Transfers that fail: rsync is real, and a stand-in for ssh runs the remote side on this machine."""

import os
import threading
from pathlib import Path

import pytest

from awsddp.model.node_answers import ResultFile
from awsddp.nodes import rsync
from awsddp.nodes.download import rsync_transfer
from awsddp.nodes.node_failures import NodeFailure
from awsddp.util.parallel import ignore_event

NONE = Path("/none")
PROC = "/proc/self/fd/"
"""A folder in which nobody, not even root, can make a file."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for a node of any host name."""
    program = tmp_path / "ssh"
    program.write_text('#!/bin/bash\nwhile [ "$1" != rsync ]; do shift; done\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / "model.pt").write_bytes(b"weights")
    return folder


def transfer(source: str, target: str) -> None:
    progress = rsync.Progress(0, "", 7, ignore_event)
    stop = threading.Event()
    rsync.transfer(["-t", source, target], ["model.pt"], ssh_config=NONE, stop=stop, progress=progress)


def test_local_folder_that_cannot_be_written_is_no_failure_of_the_node(node: Path) -> None:
    model = ResultFile(path=str(node / "model.pt"), home="node0/model.pt", size=7, node=0)
    with pytest.raises(OSError, match=PROC):
        rsync_transfer(NONE)([model], Path(PROC), rsync.Progress(0, "", 7, ignore_event), threading.Event())


def test_file_removed_on_the_node_is_no_failure_of_this_machine(node: Path, tmp_path: Path) -> None:
    file = ResultFile(path=str(node / "gone.pt"), home="node0/gone.pt", size=7, node=0)
    rsync_transfer(NONE)([file], tmp_path / "here", rsync.Progress(0, "", 7, ignore_event), threading.Event())
    assert not [path for path in (tmp_path / "here").rglob("*") if path.is_file()]


def test_folder_of_a_node_that_cannot_be_written_is_a_failure_of_the_node(node: Path) -> None:
    with pytest.raises(NodeFailure, match="some files could not be transferred"):
        transfer(f"{node}/", f"host:{PROC}")


@pytest.mark.parametrize(
    ("name", "value"), [("RSYNC_MAX_ALLOC", "1"), ("RSYNC_RSH", "false"), ("RSYNC_PARTIAL_DIR", "/none")]
)
def test_environment_variables_of_rsync_do_not_change_a_transfer(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    transfer(f"host:{node}/", f"{tmp_path}/here/")
    assert (tmp_path / "here" / "model.pt").read_bytes() == b"weights"
