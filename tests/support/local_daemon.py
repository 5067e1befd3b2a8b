"""A client that is killed while it starts the daemon of a local cloud."""

import subprocess
import sys
import time
from pathlib import Path

from awsddp.model.events import Event
from tests.support.local_cloud import until


def quiet(_: Event) -> None:
    return None


def kill_starting_client(home: Path, *, after_s: float) -> None:
    """Kill a client while it starts an automatic daemon."""
    code = (
        "import sys; from pathlib import Path; from awsddp.local import control\n"
        "control.PATIENCE_S = 1.0\n"
        "control.start(Path(sys.argv[1]), auto=True, mode='records')"
    )
    client = subprocess.Popen([sys.executable, "-c", code, str(home)])
    until((home / "local/daemon.lock").exists)
    time.sleep(after_s)
    client.kill()
    client.wait()
