"""Simulate torch's CUDA on the CPU, and NCCL with gloo, on a node in a rehearsal.

A .pth file next to this package calls `pretend`. Uses only the standard library and torch, which is patched
when the script imports it. All computation runs on the CPU. Each tensor created from Python records the GPU
that it would be on. Therefore a script gets the same errors as on a real node, for example for a GPU that the
node does not have, a tensor that was not moved, NCCL with a CPU tensor, or two ranks on one GPU. Calls that
cannot be simulated raise an error.
"""

import importlib.machinery
import os
import sys
import types

GPUS = types.SimpleNamespace(count=0, used=False, forked=False, fault="")
"""The node's identical GPUs. `used`: this process has used a GPU. `forked`: the parent process had used a GPU
before the fork. `fault`: a file that exists once the first GPU has failed."""
ANNOUNCED = "AWSDDP_REHEARSAL_TOLD"  # a rank's child processes inherit this, so that they do not repeat notes
PIP_BUILD_VARIABLES = "PIP_BUILD_TRACKER", "PIP_REQ_TRACKER"
"""pip sets one of these in builds, depending on pip's version. If torch found GPUs, builds would need CUDA's
compiler."""


def pretend(**facts):
    """Make torch find simulated GPUs with this `count`, `name`, `memory_bytes` and `capability` (a pair).

    The first GPU fails once the file `fault` exists.

    Without a count torch finds no GPU. torch is not patched while packages are built.
    """
    GPUS.__dict__.update(facts)
    if GPUS.count and not any(name in os.environ for name in PIP_BUILD_VARIABLES):
        sys.meta_path.insert(0, _PatchingFinder())


class _PatchingFinder:
    """An import finder that patches torch once torch is loaded."""

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


def announce(note, why):
    """Print a note once per job: on rank 0, but not in rank 0's child processes."""
    announced = os.environ.get(ANNOUNCED, "")
    if os.environ.get("RANK", "0") == "0" and note not in announced:
        os.environ[ANNOUNCED] = f"{announced};{note}"
        sys.stderr.write(f"rehearsal: {note}: {why}\n")


def _patch(torch):
    """Replace torch's functions to simulate a node with GPUs."""
    announce(
        f"{GPUS.count} x {GPUS.name} simulated",
        "CUDA runs on the CPU, NCCL on gloo; speed, memory, precision and kernels of GPUs are not tested",
    )
    from rehearse_gpu import devices, groups, tensors

    devices.patch_device()
    devices.patch_cuda(torch.cuda)
    devices.patch_accelerator(torch.accelerator)
    tensors.track_gpus()
    if torch.distributed.is_available():
        groups.patch_nccl(torch.distributed)
        groups.delay_destroy(torch.distributed)
    _skip_gpu_kernels(torch)


def _skip_gpu_kernels(torch):
    """Replace features that need GPU kernels with simple equivalents, and announce the replacement."""
    nn = torch.nn

    def compile_model(model=None, **kwargs):
        announce("torch.compile is left out", "the model runs uncompiled")
        return (lambda decorated: decorated) if model is None else model

    def whole_batch(self, *inputs, **kwargs):
        announce("DataParallel does not split its batch", "its module gets the whole batch")
        return self.module(*inputs, **kwargs)

    def own_batch(self, values):
        announce("SyncBatchNorm does not average over ranks", "each rank uses only its own batch")
        return nn.modules.batchnorm._BatchNorm.forward(self, values)

    torch.compile = compile_model
    nn.Module.compile = lambda self, *args, **kwargs: compile_model(self) and None
    nn.DataParallel.forward = whole_batch
    nn.SyncBatchNorm.forward = own_batch


def _without_fsdp(fsdp):
    from rehearse_gpu.refusals import refuse

    refuse(fsdp, "FullyShardedDataParallel")
    refuse(fsdp, "fully_shard")
