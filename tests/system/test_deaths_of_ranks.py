"""Ranks that die, each in another way: the cause has the right kind and a next step."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp.agent.diagnosis.causes import TABLE
from awsddp.agent.diagnosis.job_causes import JOB_TABLE
from tests.support.seed import draw_cases

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]

NAMESPACE = """\
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000 | 0x40000000) == 0, ctypes.get_errno()  # mounts and network of its own
assert libc.mount(b'none', b'/', None, 0x4000 | 0x40000, None) == 0
def small(path): assert libc.mount(b'tmpfs', path, b'tmpfs', 0, b'size=64k') == 0
"""
NOBODY = "import os; os.setuid(65534)\n"
# kind: a script that dies of it, without torch
PLAIN = {
    "exit": "import sys\nsys.exit(3)\n",
    "killed": "import os\nos.kill(os.getpid(), 9)\n",
    "signal": "import os\nos.kill(os.getpid(), 14)\n",
    "segfault": "import ctypes\nctypes.string_at(0)\n",
    "illegal_instruction": (
        "import ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(b'\\x0f\\x0b\\x00\\x00')\n"  # ud2 on x86, udf on arm
        "ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()\n"
    ),
    "abort": "import os\nos.abort()\n",
    "import_error": "import no_such_module\n\n",
    "no_metadata": "from importlib.metadata import version\nversion('no-such-package')\n",
    "library_missing": "import ctypes\nctypes.CDLL('libno_such.so.1')\n",
    "packages_mismatch": "from json import no_such_name\n\n",
    "syntax_error": "print('a'\nx = = 1\n",
    "usage": "import argparse\nargparse.ArgumentParser().parse_args(['--local-rank=0'])\n",
    "permission": NOBODY + "open('/etc/shadow')\n",
    "disk_full": NAMESPACE + "small(b'/mnt')\nopen('/mnt/x', 'wb', buffering=0).write(bytes(70000))\n"
    "open('/mnt/y', 'wb', buffering=0).write(bytes(70000))\n",
    "bus_error": NAMESPACE + "small(b'/dev/shm')\nimport mmap\nfile = open('/dev/shm/x', 'w+b')\n"
    "file.truncate(1 << 20)\nmmap.mmap(file.fileno(), 0).write(bytes(1 << 20))\n",
    "no_internet": NAMESPACE + "import urllib.request\nurllib.request.urlopen('http://example.invalid')\n",
    "too_many_files": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
    "files = [open('/dev/null') for _ in range(30)]\n",
    "too_many_processes": "import resource, threading\nresource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
    + NOBODY
    + "threading.Thread(target=print).start()\n",
    "port_in_use": "import socket\none = socket.create_server(('', 0))\n"
    "socket.create_server(('', one.getsockname()[1]))\n",
    "output_lost": "import os, sys\nsys.stdout = os.fdopen(os.dup(1), 'w')\nprint('last words')\n"
    "os.close(sys.stdout.fileno())\n",
    "no_terminal": "breakpoint()\n",
    "loss_not_finite": "import json, os\nfile = open(os.environ['AWSDDP_RUN_DIR'] + '/metrics.jsonl', 'w')\n"
    "print(json.dumps({'step': 3, 'loss': float('nan')}), file=file, flush=True)\nassert False\n",
}
# The same with torch, on one rank.
ALONE = {
    "host_oom": "torch.ones(10**14)\n",
    "shm_full": NAMESPACE.replace("import ctypes", "import ctypes, sys")
    + "small(b'/dev/shm')\ndata = torch.utils.data.DataLoader([torch.ones(10**6)] * 4, num_workers=1)\n"
    "list(data)\n",
    "no_gpu": "torch.ones(1).cuda()\n",
    "checkpoint_differs": "torch.nn.Linear(2, 3).load_state_dict(torch.nn.Linear(2, 4).state_dict())\n",
    "checkpoint_corrupt": "torch.save({'a': torch.ones(9999)}, 'c.pt')\nos.truncate('c.pt', 3000)\n"
    "torch.load('c.pt')\n",
    "checkpoint_refused": "import argparse\ntorch.save(argparse.Namespace(x=1), 'c.pt')\n"
    "torch.load('c.pt')\n",
    "no_such_interface": "os.environ['GLOO_SOCKET_IFNAME'] = 'ens3'\ndist.init_process_group('gloo')\n",
    "master_unreachable": "dist.init_process_group('gloo', init_method='tcp://127.0.0.9:1', rank=1, "
    "world_size=2, timeout=timedelta(seconds=2))\n",
    "rendezvous_timeout": "dist.init_process_group('gloo', init_method='env://', world_size=2, rank=0, "
    "timeout=timedelta(seconds=2))\n",
    "loader_died": "class Data(torch.utils.data.Dataset):\n"
    "    def __len__(self): return 1\n"
    "    def __getitem__(self, index): os.kill(os.getpid(), 9)\n"
    "list(torch.utils.data.DataLoader(Data(), num_workers=1))\n",
    "loss_not_finite": "with torch.autograd.detect_anomaly():\n"
    "    x = torch.zeros(1, requires_grad=True)\n    (x.sqrt() * 0).sum().backward()\n",
}
MODEL = """\
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, WIDTH)
    def forward(self, x): return self.a(x) if PART else self.b(self.a(x))
