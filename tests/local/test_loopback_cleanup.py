"""The processes of a host that has neither a cgroup nor a namespace."""

import os
import subprocess
import uuid
from pathlib import Path

from awsddp.local import loopback_cleanup
from tests.support.waiting import until


def test_cleanup_ends_marked_processes_and_their_descendants_only(tmp_path: Path) -> None:
    mark, unmarked = uuid.uuid4().hex, subprocess.Popen(["sleep", "60"])
    # its child carries no mark of its own
    script = f"env -u AWSDDP_HOST sleep 60 & echo $! > {tmp_path}/child; wait"
    marked = subprocess.Popen(["sh", "-c", script], env={**os.environ, "AWSDDP_HOST": f"{mark}-node"})
    try:
        until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip())
        child = int((tmp_path / "child").read_text())
        until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n")
        assert loopback_cleanup.has_mark(marked.pid, mark) and not loopback_cleanup.has_mark(child, mark)
        assert loopback_cleanup.find_processes(mark).keys() == {marked.pid, child}
        assert loopback_cleanup.kill_processes(mark)
        assert loopback_cleanup.find_processes(mark) == {}
        assert marked.wait(timeout=10) != 0
        assert unmarked.poll() is None
    finally:
        for process in (marked, unmarked):
            process.kill()
            process.wait()
