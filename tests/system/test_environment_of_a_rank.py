"""The environment of a rank is what torchrun, started by hand on the same node, sets."""

import json
from pathlib import Path

from tests.support.lab import Lab

DUMP = """
import json, os, sys
with open(os.path.join(sys.argv[1], "environment%s.json" % os.environ["RANK"]), "w") as stream:
    json.dump(dict(os.environ), stream)
"""
# Variables of a rank besides those of torchrun.
OURS = {
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "AWSDDP_RUN_DIR",
    "AWSDDP_RUN_ID",
    "AWSDDP_STACKS_DIR",
    "PYTHONPATH",
}
# Differ in each launch: the rendezvous, its id, the file of an error; and which process runs the store.
ITS_OWN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
# Variables of the login, not of the launcher.
LOGIN = {"PWD", "OLDPWD", "SHLVL", "_", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "TERM", "XDG_SESSION_ID"}


def test_the_environment_of_a_rank_is_that_of_torchrun_started_by_hand(cluster: Lab) -> None:
    cluster.script("dump.py", DUMP)
    folder = Path("environments")
    (cluster.project / folder).mkdir(exist_ok=True)
    (cluster.project / folder / "here").touch()
    each = ("--nproc-per-node", "2", "--world-size", "2")
    result = cluster.json("train", "dump.py", *each, "--", "environments")
    ours = [_read_environment(cluster.project / result["home"] / "node0" / folder, rank) for rank in (0, 1)]
    node = cluster.json("status")["nodes"][0]
    by_hand = (
        "cd awsddp/work && mkdir -p by_hand && /opt/pytorch/bin/python -m torch.distributed.run --nnodes 1 "
        f"--nproc-per-node 2 --master-addr {node['private_ip']} --master-port 29555 dump.py by_hand "
        ">/dev/null 2>&1 && cat by_hand/environment0.json && echo && cat by_hand/environment1.json"
    )
    result_by_hand = cluster.run("ssh", "--", by_hand)
    theirs = [json.loads(line) for line in result_by_hand.stdout.splitlines()]
    for rank in (0, 1):
        names = set(ours[rank]) ^ set(theirs[rank])
        assert names - LOGIN == OURS
        differ = {
            name for name in set(ours[rank]) & set(theirs[rank]) if ours[rank][name] != theirs[rank][name]
        }
        assert differ - LOGIN <= ITS_OWN
        assert ours[rank]["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def _read_environment(folder: Path, rank: int) -> dict[str, str]:
    variables: dict[str, str] = json.loads((folder / f"environment{rank}.json").read_text())
    return variables