model = torch.nn.parallel.DistributedDataParallel(Model())
for _ in range(STEPS): model(torch.ones(2, 4)).sum().backward()
"""
# And on two ranks of a process group.
TOGETHER = {
    "gloo_timeout": "group = dist.new_group(timeout=timedelta(seconds=1))\n"
    "import time\nif rank == 1: time.sleep(600)\ndist.all_reduce(torch.ones(4), group=group)\n",
    "left_early": "if rank == 1: os._exit(0)\ndist.all_reduce(torch.ones(4))\n",
    "collective_mismatch": "dist.all_reduce(torch.ones(4 if rank else 4000))\ndist.barrier()\n",
    "model_differs": "WIDTH, PART, STEPS = 4 + rank, False, 1\n" + MODEL,
    "unused_parameters": "WIDTH, PART, STEPS = 4, True, 2\n" + MODEL,
    "uneven_batches": "WIDTH, PART, STEPS = 4, False, 3 if rank else 6\n" + MODEL + "os._exit(0)\n",
}
TORCH = """\
import os
from datetime import timedelta
import torch
import torch.distributed as dist
"""
GROUP = TORCH + "dist.init_process_group('gloo', timeout=timedelta(seconds=120))\nrank = dist.get_rank()\n"


def test_each_tested_kind_is_a_row_of_the_causes() -> None:
    kinds = {row.kind for row in (*TABLE, *JOB_TABLE)}
    assert kinds >= PLAIN.keys() | ALONE.keys() | TOGETHER.keys()
    assert len(PLAIN.keys() | ALONE.keys() | TOGETHER.keys()) >= 25


def check_cause(fleet: "Fleet", kind: str, script: str, *, ranks: int) -> None:
    fleet.launch(script, world_size=ranks)
    job = fleet.wait(seconds=200)
    assert job.cause is not None
    assert job.cause.kind == kind, job.cause
    row = next(row for row in (*TABLE, *JOB_TABLE) if row.kind == kind)
    assert (job.cause.retryable, bool(job.cause.next)) == (row.retryable, bool(row.next))


@pytest.mark.skipif(os.geteuid() != 0, reason="some need to mount, or another user")
@pytest.mark.parametrize("kind", draw_cases(list(PLAIN), 4, label="deaths without torch"))
def test_death_without_torch_has_its_cause(make_fleet: "Callable[[int], Fleet]", kind: str) -> None:
    check_cause(make_fleet(1), kind, PLAIN[kind], ranks=1)


@pytest.mark.parametrize("kind", draw_cases(list(ALONE), 2, label="deaths alone"))
def test_death_with_torch_has_its_cause(make_fleet: "Callable[[int], Fleet]", kind: str) -> None:
    check_cause(make_fleet(1), kind, TORCH + ALONE[kind], ranks=1)


@pytest.mark.parametrize("kind", draw_cases(list(TOGETHER), 2, label="deaths together"))
def test_death_in_a_process_group_has_its_cause(make_fleet: "Callable[[int], Fleet]", kind: str) -> None:
    check_cause(make_fleet(1), kind, GROUP + TOGETHER[kind], ranks=2)


CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(not os.access(CGROUP, os.W_OK), reason="needs a memory cgroup (version 1)")
def test_kernel_that_kills_for_memory_is_the_cause(make_fleet: "Callable[[int], Fleet]") -> None:
    group = CGROUP / f"awsddp-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("60M")
        fleet = make_fleet(1)
        job = fleet.run(f"open('{group}/cgroup.procs', 'w').write('0')\nbytearray(200 << 20)\n", world_size=1)
        assert job.cause is not None
        assert (job.cause.kind, job.cause.exit_code) == ("host_oom", -9)
        assert "and its kernel killed process " in job.cause.explanation
    finally:
        group.rmdir()


@pytest.mark.parametrize("late", draw_cases([0, 1], 1, label="two faults"))
def test_first_of_two_faults_is_the_cause(fleet: "Fleet", late: int) -> None:
    """Rank 3 runs out of memory, and ends now or late; rank 0, which waits for it, times out after 2 s."""
    script = GROUP + (
        "group = dist.new_group(timeout=timedelta(seconds=2))\n"
        "import time\n"
        "if rank == 3:\n"
        f"    try: torch.ones(10**14)\n    finally: time.sleep({late})\n"
        "if rank in (1, 2): time.sleep(600)\n"
        "dist.all_reduce(torch.ones(4), group=group)\n"
    )
    fleet.launch(script)
    job = fleet.wait(seconds=200)
    assert job.cause is not None
    assert (job.cause.rank, job.cause.kind) == (3, "host_oom"), job.cause
