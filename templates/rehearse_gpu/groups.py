"""Process groups and DistributedDataParallel: gloo where nccl was asked for."""

import contextlib
import functools
import inspect
import os
import socket
import time
import zlib

import torch

from rehearse_gpu.devices import NCCL, current_device, index, visible
from rehearse_gpu.reductions import Reduction, as_bytes, real_type, refuse_type
from rehearse_gpu.tensors import Tensor, place_of, places, put

FLAT = "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"
FLAT += "_all_gather_base", "_reduce_scatter_base"


class Groups:
    """By process group: the backends that it was asked for with, whether its ranks have met, and what is done
    `later`, when the collectives that a script has put together have ended.
    """

    def __init__(self, distributed):
        self.distributed, self.core = distributed, distributed.distributed_c10d
        self.asked, self.met, self.later = {}, set(), {}

    def backends(self, group):
        return self.asked.get(group or self.core._get_default_group(), "")

    def refuse_the_host(self, group):
        """As a group of NCCL alone has nothing for a tensor that is on the CPU."""
        if self.backends(group) == "nccl":
            raise RuntimeError("No backend type associated with device type cpu")

    def meet(self, place, group):
        """As NCCL does when its ranks first meet, refuse a wrong interface, and two of them on one GPU."""
        group = group or self.core._get_default_group()
        if "nccl" not in self.backends(group) or group in self.met:
            return
        self.met.add(group)
        _find_interface(self.distributed)
        host = f"{socket.gethostname()} {os.environ.get('GROUP_RANK')}"
        own = torch.tensor([zlib.crc32(host.encode()), visible()[place]])
        everybody = [torch.empty_like(own) for _ in range(self.core.get_world_size(group))]
        self.core.all_gather(everybody, own, group)
        everybody = [one.tolist() for one in everybody]
        for rank, one in enumerate(everybody):
            if (other := everybody.index(one)) != rank:
                raise self.distributed.DistBackendError(
                    f"NCCL error: Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device "
                    f"{one[1]}. Call torch.cuda.set_device(local_rank) before anything is moved"
                )


def answer_nccl(distributed):
    """Have process groups meet over gloo, DistributedDataParallel take modules that are on the CPU."""
    groups = Groups(distributed)
    _answer_making(distributed, groups)
    _answer_collectives(distributed, groups)
    _answer_coalescing(distributed, groups)
    _answer_ddp(torch.nn.parallel.DistributedDataParallel, groups)
    _answer_hooks(distributed.GradBucket)


def _answer_making(distributed, groups):
    core = groups.core
    begin, divide = core.init_process_group, core.new_group

    @functools.wraps(begin)
    def init_process_group(backend=None, *args, **named):
        index(named.pop("device_id", None))
        text = str(backend or "cpu:gloo,cuda:nccl").lower()
        begin("gloo" if "nccl" in text else backend, *args, **named)
        groups.asked[core._get_default_group()] = text

    @functools.wraps(divide)
    def new_group(*args, **named):
        named.pop("device_id", None)
        text = str(named.get("backend") or groups.backends(None)).lower()
        group = divide(*args, **{**named, "backend": "gloo" if "nccl" in text else named.get("backend")})
        groups.asked[group] = text
        return group

    for module in (distributed, core):
        module.init_process_group, module.new_group = init_process_group, new_group
        module.is_nccl_available = lambda: True
    distributed.get_backend = lambda group=None: groups.backends(group) or core.get_backend(group)


def _answer_collectives(distributed, groups):
    core = groups.core
    together = "all_reduce broadcast reduce all_gather all_gather_into_tensor gather scatter reduce_scatter"
    together += " reduce_scatter_tensor all_to_all all_to_all_single all_gather_single reduce_scatter_single"
    together += " all_reduce_coalesced all_gather_coalesced _all_gather_base _reduce_scatter_base"
    for name in f"{together} send recv isend irecv".split():  # as scripts call them; torch's own calls stay
        if hasattr(core, name):
            setattr(distributed, name, _collective(getattr(core, name), groups))
    coalesced = distributed._broadcast_coalesced

    def broadcast_coalesced(group, tensors, *others):
        """What DistributedDataParallel begins with, per GPU; C++ sees but one device."""
        for goal in dict.fromkeys(map(place_of, tensors)):
            coalesced(group, [one for one in tensors if place_of(one) == goal], *others)

    def barrier(group=None, async_op=False, device_ids=None):
        for device in device_ids or ():
            index(device)
        if groups.backends(group) == "nccl":
            groups.meet(current_device(), group)
        return core.barrier(group, async_op)

    distributed._broadcast_coalesced = broadcast_coalesced
    core.isend, core.irecv = distributed.isend, distributed.irecv  # batch_isend_irecv compares with them
    distributed.barrier = barrier


