"""The Python API on real local nodes, in a script of a user."""

import subprocess
import sys

from tests.support.lab import Lab

CALLS = """
import threading, awsddp
threads = {}
def on_event(event):
    threads.setdefault(threading.current_thread(), []).append(event.text)
cluster = awsddp.Cluster(on_event=on_event)
job = cluster.train("short.py", world_size=2)
assert list(threads) == [threading.main_thread()], threads
lines = []
other = threading.Thread(target=lambda: lines.extend(job.logs()))
other.start()
other.join()
assert [line.text for line in lines] == ["short"] * 2
assert list(threads) == [threading.main_thread(), other], threads
assert threads[other][-1].startswith("fetched"), threads
"""


def test_events_arrive_on_the_thread_that_calls_a_method_or_iterates_the_logs(cluster: Lab) -> None:
    cluster.script("short.py", "print('short')\n")
    result = subprocess.run(
        [sys.executable, "-c", CALLS],
        cwd=cluster.project,
        env=cluster.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
