"""A script written for GPUs runs unchanged where they are rehearsed; what a true node refuses is refused."""

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

found["DDP of the host"] = refused(lambda: ddp())
found["two devices"] = refused(lambda: ddp(module=torch.nn.Linear(2, 2).cuda(), device_ids=[0, 1]))
found["a strided collective"] = refused(
    lambda: together("lo", lambda: dist.all_reduce(torch.ones(4, 4).cuda().t()[:2]))
)
found["a failed collective"] = refused(lambda: together("lo"))
found["no such interface"] = refused(lambda: together("ens3"))
groups.socket.if_nameindex = lambda: list(enumerate(("lo", "ens5", "ens50", "docker0")))
patterns = "ens5", "=ens5", "ens3,docker", "=ens,eth0", "^lo,docker", "^=ens5", "=ens5:4000,lo", "^"
found["interfaces"] = {pattern: groups.matching_interfaces(pattern) for pattern in patterns}
found["too many"] = [refused(lambda: cuda.set_device(2)), refused(lambda: torch.zeros(2, device="cuda:7"))]
found["to numpy"] = refused(x.numpy)
found["no graphs"] = refused(cuda.CUDAGraph)
there, here = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
row = torch.zeros(1, 4, dtype=torch.long)
found["mixtures"] = [
    refused(lambda: there + here), refused(lambda: here.mul_(there)), refused(lambda: there.gather(0, row)),
    refused(lambda: torch.where(here > 0, there, there)), refused(lambda: torch.nn.LSTM(4, 4)(there)),
    refused(lambda: torch.nn.functional.l1_loss(there, here)),
    refused(lambda: torch.nn.LayerNorm(4).cuda()(here)),
]
found["no mixtures"] = [
    refused(lambda: there + torch.tensor(1.0)), refused(lambda: there[row]), refused(lambda: there[here > 0]),
    refused(lambda: here.copy_(there)), refused(lambda: torch.nn.functional.one_hot(row.cuda(), 4)),
]
found["indices"] = refused(lambda: here[row.cuda()])
found["forced"] = there.numpy(force=True).tolist() == here.tolist()
found["pinned there"] = refused(there.pin_memory)
torch.compile(model)(x.cuda(1))
torch.compile(model)
"""

DEEPER = """
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
found["checkpoint"] = [
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
        here = torch.full((4,), 2.0).to("cuda")
        known = (gradient, *ctx.saved_tensors, gradient * here, torch.zeros_like(gradient), torch.ones(1))
        seen.append([str(one.device) for one in known])
        return gradient * here

class Same(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x)
    backward = staticmethod(lambda ctx, gradient: gradient)

found["function"] = places(lambda: Same.apply(Doubled.apply(x)).sum().backward()), Same.apply(x).is_cuda

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

found["hooks"] = sorted(places(hooked))
with ThreadPoolExecutor(1) as pool:
    found["pool"] = pool.submit(lambda: str((torch.ones(2, device="cuda") * 2).device)).result()
future = torch.futures.Future()
future.then(lambda done: seen.append(str((done.value().cuda() + 1).device)))
seen.clear()
future.set_result(torch.ones(2))
found["future"] = seen[:]

class Counted(torch.utils.data.Dataset):
    __len__ = lambda self: 1
    __getitem__ = lambda self, number: torch.tensor([torch.cuda.device_count(), torch.ones(1).cuda().is_cuda])

found["worker"] = refused(lambda: list(torch.utils.data.DataLoader(Counted(), num_workers=1)))
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
found["momentum"] = str(torch.load(file)["state"][0]["momentum_buffer"].device)
with warnings.catch_warnings(record=True) as warned:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        kept(x).sum().backward()
    found["profiled"] = "aten::addmm" in profiled.key_averages().table(sort_by="cuda_time_total")
    torch.nn.LSTM(4, 4).cuda()
    torch.zeros(2, device="cuda", requires_grad=True).grad
found["warned"] = [str(one.message) for one in warned]
with torch.device("cuda"):
    found["made in C++"] = str(torch.nn.functional.one_hot(torch.tensor([1]), 3).device)
found["on the host"] = [
    str(one.device)
    for one in (
        torch.zeros_like(x, device="cpu"), x.new_ones(2, device="cpu"), torch.as_tensor(x, device="cpu")
    )
]
found["vmap"] = str(torch.vmap(lambda one: one * (2 if one.is_cuda else "no GPU"))(x.detach()).device)

from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
groups.socket.if_nameindex = lambda: [(1, "lo")]
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
hooked = DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[0], gradient_as_bucket_view=True)
hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
hooked(x).sum().backward()
found["hook"] = [str(one.grad.device) for one in hooked.parameters()]
found["state dict"] = sorted(str(one.device) for one in get_model_state_dict(hooked).values())
found["P2POp"] = [dist.P2POp(op, torch.ones(1).cuda(), 0).op.__name__ for op in (dist.isend, dist.irecv)]
flat, batch = torch.empty(8).cuda(), torch.ones(2, 4).cuda()
dist.all_gather_into_tensor(flat, batch)
found["flat"] = flat.sum().item()
dist.destroy_process_group()

