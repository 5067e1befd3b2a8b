"""Tensors that are on the CPU and remember on which GPU they would be.

The memory of a tensor keeps the place, so that views, parameters and what autograd has saved share it. A
dispatch mode gives it to what is computed: autograd takes the mode along into a backward pass. What asks for
a place or moves a tensor is answered by the class, in every thread.
"""

import functools
import re
import threading

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode

from rehearse_gpu.devices import current_device, index

PLACE = "_rehearsed_on"
"""The attribute of a storage: the number of its GPU, or None: Python made it on the host."""
Tensor = torch.Tensor
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_wrapped = torch._C._functorch


def _memory(tensor):
    """What keeps the place of a tensor; of one without a storage, such as a sparse one: itself."""
    while _wrapped.is_functorch_wrapped_tensor(tensor):
        tensor = _wrapped.get_unwrapped(tensor)
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return tensor


def place_of(tensor):
    """The number of the GPU that a tensor would be on; None: it is on the CPU."""
    return getattr(_memory(tensor), PLACE, None)


def places(values):
    """The tensors among these, lists looked into, each with its place."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((value, place_of(value)))
        elif isinstance(value, (list, tuple)):
            found += [(one, place_of(one)) for one in value if isinstance(one, Tensor)]
    return found


def put(tensor, place):
    """The same tensor, from now on at `place`, with all that share its memory."""
    setattr(_memory(tensor), PLACE, place)
    return tensor


def put_on_host(tensor):
    """The same tensor, known to be on the host unless its memory is elsewhere."""
    memory = _memory(tensor)
    if not hasattr(memory, PLACE):
        setattr(memory, PLACE, None)
    return tensor


class _Moved(torch.autograd.Function):
    """A copy at another place; its gradient goes back to where the tensor is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor, place):
        return put(tensor.clone(), place)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.place = place_of(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        return _move(gradient, ctx.place), None


def _move(tensor, place):
    """The tensor at `place`: a copy where it was elsewhere."""
    return tensor if place_of(tensor) == place else _Moved.apply(tensor, place)


# Methods of Tensor that are answered otherwise: each gets the method and its arguments.


def _to(method, tensor, *args, **named):
    """Tensor.to: a device, a dtype, another tensor, or several of these."""
    asked = named.get("other", named.get("device", args[0] if args else None))
    goal = place_of(tensor)
    if isinstance(asked, Tensor):
        goal = place_of(asked)
    elif isinstance(asked, (str, int, torch.device)) and not isinstance(asked, bool):
        goal = index(asked)
        if goal is not None and "device" in named:
            named["device"] = "cpu"
        elif goal is not None:
            args = ("cpu", *args[1:])
    return _move(method(tensor, *args, **named), goal)


def _type(method, tensor, kind=None, *args, **named):
    """Tensor.type: its name, or a conversion to a name, a class or a dtype."""
    if kind is None:
        name = method(tensor)
        return name if place_of(tensor) is None else name.replace("torch.", "torch.cuda.")
    if isinstance(kind, torch.dtype):
        return method(tensor, kind)
    name = re.search(r"torch\.(cuda\.)?(\w+)", str(kind))
    return _move(method(tensor, f"torch.{name[2]}"), current_device() if name[1] else None)


def _cuda(method, tensor, device=None, *args, **named):
    return _move(tensor, index("cuda" if device is None else device))


def _numpy(method, tensor, *args, **named):
    if place_of(tensor) is not None and not named.get("force"):
        raise TypeError(
            f"can't convert cuda:{place_of(tensor)} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )
    return method(tensor, *args, **named)


def _pinned(method, tensor, *args, **named):
    if place_of(tensor) is not None:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    return tensor


def _grad(get, tensor):
    """The gradient, whose memory DistributedDataParallel may have made without a place."""
    found, place = get(tensor), place_of(tensor)
    return found if found is None or place is None else put(found, place)


def _number(method, tensor):
    return method(tensor) if place_of(tensor) is None else place_of(tensor)


_METHODS = {
    "get_device": _number,
    "cuda": _cuda,
    "cpu": lambda method, tensor, *args, **named: _move(tensor, None),
    "to": _to,
    "type": _type,
    "type_as": lambda method, tensor, other: _move(method(tensor, other), place_of(other)),
    "numpy": _numpy,
    "pin_memory": _pinned,
    "record_stream": lambda method, tensor, stream: None,
}
_PROPERTIES = {
    "device": lambda get, tensor: (
        get(tensor) if place_of(tensor) is None else torch.device("cuda", place_of(tensor))
    ),
    "is_cuda": lambda get, tensor: place_of(tensor) is not None or get(tensor),
    "is_cpu": lambda get, tensor: place_of(tensor) is None and get(tensor),
    "grad": _grad,
}


def _factory(function, default, *, host):
    """A function that makes a tensor on a `device`, which may be a GPU's bare number; else on the `host`."""
    finish = {"tensor": put, "new_tensor": put, "as_tensor": _move, "asarray": _move}.get(function.__name__)

    @functools.wraps(function)
    def made(*args, device=None, **named):
        device = default(args) if device is None else device
        if device is None:
            found = function(*args, **named)
            copied = isinstance(next(iter(args), None), Tensor)
            return put_on_host(found) if host and not copied else found
        place = index(device)
        if finish:  # these move what they made unseen
            return finish(function(*args, device=device if place is None else "cpu", **named), place)
        if place is None:  # C++ calls these, too, and means no place by "cpu"
            return put(function(*args, device=device, **named), None)
        return function(*args, device=torch.device("cuda", place), **named)

    return made


_aten = torch.ops.aten
_COPIES = {_aten.copy_, _aten._foreach_copy_}  # between places
# Where no mixture of devices can be meant. A scalar may be anywhere.
_STRICT = {
    *(_aten.addmm, _aten.mm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.cat, _aten.stack),
    *(_aten.linear, _aten.convolution, _aten.embedding, _aten.nll_loss_forward, _aten.nll_loss2d_forward),
    *(_aten.mse_loss, _aten.binary_cross_entropy, _aten.binary_cross_entropy_with_logits),
}
# Where C++ may bring a tensor that it made at no place, as with all that torch calls pointwise; as far as the
# release has it.
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


class _OnTheCpu(TorchDispatchMode):
    """Has every operation that names a GPU work on the CPU, and what it returns remember the GPU."""

    def __torch_dispatch__(self, op, kinds, args=(), kwargs=None):
        named = dict(kwargs) if kwargs else {}
        if FakeTensor in kinds or torch._C._get_dispatch_mode(_FAKE):
            return op(*args, **named)  # these know devices themselves
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in kinds):
            return NotImplemented  # what a tensor of such a kind holds comes here again
        if named.get("pin_memory"):
            named["pin_memory"] = False
        place, host = index(named.get("device")), False
        if place is not None:
            named["device"] = "cpu"
        else:
            given = places((*args, *named.values()))
            place = next((place for _, place in given if place is not None), None)
            if place is not None:
                _refuse_mixture(op, given)
            host = place is None and any(map(_is_of_the_host, given))
        result = op(*args, **named)
        if (place is not None or host) and op.overloadpacket not in _COPIES:
            for one in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(one, Tensor):
                    put_on_host(one) if host else put(one, place)
        return result


def _is_of_the_host(found):
    return found[1] is None and hasattr(_memory(found[0]), PLACE)


def _refuse_mixture(op, given):
    """Refuse tensors on several devices.

    A GPU's tensor takes indices from the host, and not the other way round.
    """
    kind = op.overloadpacket
    if kind in _INDEXED and _is_of_the_host(given[0]):
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    if kind in _LENIENT or torch.Tag.pointwise in op.tags:
        given = [one for one in given if one[1] is not None or _is_of_the_host(one)]
    elif kind not in _STRICT:
        return
    found = {place for tensor, place in given if tensor.dim()}
    if len(found) > 1 and torch._C._current_graph_task_id() == -1:  # C++ makes gradients without a place
        names = sorted(("cpu" if place is None else f"cuda:{place}" for place in found), reverse=True)
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{names[0]} and {names[1]}!"
        )


