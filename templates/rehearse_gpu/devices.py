"""Simulate torch.cuda and torch.accelerator of a node with GPUs."""

import functools
import os
import threading
import time
import types

import torch

from rehearse_gpu import GPUS
from rehearse_gpu.refusals import refusal_text, refuse

CUDA, NCCL = "13.0", (2, 29, 7)  # the versions in torch 2.13
_thread = threading.local()


def visible_gpus():
    """Return the numbers of the GPUs in CUDA_VISIBLE_DEVICES, up to the first invalid one."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = []
    for word in range(GPUS.count) if setting is None else setting.split(","):
        if not str(word).strip().isdigit() or int(word) >= GPUS.count:
            break
        numbers.append(int(word))
    return numbers


def gpu_index(device):
    """Return the number of the GPU that `device` names, or None for another device.

    Raises RuntimeError if the GPU does not exist, or if this process cannot use GPUs because of a fork.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        number = device
    elif isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == "cuda":
        text = str(device).partition(":")[2]
        number = int(text) if text else current_device()
    else:
        return None
    count = len(visible_gpus())
    if not 0 <= number < count:
        total = "1 GPU" if count == 1 else f"{count} GPUs"
        raise getattr(torch, "AcceleratorError", RuntimeError)(
            f"CUDA error: invalid device ordinal\ncuda:{number} was requested; this node would have {total}"
        )
    if GPUS.forked:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use "
            "the 'spawn' start method"
        )
    GPUS.used = True
    return number


def check_gpu(number):
    """Raise the error of a failed GPU if the GPU `number` has failed.

    For example: https://github.com/pytorch/pytorch/issues/74235
    """
    if GPUS.fault and os.access(GPUS.fault, os.F_OK) and visible_gpus()[number] == 0:
        raise getattr(torch, "AcceleratorError", RuntimeError)(
            "CUDA error: unspecified launch failure\nGPU 0 of this node has failed (local fault add NODE xid)"
        )


def current_device():
    """Return the number of this thread's current GPU."""
    return getattr(_thread, "device", 0)


def set_device(device):
    """Set this thread's current GPU."""
    number = gpu_index(device)
    if number is not None:
        _thread.device = number


class _DeviceType(type):
    """The metaclass of the replacement for torch.device, which interprets a plain number as a GPU."""

    original = torch.device

    def __call__(cls, *args, **kwargs):
        first = kwargs["device"] if "device" in kwargs else next(iter(args), None)
        if isinstance(first, int) and not isinstance(first, bool):
            return cls.original("cuda", first)
        return cls.original(*args, **kwargs)

    def __instancecheck__(cls, thing):
        return isinstance(thing, cls.original)

    def __eq__(cls, other):  # torch's earlier tables contain the original class
        return other is cls or other is cls.original

    def __hash__(cls):
        return hash(cls.original)


def patch_device():
    """Make `torch.device(1)` mean the second GPU, which it means in torch if there is an accelerator."""
    torch.device = _DeviceType("device", (), {"__module__": "torch"})


class Device:
    """Replaces the context manager torch.cuda.device."""

    def __init__(self, device):
        self.idx = gpu_index(device)

    def __enter__(self):
        self.before = current_device()
        set_device(self.idx)

    def __exit__(self, *error):
        _thread.device = self.before


class Stream:
    """A stream whose work is always complete. It is also a context manager."""

    cuda_stream = 0

    def __init__(self, device=None, priority=0, **kwargs):
        self.device = torch.device("cuda", _index_or_current(device))
        self.device_index = self.device.index

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def query(self):
        return True

    def is_capturing(self):
        return False

    def synchronize(self):
        return None

    wait_event = wait_stream = lambda self, other: None

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event


class Event:
    """An event whose `elapsed_time` is measured on the CPU."""

    def __init__(self, *args, **kwargs):
        self.recorded = 0.0

    def record(self, stream=None):
        self.recorded = time.perf_counter()

    def query(self):
        return True

    def elapsed_time(self, later):
        return (later.recorded - self.recorded) * 1000

    wait = synchronize = lambda self, *args: None


