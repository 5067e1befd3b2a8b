"""Which files come home."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp.errors import NodeError
from awsddp.jobs import launchers
from awsddp.jobs.results import Manifest, manifest
from awsddp.jobs.supervisor import manifest as on_node
from awsddp.jobs.supervisor.folder import JobFolder

if TYPE_CHECKING:
    from tests.jobs.conftest import Fleet

SAVES = r"""
import os
from pathlib import Path
Path('saved_models').mkdir()
Path('saved_models/x.pth').write_bytes(b'weights %s' % os.environ['RANK'].encode())
Path(os.environ['AWSDDP_RUN_DIR'], 'deep').mkdir()
Path(os.environ['AWSDDP_RUN_DIR'], 'deep', 'metrics.json').write_text('{}')
Path('grown.txt').open('a').write('more')
Path('runs').mkdir(); Path('runs/no').write_text('x')
Path('sub/__pycache__').mkdir(parents=True); Path('sub/__pycache__/no.pyc').write_text('x')
Path('sub/runs').mkdir(); Path('sub/runs/yes').write_text('x')
Path('latest').symlink_to('saved_models/x.pth')
open(b'odd \xff "name"\n-x', 'w').write('odd')
os.mkfifo('pipe')
Path('big1').write_bytes(b'1' * 40); Path('big2').write_bytes(b'2' * 30)
Path(os.environ['HOME'], 'elsewhere').mkdir(); Path(os.environ['HOME'], 'elsewhere/e').write_text('e')
"""


def found(fleet: "Fleet", node: int = 0) -> Manifest:
    return manifest(fleet.ask(node, launchers.manifest_request("job")), node=node)


def test_everything_new_or_changed_comes_home(make_fleet: "Callable[[int], Fleet]") -> None:
    fleet = make_fleet(1)
    fleet.write("same.txt", "same")
    fleet.write("grown.txt", "less")
    job = fleet.run(SAVES, world_size=1, outputs=("big1", "~/elsewhere", "not/there"))
    assert job.state == "succeeded", fleet.log(0)
    result = found(fleet)
    files = {file.home: file for file in result.files}
    assert set(files) == {
        "logs/rank0.log",
        "logs/supervisor0.log",
        "logs/times0.jsonl",
        "node0/saved_models/x.pth",
        "node0/run/deep/metrics.json",
        "node0/grown.txt",
        "node0/sub/runs/yes",
        "node0/latest",
        'node0/odd \udcff "name"\n-x',
        "node0/big1",
        "node0/big2",
        f"node0/outside{fleet.homes[0]}/elsewhere/e",
    }
    assert files["node0/latest"].link == "saved_models/x.pth"
    weights = files["node0/saved_models/x.pth"]
    assert (weights.size, weights.sha256) == (9, hashlib.sha256(b"weights 0").hexdigest())
    assert Path(
        os.fsencode(files['node0/odd \udcff "name"\n-x'].path).decode(errors="surrogateescape")
    ).exists()
    assert [(Path(file.path).name, file.why) for file in result.skipped] == [("there", "it is not there")]


def test_over_the_limit_the_smallest_come_home_and_the_rest_is_named(
    make_fleet: "Callable[[int], Fleet]", monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(1)
    fleet.run("for size in (10, 60, 50): open(f'f{size}', 'w').write('x' * size)\n", world_size=1)
    monkeypatch.setattr(on_node, "LIMIT", 65)
    result = on_node.manifest(JobFolder("job", fleet.folder(0)))
    homes = {file["home"] for file in result["files"]}
    assert {"node0/f10", "node0/f50"} <= homes
    assert "node0/f60" not in homes
    assert [(Path(file["path"]).name, file["size"]) for file in result["skipped"]] == [("f60", 60)]


def test_small_results_come_with_the_list_and_logs_do_not(make_fleet: "Callable[[int], Fleet]") -> None:
    fleet = make_fleet(1)
    fleet.run(
        "print('said')\nfor size in (10, 60, 50): open(f'f{size}', 'w').write('x' * size)\n", world_size=1
    )
    times = JobFolder("job", fleet.folder(0)).times.read_bytes()
    result = on_node.manifest(JobFolder("job", fleet.folder(0)), at_once=len(times) + 65)
    came = {file.home: file.data for file in manifest(result, node=0).files}
    assert came == {
        "logs/rank0.log": None,
        "logs/supervisor0.log": b"",
        "logs/times0.jsonl": times,
        "node0/f10": b"x" * 10,
        "node0/f50": b"x" * 50,
        "node0/f60": None,
    }


@pytest.mark.parametrize("files", [None, [{}], [{"path": "/x", "home": "x", "size": 1, "data": "no base64"}]])
def test_what_is_no_list_of_results_is_refused(files: object) -> None:
    with pytest.raises(NodeError, match="node1 does not say what its results are"):
        manifest({"files": files, "skipped": []}, node=1)


@pytest.mark.parametrize("home", ["/etc/passwd", "../x", "node0/../../x", "node0/\0"])
def test_place_outside_of_the_results_is_refused(home: str) -> None:
    answer = {"files": [{"path": "/x", "home": home, "size": 1, "sha256": "0"}], "skipped": []}
    with pytest.raises(NodeError, match="node1"):
        manifest(answer, node=1)
