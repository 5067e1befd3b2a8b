"""Events from real local nodes: in order, and each once."""

import time

import pytest

from tests.settings.test_loader_secrets import find_files_with
from tests.support.lab import Lab
from tests.support.local_cloud import needs_root
from tests.support.webhook import serve_webhook

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300), needs_root]

SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(0)))
print("up", flush=True)
time.sleep(600)
"""


def test_nodes_send_a_spot_notice_and_the_end_in_order(lab: Lab) -> None:
    lab.script("saves.py", SAVES)
    lab.script("ends.py", "raise ValueError('the password')")
    up = lab.json("up", "--local", "--nodes", "2", "--spot", "-y")
    network = up["nodes"][0]["private_ip"].rsplit(".", 2)[0]
    with serve_webhook(address="0.0.0.0", host=f"{network}.0.1") as hook:
        lab.environ |= {"AWSDDP_NOTIFY_URL": hook.url, "AWSDDP_NOTIFY_FORMAT": "json"}
        assert lab.run("train", "ends.py", "--world-size", "2", "--name", "fails").returncode == 1
        (failed,) = hook.wait(1)
        assert (failed["event"], failed["job"], failed["cause"]["explanation"]) == (
            "ended",
            "fails",
            "ValueError",
        )
        lab.run("train", "saves.py", "--world-size", "2", "--name", "noticed", "--detach")
        while lab.run("logs", "noticed").stdout.count("up") < 2:
            time.sleep(0.2)
        lab.run("local", "fault", "add", "node0", "reclaim", "--notice", "20s")
        hook.wait(3, seconds=60)
        assert [(body["event"], body["cause"]["kind"]) for body in hook.bodies[1:]] == [
            ("spot_notice", "spot_interruption"),
            ("ended", "spot_interruption"),
        ]
        assert len({body["id"] for body in hook.bodies}) == 3
    assert list(find_files_with("s3cret", lab.home / "clusters", lab.home / "history", lab.project)) == []
