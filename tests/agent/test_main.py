"""Requests and answers over one connection, as the node's program reads and writes them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from awsddp.agent.log_stream import MAGIC

MAIN = "import sys; from awsddp.agent.main import main; sys.exit(main(sys.stdin.buffer))"


def test_request_that_cannot_be_done_is_answered_and_the_next_one_too(tmp_path: Path) -> None:
    requests = [json.dumps(one).encode() for one in ({"do": "nothing"}, {"do": "state"})]
    sent = b"".join(b"%d\n%b" % (len(one), one) for one in requests)
    environ = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", MAIN], input=sent, env=environ, capture_output=True)
    before, refused, state = done.stdout.split(MAGIC)
    error = json.loads(refused)["error"]
    assert (before, error["message"], error["kind"]) == (b"", "unknown request nothing", "usage")
    assert json.loads(state)["jobs"] == []
    assert done.returncode == 1, done.stderr