def _missing(name):
    """Replace torch._C's __getattr__: raise AttributeError, with refusal_text() for a function of CUDA."""
    message = f"module 'torch._C' has no attribute '{name}'"
    raise AttributeError(refusal_text(f"torch._C.{name}") if name.startswith("_cuda") else message)


def _index_or_current(device=None):
    return gpu_index("cuda" if device is None else device)


def _properties(device=None):
    _index_or_current(device)
    major, minor = GPUS.capability
    return types.SimpleNamespace(
        name=f"{GPUS.name} (rehearsed)",
        total_memory=GPUS.memory_bytes,
        major=major,
        minor=minor,
        multi_processor_count=1,
    )


def _replacements():
    """Return {name: replacement} for functions in torch.cuda."""
    replacements = {
        "is_available": lambda: bool(visible_gpus()),
        "is_initialized": lambda: GPUS.used,
        "_is_in_bad_fork": lambda: GPUS.forked,
        "device_count": lambda: len(visible_gpus()),
        "current_device": current_device,
        "set_device": set_device,
        "device": Device,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda device=None: (_index_or_current(device), GPUS.capability)[1],
        "get_device_properties": _properties,
        "get_arch_list": lambda: [f"sm_{GPUS.capability[0]}{GPUS.capability[1]}"],
        "can_device_access_peer": lambda device, peer: _index_or_current(device) != _index_or_current(peer),
        "is_bf16_supported": lambda *args, **kwargs: GPUS.capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (_properties(device).total_memory, GPUS.memory_bytes),
        "memory_stats": lambda device=None: {},
        "memory_summary": lambda *args, **kwargs: "rehearsal: no memory of a GPU is used\n",
        "utilization": lambda device=None: 0,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8) for _ in visible_gpus()],
        "initial_seed": torch.initial_seed,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: stream or Stream(),
        "current_stream": Stream,
        "default_stream": Stream,
        "_lazy_init": lambda: None,
    }
    no_result = (
        "init synchronize empty_cache ipc_collect manual_seed manual_seed_all seed seed_all set_rng_state"
    )
    no_result += " set_rng_state_all set_stream set_per_process_memory_fraction reset_peak_memory_stats"
    no_result += " reset_max_memory_allocated reset_max_memory_cached reset_accumulated_memory_stats"
    zeros = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached"
    replacements |= {name: lambda *args, **kwargs: None for name in no_result.split()}
    replacements |= {name: lambda device=None: 0 for name in f"{zeros} max_memory_cached".split()}
    return replacements


def patch_cuda(cuda):
    """Replace functions in torch.cuda. As with real CUDA, a forked process cannot use GPUs again."""
    os.register_at_fork(after_in_child=lambda: GPUS.__dict__.update(forked=GPUS.used))
    replacements = _replacements()
    cuda.__dict__.update(replacements)
    for name in ("CUDAGraph", "graph", "make_graphed_callables"):
        refuse(cuda, name)
    torch._C.__getattr__ = _missing
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)
    cuda.nccl.version = lambda: NCCL
    torch.version.cuda = torch.version.cuda or CUDA
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # True would cause a warning
    profiler, activities = torch.autograd.profiler, torch.profiler.ProfilerActivity
    profiler._supported_activities = lambda: {activities.CPU, activities.CUDA}
    profiler.profile.__init__ = functools.partialmethod(profiler.profile.__init__, use_kineto=True)
    cuda.profiler.start = cuda.profiler.stop = lambda: None
    cuda.random.__dict__.update(
        {name: replacements[name] for name in replacements if hasattr(cuda.random, name)}
    )


def patch_accelerator(accelerator):
    """Replace functions in torch.accelerator with those in torch.cuda."""
    cuda = torch.cuda
    accelerator.current_accelerator = lambda check_available=False: (
        torch.device("cuda") if visible_gpus() else None
    )
    accelerator.is_available, accelerator.device_count = cuda.is_available, cuda.device_count
    accelerator.current_device_index = accelerator.current_device_idx = current_device
    accelerator.set_device_index = accelerator.set_device_idx = set_device
    accelerator.current_stream, accelerator.synchronize = Stream, cuda.synchronize
