"""A script written for GPUs runs unchanged where they are rehearsed; what a true node refuses is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from awsddp.local import rehearsal
from tests.cli.conftest import Lab

ANSWERS = """
import copy, io, json, os, pickle, threading, torch
import torch.distributed as dist
from rehearse_gpu import interfaces
cuda, found = torch.cuda, {}

def refused(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

x = torch.randn(4, 3).cuda()
found["facts"] = [cuda.is_available(), cuda.device_count(), cuda.get_device_name(0), cuda.mem_get_info()[1]]
found["places"] = [str((x + 1).device), str(x.to("cuda:1").device), str(x.cpu().device), x.sum().is_cuda]
host = torch.ones(3)
host.cuda().add_(1)
found["a copy"] = host.tolist()
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).to(torch.device("cuda", 1))
found["model"] = sorted({str(t.device) for t in [*model.parameters(), *copy.deepcopy(model).buffers()]})
found["mixed"] = refused(lambda: model(x))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
copies, begun, ended = cuda.Stream(), cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
begun.record()
with cuda.stream(copies), torch.autocast("cuda", dtype=torch.bfloat16):
    target = torch.zeros(4, dtype=torch.long, device="cuda:1")
    loss = torch.nn.functional.cross_entropy(model(x.cuda(1)), target)
cuda.current_stream().wait_stream(copies)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
ended.record()
cuda.synchronize()
found["a step"] = [str(model[0].weight.grad.device), begun.elapsed_time(ended) > 0]
file = io.BytesIO()
torch.save(model.state_dict(), file)
found["loaded"] = [
    str(torch.load(io.BytesIO(file.getvalue()), map_location=place)["0.weight"].device)
    for place in (None, "cuda:0", torch.device("cuda", 1))
]
with torch.device("cuda"):
    found["default"] = str(torch.nn.Linear(2, 2).weight.device)
thread = threading.Thread(target=lambda: found.update(thread=str(torch.ones(2).cuda().device)))
thread.start()
thread.join()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), pin_memory=True)
found["pinned"] = [str(batch.device) for batch, in loader][:1]
cuda.manual_seed_all(1)

def of(module):
    return sorted({str(one.device) for one in module.parameters()})

layer = lambda: torch.nn.Linear(2, 2)
found["module.to"] = [
    of(layer().to(1)), of(layer().to(device=1)), of(layer().to(torch.device(1))), of(layer().to("cuda:1")),
    of(layer().to(torch.device("cuda", 1))), of(layer().to(device=torch.device(1), dtype=torch.float64)),
    of(layer().to(1, torch.float16, non_blocking=True)), of(layer().to(torch.ones(1).to(1))),
    of(layer().to_empty(device=1)),
]
found["module stays"] = [of(layer().to(1).to(torch.half)), of(layer().to(1).to("cpu")), of(layer().to())]
moved = host.to(1), host.to(device=1), host.to(torch.device(1)), host.to(1, torch.half)
found["tensor.to"] = [str(one.device) for one in moved]
with torch.device(1):
    found["with"] = [str(torch.ones(2).device), of(layer())]
one = torch.device(1)
found["device"] = [str(one), isinstance(one, torch.device), pickle.loads(pickle.dumps(one)) == one]
found["too many to"] = [refused(lambda: layer().to(2)), refused(lambda: host.to(2))]
found["nccl"] = cuda.nccl.version() > (2, 10)
file.seek(0)
other = copy.deepcopy(model)
other.load_state_dict(torch.load(file, map_location={"cuda:0": "cuda:1"}, weights_only=True))
found["mapped"] = of(other)

def together(pattern):
    os.environ["NCCL_SOCKET_IFNAME"] = pattern
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_gather([torch.ones(2).to(1)], torch.ones(3).to(1))
    finally:
        dist.destroy_process_group()

found["a failed collective"] = refused(lambda: together("lo"))
found["no such interface"] = refused(lambda: together("ens3"))
interfaces._with_address = lambda: ["lo", "ens5", "ens50", "docker0"]
patterns = "ens5", "=ens5", "ens3,docker", "=ens,eth0", "^lo,docker", "^=ens5", "=ens5:4000,lo", "^"
found["interfaces"] = {pattern: interfaces.chosen(pattern) for pattern in patterns}
found["too many"] = [refused(lambda: cuda.set_device(2)), refused(lambda: torch.zeros(2, device="cuda:7"))]
found["to numpy"] = refused(x.numpy)
found["no graphs"] = refused(cuda.CUDAGraph)
torch.compile(model)(x.cuda(1))
torch.compile(model)
print(json.dumps(found))
"""

RANK = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group(backend="nccl")
model = DistributedDataParallel(torch.nn.Linear(4, 2).to(local_rank), device_ids=[local_rank])
model(torch.randn(8, 4)).square().mean().backward()  # it moves its input itself
total = torch.ones(1, device=torch.device("cuda", local_rank)) * dist.get_rank()
dist.all_reduce(total, op=dist.ReduceOp.AVG)
print("mean", total.item(), total.device, torch.cuda.device_count())
for call in (lambda: dist.all_reduce(torch.ones(1)), lambda: torch.cuda.set_device(4)):
    try:
        call()
    except RuntimeError as error:
        print("refused:", str(error).splitlines()[0])
dist.barrier(device_ids=[local_rank])
dist.destroy_process_group()
"""

