"""The folder of a cluster, each file cut anywhere: `status` lists the nodes, and `down` terminates them."""

import random
import sys

import pytest

from awsddp.cluster.down import down
from awsddp.cluster.status import status
from awsddp.cluster.up import up
from tests.support.seed import FULL, SEED
from tests.support.world import World, agree

SOME = 12


@pytest.mark.prove
@pytest.mark.timeout(3600 if FULL else 300)
def test_status_and_down_work_with_a_file_cut_at_any_byte(world: World) -> None:
    assert world.run(up, confirm=agree).code == 0
    world.save("cluster")
    whole = {path: path.read_bytes() for path in sorted((world.home / "clusters/demo").iterdir())}
    cuts = [(path, size) for path, data in whole.items() for size in range(len(data))]
    if not FULL:
        cuts = random.Random(SEED).sample(cuts, SOME)
        cuts += [(path, 0) for path in whole]
    for path, size in cuts:
        world.restore("cluster")
        path.write_bytes(whole[path][:size])
        outcome = world.run(status)
        assert outcome.code == 0, (path.name, size, outcome.text)
        assert (outcome.document["state"], len(outcome.document["nodes"])) == ("ready", 2), (path.name, size)
        ended = world.run(down, confirm=agree)
        assert (ended.code, len(ended.document["terminated"])) == (0, 2), (path.name, size, ended.text)
        assert world.cloud.find_leftovers() == [], (path.name, size)
        assert world.run(status).document["state"] == "absent", (path.name, size)
    sys.stdout.write(f"{len(cuts)} cuts in {len(whole)} files, 0 left\n")