class Sharded(FullyShardedDataParallel):
    pass

found["asked"] = [isinstance(kept, Sharded), FullyShardedDataParallel.fsdp_modules(kept)]
found["refused"] = [
    refused(lambda: Sharded(kept)),
    refused(lambda: fully_shard(kept)),
    refused(torch.cuda.memory_snapshot),
]
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
    return torch.cat([one.detach().flatten() for one in model.parameters()])

compressed = lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
plain, optimizer = trained()
for hook, state in (
    (default_hooks.fp16_compress_hook, None),
    (default_hooks.bf16_compress_hook, None),
    (powerSGD_hook.powerSGD_hook, compressed()),
    (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), compressed()),
):
    own = weights(trained(hook, state)[0])
    others = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(others, own)
    assert torch.equal(*others) and torch.allclose(own, weights(plain), atol=0.05), hook

model_state, optimizer_state = get_state_dict(plain, optimizer)
folder = os.environ.get("AWSDDP_RUN_DIR", ".") + "/checkpoint"
before = weights(plain)
dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
for one in plain.parameters():
    one.data.zero_()
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
# accelerate and Lightning, installed here, train on the torch of the node.
FOREIGN = f"""
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
    for inputs, wanted in batches:
        with accelerator.accumulate(model):
            loss = mse_loss(model(inputs), wanted)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
print("accelerate", accelerator.num_processes, accelerator.device, losses[-1] < losses[0])
accelerator.end_training()
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
    image.install_rehearsal(folder, "g6.24xlarge")
    text = (folder / "rehearse_gpu.pth").read_text().replace("'count': 4", "'count': 2")
    (folder / "script.py").write_text(text + ANSWERS + DEEPER)
    shown = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    said = [line for line in shown.stderr.splitlines() if line.startswith("rehearsal:")]
    return {**json.loads(shown.stdout), "said": said, "stderr": shown.stderr}


@pytest.mark.prove
def test_it_says_once_what_is_pretended_and_what_is_left_out(answers: dict[str, Any]) -> None:
    first, second = answers["said"]
    assert first.startswith("rehearsal: 2 x NVIDIA L4 simulated: CUDA runs on the CPU, NCCL on gloo")
    assert second == "rehearsal: torch.compile is left out: the model runs as it is written"


def test_torch_finds_the_gpus_of_the_instance_type(answers: dict[str, Any]) -> None:
    assert answers["facts"] == [True, 2, "NVIDIA L4 (rehearsed)", int(22.4 * 2**30)]


def test_tensors_remember_where_they_would_be(answers: dict[str, Any]) -> None:
    assert answers["places"] == ["cuda:0", "cuda:1", "cpu", True]
    assert answers["a copy"] == [1, 1, 1]
    assert answers["model"] == ["cuda:1"]
    assert answers["a step"] == ["cuda:1", True]
    assert answers["loaded"] == ["cuda:1", "cuda:0", "cuda:1"]
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
    assert answers["forced"]
    assert answers["pinned there"].startswith(
        "RuntimeError: cannot pin 'torch.cuda.FloatTensor' only dense CPU"
    )
    assert answers["two devices"].endswith("device_ids can only be None or contain a single element.")
    assert answers["DDP of the host"] == "RuntimeError: No backend type associated with device type cpu"
    assert answers["a strided collective"] == "ValueError: Tensors must be contiguous"
    assert "needs a true GPU and cannot be simulated" in answers["no graphs"]


def test_a_mixture_of_devices_is_refused_wherever_a_gpu_refuses_it(answers: dict[str, Any]) -> None:
    """As on an H100 (benchmarks/rehearsed_gpu.py)."""
    for text in answers["mixtures"]:
        assert text.startswith("RuntimeError: Expected all tensors to be on the same device"), answers[
            "mixtures"
        ]
    assert answers["no mixtures"] == [None] * 5
    assert "indices should be either on cpu or on the same device" in answers["indices"]


def test_a_checkpointed_block_sees_the_same_gpu_when_it_runs_again(answers: dict[str, Any]) -> None:
    for runs in answers["checkpoint"]:
        assert runs == [[True, "cuda:0", "cpu"]] * 2


def test_a_backward_pass_and_its_hooks_see_the_same_gpu(answers: dict[str, Any]) -> None:
    assert answers["function"] == [[["cuda:0"] * 5 + ["cpu"]], True]
    assert answers["hooks"] == [
        ["bias", "cuda:0"],
        ["host", "cpu"],
        ["host.grad", "cpu"],
        ["module", "cuda:0"],
        ["moved", "cuda:1"],
        ["weight", "cuda:0"],
    ]


def test_other_threads_see_the_same_gpus(answers: dict[str, Any]) -> None:
    assert (answers["pool"], answers["future"]) == ("cuda:0", ["cuda:0"])


def test_a_worker_that_is_forked_cannot_use_a_gpu(answers: dict[str, Any]) -> None:
    """As on an H100 (benchmarks/rehearsed_gpu.py)."""
    assert "Cannot re-initialize CUDA in forked subprocess. To use CUDA" in answers["worker"]


def test_places_hold_for_what_cpp_makes_what_is_saved_and_what_is_asked_for_on_the_host(
    answers: dict[str, Any],
) -> None:
    assert (answers["momentum"], answers["made in C++"], answers["vmap"]) == ("cuda:0", "cuda:0", "cuda:0")
    assert answers["on the host"] == ["cpu"] * 3


def test_the_profiler_and_torch_do_not_warn_of_a_gpu_that_is_missing(answers: dict[str, Any]) -> None:
    assert (answers["profiled"], answers["warned"]) == (True, [])
    assert "Failed to record CUDA event" not in answers["stderr"]


def test_communication_hooks_and_point_to_point_operations_are_those_of_torch(
    answers: dict[str, Any],
) -> None:
    assert answers["hook"] == ["cuda:0", "cuda:0"]
    assert answers["P2POp"] == ["isend", "irecv"]
    assert answers["flat"] == 8


def test_a_class_that_is_not_pretended_can_be_asked_and_not_made(answers: dict[str, Any]) -> None:
    assert answers["asked"] == [False, []]
    assert answers["state dict"] == ["cuda:0", "cuda:0"]
    made, sharded, snapshot = answers["refused"]
    for text, call, line in (
        (made, "torch.distributed.fsdp.FullyShardedDataParallel", "refused(lambda: Sharded(kept)),)."),
        (sharded, "torch.distributed.fsdp.fully_shard", "refused(lambda: fully_shard(kept)),)."),
        (snapshot, "torch._C._cuda_memorySnapshot", "call())."),
    ):
        assert f"rehearsal: {call} needs a true GPU" in text
        assert "script.py, line " in text
        assert f": {line}" in text
        assert text.endswith("-o local.gpus=off")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster of two nodes with four rehearsed GPUs each."""
    made = Lab(tmp_path_factory.mktemp("lab"))
    made.script("rank.py", RANK)
    try:
        assert made.run("local", "start", "--share", SITE).returncode == 0
        shown = made.run("up", "--local", "--instance-type", "g6.12xlarge", "-y")
        assert shown.returncode == 0, shown.stderr
        assert "node1: ready: torch" in shown.stderr
        assert ", 4 rehearsed GPUs, " in shown.stderr
        yield made
    finally:
        made.close()