TUTORIAL = """
import os, sys, tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last
        self.net1, self.net2 = nn.Linear(10, 10).to(first), nn.Linear(10, 5).to(last)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x.to(self.first))).to(self.last))

def begin(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    accelerator = torch.accelerator.current_accelerator()
    dist.init_process_group(
        dist.get_default_backend_for_device(accelerator), rank=rank, world_size=world_size
    )

def step(model, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    nn.MSELoss()(model(torch.randn(20, 10)), torch.randn(20, 5).to(rank)).backward()
    optimizer.step()

def basic(rank, world_size):
    begin(rank, world_size)
    model = DDP(Net(rank, rank).to(rank), device_ids=[rank])
    step(model, rank)
    file = tempfile.gettempdir() + f"/model.{os.environ['RANK']}"
    if rank == 0:
        torch.save(model.state_dict(), file)
    dist.barrier()
    where = {"cuda:%d" % 0: "cuda:%d" % rank}
    model.load_state_dict(torch.load(file, map_location=where, weights_only=True))
    step(model, rank)
    dist.barrier()  # else torch's gloo sometimes aborts at the exit
    dist.destroy_process_group()
    print(f"basic {rank}\\n", end="", flush=True)

def model_parallel(rank, world_size):
    begin(rank, world_size)
    step(DDP(Net(rank * 2, rank * 2 + 1)), rank * 2 + 1)
    dist.barrier()
    dist.destroy_process_group()
    print(f"model parallel {rank}\\n", end="", flush=True)

if __name__ == "__main__":
    gpus = torch.accelerator.device_count()
    mp.spawn(basic, args=(gpus,), nprocs=gpus, join=True)
    mp.spawn(model_parallel, args=(gpus // 2,), nprocs=gpus // 2, join=True)
"""

BOTH_ON_ONE = """
import torch, torch.distributed as dist
dist.init_process_group("cpu:gloo,cuda:nccl")
dist.all_reduce(torch.ones(1))
dist.all_reduce(torch.ones(1).cuda())
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a script sees on a node that rehearses two GPUs, and under "said" what it was told."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("node")
    rehearsal.install(folder, "g6.24xlarge")
    text = (folder / "rehearse_gpu.pth").read_text().replace("'count': 4", "'count': 2")
    (folder / "script.py").write_text(text + ANSWERS)
    shown = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    said = [line for line in shown.stderr.splitlines() if line.startswith("rehearsal:")]
    return {**json.loads(shown.stdout), "said": said}


def test_it_says_once_what_is_pretended_and_what_is_left_out(answers: dict[str, Any]) -> None:
    first, second = answers["said"]
    assert first.startswith(
        "rehearsal: 2 x NVIDIA L4 are pretended: CUDA is answered by the CPU, nccl by gloo"
    )
    assert second == "rehearsal: torch.compile is left out: the model runs as it is written"


def test_torch_finds_the_gpus_of_the_instance_type(answers: dict[str, Any]) -> None:
    assert answers["facts"] == [True, 2, "NVIDIA L4 (rehearsed)", int(22.4 * 2**30)]


def test_tensors_remember_where_they_would_be(answers: dict[str, Any]) -> None:
    assert answers["places"] == ["cuda:0", "cuda:1", "cpu", True]
    assert answers["a copy"] == [1, 1, 1]
    assert answers["model"] == ["cuda:1"]
    assert answers["a step"] == ["cuda:1", True]
    assert answers["loaded"] == ["cpu", "cuda:0", "cuda:1"]
    assert (answers["default"], answers["thread"], answers["pinned"]) == ("cuda:0", "cuda:0", ["cpu"])


def test_a_bare_number_is_a_gpu_wherever_torch_takes_one(answers: dict[str, Any]) -> None:
    assert answers["module.to"] == [["cuda:1"]] * 9
    assert answers["module stays"] == [["cuda:1"], ["cpu"], ["cpu"]]
    assert answers["tensor.to"] == ["cuda:1"] * 4
    assert answers["with"] == ["cuda:1", ["cuda:1"]]
    assert answers["device"] == ["cuda:1", True, True]
    assert answers["mapped"] == ["cuda:1"]


def test_a_collective_that_fails_ends_in_torchs_own_error(answers: dict[str, Any]) -> None:
    assert answers["nccl"] is True
    assert answers["a failed collective"].startswith("RuntimeError: ProcessGroupGloo::allgather: invalid")


def test_an_interface_that_the_node_does_not_have_is_refused_in_nccls_words(answers: dict[str, Any]) -> None:
    refused = answers["no such interface"]
    assert refused.startswith("DistBackendError: NCCL error: invalid usage")
    assert "Bootstrap : no socket interface found\nNCCL_SOCKET_IFNAME is ens3; this node has " in refused


def test_interfaces_are_named_by_nccls_rules(answers: dict[str, Any]) -> None:
    assert answers["interfaces"] == {
        "ens5": ["ens5", "ens50"],
        "=ens5": ["ens5"],
        "ens3,docker": ["docker0"],
        "=ens,eth0": [],
        "^lo,docker": ["ens5", "ens50"],
        "^=ens5": ["lo", "ens50", "docker0"],
        "=ens5:4000,lo": ["lo", "ens5"],
        "^": [],
    }


def test_what_a_true_node_refuses_is_refused_in_its_words(answers: dict[str, Any]) -> None:
    assert all(
        "CUDA error: invalid device ordinal" in text for text in answers["too many"] + answers["too many to"]
    )
    assert "this node would have 2 GPUs" in answers["too many"][0]
    assert "Expected all tensors to be on the same device" in answers["mixed"]
    assert "can't convert cuda:0 device type tensor to numpy" in answers["to numpy"]
    assert "needs a true GPU and cannot be pretended" in answers["no graphs"]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster of two nodes with four rehearsed GPUs each."""
    made = Lab(tmp_path_factory.mktemp("lab"))
    made.script("rank.py", RANK)
    try:
        shown = made.run("up", "--local", "--instance-type", "g6.12xlarge", "-y")
        assert shown.returncode == 0, shown.stderr
        assert "node1: ready: torch" in shown.stderr
        assert ", 4 rehearsed GPUs, " in shown.stderr
        yield made
    finally:
        made.close()


