"""Scripts for GPUs run unchanged on simulated GPUs, and get the errors of a real node."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import pytest

from awsddp.local import image
from tests.support.lab import Lab

ANSWERS = """
import copy, io, json, os, pickle, threading, torch
import torch.distributed as dist
from rehearse_gpu import groups
cuda, answers = torch.cuda, {}

def refused(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

x = torch.randn(4, 3).cuda()
answers["facts"] = [cuda.is_available(), cuda.device_count(), cuda.get_device_name(0), cuda.mem_get_info()[1]]
answers["places"] = [str((x + 1).device), str(x.to("cuda:1").device), str(x.cpu().device), x.sum().is_cuda]
host = torch.ones(3)
host.cuda().add_(1)
answers["a copy"] = host.tolist()
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).to(torch.device("cuda", 1))
answers["model"] = sorted({str(t.device) for t in [*model.parameters(), *copy.deepcopy(model).buffers()]})
answers["mixed"] = refused(lambda: model(x))
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
answers["a step"] = [str(model[0].weight.grad.device), begun.elapsed_time(ended) > 0]
file = io.BytesIO()
torch.save(model.state_dict(), file)
answers["loaded"] = [
    str(torch.load(io.BytesIO(file.getvalue()), map_location=place)["0.weight"].device)
    for place in (None, "cuda:0", torch.device("cuda", 1))
]
with torch.device("cuda"):
    answers["default"] = str(torch.nn.Linear(2, 2).weight.device)
thread = threading.Thread(target=lambda: answers.update(thread=str(torch.ones(2).cuda().device)))
thread.start()
thread.join()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), pin_memory=True)
answers["pinned"] = [str(batch.device) for batch, in loader][:1]
cuda.manual_seed_all(1)

def devices(module):
    return sorted({str(parameter.device) for parameter in module.parameters()})

layer = lambda: torch.nn.Linear(2, 2)
answers["module.to"] = [
    devices(layer().to(1)), devices(layer().to(device=1)), devices(layer().to(torch.device(1))),
    devices(layer().to("cuda:1")), devices(layer().to(torch.device("cuda", 1))),
    devices(layer().to(device=torch.device(1), dtype=torch.float64)),
    devices(layer().to(1, torch.float16, non_blocking=True)), devices(layer().to(torch.ones(1).to(1))),
    devices(layer().to_empty(device=1)),
]
answers["module stays"] = [
    devices(layer().to(1).to(torch.half)), devices(layer().to(1).to("cpu")), devices(layer().to())
]
moved = host.to(1), host.to(device=1), host.to(torch.device(1)), host.to(1, torch.half)
answers["tensor.to"] = [str(tensor.device) for tensor in moved]
with torch.device(1):
    answers["with"] = [str(torch.ones(2).device), devices(layer())]
gpu1 = torch.device(1)
answers["device"] = [str(gpu1), isinstance(gpu1, torch.device), pickle.loads(pickle.dumps(gpu1)) == gpu1]
answers["too many to"] = [refused(lambda: layer().to(2)), refused(lambda: host.to(2))]
answers["nccl"] = cuda.nccl.version() > (2, 10)
file.seek(0)
other = copy.deepcopy(model)
other.load_state_dict(torch.load(file, map_location={"cuda:0": "cuda:1"}, weights_only=True))
answers["mapped"] = devices(other)

def together(pattern, call=lambda: dist.all_gather([torch.ones(2).to(1)], torch.ones(3).to(1))):
    os.environ["NCCL_SOCKET_IFNAME"] = pattern
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        call()
    finally:
        dist.destroy_process_group()

def ddp(**named):
    module = torch.nn.Linear(2, 2)
    together("lo", lambda: torch.nn.parallel.DistributedDataParallel(**{"module": module, **named}))