def in_the_mode(function):
    """The function, for a thread of its own: a mode holds for one."""

    @functools.wraps(function)
    def call(*args, **named):
        with _OnTheCpu():
            return function(*args, **named)

    return call


def keep_places():
    """From now on, in every thread, tensors remember where they would be."""
    _OnTheCpu().__enter__()  # for good
    threading.Thread._bootstrap_inner = in_the_mode(threading.Thread._bootstrap_inner)
    for name in ("then", "add_done_callback"):  # gloo's threads call what was given to these
        take = getattr(torch._C.Future, name)
        setattr(torch._C.Future, name, lambda self, call, take=take: take(self, in_the_mode(call)))
    _answer_tensors()
    _answer_factories()
    _answer_storages()
    _move_modules()


class _Property(property):
    """A property of Tensor with what torch._dynamo reads from torch's own (seen with 2.11)."""

    __objclass__ = torch._C.TensorBase

    def __init__(self, name, *how):
        super().__init__(*how)
        self.__name__ = name


def _answer_tensors():
    def answered(answer, method):
        return functools.wraps(method)(lambda *args, **named: answer(method, *args, **named))

    for name, answer in _METHODS.items():
        setattr(Tensor, name, answered(answer, getattr(Tensor, name)))
    for name, answer in _PROPERTIES.items():
        found = getattr(Tensor, name)
        get = functools.partial(answer, found.__get__)
        setattr(Tensor, name, _Property(name, get, found.__set__, found.__delete__))


