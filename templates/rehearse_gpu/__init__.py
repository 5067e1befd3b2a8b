"""On a node of a rehearsal: answers torch's CUDA calls with the CPU, and nccl with gloo.

A .pth file beside it calls `pretend`. Knows nothing but the standard library and torch, which it waits
for: nothing is imported before the script does so. All is computed on the CPU. A tensor remembers on which
GPU it would be, as far as Python sees it made, so that what a true node refuses is refused here: a GPU that
it would not have, a tensor that was not moved, nccl for one on the CPU, two ranks on one GPU. What cannot be
pretended says so.
"""

import importlib.machinery
import os
import sys
import types

GPUS = types.SimpleNamespace(count=0, used=False, forked=False)
"""The GPUs of the node that is rehearsed, all alike. Used: by this process; forked: it began after that."""
TOLD = "AWSDDP_REHEARSAL_TOLD"  # set for the processes that a rank starts: they need not say it again
BUILDS = "PIP_BUILD_TRACKER", "PIP_REQ_TRACKER"
"""What pip, by its release, sets while it builds packages: one that finds CUDA looks for its compiler."""


def pretend(**facts):
    """From now on torch finds so many GPUs (`count`), each of this name, memory_bytes and capability (8, 9).

    Without them it finds none. What builds a package sees torch as it is.
    """
    GPUS.__dict__.update(facts)
    if GPUS.count and not any(name in os.environ for name in BUILDS):
        sys.meta_path.insert(0, _Waits())


class _Waits:
    """Finds torch as everybody else does, and has it patched once it is loaded."""

    def find_spec(self, name, path=None, target=None):
        patch = {"torch": _patch, "torch.distributed.fsdp": _without_fsdp}.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if patch else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                patch(module)

            spec.loader.exec_module = exec_module
        return spec


def say(what, why):
    """Tell it once in a job: rank 0 does, and not the processes that it starts."""
    told = os.environ.get(TOLD, "")
    if os.environ.get("RANK", "0") == "0" and what not in told:
        os.environ[TOLD] = f"{told};{what}"
        sys.stderr.write(f"rehearsal: {what}: {why}\n")


def _patch(torch):
    """Put the answers of a node with GPUs in place of torch's own."""
    say(
        f"{GPUS.count} x {GPUS.name} simulated",
        "CUDA runs on the CPU, NCCL on gloo; speed, memory, precision and kernels of GPUs are not tested",
    )
    from rehearse_gpu import devices, groups, tensors

    devices.answer_device()
    devices.answer_cuda(torch.cuda)
    devices.answer_accelerator(torch.accelerator)
    tensors.keep_places()
    if torch.distributed.is_available():
        groups.answer_nccl(torch.distributed)
        groups.end_after_peers(torch.distributed)
    _leave_out(torch)


def _leave_out(torch):
    """Do what needs kernels of a GPU in the simplest way that gives the same, and say so."""
    nn = torch.nn

    def compile(model=None, **named):
        say("torch.compile is left out", "the model runs as it is written")
        return (lambda later: later) if model is None else model

    def whole_batch(self, *inputs, **named):
        say("DataParallel does not split its batch", "its module gets all of it")
        return self.module(*inputs, **named)

    def own_batch(self, values):
        say("SyncBatchNorm does not average over ranks", "each rank takes its own batch")
        return nn.modules.batchnorm._BatchNorm.forward(self, values)

    torch.compile = compile
    nn.Module.compile = lambda self, *args, **named: compile(self) and None
    nn.DataParallel.forward = whole_batch
    nn.SyncBatchNorm.forward = own_batch


def _without_fsdp(fsdp):
    from rehearse_gpu.refusals import refuse

    refuse(fsdp, "FullyShardedDataParallel")
    refuse(fsdp, "fully_shard")
