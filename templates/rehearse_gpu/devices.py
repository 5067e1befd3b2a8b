"""torch.cuda and torch.accelerator of a node that would have GPUs."""

import functools
import os
import threading
import time
import types

import torch

from rehearse_gpu import GPUS
from rehearse_gpu.refusals import refusal, refuse

CUDA, NCCL = "13.0", (2, 29, 7)  # what comes with torch 2.13
_here = threading.local()


def visible():
    """The numbers of the GPUs that CUDA_VISIBLE_DEVICES lets this process see: up to one that is none."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = []
    for word in range(GPUS.count) if asked is None else asked.split(","):
        if not str(word).strip().isdigit() or int(word) >= GPUS.count:
            break
        numbers.append(int(word))
    return numbers


def index(device):
    """The number of a GPU, however it is written; None for what is no GPU. Refuses one that is not there."""
    if isinstance(device, int) and not isinstance(device, bool):
        number = device
    elif isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == "cuda":
        text = str(device).partition(":")[2]
        number = int(text) if text else current_device()
    else:
        return None
    there = len(visible())
    if not 0 <= number < there:
        many = "1 GPU" if there == 1 else f"{there} GPUs"
        raise getattr(torch, "AcceleratorError", RuntimeError)(
            f"CUDA error: invalid device ordinal\ncuda:{number} was asked for; this node would have {many}"
        )
    if GPUS.forked:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use "
            "the 'spawn' start method"
        )
    GPUS.used = True
    return number


def current_device():
    """The number of the GPU that this thread has set."""
    return getattr(_here, "device", 0)


def set_device(device):
    """Set it, for this thread."""
    number = index(device)
    if number is not None:
        _here.device = number


class _Kind(type):
    """What stands for torch.device: here a bare number is a GPU's."""

    made = torch.device

    def __call__(cls, *args, **named):
        first = named["device"] if "device" in named else next(iter(args), None)
        if isinstance(first, int) and not isinstance(first, bool):
            return cls.made("cuda", first)
        return cls.made(*args, **named)

    def __instancecheck__(cls, thing):
        return isinstance(thing, cls.made)

    def __eq__(cls, other):  # tables of torch's that were made earlier hold the true one
        return other is cls or other is cls.made

    def __hash__(cls):
        return hash(cls.made)


def answer_device():
    """Have `torch.device(1)` be the second GPU, as where torch finds an accelerator."""
    torch.device = _Kind("device", (), {"__module__": "torch"})


class Device:
    """torch.cuda.device, a context."""

    def __init__(self, device):
        self.idx = index(device)

    def __enter__(self):
        self.before = current_device()
        set_device(self.idx)

    def __exit__(self, *error):
        _here.device = self.before


class Stream:
    """A stream whose work is done when it was given: one, for all, as a context too."""

    cuda_stream = 0

    def __init__(self, device=None, priority=0, **named):
        self.device = torch.device("cuda", _known(device))
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
    """A moment; `elapsed_time` tells the CPU's."""

    def __init__(self, *args, **named):
        self.at = 0.0

    def record(self, stream=None):
        self.at = time.perf_counter()

    def query(self):
        return True

    def elapsed_time(self, later):
        return (later.at - self.at) * 1000

    wait = synchronize = lambda self, *args: None


def _missing(name):
    """What torch.cuda calls in torch._C, where it is not answered here."""
    missing = f"module 'torch._C' has no attribute '{name}'"
    raise AttributeError(refusal(f"torch._C.{name}") if name.startswith("_cuda") else missing)


def _known(device=None):
    return index("cuda" if device is None else device)


def _properties(device=None):
    _known(device)
    major, minor = GPUS.capability
    return types.SimpleNamespace(
        name=f"{GPUS.name} (rehearsed)",
        total_memory=GPUS.memory_bytes,
        major=major,
        minor=minor,
        multi_processor_count=1,
    )


def _answers():
    """What `torch.cuda` says on the node, by name."""
    answers = {
        "is_available": lambda: bool(visible()),
        "is_initialized": lambda: GPUS.used,
        "_is_in_bad_fork": lambda: GPUS.forked,
        "device_count": lambda: len(visible()),
        "current_device": current_device,
        "set_device": set_device,
        "device": Device,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda device=None: (_known(device), GPUS.capability)[1],
        "get_device_properties": _properties,
        "get_arch_list": lambda: [f"sm_{GPUS.capability[0]}{GPUS.capability[1]}"],
        "can_device_access_peer": lambda device, peer: _known(device) != _known(peer),
        "is_bf16_supported": lambda *args, **named: GPUS.capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (_properties(device).total_memory, GPUS.memory_bytes),
        "memory_stats": lambda device=None: {},
        "memory_summary": lambda *args, **named: "rehearsal: no memory of a GPU is used\n",
        "utilization": lambda device=None: 0,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8) for _ in visible()],
        "initial_seed": torch.initial_seed,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: stream or Stream(),
        "current_stream": Stream,
        "default_stream": Stream,
        "_lazy_init": lambda: None,
    }
    nothing = (
        "init synchronize empty_cache ipc_collect manual_seed manual_seed_all seed seed_all set_rng_state"
    )
    nothing += " set_rng_state_all set_stream set_per_process_memory_fraction reset_peak_memory_stats"
    nothing += " reset_max_memory_allocated reset_max_memory_cached reset_accumulated_memory_stats"
    none = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached"
    answers |= {name: lambda *args, **named: None for name in nothing.split()}
    answers |= {name: lambda device=None: 0 for name in f"{none} max_memory_cached".split()}
    return answers


def answer_cuda(cuda):
    """Have `torch.cuda` say what it would on the node; a context of CUDA does not live on in a fork."""
    os.register_at_fork(after_in_child=lambda: GPUS.__dict__.update(forked=GPUS.used))
    answers = _answers()
    cuda.__dict__.update(answers)
    for name in ("CUDAGraph", "graph", "make_graphed_callables"):
        refuse(cuda, name)
    torch._C.__getattr__ = _missing
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, lambda *args, **named: None)
    cuda.nccl.version = lambda: NCCL
    torch.version.cuda = torch.version.cuda or CUDA
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # else it warns that there is none
    profiler, activities = torch.autograd.profiler, torch.profiler.ProfilerActivity
    profiler._supported_activities = lambda: {activities.CPU, activities.CUDA}
    profiler.profile.__init__ = functools.partialmethod(profiler.profile.__init__, use_kineto=True)
    cuda.profiler.start = cuda.profiler.stop = lambda: None
    cuda.random.__dict__.update({name: answers[name] for name in answers if hasattr(cuda.random, name)})


def answer_accelerator(accelerator):
    """Have `torch.accelerator` say the same as `torch.cuda`."""
    cuda = torch.cuda
    accelerator.current_accelerator = lambda check_available=False: (
        torch.device("cuda") if visible() else None
    )
    accelerator.is_available, accelerator.device_count = cuda.is_available, cuda.device_count
    accelerator.current_device_index = accelerator.current_device_idx = current_device
    accelerator.set_device_index = accelerator.set_device_idx = set_device
    accelerator.current_stream, accelerator.synchronize = Stream, cuda.synchronize
