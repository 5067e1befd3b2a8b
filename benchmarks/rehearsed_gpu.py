"""Results and errors of torch on the GPU of this machine, compared with a rehearsal of the same GPU.

    python benchmarks/rehearsed_gpu.py [--all]

Each case is an expression that is evaluated on the GPU and, in another process, in a rehearsal. The tensor
`x` is on the GPU, the tensor `h` on the host. Cases with two ranks (on one GPU) and cases that corrupt CUDA's
context run in separate processes. The output shows the cases that differ, and then the numbers of cases with
equal answers, of cases that the GPU and the rehearsal both refuse, and of cases that only one of them
refuses. Exceptions are compared by their class, not by their message.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
FACTS = "AWSDDP_BENCHMARK_GPU"
BEGIN = """\
import copy, io, os, pickle, warnings
import numpy as np
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
warnings.simplefilter("ignore")
cuda, host, layer = torch.cuda, torch.device("cpu"), nn.Linear(4, 4)
def fresh():
    return torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
def layer_of_gpu():
    return copy.deepcopy(layer).cuda()
def saved(value, **named):
    file = io.BytesIO(); torch.save(value, file); file.seek(0)
    return torch.load(file, **named)
def together(*calls, backend="nccl"):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        return [call() for call in calls][-1]
    finally:
        dist.destroy_process_group()
class Worked(torch.utils.data.Dataset):
    __len__ = lambda self: 1
    __getitem__ = lambda self, number: torch.ones(1).cuda().cpu()