answers["DDP of the host"] = refused(lambda: ddp())
answers["two devices"] = refused(lambda: ddp(module=torch.nn.Linear(2, 2).cuda(), device_ids=[0, 1]))
answers["a strided collective"] = refused(
    lambda: together("lo", lambda: dist.all_reduce(torch.ones(4, 4).cuda().t()[:2]))
)
answers["a failed collective"] = refused(lambda: together("lo"))
answers["no such interface"] = refused(lambda: together("ens3"))
groups.socket.if_nameindex = lambda: list(enumerate(("lo", "ens5", "ens50", "docker0")))
patterns = "ens5", "=ens5", "ens3,docker", "=ens,eth0", "^lo,docker", "^=ens5", "=ens5:4000,lo", "^"
answers["interfaces"] = {pattern: groups.matching_interfaces(pattern) for pattern in patterns}
answers["too many"] = [refused(lambda: cuda.set_device(2)), refused(lambda: torch.zeros(2, device="cuda:7"))]
answers["to numpy"] = refused(x.numpy)
answers["no graphs"] = refused(cuda.CUDAGraph)
gpu, cpu = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
row = torch.zeros(1, 4, dtype=torch.long)
answers["mixtures"] = [
    refused(lambda: gpu + cpu), refused(lambda: cpu.mul_(gpu)), refused(lambda: gpu.gather(0, row)),
    refused(lambda: torch.where(cpu > 0, gpu, gpu)), refused(lambda: torch.nn.LSTM(4, 4)(gpu)),
    refused(lambda: torch.nn.functional.l1_loss(gpu, cpu)),
    refused(lambda: torch.nn.LayerNorm(4).cuda()(cpu)),
]
answers["no mixtures"] = [
    refused(lambda: gpu + torch.tensor(1.0)), refused(lambda: gpu[row]), refused(lambda: gpu[cpu > 0]),
    refused(lambda: cpu.copy_(gpu)), refused(lambda: torch.nn.functional.one_hot(row.cuda(), 4)),
]
answers["indices"] = refused(lambda: cpu[row.cuda()])
answers["forced"] = gpu.numpy(force=True).tolist() == cpu.tolist()
answers["pinned there"] = refused(gpu.pin_memory)
torch.compile(model)(x.cuda(1))
torch.compile(model)
from rehearse_gpu import GPUS
fault = GPUS.fault
GPUS.fault = __file__
add = lambda number: refused(lambda: torch.ones(2).cuda(number) + 1)
answers["failed"] = [fault, add(0), add(1), refused(cpu.sum)]
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
answers["failed"].append(add(0))
del os.environ["CUDA_VISIBLE_DEVICES"]
GPUS.fault = fault
"""

MORE_ANSWERS = """
import warnings
from concurrent.futures import ThreadPoolExecutor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
seen, kept = [], torch.nn.Linear(4, 4).cuda()

def block(x):
    inside = x + torch.ones(4).cuda() + torch.full((4,), 1.0, device="cuda")
    seen.append([x.is_cuda, str(inside.device), str(torch.ones(2).device)])
    return kept(inside)

def places(run):
    seen.clear()
    run()
    return seen[:]

x = torch.ones(2, 4, device="cuda", requires_grad=True)
answers["checkpoint"] = [
    places(lambda: checkpoint(block, x, use_reentrant=reentrant).sum().backward())
    for reentrant in (False, True)
]

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x * 2)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        two = torch.full((4,), 2.0).to("cuda")
        tensors = (gradient, *ctx.saved_tensors, gradient * two, torch.zeros_like(gradient), torch.ones(1))
        seen.append([str(tensor.device) for tensor in tensors])
        return gradient * two

class Same(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x)
    backward = staticmethod(lambda ctx, gradient: gradient)

answers["function"] = places(lambda: Same.apply(Doubled.apply(x)).sum().backward()), Same.apply(x).is_cuda

def hooked():
    on_host = torch.ones(4, requires_grad=True)
    on_host.register_hook(lambda gradient: seen.append(["host", str(gradient.device)]))
    kept.weight.register_hook(lambda gradient: seen.append(["weight", str(gradient.device)]))
    kept.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(["bias", str(bias.grad.device)]))
    kept.register_full_backward_hook(lambda module, into, out: seen.append(["module", str(out[0].device)]))
    moved = on_host.cuda(1)
    moved.register_hook(lambda gradient: seen.append(["moved", str(gradient.cuda(1).device)]))
    (moved * 2).sum().backward()
    kept(x).sum().backward()
    seen.append(["host.grad", str(on_host.grad.device)])

