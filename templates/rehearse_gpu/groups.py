"""Make process groups and DistributedDataParallel work with gloo instead of NCCL."""

import contextlib
import functools
import inspect
import os
import socket
import time
import zlib

import torch

from rehearse_gpu.devices import NCCL, current_device, gpu_index, visible_gpus
from rehearse_gpu.reductions import Reduction, as_bytes, real_type, refuse_type
from rehearse_gpu.tensors import Tensor, gpu_of, set_gpu, tensors_with_gpus

FLAT = "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"
FLAT += "_all_gather_base", "_reduce_scatter_base"


class Groups:
    """Holds the process groups' state: the requested backends, the groups whose ranks have connected, and the
    functions to call after coalesced collectives.
    """

    def __init__(self, distributed):
        self.distributed, self.core = distributed, distributed.distributed_c10d
        self.requested, self.connected, self.pending = {}, set(), {}

    def backends(self, group):
        return self.requested.get(group or self.core._get_default_group(), "")

    def check_cpu_backend(self, group):
        """Raise RuntimeError if a group has only NCCL, which does not support CPU tensors."""
        if self.backends(group) == "nccl":
            raise RuntimeError("No backend type associated with device type cpu")

    def connect(self, gpu, group):
        """Raise the errors that NCCL raises at its first use in a group: a wrong interface, two ranks on one
        GPU."""
        group = group or self.core._get_default_group()
        if "nccl" not in self.backends(group) or group in self.connected:
            return
        self.connected.add(group)
        _check_interface(self.distributed)
        host = f"{socket.gethostname()} {os.environ.get('GROUP_RANK')}"
        own_gpu = torch.tensor([zlib.crc32(host.encode()), visible_gpus()[gpu]])
        gathered = [torch.empty_like(own_gpu) for _ in range(self.core.get_world_size(group))]
        self.core.all_gather(gathered, own_gpu, group)
        gpus = [values.tolist() for values in gathered]
        for rank, rank_gpu in enumerate(gpus):
            if (other := gpus.index(rank_gpu)) != rank:
                raise self.distributed.DistBackendError(
                    f"NCCL error: Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device "
                    f"{rank_gpu[1]}. Call torch.cuda.set_device(local_rank) before anything is moved"
                )


def patch_nccl(distributed):
    """Make process groups use gloo, and DistributedDataParallel accept modules on the CPU."""
    groups = Groups(distributed)
    _patch_constructors(distributed, groups)
    _patch_collectives(distributed, groups)
    _patch_coalescing(distributed, groups)
    _patch_ddp(torch.nn.parallel.DistributedDataParallel, groups)
    _patch_hooks(distributed.GradBucket)


def _patch_constructors(distributed, groups):
    core = groups.core
    init, new = core.init_process_group, core.new_group

    @functools.wraps(init)
    def init_process_group(backend=None, *args, **kwargs):
        gpu_index(kwargs.pop("device_id", None))
        text = str(backend or "cpu:gloo,cuda:nccl").lower()
        init("gloo" if "nccl" in text else backend, *args, **kwargs)
        groups.requested[core._get_default_group()] = text

    @functools.wraps(new)
    def new_group(*args, **kwargs):
        kwargs.pop("device_id", None)
        text = str(kwargs.get("backend") or groups.backends(None)).lower()
        group = new(*args, **{**kwargs, "backend": "gloo" if "nccl" in text else kwargs.get("backend")})
        groups.requested[group] = text
        return group

    for module in (distributed, core):
        module.init_process_group, module.new_group = init_process_group, new_group
        module.is_nccl_available = lambda: True
    distributed.get_backend = lambda group=None: groups.backends(group) or core.get_backend(group)