"""
CASES = """\
cuda.is_available(), cuda.device_count(), cuda.current_device(), cuda.is_bf16_supported()
cuda.get_device_name().removesuffix(" (rehearsed)"), cuda.get_device_capability()
cuda.get_device_properties(0).total_memory == cuda.mem_get_info()[1]
f"sm_{cuda.get_device_capability()[0]}0" in cuda.get_arch_list()
cuda.get_device_properties(0).multi_processor_count > 0
len(str(cuda.get_device_properties(0).uuid))
cuda.get_device_properties(0).L2_cache_size > 0
cuda.nccl.version() > (2, 10), dist.is_nccl_available(), torch.version.cuda is not None
torch.accelerator.current_accelerator(), torch.accelerator.device_count()
str(torch.device(0)), str(torch.device("cuda")), str(torch.device("cuda", 0))
[str(one.device) for one in (h.cuda(), h.to("cuda"), h.to(0), h.to(device=0), h.to(x), h.cuda(0))]
[str(one.device) for one in (x + 1, x @ x, x.sum(), x.new_ones(2), torch.zeros_like(x), x.cpu())]
[str(one.device) for one in (torch.zeros_like(x, device="cpu"), x.new_ones(2, device="cpu"))]
x.is_cuda, x.is_cpu, x.get_device(), x.type(), h.get_device()
repr(x), repr(x.half()), repr(nn.Parameter(x))
str(x.untyped_storage().device), str(x.detach().device), str(x.numpy(force=True).shape)
x.tolist(), x[0, 0].item(), float(x.sum()), bool(x.any())
str(saved(x).device), str(saved(x, map_location="cpu").device), str(saved(h, map_location="cuda").device)
str(pickle.loads(pickle.dumps(x)).device), str(copy.deepcopy(x).device)
str(torch.Generator("cuda").device), cuda.get_rng_state().numel()
str(torch.randperm(4, device="cuda", generator=torch.Generator("cuda")).device)
str(cuda.current_stream().device), cuda.Stream().query(), cuda.Event().query()
str(layer_of_gpu().weight.device), str(copy.deepcopy(layer).to(0)(x).device)
(lambda one: str(one(x).dtype))(torch.autocast("cuda")(layer_of_gpu()))
str(torch.autocast("cuda", dtype=torch.bfloat16)(layer_of_gpu())(x).dtype)
torch.get_autocast_dtype("cuda"), torch.amp.GradScaler("cuda").get_scale()
str(torch.compile(layer_of_gpu())(x).device)
str(nn.DataParallel(layer_of_gpu())(x).device)
str(F.one_hot(torch.tensor([1], device="cuda")).device), str(torch.arange(3, device=0).device)
str(torch.from_numpy(np.ones(2)).cuda().device), str(torch.as_tensor(np.ones(2), device="cuda").device)
str(cuda.FloatTensor(2).device), x.type("torch.FloatTensor").is_cuda
h.pin_memory().is_pinned(), x.is_pinned(), h.is_pinned()
torch.backends.cudnn.is_available(), torch.backends.cuda.is_built()
torch.equal(x[torch.tensor([0])], x[:1]), x[h > 0].is_cuda, (x + torch.tensor(1.0)).is_cuda
x.copy_(h).is_cuda, h.copy_(x).is_cuda
torch.testing.assert_close(x, x.cpu())
cuda.memory_allocated() > 0, cuda.max_memory_allocated() > 0
x.__cuda_array_interface__["shape"]
torch.from_dlpack(x).is_cuda
x.numpy()
np.asarray(x)
x + h
x * torch.ones(4)
h + x
x.add_(h)
h.add_(x)
x == h
torch.maximum(x, h)
torch.where(x > 0, x, h)
torch.where(h > 0, x, x)
x.masked_fill(h > 0, 1.0)
x.lerp(h, 0.5)
torch.addcmul(x, h, x)
torch.clamp(x, min=h)
torch.equal(x, h)
torch.allclose(x, h)
x @ h
x.matmul(h)
torch.einsum("ij,jk", x, h)
torch.bmm(x[None], h[None])
torch.dot(x[0], h[0])
torch.outer(x[0], h[0])
torch.cat([x, h])
torch.stack([x, h])
h[torch.tensor([0], device="cuda")]
x.index_select(0, torch.tensor([0]))
x.gather(0, torch.zeros(1, 4, dtype=torch.long))
x.scatter_(0, torch.zeros(1, 4, dtype=torch.long), x.clone())
x.index_add_(0, torch.tensor([0]), x[:1].clone())
torch.isin(x, h)
layer(x)
layer_of_gpu()(h)
nn.Conv2d(1, 1, 2)(x[None, None])
nn.Conv2d(1, 1, 2).cuda()(h[None, None])
nn.BatchNorm1d(4)(x)
nn.LayerNorm(4)(x)
nn.LayerNorm(4).cuda()(h)
nn.Embedding(4, 4)(torch.tensor([0], device="cuda"))
nn.Embedding(4, 4).cuda()(torch.tensor([0]))
nn.LSTM(4, 4)(x)
nn.LSTM(4, 4).cuda()(h)
nn.MultiheadAttention(4, 1).cuda()(x, h, h)
F.scaled_dot_product_attention(x[None, None], h[None, None], h[None, None])
F.cross_entropy(x, torch.zeros(4, dtype=torch.long))
F.cross_entropy(h, torch.zeros(4, dtype=torch.long, device="cuda"))
F.cross_entropy(x, x.argmax(1), weight=torch.ones(4))
F.nll_loss(x, torch.zeros(4, dtype=torch.long))
F.mse_loss(x, h)
F.l1_loss(x, h)
F.smooth_l1_loss(x, h)
F.binary_cross_entropy(x, h)
F.binary_cross_entropy_with_logits(x, h)
F.kl_div(x, h)
F.cosine_similarity(x, h)
F.linear(x, h)
F.prelu(x, torch.ones(1))
torch.randn(2, device="cuda", generator=torch.Generator())
torch.randn(2, generator=torch.Generator("cuda"))
torch.empty(2, device="cuda", pin_memory=True)
x.pin_memory()
(lambda one: (one(x).sum().backward(), nn.utils.clip_grad_norm_(one.parameters(), 1.0)))(layer_of_gpu())
(lambda one: (one(h).sum().backward(), one.weight.cuda().grad))(copy.deepcopy(layer))
(lambda one: (setattr(one, "data", one.data.cuda()), one.device))(nn.Parameter(h))
[str(one.device) for one in torch.optim.Adam(layer_of_gpu().parameters()).param_groups[0]["params"]]
torch.autograd.grad((x.requires_grad_() * 2).sum(), x)
(x.requires_grad_() @ x).sum().backward()
h.requires_grad_().cuda().sum().backward()
setattr(x, "grad", h)
torch.utils.checkpoint.checkpoint(layer_of_gpu(), h, use_reentrant=False)
torch.zeros(2, device="cuda:1")
torch.zeros(2, device=1)
h.to("cuda:1")
h.cuda(7)
copy.deepcopy(layer).to(2)
cuda.set_device(1)
cuda.get_device_name(1)
cuda.get_device_properties(1)
cuda.get_device_capability(1)
cuda.device(1).__enter__()
cuda.synchronize(1)
cuda.get_device_name("cpu")
saved(x, map_location="cuda:1")
torch.Generator("cuda:1")
cuda.Stream(1)
cuda.mem_get_info(1)
cuda.can_device_access_peer(0, 1)
torch.zeros(2, device="gpu")
torch.empty(10**13, device="cuda")
cuda.Event(enable_timing=True).elapsed_time(cuda.Event(enable_timing=True))
list(torch.utils.data.DataLoader(Worked(), num_workers=1))
together(lambda: dist.all_reduce(h))
together(lambda: dist.all_reduce(x), lambda: dist.get_backend())
together(lambda: dist.all_reduce(x.to(torch.int16)))
together(lambda: dist.all_reduce(x > 0))
together(lambda: dist.all_reduce(x.to(torch.complex64)))
together(lambda: dist.all_reduce(x.bfloat16(), op=dist.ReduceOp.AVG))
together(lambda: dist.all_reduce(x.int(), op=dist.ReduceOp.BAND))
together(lambda: dist.all_reduce(x.t()[:2]))
together(lambda: dist.all_reduce(x.to_sparse()))
together(lambda: dist.all_gather([torch.ones(2).cuda()], torch.ones(3).cuda()))
together(lambda: dist.all_gather([h], x))
together(lambda: dist.all_gather([x.clone()], x[:, 0]))
together(lambda: dist.all_gather_into_tensor(torch.empty(3).cuda(), torch.ones(2).cuda()))
together(lambda: dist.reduce_scatter_tensor(torch.empty(16).cuda(), x))
together(lambda: dist.broadcast(x, 1))
together(lambda: dist.broadcast(h, 0))
together(lambda: dist.gather(x, [x.clone()], dst=0))
together(lambda: dist.scatter(x, [h], src=0))
together(lambda: dist.send(x, 0))
together(lambda: dist.barrier())
together(lambda: dist.barrier(device_ids=[3]))
together(lambda: dist.monitored_barrier())
together(lambda: dist.all_gather_object([None], {"a": 1}))
together(lambda: dist.broadcast_object_list([1]))
together(lambda: dist.all_reduce(h, group=dist.new_group(backend="gloo")))
together(lambda: dist.all_reduce(h), backend="cpu:gloo,cuda:nccl")
together(lambda: dist.all_reduce(x), backend=None)
together(lambda: dist.all_reduce(x), backend="gloo")
together(lambda: str(next(DDP(layer_of_gpu(), device_ids=[0]).parameters()).device))
together(lambda: str(DDP(layer_of_gpu(), device_ids=[0])(h).device))
together(lambda: str(DDP(layer_of_gpu())(h).device))
together(lambda: DDP(copy.deepcopy(layer)))
together(lambda: DDP(copy.deepcopy(layer), device_ids=[0]))
together(lambda: DDP(layer_of_gpu(), device_ids=[1]))
together(lambda: DDP(layer_of_gpu(), device_ids=[0, 0]))
together(lambda: DDP(nn.Sequential(layer_of_gpu(), copy.deepcopy(layer))))
together(lambda: DDP(nn.BatchNorm1d(4, affine=False).cuda()))
together(lambda: str(nn.SyncBatchNorm(4).cuda()(x).device))
together(lambda: nn.SyncBatchNorm(4)(h))
"""
ALONE = """\
os.environ.update(NCCL_SOCKET_IFNAME="ens3"), together(lambda: dist.all_reduce(x))
F.cross_entropy(x, torch.full((4,), 9, device="cuda")).item()
nn.Embedding(4, 4).cuda()(torch.tensor([9], device="cuda")).sum().item()
x[torch.tensor([9], device="cuda")].sum().item()
F.binary_cross_entropy(x * 2, x).item()
cuda.is_initialized()
(torch.set_default_device("cuda"), str(torch.ones(2).device), str(nn.Linear(2, 2).weight.device))[1:]
(torch.use_deterministic_algorithms(True), torch.ones(4, device="cuda").cumsum(0).is_cuda)[1]
(torch.use_deterministic_algorithms(True), (x @ x).is_cuda)[1]
os.environ.update(CUDA_VISIBLE_DEVICES=""), cuda.is_available(), cuda.device_count()
"""
RANKS = """\
begin(), dist.all_reduce(x)
begin(), dist.barrier()
begin(), dist.all_reduce(h)
begin(), dist.all_gather_object([None, None], 1)
begin(), DDP(layer_of_gpu())
begin("cpu:gloo,cuda:nccl"), dist.all_reduce(h)
"""


def describe(value: Any) -> str:
    """Return a text that describes a value: a tensor's device, type and shape, or a module's class."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(describe, value))}]"
    if hasattr(value, "is_cuda"):
        return f"{value.device} {value.dtype} {tuple(value.shape)}"
    return type(value).__name__ if hasattr(value, "parameters") else repr(value)