answers["hooks"] = sorted(places(hooked))
with ThreadPoolExecutor(1) as pool:
    answers["pool"] = pool.submit(lambda: str((torch.ones(2, device="cuda") * 2).device)).result()
future = torch.futures.Future()
future.then(lambda done: seen.append(str((done.value().cuda() + 1).device)))
seen.clear()
future.set_result(torch.ones(2))
answers["future"] = seen[:]

class Counted(torch.utils.data.Dataset):
    __len__ = lambda self: 1
    __getitem__ = lambda self, number: torch.tensor([torch.cuda.device_count(), torch.ones(1).cuda().is_cuda])

answers["worker"] = refused(lambda: list(torch.utils.data.DataLoader(Counted(), num_workers=1)))
steps = torch.optim.SGD(kept.parameters(), 0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
with torch.autocast("cuda", dtype=torch.float16):
    loss = kept(x).square().mean()
scaler.scale(loss).backward()
scaler.unscale_(steps)
torch.nn.utils.clip_grad_norm_(kept.parameters(), 1.0)
scaler.step(steps)
scaler.update()
file = io.BytesIO()
torch.save(steps.state_dict(), file)
file.seek(0)
answers["momentum"] = str(torch.load(file)["state"][0]["momentum_buffer"].device)
with warnings.catch_warnings(record=True) as warned:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        kept(x).sum().backward()
    answers["profiled"] = "aten::addmm" in profiled.key_averages().table(sort_by="cuda_time_total")
    torch.nn.LSTM(4, 4).cuda()
    torch.zeros(2, device="cuda", requires_grad=True).grad
answers["warned"] = [str(warning.message) for warning in warned]
with torch.device("cuda"):
    answers["made in C++"] = str(torch.nn.functional.one_hot(torch.tensor([1]), 3).device)
answers["on the host"] = [
    str(tensor.device)
    for tensor in (
        torch.zeros_like(x, device="cpu"), x.new_ones(2, device="cpu"), torch.as_tensor(x, device="cpu")
    )
]
answers["vmap"] = str(torch.vmap(lambda row: row * (2 if row.is_cuda else "no GPU"))(x.detach()).device)

from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
groups.socket.if_nameindex = lambda: [(1, "lo")]
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
hooked = DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[0], gradient_as_bucket_view=True)
hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
hooked(x).sum().backward()
answers["hook"] = [str(weight.grad.device) for weight in hooked.parameters()]
answers["state dict"] = sorted(str(value.device) for value in get_model_state_dict(hooked).values())
answers["P2POp"] = [dist.P2POp(op, torch.ones(1).cuda(), 0).op.__name__ for op in (dist.isend, dist.irecv)]
flat, batch = torch.empty(8).cuda(), torch.ones(2, 4).cuda()
dist.all_gather_into_tensor(flat, batch)
answers["flat"] = flat.sum().item()
dist.destroy_process_group()

class Sharded(FullyShardedDataParallel):
    pass

answers["asked"] = [isinstance(kept, Sharded), FullyShardedDataParallel.fsdp_modules(kept)]
answers["refused"] = [
    refused(lambda: Sharded(kept)),
    refused(lambda: fully_shard(kept)),
    refused(torch.cuda.memory_snapshot),
]
print(json.dumps(answers))
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
    devices = {"cuda:%d" % 0: "cuda:%d" % rank}
    model.load_state_dict(torch.load(file, map_location=devices, weights_only=True))
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