def _answer_factories():
    own = _device._device_constructors()  # what `with torch.device("cuda")` holds for
    scripted = torch.jit._builtins._get_builtin_table()

    def answer(owner, names, default, *, host=False):
        for name in names:
            function = getattr(owner, name)
            made = _factory(function, default, host=host)
            scripted[id(made)] = scripted.get(id(function))
            setattr(owner, name, made)

    def default(args):
        modes = torch.overrides._get_current_function_mode_stack()
        return next((mode.device for mode in modes[::-1] if isinstance(mode, _device.DeviceContext)), None)

    for module in (torch, torch.fft):
        names = [name for name, found in vars(module).items() if callable(found) and found in own]
        answer(module, names, default, host=True)
    answer(torch, [name for name in dir(torch) if name.endswith("_like")], lambda args: None)
    answer(Tensor, [name for name in dir(Tensor) if name.startswith("new_")], lambda args: args[0].device)
    wrap = Tensor._make_wrapper_subclass

    def make_wrapper_subclass(*args, device=None, **named):
        place = index(device)
        return put(wrap(*args, device=device if place is None else "cpu", **named), place)

    Tensor._make_wrapper_subclass = make_wrapper_subclass
    generator = torch.Generator

    class Generator(generator):
        """A generator of random numbers, on the CPU."""

        def __new__(cls, device="cpu"):
            return generator.__new__(cls, device if index(device) is None else "cpu")

    torch.Generator = Generator


def _answer_storages():
    """What is saved, loaded and copied is at the same place again."""
    storage = torch.UntypedStorage
    copy = storage.clone

    def at(memory, place):
        setattr(memory, PLACE, place)
        return memory

    def tag(memory):
        place = getattr(memory, PLACE, None)
        return None if place is None else f"cuda:{place}"

    storage.clone = lambda self: at(copy(self), getattr(self, PLACE, None))
    storage.cuda = lambda self, device=None, *args, **named: at(
        copy(self), index("cuda" if device is None else device)
    )
    torch.serialization.register_package(
        5, tag, lambda memory, place: None if index(place) is None else at(memory, index(place))
    )


def _move_modules():
    """Module.to, too, knows a GPU by its bare number, by `device=` and by a tensor that is on it."""
    parse = torch._C._nn._parse_to

    def parse_to(*args, **named):
        asked = [named.pop(name) for name in ("device", "tensor") if name in named] + list(args)
        if asked and isinstance(asked[0], Tensor):
            place = place_of(asked[0])
        else:
            place = index(asked[0]) if asked else None
            asked[:1] = asked[:1] if place is None else ["cpu"]
        device, *others = parse(*asked, **named)
        return (device if place is None else torch.device("cuda", place), *others)

    torch._C._nn._parse_to = parse_to