@pytest.mark.prove
def test_a_script_for_nccl_runs_to_its_end_on_two_nodes(rehearsed: Lab) -> None:
    shown = rehearsed.run("train", "rank.py", "--world-size", "4")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert sum("rehearsal: 4 x NVIDIA L4 simulated" in line for line in lines) == 1
    for rank in range(4):
        mine = [
            line.partition("] ")[2] for line in lines if line.startswith(f"[rank {rank} @ node{rank // 2}]")
        ]
        assert mine[-3:] == [
            f"mean 1.5 cuda:{rank % 2} 4",
            "refused: No backend type associated with device type cpu",
            "refused: CUDA error: invalid device ordinal",
        ]


@pytest.mark.prove
def test_more_ranks_than_gpus_are_refused_as_on_the_true_node(rehearsed: Lab) -> None:
    shown = rehearsed.run("train", "rank.py", "--world-size", "10")
    assert shown.returncode == 2
    assert "5 ranks per node do not fit: a node has 4 GPUs" in shown.stderr


@pytest.mark.prove
def test_a_rank_a_gpu_is_the_default_and_the_bundled_program_trains(rehearsed: Lab) -> None:
    result = rehearsed.json("train", "--", "--epochs", "3")
    assert result["state"] == "succeeded"
    assert len(result["ranks"]) == 8
    log = (rehearsed.project / result["home"] / "logs" / "rank5.log").read_text()
    assert "rank 5 of 8 on cuda:1" in log