@pytest.mark.prove(share=0.5)
def test_a_script_for_nccl_runs_to_its_end_on_two_nodes(rehearsed: Lab) -> None:
    shown = rehearsed.run("train", "rank.py", "--world-size", "4")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert sum("rehearsal: 4 x NVIDIA L4 are pretended" in line for line in lines) == 1
    for rank in range(4):
        mine = [
            line.partition("] ")[2] for line in lines if line.startswith(f"[rank {rank} @ node{rank // 2}]")
        ]
        assert mine[-3:] == [
            f"mean 1.5 cuda:{rank % 2} 4",
            "refused: No backend type associated with device type cpu",
            "refused: CUDA error: invalid device ordinal",
        ]


def test_more_ranks_than_gpus_are_refused_as_on_the_true_node(rehearsed: Lab) -> None:
    shown = rehearsed.run("train", "rank.py", "--world-size", "10")
    assert shown.returncode == 2
    assert "5 ranks per node do not fit: a node has 4 GPUs" in shown.stderr


@pytest.mark.prove(share=0.5)
def test_a_rank_a_gpu_is_the_default_and_the_bundled_program_trains(rehearsed: Lab) -> None:
    result = rehearsed.json("train", "--", "--epochs", "3")
    assert result["state"] == "succeeded"
    assert len(result["ranks"]) == 8
    log = (rehearsed.project / result["home"] / "logs" / "rank5.log").read_text()
    assert "rank 5 of 8 on cuda:1" in log


@pytest.mark.prove(share=0.5)
def test_a_program_in_the_style_of_torchs_tutorial_runs_unchanged(rehearsed: Lab) -> None:
    rehearsed.script("tutorial.py", TUTORIAL)
    shown = rehearsed.run("train", "tutorial.py", "--nproc-per-node", "1")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    for node in range(2):
        said = sorted(line.partition("] ")[2] for line in lines if f"@ node{node}]" in line)
        ranks = [*(f"basic {rank}" for rank in range(4)), *(f"model parallel {rank}" for rank in range(2))]
        assert [line for line in said if not line.startswith("rehearsal:")] == ranks


@pytest.mark.prove(share=0.5)
def test_two_ranks_on_one_gpu_are_refused(rehearsed: Lab) -> None:
    rehearsed.script("both.py", BOTH_ON_ONE)
    shown = rehearsed.run("train", "both.py", "--world-size", "4")
    assert shown.returncode == 1
    assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0" in shown.stdout


@pytest.mark.prove(share=0.5)
def test_hosts_without_root_rehearse_too(lab: Lab) -> None:
    lab.script("rank.py", RANK)
    assert lab.run("local", "start", "--loopback").returncode == 0
    up = lab.run("up", "--local", "--nodes", "1", "--instance-type", "g6.12xlarge", "-y")
    assert up.returncode == 0, up.stderr
    shown = lab.run("train", "rank.py", "--world-size", "2")
    assert "[rank 1 @ node0] mean 0.5 cuda:1 4" in shown.stdout.splitlines()
