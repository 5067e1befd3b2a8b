"""Requests and answers over one connection, as the agent reads and writes them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from awsddp.agent.log_stream import MAGIC

MAIN = "import sys; from awsddp.agent.main import main; sys.exit(main(sys.stdin.buffer))"


def test_unknown_request_gets_an_error_and_the_next_one_its_answer(tmp_path: Path) -> None:
    requests = [json.dumps(request).encode() for request in ({"do": "nothing"}, {"do": "state"})]
    sent = b"".join(b"%d\n%b" % (len(request), request) for request in requests)
    environ = {**os.environ, "HOME": str(tmp_path)}
    process = subprocess.run([sys.executable, "-c", MAIN], input=sent, env=environ, capture_output=True)
    before, refused, state = process.stdout.split(MAGIC)
    error = json.loads(refused)["error"]
    assert (before, error["message"], error["kind"]) == (b"", "unknown request nothing", "usage")
    assert json.loads(state)["jobs"] == []
    assert process.returncode == 1, process.stderr