def _patch_collectives(distributed, groups):
    core = groups.core
    names = "all_reduce broadcast reduce all_gather all_gather_into_tensor gather scatter reduce_scatter"
    names += " reduce_scatter_tensor all_to_all all_to_all_single all_gather_single reduce_scatter_single"
    names += " all_reduce_coalesced all_gather_coalesced _all_gather_base _reduce_scatter_base"
    for (
        name
    ) in f"{names} send recv isend irecv".split():  # changes calls in scripts, but not calls within torch
        if hasattr(core, name):
            setattr(distributed, name, _collective(getattr(core, name), groups))
    coalesced = distributed._broadcast_coalesced

    def broadcast_coalesced(group, tensors, *others):
        """Broadcast once for each GPU, because C++ sees a single device. DistributedDataParallel uses
        this."""
        for gpu in dict.fromkeys(map(gpu_of, tensors)):
            coalesced(group, [tensor for tensor in tensors if gpu_of(tensor) == gpu], *others)

    def barrier(group=None, async_op=False, device_ids=None):
        for device in device_ids or ():
            gpu_index(device)
        if groups.backends(group) == "nccl":
            groups.connect(current_device(), group)
        return core.barrier(group, async_op)

    distributed._broadcast_coalesced = broadcast_coalesced
    core.isend, core.irecv = distributed.isend, distributed.irecv  # batch_isend_irecv checks for these
    distributed.barrier = barrier


def _collective(function, groups):
    name, core, signature = function.__name__, groups.core, inspect.signature(function)

    def flatten(tensor):
        """Return a flat view, because gloo compares shapes and NCCL does not."""
        return tensor.view(-1) if tensor.is_contiguous() else tensor

    def map_tensors(arguments, convert):
        arguments.update(torch.utils._pytree.tree_map_only(Tensor, convert, dict(arguments)))

    def call_as_nccl(bound, group, tensors):
        """Call `function` with NCCL's types and reductions; convert those that gloo does not support."""
        arguments = bound.arguments
        if "op" not in arguments:
            for tensor in tensors:
                refuse_type(real_type(tensor.dtype))
            map_tensors(arguments, as_bytes)
            return function(*bound.args, **bound.kwargs)
        output, dtype = arguments.get("output"), tensors[0].dtype
        if output is None:  # torch passes a complex number as two real ones, except to reduce_scatter
            dtype = real_type(dtype)
        reduction = Reduction(groups.distributed, arguments["op"], dtype, group.size())
        arguments["op"] = reduction.op
        keeps = output is not None or (name == "reduce" and not _is_root(arguments, group, core))
        sent = {
            id(tensor): reduction.result(tensor) if tensor is output else reduction.before(tensor, keeps)
            for tensor in tensors
        }
        map_tensors(arguments, lambda tensor: sent.get(id(tensor), tensor))

        def finish():
            for tensor in tensors if output is None else [output]:
                reduction.after(tensor, sent[id(tensor)])

        if (keeps and output is None) or not reduction.is_later:
            return function(*bound.args, **bound.kwargs)
        work = function(*bound.args, **bound.kwargs)
        if group in groups.pending:
            groups.pending[group].append(finish)
            return work
        if work is not None:
            work.wait()
        finish()
        return work

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)
        bound.apply_defaults()
        group = bound.arguments.get("group") or core._get_default_group()
        if name in FLAT:
            map_tensors(bound.arguments, flatten)
        pairs = tensors_with_gpus(bound.arguments.values())
        if any(gpu is None for _, gpu in pairs):
            groups.check_cpu_backend(group)
        elif pairs and "nccl" in groups.backends(group):
            if not name.endswith(("send", "recv")):
                groups.connect(pairs[0][1], group)
                if not all(_is_dense(tensor) for tensor, _ in pairs):
                    raise ValueError("Tensors must be contiguous")
            return call_as_nccl(bound, group, [tensor for tensor, _ in pairs])
        return function(*bound.args, **bound.kwargs)

    return call


def _is_root(arguments, group, core):
    """Return True if this rank receives a reduce's result."""
    if arguments.get("group_dst") is not None:
        return arguments["group_dst"] == group.rank()
    return arguments["dst"] == core.get_rank()