def evaluate(case: str, names: dict[str, Any]) -> list[str]:
    """Return "answers" and the value as text, or "refuses: CLASS" and the message of the exception."""
    try:
        if "begin(" not in case and "initialized" not in case:
            names["x"], names["h"] = names["fresh"]()
        names["torch"].manual_seed(0)
        return ["answers", describe(eval(case, names))]
    except Exception as error:
        return [f"refuses: {type(error).__name__}", str(error)]


def evaluate_all(cases: list[str]) -> None:
    """Evaluate the cases in this process and print the results as JSON."""
    if facts := json.loads(os.environ.get(FACTS, "{}")):
        sys.path.insert(0, str(TEMPLATES))
        import rehearse_gpu

        rehearse_gpu.pretend(**{**facts, "capability": tuple(facts["capability"])})
    names: dict[str, Any] = {}
    exec(BEGIN, names)
    names["begin"] = lambda backend="nccl": (
        names["dist"].init_process_group(backend),
        names.update(zip("xh", names["fresh"](), strict=True)),
    )
    with contextlib.redirect_stdout(sys.stderr):
        results = [evaluate(case, names) for case in cases]
    print(json.dumps(results), flush=True)
    os._exit(0)  # a failed collective may wait for other ranks at exit


def start(cases: list[str], facts: dict[str, Any], **environ: str) -> "subprocess.Popen[str]":
    """Start a process that evaluates the cases on the GPU, or in a rehearsal if `facts` is not empty."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", FACTS: json.dumps(facts), **environ}
    command = [sys.executable, __file__, "--cases", json.dumps(cases)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_results(process: "subprocess.Popen[str]", cases: list[str], limit_s: float = 200) -> list[list[str]]:
    """Return the results of the cases."""
    try:
        text, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        text, errors = process.communicate()
    if text:
        return json.loads(text)
    return [["no end", f"exit code {process.returncode}: {errors[-300:]}"]] * len(cases)


def evaluate_cases(facts: dict[str, Any]) -> dict[str, list[str]]:
    """Return {case: result} for every case."""
    cases, alone = CASES.splitlines(), ALONE.splitlines()
    running = [start(cases, facts), *(start([case], facts) for case in alone)]
    results = dict(zip(cases, read_results(running[0], cases), strict=True))
    for case, process in zip(alone, running[1:], strict=True):
        results[case] = read_results(process, [case])[0]
    pairs = {}
    for case in RANKS.splitlines():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        pairs[case] = [start([case], facts, RANK=str(rank), **rendezvous) for rank in range(2)]
    for case, ranks in pairs.items():
        results[f"2 ranks: {case}"] = next(iter([read_results(rank, [case]) for rank in ranks]))[0]
    return results


def main() -> None:
    """Evaluate the cases on the GPU and in a rehearsal; print the differences and the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="show the cases that agree, too")
    parser.add_argument("--rehearsed", action="store_true", help="show the rehearsal only: needs no GPU")
    parser.add_argument("--cases", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cases:
        evaluate_all(args.cases)
    import torch

    if args.rehearsed:
        facts = {"count": 1, "name": "NVIDIA L4", "memory_bytes": 22 << 30, "capability": (8, 9)}
        for case, (outcome, words) in evaluate_cases(facts).items():
            print(f"{case}\n    {outcome}: {words[:200]}")
        return
    if not torch.cuda.is_available():
        print("left out: there is no GPU here")
        return
    gpu = torch.cuda.get_device_properties(0)
    facts = {
        "count": 1,
        "name": gpu.name,
        "memory_bytes": gpu.total_memory,
        "capability": (gpu.major, gpu.minor),
    }
    print(f"torch {torch.__version__}, {gpu.name}")
    real, rehearsed = evaluate_cases({}), evaluate_cases(facts)
    count: Counter[str] = Counter()
    for case, (outcome, words) in real.items():
        pretended, rehearsed_words = rehearsed[case]
        if outcome == pretended and (outcome != "answers" or words == rehearsed_words):
            kind = "the same answer" if outcome == "answers" else "both refuse, by the same class"
        elif outcome == pretended:
            kind = "another answer"
        elif "answers" not in (outcome, pretended):
            kind = "both refuse, by another class"
        else:
            kind = f"only the {'rehearsal' if outcome == 'answers' else 'GPU'} refuses"
        count[kind] += 1
        if args.all or kind not in ("the same answer", "both refuse, by the same class"):
            print(f"\n{kind}: {case}")
            print(f"  GPU       {outcome}: {words[:300]}\n  rehearsal {pretended}: {rehearsed_words[:300]}")
    print()
    for kind, cases in count.most_common():
        print(f"{cases:4}  {kind}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main()