@pytest.mark.prove
def test_a_program_in_the_style_of_torchs_tutorial_runs_unchanged(rehearsed: Lab) -> None:
    rehearsed.script("tutorial.py", TUTORIAL)
    shown = rehearsed.run("train", "tutorial.py", "--nproc-per-node", "1")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    for node in range(2):
        said = sorted(line.partition("] ")[2] for line in lines if f"@ node{node}]" in line)
        ranks = [*(f"basic {rank}" for rank in range(4)), *(f"model parallel {rank}" for rank in range(2))]
        assert [line for line in said if not line.startswith("rehearsal:")] == ranks


@pytest.mark.prove
def test_hooks_checkpoints_pairs_and_tensor_parallelism_of_torch_hold_between_ranks(rehearsed: Lab) -> None:
    rehearsed.script("pair.py", PAIR)
    shown = rehearsed.run("train", "pair.py", "--world-size", "2", "--on", "0")
    assert shown.returncode == 0, shown.stdout
    assert sum("all held" in line for line in shown.stdout.splitlines()) == 2


@pytest.mark.prove
def test_accelerate_and_lightning_train_unchanged(rehearsed: Lab) -> None:
    rehearsed.script("foreign.py", FOREIGN)
    shown = rehearsed.run("train", "foreign.py", "--world-size", "2", "--on", "0")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = shown.stdout.splitlines()
    for rank in range(2):
        for library in ("lightning", "accelerate"):
            assert f"[rank {rank} @ node0] {library} 2 cuda:{rank} True" in lines


@pytest.mark.prove
def test_two_ranks_on_one_gpu_are_refused(rehearsed: Lab) -> None:
    rehearsed.script("both.py", BOTH_ON_ONE)
    shown = rehearsed.run("train", "both.py", "--world-size", "4")
    assert shown.returncode == 1
    assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0" in shown.stdout


@pytest.mark.prove
def test_hosts_without_root_rehearse_too(lab: Lab) -> None:
    lab.script("rank.py", RANK)
    assert lab.run("local", "start", "--loopback").returncode == 0
    up = lab.run("up", "--local", "--nodes", "1", "--instance-type", "g6.12xlarge", "-y")
    assert up.returncode == 0, up.stderr
    shown = lab.run("train", "rank.py", "--world-size", "2")
    assert "[rank 1 @ node0] mean 0.5 cuda:1 4" in shown.stdout.splitlines()