PAIR = """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")

def trained(hook=None, state=None):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).cuda()
    model = DistributedDataParallel(layers, device_ids=[torch.cuda.current_device()])
    if hook:
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 8), rank + 1.0)).square().mean().backward()
        optimizer.step()
    return model, optimizer

def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])

compressed = lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
plain, optimizer = trained()
for hook, state in (
    (default_hooks.fp16_compress_hook, None),
    (default_hooks.bf16_compress_hook, None),
    (powerSGD_hook.powerSGD_hook, compressed()),
    (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), compressed()),
):
    trained_weights = weights(trained(hook, state)[0])
    others = [torch.empty_like(trained_weights) for _ in range(2)]
    dist.all_gather(others, trained_weights)
    assert torch.equal(*others) and torch.allclose(trained_weights, weights(plain), atol=0.05), hook

model_state, optimizer_state = get_state_dict(plain, optimizer)
folder = os.environ.get("AWSDDP_RUN_DIR", ".") + "/checkpoint"
before = weights(plain)
dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
for weight in plain.parameters():
    weight.data.zero_()
dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
set_state_dict(plain, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
assert torch.equal(before, weights(plain)) and before.is_cuda

out, into = torch.full((2,), rank + 1.0).cuda(), torch.empty(2, device="cuda")
pair = [dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
for work in dist.batch_isend_irecv(pair):
    work.wait()
assert into.tolist() == [2.0 - rank] * 2

plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).cuda()
split = parallelize_module(layers, init_device_mesh("cuda", (2,)), plan)
result = split(torch.ones(2, 4).cuda())
result.sum().backward()
assert result.is_cuda and split[0].weight.grad.to_local().is_cuda
print("all held")
dist.barrier()
dist.destroy_process_group()
"""

SITE = sysconfig.get_path("purelib")
# accelerate and Lightning of this machine train with the torch of the node.
LIBRARIES = f"""
import sys
sys.path.append({SITE!r})
import lightning, torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss

def data():
    pairs = torch.utils.data.TensorDataset(torch.eye(16), torch.ones(16, 1))
    return torch.utils.data.DataLoader(pairs, batch_size=4)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, _):
        loss = mse_loss(self.layer(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

module = Module()
trainer = lightning.Trainer(
    accelerator="gpu", devices=2, strategy="ddp", precision="16-mixed", max_epochs=2, logger=False,
    enable_progress_bar=False, enable_checkpointing=False, deterministic=True, sync_batchnorm=True,
)
trainer.fit(module, data())
print("lightning", trainer.world_size, trainer.strategy.root_device, module.losses[-1] < module.losses[0])

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
layer = torch.nn.Linear(16, 1)
model, optimizer, batches = accelerator.prepare(layer, torch.optim.AdamW(layer.parameters(), lr=0.1), data())
losses = []
for _ in range(2):
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            loss = mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
print("accelerate", accelerator.num_processes, accelerator.device, losses[-1] < losses[0])
accelerator.end_training()
"""

