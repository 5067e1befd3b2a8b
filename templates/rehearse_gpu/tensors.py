"""Tensors that are on the CPU and remember on which GPU they would be."""

import functools
import re
import threading

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _device, _pytree

from rehearse_gpu.devices import current_device, index

PLACE = "_rehearsed_on"  # the attribute of a tensor that would be on a GPU: its number
KINDS = "Byte", "Char", "Short", "Int", "Long", "Half", "Float", "Double", "Bool", "BFloat16"
Tensor = torch.Tensor


def place_of(tensor):
    """The number of the GPU that a tensor would be on; None: it is on the CPU."""
    return getattr(tensor, PLACE, None)


def places(values):
    """The tensors among these, lists looked into, each with its place."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((value, place_of(value)))
        elif isinstance(value, (list, tuple)):
            found += [(one, place_of(one)) for one in value if isinstance(one, Tensor)]
    return found


def _put(tensor, place):
    if place is None:
        tensor.__dict__.pop(PLACE, None)
    else:
        setattr(tensor, PLACE, place)
    return tensor


def _move(tensor, place, converted=None):
    """The tensor, or what it was converted to, at `place`: as a copy where it was elsewhere."""
    if converted is not None and converted is not tensor:
        return _put(converted, place)
    return tensor if place_of(tensor) == place else _put(tensor.clone(), place)


# Functions of torch that are answered otherwise: each gets the function and its arguments.


def _device_of(function, tensor):
    return function(tensor) if place_of(tensor) is None else torch.device("cuda", place_of(tensor))


def _cuda(function, tensor, device=None, *args, **named):
    return _move(tensor, current_device() if device is None else index(device))


def _to(function, tensor, *args, **named):
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
    return _move(tensor, goal, function(tensor, *args, **named))


def _type(function, tensor, kind=None, *args, **named):
    """Tensor.type: its name, or a conversion to a name, a class or a dtype."""
    if kind is None:
        name = function(tensor)
        return name if place_of(tensor) is None else name.replace("torch.", "torch.cuda.")
    if isinstance(kind, torch.dtype):
        return _move(tensor, place_of(tensor), function(tensor, kind))
    name = re.search(r"torch\.(cuda\.)?(\w+)", str(kind))
    return _move(tensor, current_device() if name[1] else None, function(tensor, f"torch.{name[2]}"))


def _numpy(function, tensor, *args, **named):
    if place_of(tensor) is not None:
        raise TypeError(
            f"can't convert cuda:{place_of(tensor)} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )
    return function(tensor, *args, **named)


def _set_data(function, tensor, value):
    function(tensor, value)
    _put(tensor, place_of(value))


_ANSWERS = {
    Tensor.is_cuda.__get__: lambda function, tensor: place_of(tensor) is not None,
    Tensor.is_cpu.__get__: lambda function, tensor: place_of(tensor) is None and function(tensor),
    Tensor.device.__get__: _device_of,
    Tensor.get_device: lambda function, tensor: -1 if place_of(tensor) is None else place_of(tensor),
    Tensor.data.__set__: _set_data,
    Tensor.cuda: _cuda,
    Tensor.cpu: lambda function, tensor, *args, **named: _move(tensor, None),
    Tensor.to: _to,
    Tensor.type: _type,
    Tensor.type_as: lambda function, tensor, other: _move(tensor, place_of(other), function(tensor, other)),
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.pin_memory: lambda function, tensor, *args: tensor,
}
_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray}  # a list's numbers may lie on any device
# Where no mixture of devices can be meant. A scalar may be anywhere.
_STRICT = {
    *(functional.linear, functional.embedding, functional.conv1d, functional.conv2d, functional.conv3d),
    *(functional.cross_entropy, functional.nll_loss, functional.mse_loss),
    *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits),
    *(torch.matmul, torch.mm, torch.bmm, torch.cat, torch.stack, Tensor.matmul, Tensor.__matmul__),
}


class _OnTheCpu(TorchFunctionMode):
    """Has every call of torch that names a GPU work on the CPU, and what it returns remember the GPU."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        named = dict(kwargs) if kwargs else {}
        if (answer := _ANSWERS.get(function)) is not None:
            return answer(function, *args, **named)
        if named.get("pin_memory"):
            named["pin_memory"] = False
        device = named.get("device")
        if device is None and function in _device._device_constructors():
            device = _device.CURRENT_DEVICE  # of `with torch.device("cuda")`
        given = places((*args, *named.values()))
        if device is None:
            sources = given if function not in _OF_DATA else [one for one in given if one[0] is args[0]]
            place = next((place for _, place in sources if place is not None), None)
            if place is not None and function in _STRICT:
                _on_one_device(given)
            return _remember(function(*args, **named), place, given)
        place = index(device)
        named["device"] = device if place is None else "cpu"
        result = function(*args, **named)
        if args and result is args[0]:  # as_tensor: on the CPU there was nothing to do
            return _move(result, place)
        return _remember(result, place, given)


