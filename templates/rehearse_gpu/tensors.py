"""CPU tensors that record the GPU that they would be on.

The GPU is an attribute of a tensor's storage, so that views, parameters and tensors saved by autograd share
it. A dispatch mode sets the GPU of an operation's results; autograd enters the mode in a backward pass, too.
The methods of Tensor that read or change the device are replaced; this applies to all threads.
"""

import functools
import re
import threading

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode

from rehearse_gpu.devices import check_gpu, current_device, gpu_index

GPU_ATTRIBUTE = "_rehearsed_on"
"""The attribute of a storage: its GPU's number, or None if Python created the storage on the host."""
Tensor = torch.Tensor
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_functorch = torch._C._functorch


def _storage(tensor):
    """Return the object with the GPU attribute: the tensor's storage, or the tensor if it has no storage."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return tensor


def gpu_of(tensor):
    """Return the number of the GPU that a tensor would be on, or None for the CPU."""
    return getattr(_storage(tensor), GPU_ATTRIBUTE, None)


def tensors_with_gpus(values):
    """Return (tensor, GPU) pairs for the tensors in `values` and in lists in `values`."""
    pairs = []
    for value in values:
        if isinstance(value, Tensor):
            pairs.append((value, gpu_of(value)))
        elif isinstance(value, (list, tuple)):
            pairs += [(item, gpu_of(item)) for item in value if isinstance(item, Tensor)]
    return pairs


def set_gpu(tensor, gpu):
    """Set the GPU for a tensor and all tensors that share its storage, and return the tensor."""
    setattr(_storage(tensor), GPU_ATTRIBUTE, gpu)
    return tensor


def set_on_host(tensor):
    """Mark a tensor as created on the host unless its storage has a GPU, and return the tensor."""
    storage = _storage(tensor)
    if not hasattr(storage, GPU_ATTRIBUTE):
        setattr(storage, GPU_ATTRIBUTE, None)
    return tensor


class _Move(torch.autograd.Function):
    """Copies a tensor to another device, and moves the copy's gradient back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor, gpu):
        return set_gpu(tensor.clone(), gpu)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.gpu = gpu_of(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        return _move(gradient, ctx.gpu), None


def _move(tensor, gpu):
    """Return the tensor if it is on `gpu`, or else a copy on `gpu`."""
    return tensor if gpu_of(tensor) == gpu else _Move.apply(tensor, gpu)


# The following functions replace Tensor's methods. Each takes the original method and the call's arguments.


def _to(method, tensor, *args, **kwargs):
    """Replace Tensor.to, which takes a device, a dtype, another tensor, or several of these."""
    requested = kwargs.get("other", kwargs.get("device", args[0] if args else None))
    target = gpu_of(tensor)
    if isinstance(requested, Tensor):
        target = gpu_of(requested)
    elif isinstance(requested, (str, int, torch.device)) and not isinstance(requested, bool):
        target = gpu_index(requested)
        if target is not None and "device" in kwargs:
            kwargs["device"] = "cpu"
        elif target is not None:
            args = ("cpu", *args[1:])
    return _move(method(tensor, *args, **kwargs), target)


def _type(method, tensor, kind=None, *args, **kwargs):
    """Replace Tensor.type, which returns the name of a tensor's type, or converts the tensor to a type.

    The type `kind` is a name, a class or a dtype.
    """
    if kind is None:
        name = method(tensor)
        return name if gpu_of(tensor) is None else name.replace("torch.", "torch.cuda.")
    if isinstance(kind, torch.dtype):
        return method(tensor, kind)
    name = re.search(r"torch\.(cuda\.)?(\w+)", str(kind))
    return _move(method(tensor, f"torch.{name[2]}"), current_device() if name[1] else None)


def _cuda(method, tensor, device=None, *args, **kwargs):
    return _move(tensor, gpu_index("cuda" if device is None else device))


def _numpy(method, tensor, *args, **kwargs):
    if gpu_of(tensor) is not None and not kwargs.get("force"):
        raise TypeError(
            f"can't convert cuda:{gpu_of(tensor)} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )
    return method(tensor, *args, **kwargs)


def _pin_memory(method, tensor, *args, **kwargs):
    if gpu_of(tensor) is not None:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    return tensor


def _grad(get, tensor):
    """Return the gradient with its GPU, because DistributedDataParallel may create it without a GPU."""
    gradient, gpu = get(tensor), gpu_of(tensor)
    return gradient if gradient is None or gpu is None else set_gpu(gradient, gpu)


def _get_device(method, tensor):
    return method(tensor) if gpu_of(tensor) is None else gpu_of(tensor)


_METHODS = {
    "get_device": _get_device,
    "cuda": _cuda,
    "cpu": lambda method, tensor, *args, **kwargs: _move(tensor, None),
    "to": _to,
    "type": _type,
    "type_as": lambda method, tensor, other: _move(method(tensor, other), gpu_of(other)),
    "numpy": _numpy,
    "pin_memory": _pin_memory,
    "record_stream": lambda method, tensor, stream: None,
}
_PROPERTIES = {
    "device": lambda get, tensor: (
        get(tensor) if gpu_of(tensor) is None else torch.device("cuda", gpu_of(tensor))
    ),
    "is_cuda": lambda get, tensor: gpu_of(tensor) is not None or get(tensor),
    "is_cpu": lambda get, tensor: gpu_of(tensor) is None and get(tensor),
    "grad": _grad,
}


def _factory(function, default, *, host):
    """Return a replacement for a function that creates a tensor on a `device`, by default on the host."""
    finish = {"tensor": set_gpu, "new_tensor": set_gpu, "as_tensor": _move, "asarray": _move}.get(
        function.__name__
    )

    @functools.wraps(function)
    def create(*args, device=None, **kwargs):
        device = default(args) if device is None else device
        if device is None:
            tensor = function(*args, **kwargs)
            is_copy = isinstance(next(iter(args), None), Tensor)
            return set_on_host(tensor) if host and not is_copy else tensor
        gpu = gpu_index(device)
        if finish:  # these functions move their result internally
            return finish(function(*args, device=device if gpu is None else "cpu", **kwargs), gpu)
        if gpu is None:  # set here, because the mode also sees tensors that C++ creates on "cpu"
            return set_gpu(function(*args, device=device, **kwargs), None)
        return function(*args, device=torch.device("cuda", gpu), **kwargs)

    return create


_aten = torch.ops.aten
_COPIES = {_aten.copy_, _aten._foreach_copy_}  # operations that copy between devices
# Operations that raise an error for tensors on several devices, unless the tensors are scalars.
_STRICT = {
    *(_aten.addmm, _aten.mm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.cat, _aten.stack),
    *(_aten.linear, _aten.convolution, _aten.embedding, _aten.nll_loss_forward, _aten.nll_loss2d_forward),
    *(_aten.mse_loss, _aten.binary_cross_entropy, _aten.binary_cross_entropy_with_logits),
}
# Operations that C++ code may call with a tensor that it created without a GPU. C++ code may also call all
# pointwise operations with such a tensor. Some of these names do not exist in all releases of torch.
_LENIENT = {
    getattr(_aten, name, None)
    for name in (
        *("dot", "equal", "allclose", "isin", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_"),
        *("index_select", "index_add", "index_add_", "native_batch_norm", "native_layer_norm"),
        *("_prelu_kernel", "mkldnn_rnn_layer", "smooth_l1_loss"),
        "_scaled_dot_product_flash_attention_for_cpu",
    )
}
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_}


class FakeCudaTensorMode(TorchDispatchMode):
    """Runs every operation on the CPU, and sets the GPU of the results."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = dict(kwargs) if kwargs else {}
        if FakeTensor in types or torch._C._get_dispatch_mode(_FAKE):
            return op(*args, **kwargs)  # a fake tensor has its own device
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return NotImplemented  # a subclass dispatches operations on its inner tensors again
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        gpu, is_on_host = gpu_index(kwargs.get("device")), False
        if gpu is not None:
            kwargs["device"] = "cpu"
        else:
            pairs = tensors_with_gpus((*args, *kwargs.values()))
            gpu = next((gpu for _, gpu in pairs if gpu is not None), None)
            if gpu is not None:
                _refuse_mixed_devices(op, pairs)
            is_on_host = gpu is None and any(_is_on_host(*pair) for pair in pairs)
        if gpu is not None:
            check_gpu(gpu)
        result = op(*args, **kwargs)
        if (gpu is not None or is_on_host) and op.overloadpacket not in _COPIES:
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor):
                    set_on_host(tensor) if is_on_host else set_gpu(tensor, gpu)
        return result


def _is_on_host(tensor, gpu):
    """Return True if Python created the tensor on the host."""
    return gpu is None and hasattr(_storage(tensor), GPU_ATTRIBUTE)


def _refuse_mixed_devices(op, pairs):
    """Raise RuntimeError if an operation's tensors are on several devices.

    A tensor on a GPU accepts indices on the host, but a tensor on the host accepts no indices on a GPU.
    """
    kind = op.overloadpacket
    if kind in _INDEXED and _is_on_host(*pairs[0]):
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    if kind in _LENIENT or torch.Tag.pointwise in op.tags:
        pairs = [pair for pair in pairs if pair[1] is not None or _is_on_host(*pair)]
    elif kind not in _STRICT:
        return
    gpus = {gpu for tensor, gpu in pairs if tensor.dim()}
    if len(gpus) > 1 and torch._C._current_graph_task_id() == -1:  # C++ creates gradients without a GPU
        names = sorted(("cpu" if gpu is None else f"cuda:{gpu}" for gpu in gpus), reverse=True)
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{names[0]} and {names[1]}!"
        )


def with_mode(function):
    """Return a function that enters the mode and calls `function`; a mode applies to a single thread."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with FakeCudaTensorMode():
            return function(*args, **kwargs)

    return call


def track_gpus():
    """Make tensors record their GPU, in all threads."""
    FakeCudaTensorMode().__enter__()  # the mode is never left
    threading.Thread._bootstrap_inner = with_mode(threading.Thread._bootstrap_inner)
    for name in ("then", "add_done_callback"):  # gloo's threads call the callbacks of futures
        add = getattr(torch._C.Future, name)
        setattr(torch._C.Future, name, lambda self, call, add=add: add(self, with_mode(call)))
    _patch_tensors()
    _patch_factories()
    _patch_storages()
    _patch_modules()


class _Property(property):
    """One of Tensor's properties, with the attributes that torch._dynamo reads (observed with torch 2.11)."""

    __objclass__ = torch._C.TensorBase

    def __init__(self, name, *accessors):
        super().__init__(*accessors)
        self.__name__ = name


def _patch_tensors():
    def wrap(replacement, method):
        return functools.wraps(method)(lambda *args, **kwargs: replacement(method, *args, **kwargs))

    for name, replacement in _METHODS.items():
        setattr(Tensor, name, wrap(replacement, getattr(Tensor, name)))
    for name, replacement in _PROPERTIES.items():
        original = getattr(Tensor, name)
        get = functools.partial(replacement, original.__get__)
        setattr(Tensor, name, _Property(name, get, original.__set__, original.__delete__))


def _patch_factories():
    constructors = _device._device_constructors()  # what `with torch.device("cuda")` applies to
    scripted = torch.jit._builtins._get_builtin_table()

    def replace(owner, names, default, *, host=False):
        for name in names:
            function = getattr(owner, name)
            replacement = _factory(function, default, host=host)
            scripted[id(replacement)] = scripted.get(id(function))
            setattr(owner, name, replacement)

    def default(args):
        modes = torch.overrides._get_current_function_mode_stack()
        return next((mode.device for mode in modes[::-1] if isinstance(mode, _device.DeviceContext)), None)

    for module in (torch, torch.fft):
        names = [name for name, value in vars(module).items() if callable(value) and value in constructors]
        replace(module, names, default, host=True)
    replace(torch, [name for name in dir(torch) if name.endswith("_like")], lambda args: None)
    replace(Tensor, [name for name in dir(Tensor) if name.startswith("new_")], lambda args: args[0].device)
    wrap = Tensor._make_wrapper_subclass

    def make_wrapper_subclass(*args, device=None, **kwargs):
        gpu = gpu_index(device)
        return set_gpu(wrap(*args, device=device if gpu is None else "cpu", **kwargs), gpu)

    Tensor._make_wrapper_subclass = make_wrapper_subclass
    generator = torch.Generator

    class Generator(generator):
        """A random number generator that works on the CPU."""

        def __new__(cls, device="cpu"):
            return generator.__new__(cls, device if gpu_index(device) is None else "cpu")

    torch.Generator = Generator


def _patch_storages():
    """Keep a storage's GPU when the storage is saved, loaded or copied."""
    storage = torch.UntypedStorage
    copy = storage.clone

    def with_gpu(memory, gpu):
        setattr(memory, GPU_ATTRIBUTE, gpu)
        return memory

    def tag(memory):
        gpu = getattr(memory, GPU_ATTRIBUTE, None)
        return None if gpu is None else f"cuda:{gpu}"

    storage.clone = lambda self: with_gpu(copy(self), getattr(self, GPU_ATTRIBUTE, None))
    storage.cuda = lambda self, device=None, *args, **kwargs: with_gpu(
        copy(self), gpu_index("cuda" if device is None else device)
    )
    torch.serialization.register_package(
        5,
        tag,
        lambda memory, location: (
            None if gpu_index(location) is None else with_gpu(memory, gpu_index(location))
        ),
    )


def _patch_modules():
    """Make Module.to accept a GPU as a plain number, as `device=`, or as a tensor on the GPU."""
    parse = torch._C._nn._parse_to

    def parse_to(*args, **kwargs):
        values = [kwargs.pop(name) for name in ("device", "tensor") if name in kwargs] + list(args)
        if values and isinstance(values[0], Tensor):
            gpu = gpu_of(values[0])
        else:
            gpu = gpu_index(values[0]) if values else None
            values[:1] = values[:1] if gpu is None else ["cpu"]
        device, *others = parse(*values, **kwargs)
        return (device if gpu is None else torch.device("cuda", gpu), *others)

    torch._C._nn._parse_to = parse_to
