"""Runs on a node of a rehearsal as `sitecustomize`: answers torch's CUDA calls with the CPU, nccl with gloo.

Knows nothing but the standard library and torch, which it waits for: nothing is imported before the script
does so. AWSDDP_REHEARSE_GPUS says how many devices the node would have; a call for another one is refused as
CUDA would. What is computed is computed on the CPU: tensors say so, and there are no streams, events or
kernels.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import warnings

COUNT = int(os.environ.get("AWSDDP_REHEARSE_GPUS", "0"))
_current = [0]  # the device that the process has set


class _Waits(importlib.abc.MetaPathFinder):
    """Finds torch as everybody else does, and has it patched once it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                _pretend(module)

            spec.loader.exec_module = exec_module
        return spec


def _pretend(torch):
    """Put the answers of a machine with COUNT devices in place of torch's own."""
    _say()
    cuda = torch.cuda
    cuda.is_available = lambda: COUNT > 0
    cuda.device_count = lambda: COUNT
    cuda.current_device = lambda: _current[0]
    cuda.set_device = _set_device
    cuda.get_device_name = lambda device=None: "pretended GPU"
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.is_bf16_supported = lambda *args, **named: True
    for name in (
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "manual_seed",
        "manual_seed_all",
        "init",
    ):
        setattr(cuda, name, lambda *args, **named: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **named: 0)
    _on_the_cpu(torch)
    _distributed(torch)
    warnings.filterwarnings("ignore", message=".*pin.memory.*")


def _say():
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            f"rehearsal: CUDA is answered by the CPU ({COUNT} devices are pretended), nccl by gloo\n"
        )


def _index(device):
    """Return the number of a CUDA device, however written; None where it is none. Refuses one too many."""
    if device is None or isinstance(device, bool):
        return None
    if isinstance(device, int):
        number = device
    else:
        kind, _, text = str(device).partition(":")
        if kind != "cuda":
            return None
        number = int(text) if text else _current[0]
    if not 0 <= number < COUNT:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: cuda:{number}, and this node would have {COUNT} devices"
        )
    return number


def _set_device(device):
    number = _index(device)
    if number is not None:
        _current[0] = number


def _on_the_cpu(torch):
    """Have every call of torch that names a CUDA device work on the CPU."""

    def place(value):
        number = isinstance(value, int) and not isinstance(value, bool)
        word = isinstance(value, str) and value.split(":")[0] == "cuda"
        named = number or word or isinstance(value, torch.device)
        return torch.device("cpu") if named and _index(value) is not None else value

    class OnTheCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            named = dict(kwargs or {})
            if function is torch.Tensor.cuda:
                _index(args[1] if len(args) > 1 else named.get("device"))
                return args[0]
            if "device" in named:
                named["device"] = place(named["device"])
            if function is torch.Tensor.to:
                args = tuple(map(place, args))
            return function(*args, **named)

    OnTheCpu().__enter__()  # for good
    torch.Tensor.pin_memory = lambda self, device=None: self


def _distributed(torch):
    """Have process groups meet over gloo, and DistributedDataParallel take modules that are on the CPU."""
    if not torch.distributed.is_available():
        return
    from torch.nn.parallel import DistributedDataParallel

    def gloo(function):
        @functools.wraps(function)
        def call(*args, **named):
            args = tuple("gloo" if _nccl(value) else value for value in args)
            if _nccl(named.get("backend")) or (function.__name__ == "init_process_group" and not args):
                named["backend"] = "gloo"
            if named.get("device_id") is not None:
                _index(named.pop("device_id"))
            return function(*args, **named)

        return call

    distributed = torch.distributed
    for module in (distributed, distributed.distributed_c10d):
        module.init_process_group = gloo(distributed.distributed_c10d.init_process_group)
        module.new_group = gloo(distributed.distributed_c10d.new_group)
    distributed.is_nccl_available = lambda: True
    begin = DistributedDataParallel.__init__

    @functools.wraps(begin)
    def without_devices(self, module, device_ids=None, output_device=None, *args, **named):
        for device in (*(device_ids or ()), output_device):
            _index(device)
        begin(self, module, None, None, *args, **named)

    DistributedDataParallel.__init__ = without_devices


def _nccl(value):
    return isinstance(value, str) and "nccl" in value.lower()


if COUNT:
    sys.meta_path.insert(0, _Waits())