def _remember(result, place, given):
    """What a function returned, its new tensors at `place`; those that it was given stay where they are."""
    if place is not None:
        known = {id(tensor) for tensor, _ in given}
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, Tensor) and id(one) not in known:
                setattr(one, PLACE, place)
    return result


def _on_one_device(given):
    found = {place for tensor, place in given if tensor.dim()}
    if len(found) > 1 and torch._C._current_graph_task_id() == -1:  # a backward is not seen whole
        names = sorted(("cpu" if place is None else f"cuda:{place}" for place in found), reverse=True)
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{names[0]} and {names[1]}!"
        )


class _Legacy(type):
    """torch.cuda.FloatTensor and the like."""

    def __call__(self, *args):
        return _move(getattr(torch, self.__name__)(*args), current_device())

    def __instancecheck__(self, thing):
        return isinstance(thing, Tensor) and thing.type() == f"torch.cuda.{self.__name__}"


def keep_places():
    """From now on, in every thread, tensors remember where they would be."""
    _OnTheCpu().__enter__()  # for good; a mode holds for one thread
    begin = threading.Thread._bootstrap_inner

    def in_the_mode(self):
        with _OnTheCpu():
            begin(self)

    threading.Thread._bootstrap_inner = in_the_mode
    _keep_in_copies()
    _load_to_places()
    for kind in KINDS:
        setattr(torch.cuda, f"{kind}Tensor", _Legacy(f"{kind}Tensor", (), {"__module__": "torch.cuda"}))
    generator = torch.Generator

    class Generator(generator):
        """A generator of random numbers, on the CPU."""

        def __new__(cls, device="cpu"):
            return generator.__new__(cls, device if index(device) is None else "cpu")

    torch.Generator = Generator
    Tensor.record_stream = lambda self, stream: None
    _move_modules()


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


def _keep_in_copies():
    """A parameter is where its data is; what is saved is a tensor on the CPU."""
    new, state = torch.nn.Parameter.__new__, torch._utils._get_obj_state

    def with_place(cls, data=None, *args, **named):
        return _put(new(cls, data, *args, **named), place_of(data))

    def without_place(thing):
        found = state(thing)
        return {key: found[key] for key in found if key != PLACE} if isinstance(found, dict) else found

    torch.nn.Parameter.__new__ = with_place
    torch._utils._get_obj_state = without_place


def _load_to_places():
    """torch.load finds the GPUs that a file or its reader names."""
    load = torch.load

    @functools.wraps(load)
    def load_to_place(file, map_location=None, *args, **named):
        place = index(map_location) if isinstance(map_location, (str, torch.device)) else None
        found = load(file, map_location, *args, **named)
        return _pytree.tree_map_only(Tensor, lambda one: _put(one, place), found)

    torch.load = load_to_place
    torch.UntypedStorage.cuda = lambda self, *args, **named: self
    torch.serialization.register_package(
        5, lambda storage: None, lambda storage, place: None if index(place) is None else storage
    )