TWO_ON_ONE_GPU = """
import torch, torch.distributed as dist
dist.init_process_group("cpu:gloo,cuda:nccl")
dist.all_reduce(torch.ones(1))
dist.all_reduce(torch.ones(1).cuda())
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a script gets on a node with two simulated GPUs, and under "messages" what it prints."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("node")
    image.install_rehearsal(folder, "g6.24xlarge")
    text = (folder / "rehearse_gpu.pth").read_text().replace("'count': 4", "'count': 2")
    (folder / "script.py").write_text(text + ANSWERS + MORE_ANSWERS)
    result = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    messages = [line for line in result.stderr.splitlines() if line.startswith("rehearsal:")]
    return {**json.loads(result.stdout), "messages": messages, "stderr": result.stderr}


@pytest.mark.prove
def test_simulation_reports_once_what_it_simulates_and_what_it_leaves_out(answers: dict[str, Any]) -> None:
    first, second = answers["messages"]
    assert first.startswith("rehearsal: 2 x NVIDIA L4 simulated: CUDA runs on the CPU, NCCL on gloo")
    assert second == "rehearsal: torch.compile is left out: the model runs uncompiled"


def test_torch_finds_the_gpus_of_the_instance_type(answers: dict[str, Any]) -> None:
    assert answers["facts"] == [True, 2, "NVIDIA L4 (rehearsed)", int(22.4 * 2**30)]


def test_tensors_keep_their_device(answers: dict[str, Any]) -> None:
    assert answers["places"] == ["cuda:0", "cuda:1", "cpu", True]
    assert answers["a copy"] == [1, 1, 1]
    assert answers["model"] == ["cuda:1"]
    assert answers["a step"] == ["cuda:1", True]
    assert answers["loaded"] == ["cuda:1", "cuda:0", "cuda:1"]
    assert (answers["default"], answers["thread"], answers["pinned"]) == ("cuda:0", "cuda:0", ["cpu"])


def test_number_is_a_gpu_wherever_torch_accepts_one(answers: dict[str, Any]) -> None:
    assert answers["module.to"] == [["cuda:1"]] * 9
    assert answers["module stays"] == [["cuda:1"], ["cpu"], ["cpu"]]
    assert answers["tensor.to"] == ["cuda:1"] * 4
    assert answers["with"] == ["cuda:1", ["cuda:1"]]
    assert answers["device"] == ["cuda:1", True, True]
    assert answers["mapped"] == ["cuda:1"]


def test_only_the_ranks_on_a_failed_gpu_fail(answers: dict[str, Any]) -> None:
    file, first, *others = answers["failed"]
    assert file == f"/{image.KERNEL_LOG}"
    assert first.startswith("AcceleratorError: CUDA error: unspecified launch failure\nGPU 0 of this node")
    assert others == [None, None, None], "another GPU, the host, another GPU that is the process's first"


def test_failed_collective_raises_the_error_of_torch(answers: dict[str, Any]) -> None:
    assert answers["nccl"] is True
    assert answers["a failed collective"].startswith("RuntimeError: ProcessGroupGloo::allgather: invalid")


def test_missing_interface_raises_the_error_of_nccl(answers: dict[str, Any]) -> None:
    refused = answers["no such interface"]
    assert refused.startswith("DistBackendError: NCCL error: invalid usage")
    assert "Bootstrap : no socket interface found\nNCCL_SOCKET_IFNAME is ens3; this node has " in refused


def test_interface_patterns_follow_the_rules_of_nccl(answers: dict[str, Any]) -> None:
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


def test_invalid_calls_raise_the_errors_of_a_real_node(answers: dict[str, Any]) -> None:
    assert all(
        "CUDA error: invalid device ordinal" in text for text in answers["too many"] + answers["too many to"]
    )
    assert "this node would have 2 GPUs" in answers["too many"][0]
    assert "Expected all tensors to be on the same device" in answers["mixed"]
    assert "can't convert cuda:0 device type tensor to numpy" in answers["to numpy"]
    assert answers["forced"]
    assert answers["pinned there"].startswith(
        "RuntimeError: cannot pin 'torch.cuda.FloatTensor' only dense CPU"
    )
    assert answers["two devices"].endswith("device_ids can only be None or contain a single element.")
    assert answers["DDP of the host"] == "RuntimeError: No backend type associated with device type cpu"
    assert answers["a strided collective"] == "ValueError: Tensors must be contiguous"
    assert "needs a real GPU and cannot be simulated" in answers["no graphs"]


def test_mixed_devices_are_refused_as_on_a_gpu(answers: dict[str, Any]) -> None:
    """As on an H100 (benchmarks/rehearsed_gpu.py)."""
    for text in answers["mixtures"]:
        assert text.startswith("RuntimeError: Expected all tensors to be on the same device"), answers[
            "mixtures"
        ]
    assert answers["no mixtures"] == [None] * 5
    assert "indices should be either on cpu or on the same device" in answers["indices"]


def test_checkpointed_block_uses_the_same_gpu_when_it_runs_again(answers: dict[str, Any]) -> None:
    for runs in answers["checkpoint"]:
        assert runs == [[True, "cuda:0", "cpu"]] * 2


def test_backward_pass_and_its_hooks_use_the_same_gpu(answers: dict[str, Any]) -> None:
    assert answers["function"] == [[["cuda:0"] * 5 + ["cpu"]], True]
    assert answers["hooks"] == [
        ["bias", "cuda:0"],
        ["host", "cpu"],
        ["host.grad", "cpu"],
        ["module", "cuda:0"],
        ["moved", "cuda:1"],
        ["weight", "cuda:0"],
    ]


def test_other_threads_use_the_same_gpu(answers: dict[str, Any]) -> None:
    assert (answers["pool"], answers["future"]) == ("cuda:0", ["cuda:0"])


def test_forked_worker_cannot_use_a_gpu(answers: dict[str, Any]) -> None:
    """As on an H100 (benchmarks/rehearsed_gpu.py)."""
    assert "Cannot re-initialize CUDA in forked subprocess. To use CUDA" in answers["worker"]


def test_devices_are_right_for_cpp_functions_saved_state_and_host_tensors(
    answers: dict[str, Any],
) -> None:
    assert (answers["momentum"], answers["made in C++"], answers["vmap"]) == ("cuda:0", "cuda:0", "cuda:0")
    assert answers["on the host"] == ["cpu"] * 3


def test_profiler_and_torch_do_not_warn_of_a_missing_gpu(answers: dict[str, Any]) -> None:
    assert (answers["profiled"], answers["warned"]) == (True, [])
    assert "Failed to record CUDA event" not in answers["stderr"]


def test_communication_hooks_and_point_to_point_operations_work_as_in_torch(
    answers: dict[str, Any],
) -> None:
    assert answers["hook"] == ["cuda:0", "cuda:0"]
    assert answers["P2POp"] == ["isend", "irecv"]
    assert answers["flat"] == 8


def test_unsupported_class_can_be_checked_for_and_not_created(answers: dict[str, Any]) -> None:
    assert answers["asked"] == [False, []]
    assert answers["state dict"] == ["cuda:0", "cuda:0"]
    made, sharded, snapshot = answers["refused"]
    for text, call, line in (
        (made, "torch.distributed.fsdp.FullyShardedDataParallel", "refused(lambda: Sharded(kept)),)."),
        (sharded, "torch.distributed.fsdp.fully_shard", "refused(lambda: fully_shard(kept)),)."),
        (snapshot, "torch._C._cuda_memorySnapshot", "call())."),
    ):
        assert f"rehearsal: {call} needs a real GPU" in text
        assert "script.py, line " in text
        assert f": {line}" in text
        assert text.endswith("-o local.gpus=off")


@pytest.fixture(scope="module")
def gpu_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster of two nodes with four simulated GPUs each."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    lab.script("rank.py", RANK)
    try:
        assert lab.run("local", "start", "--share", SITE).returncode == 0
        result = lab.run("up", "--local", "--instance-type", "g6.12xlarge", "-y")
        assert result.returncode == 0, result.stderr
        assert "node1: ready: torch" in result.stderr
        assert ", 4 rehearsed GPUs, " in result.stderr
        yield lab
    finally:
        lab.close()


@pytest.mark.prove
def test_nccl_script_runs_on_two_nodes(gpu_lab: Lab) -> None:
    result = gpu_lab.run("train", "rank.py", "--world-size", "4")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum("rehearsal: 4 x NVIDIA L4 simulated" in line for line in lines) == 1
    for rank in range(4):
        texts = [
            line.partition("] ")[2] for line in lines if line.startswith(f"[rank {rank} @ node{rank // 2}]")
        ]
        assert texts[-3:] == [
            f"mean 1.5 cuda:{rank % 2} 4",
            "refused: No backend type associated with device type cpu",
            "refused: CUDA error: invalid device ordinal",
        ]


@pytest.mark.prove
def test_more_ranks_than_gpus_are_refused_as_on_a_real_node(gpu_lab: Lab) -> None:
    result = gpu_lab.run("train", "rank.py", "--world-size", "10")
    assert result.returncode == 2
    assert "5 ranks per node do not fit: a node has 4 GPUs" in result.stderr


@pytest.mark.prove
def test_default_is_one_rank_per_gpu_and_the_bundled_program_trains(gpu_lab: Lab) -> None:
    result = gpu_lab.json("train", "--", "--epochs", "3")
    assert result["state"] == "succeeded"
    assert len(result["ranks"]) == 8
    log = (gpu_lab.project / result["home"] / "logs" / "rank5.log").read_text()
    assert "rank 5 of 8 on cuda:1" in log


@pytest.mark.prove
def test_program_like_the_tutorial_of_torch_runs_unchanged(gpu_lab: Lab) -> None:
    gpu_lab.script("tutorial.py", TUTORIAL)
    result = gpu_lab.run("train", "tutorial.py", "--nproc-per-node", "1")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for node in range(2):
        texts = sorted(line.partition("] ")[2] for line in lines if f"@ node{node}]" in line)
        ranks = [*(f"basic {rank}" for rank in range(4)), *(f"model parallel {rank}" for rank in range(2))]
        assert [line for line in texts if not line.startswith("rehearsal:")] == ranks


@pytest.mark.prove
def test_hooks_checkpoints_pairs_and_tensor_parallelism_work_between_ranks(gpu_lab: Lab) -> None:
    gpu_lab.script("pair.py", PAIR)
    result = gpu_lab.run("train", "pair.py", "--world-size", "2", "--on", "0")
    assert result.returncode == 0, result.stdout
    assert sum("all held" in line for line in result.stdout.splitlines()) == 2


@pytest.mark.prove
def test_accelerate_and_lightning_train_unchanged(gpu_lab: Lab) -> None:
    gpu_lab.script("foreign.py", LIBRARIES)
    result = gpu_lab.run("train", "foreign.py", "--world-size", "2", "--on", "0")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    for rank in range(2):
        for library in ("lightning", "accelerate"):
            assert f"[rank {rank} @ node0] {library} 2 cuda:{rank} True" in lines


@pytest.mark.prove
def test_two_ranks_on_one_gpu_are_refused(gpu_lab: Lab) -> None:
    gpu_lab.script("both.py", TWO_ON_ONE_GPU)
    result = gpu_lab.run("train", "both.py", "--world-size", "4")
    assert result.returncode == 1
    assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0" in result.stdout


GPU_LOOP = """
import os, time, torch, torch.distributed as dist
gpu = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(gpu)
dist.init_process_group("nccl")
while True:
    dist.all_reduce(torch.ones(1).cuda() * 2)
    print("step", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.prove
def test_a_gpu_that_fails_is_the_cause_by_its_own_nodes_kernel_log(gpu_lab: Lab) -> None:
    """This is the last test on these nodes: a GPU stays broken until its node reboots."""
    gpu_lab.script("steps.py", GPU_LOOP)
    client = gpu_lab.start("train", "steps.py", "--world-size", "4", "--name", "broken")
    assert client.stdout is not None
    assert any(b"@ node1] step" in line for line in client.stdout)
    added = gpu_lab.run("local", "fault", "add", "node1", "xid")
    assert (added.returncode, "No faults." in added.stdout) == (0, True), "it happens once"
    client.communicate()
    record = json.loads((gpu_lab.project / "runs/broken/job.json").read_text())
    cause, node = record["cause"], record["nodes"][1]
    assert (client.returncode, record["state"]) == (1, "failed")
    assert (cause["kind"], cause["values"]["xid"], cause["retryable"]) == ("xid", "79", True)
    assert (cause["rank"], cause["node"], cause["instance_id"]) == (2, 1, node["instance_id"])
    assert "GPU 0000:00:1e failed (Xid 79 in the kernel's log" in cause["explanation"]


@pytest.mark.prove
def test_rehearsal_works_without_root(lab: Lab) -> None:
    lab.script("rank.py", RANK)
    assert lab.run("local", "start", "--loopback").returncode == 0
    up = lab.run("up", "--local", "--nodes", "1", "--instance-type", "g6.12xlarge", "-y")
    assert up.returncode == 0, up.stderr
    result = lab.run("train", "rank.py", "--world-size", "2")
    assert "[rank 1 @ node0] mean 0.5 cuda:1 4" in result.stdout.splitlines()