def _collective(function, groups):
    name, core, known = function.__name__, groups.core, inspect.signature(function)

    def flattened(tensor):
        """As nccl takes it, in whatever shape; gloo compares shapes."""
        return tensor.view(-1) if tensor.is_contiguous() else tensor

    def change(given, what):
        given.update(torch.utils._pytree.tree_map_only(Tensor, what, dict(given)))

    def call_as_nccl(asked, group, tensors):
        """Call it with what nccl carries or reduces; what gloo lacks of that is done here."""
        given = asked.arguments
        if "op" not in given:
            for one in tensors:
                refuse_type(real_type(one.dtype))
            change(given, as_bytes)
            return function(*asked.args, **asked.kwargs)
        into, dtype = given.get("output"), tensors[0].dtype
        if into is None:  # torch gives nccl complex numbers as two, but not to scatter them
            dtype = real_type(dtype)
        plan = Reduction(groups.distributed, given["op"], dtype, group.size())
        given["op"] = plan.op
        keeps = into is not None or (name == "reduce" and not _is_root(given, group, core))
        sent = {id(one): plan.result(one) if one is into else plan.before(one, keeps) for one in tensors}
        change(given, lambda one: sent.get(id(one), one))

        def finish():
            for one in tensors if into is None else [into]:
                plan.after(one, sent[id(one)])

        if (keeps and into is None) or not plan.is_later:
            return function(*asked.args, **asked.kwargs)
        work = function(*asked.args, **asked.kwargs)
        if group in groups.later:
            groups.later[group].append(finish)
            return work
        if work is not None:
            work.wait()
        finish()
        return work

    @functools.wraps(function)
    def call(*args, **named):
        try:
            asked = known.bind(*args, **named)
        except TypeError:
            return function(*args, **named)
        asked.apply_defaults()
        group = asked.arguments.get("group") or core._get_default_group()
        if name in FLAT:
            change(asked.arguments, flattened)
        found = places(asked.arguments.values())
        if any(place is None for _, place in found):
            groups.refuse_the_host(group)
        elif found and "nccl" in groups.backends(group):
            if not name.endswith(("send", "recv")):
                groups.meet(found[0][1], group)
                if not all(map(_is_dense, found)):
                    raise ValueError("Tensors must be contiguous")
            return call_as_nccl(asked, group, [tensor for tensor, _ in found])
        return function(*asked.args, **asked.kwargs)

    return call


def _is_root(given, group, core):
    """Whether this rank gets what is reduced."""
    if given.get("group_dst") is not None:
        return given["group_dst"] == group.rank()
    return given["dst"] == core.get_rank()


def _answer_coalescing(distributed, groups):
    """What is done after collectives that a script puts together is done when they have ended."""
    core = groups.core
    together = core._coalescing_manager

    @contextlib.contextmanager
    def coalescing_manager(group=None, device=None, *others, **named):
        group = group or core._get_default_group()
        later = groups.later[group] = []
        try:
            with together(
                group, None if "nccl" in groups.backends(group) else device, *others, **named
            ) as begun:
                yield begun
            if later:
                begun.wait()
        finally:
            del groups.later[group]
            core._world.pg_coalesce_state.pop(group, None)  # torch leaves it where one was refused
        for finish in later:
            finish()

    distributed._coalescing_manager = core._coalescing_manager = coalescing_manager


def _is_dense(found):
    return found[0].is_contiguous(memory_format=torch._prims_common.suggest_memory_format(found[0]))


def end_after_peers(distributed):
    """Destroy a group a moment later: else gloo may abort a peer in its last collective (seen with 2.13)."""
    core = distributed.distributed_c10d
    destroy = core.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group=None):
        time.sleep(0.2)
        destroy(group)

    distributed.destroy_process_group = core.destroy_process_group = destroy_process_group


def chosen(pattern):
    """The interfaces of this node that a pattern of NCCL's lets through.

    Prefixes with commas between; `=` before them: whole names; `^` before all: every other interface.
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    excluding = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    exact = pattern.startswith("=")
    asked = [one.partition(":")[0] for one in pattern.removeprefix("=").split(",") if one]

    def named(interface):
        return not asked or any(interface == one if exact else interface.startswith(one) for one in asked)

    return [name for _, name in socket.if_nameindex() if named(name) != excluding]


def _find_interface(distributed):
    """NCCL_SOCKET_IFNAME is find or fail; one letter is as good as none."""
    pattern = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if len(pattern) > 1 and not chosen(pattern):
        there = " ".join(name for _, name in socket.if_nameindex())
        raise distributed.DistBackendError(
            f"NCCL error: invalid usage, NCCL version {'.'.join(map(str, NCCL))}\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
            "Last error:\nBootstrap : no socket interface found\n"
            f"NCCL_SOCKET_IFNAME is {pattern}; this node has {there}"
        )


def _answer_ddp(kind, groups):
    begin, forward = kind.__init__, kind.forward

    @functools.wraps(begin)
    def without_devices(self, module, device_ids=None, output_device=None, *args, **named):
        for device in (*(device_ids or ()), output_device):
            index(device)
        if len(device_ids or ()) > 1:
            raise ValueError("device_ids can only be None or contain a single element.")
        first, group = next(module.parameters(), None), named.get("process_group")
        if first is not None and first.is_cuda:
            groups.meet(place_of(first), group)
            begin(self, module, None, None, *args, **named)
        else:
            begin(self, module, device_ids, output_device, *args, **named)
            groups.refuse_the_host(group)
        self.inputs_to = index(device_ids[0]) if device_ids else None

    @functools.wraps(forward)
    def with_inputs(self, *inputs, **named):
        if self.inputs_to is not None:
            inputs, named = torch.utils._pytree.tree_map_only(
                Tensor, lambda one: one.cuda(self.inputs_to), (inputs, named)
            )
        return forward(self, *inputs, **named)

    kind.__init__, kind.forward = without_devices, with_inputs


def _answer_hooks(bucket):
    """The bucket of gradients that a communication hook gets: C++ made it without a place."""
    for name in ("buffer", "gradients"):
        get = getattr(bucket, name)

        def placed(self, get=get):
            found = get(self)
            put(found if isinstance(found, Tensor) else found[0], place_of(self.parameters()[0]))
            return found

        setattr(bucket, name, placed)