def _patch_coalescing(distributed, groups):
    """Convert coalesced collectives' results after all of these collectives have ended."""
    core = groups.core
    original = core._coalescing_manager

    @contextlib.contextmanager
    def coalescing_manager(group=None, device=None, *others, **kwargs):
        group = group or core._get_default_group()
        pending = groups.pending[group] = []
        try:
            with original(
                group, None if "nccl" in groups.backends(group) else device, *others, **kwargs
            ) as begun:
                yield begun
            if pending:
                begun.wait()
        finally:
            del groups.pending[group]
            core._world.pg_coalesce_state.pop(group, None)  # torch does not remove the state after an error
        for finish in pending:
            finish()

    distributed._coalescing_manager = core._coalescing_manager = coalescing_manager


def _is_dense(tensor):
    return tensor.is_contiguous(memory_format=torch._prims_common.suggest_memory_format(tensor))


def delay_destroy(distributed):
    """Delay a group's end, because gloo may abort a peer in its last collective (observed with torch
    2.13)."""
    core = distributed.distributed_c10d
    destroy = core.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group=None):
        time.sleep(0.2)
        destroy(group)

    distributed.destroy_process_group = core.destroy_process_group = destroy_process_group


def matching_interfaces(pattern):
    """Return this node's interfaces that match a value of NCCL_SOCKET_IFNAME.

    A value is a list of prefixes separated by commas. A `=` before the list turns the prefixes into exact
    names. A `^` at the beginning of the value excludes the interfaces that match.
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    excluding = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    exact = pattern.startswith("=")
    names = [name.partition(":")[0] for name in pattern.removeprefix("=").split(",") if name]

    def matches(interface):
        return not names or any(interface == name if exact else interface.startswith(name) for name in names)

    return [interface for _, interface in socket.if_nameindex() if matches(interface) != excluding]


def _check_interface(distributed):
    """Raise if NCCL_SOCKET_IFNAME matches no interface. NCCL ignores a value that has a single character."""
    pattern = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if len(pattern) > 1 and not matching_interfaces(pattern):
        interfaces = " ".join(name for _, name in socket.if_nameindex())
        raise distributed.DistBackendError(
            f"NCCL error: invalid usage, NCCL version {'.'.join(map(str, NCCL))}\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
            "Last error:\nBootstrap : no socket interface found\n"
            f"NCCL_SOCKET_IFNAME is {pattern}; this node has {interfaces}"
        )


def _patch_ddp(ddp, groups):
    init, forward = ddp.__init__, ddp.forward

    @functools.wraps(init)
    def without_devices(self, module, device_ids=None, output_device=None, *args, **kwargs):
        for device in (*(device_ids or ()), output_device):
            gpu_index(device)
        if len(device_ids or ()) > 1:
            raise ValueError("device_ids can only be None or contain a single element.")
        first, group = next(module.parameters(), None), kwargs.get("process_group")
        if first is not None and first.is_cuda:
            groups.connect(gpu_of(first), group)
            init(self, module, None, None, *args, **kwargs)
        else:
            init(self, module, device_ids, output_device, *args, **kwargs)
            groups.check_cpu_backend(group)
        self.input_gpu = gpu_index(device_ids[0]) if device_ids else None

    @functools.wraps(forward)
    def with_inputs(self, *inputs, **kwargs):
        if self.input_gpu is not None:
            inputs, kwargs = torch.utils._pytree.tree_map_only(
                Tensor, lambda tensor: tensor.cuda(self.input_gpu), (inputs, kwargs)
            )
        return forward(self, *inputs, **kwargs)

    ddp.__init__, ddp.forward = without_devices, with_inputs


def _patch_hooks(bucket):
    """Set the GPU for gradients that are passed to communication hooks; C++ creates them without a GPU."""
    for name in ("buffer", "gradients"):
        get = getattr(bucket, name)

        def on_gpu(self, get=get):
            gradients = get(self)
            first = gradients if isinstance(gradients, Tensor) else gradients[0]
            set_gpu(first, gpu_of(self.parameters()[0]))
            return gradients

        setattr(bucket, name, on_gpu)
