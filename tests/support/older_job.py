"""The files of a job that an older awsddp wrote on its node."""

from typing import Any

# Written by 5937cdd; shortened: one rank of each node, and the variables of their processes.
LAUNCHED: dict[str, Any] = {
    "do": "launch",
    "job": "job",
    "launch": "3e5257e00063753e",
    "slot": 0,
    "created": "2026-11-25T22:15:22+00:00",
    "nodes": [
        {"node": 0, "private_ip": "127.55.19.1", "instance_id": "i-0"},
        {"node": 1, "private_ip": "127.55.19.2", "instance_id": "i-1"},
    ],
    "facts": {"script": "job.py", "args": [], "launcher": "ssh"},
    "layout": [[0, 0, 0], [1, 0, 1]],
    "secret": "2dd5cd80d23b6ef9",
    "master_port": 16797,
    "link_port": 16798,
    "join_s": 60.0,
    "silent_s": 300.0,
    "timeout": None,
    "hang_after": None,
    "grace": 30.0,
    "outputs": [],
    "defaults": {"OMP_NUM_THREADS": "1"},
    "after": [],
    "secrets": [],
    "elastic": None,
    "node": 0,
    "folder": "/home/ubuntu/.awsddp/jobs/job",
    "workdir": "/home/ubuntu/awsddp/work",
    "path": "/opt/pytorch/bin",
    "gpus": [],
    "processes": [
        {
            "ranks": [0],
            "argv": ["/opt/pytorch/bin/python", "job.py"],
            "environment": {"RANK": "0", "GLOO_SOCKET_IFNAME": "lo"},
            "log": "rank0.log",
            "script": "job.py",
            "files": {},
        }
    ],
}


STATE: dict[str, Any] = {
    "job": "job",
    "node": 0,
    "state": "running",
    "cause": None,
    "complete": True,
    "boot": "fb51b06e-03f0-40eb-8b12-c879c7db5549",
    "created": "2026-11-25T22:15:22+00:00",
    "ranks": [
        {"rank": 0, "local_rank": 0, "node": 0, "exit_code": 3, "seconds": 2.0, "started": 1795644924.5},
        {"rank": 1, "local_rank": 0, "node": 1, "exit_code": None, "seconds": 0.0, "started": None},
    ],
    "pid": 5272,
}
