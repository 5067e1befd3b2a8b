"""The network interface that NCCL would take, as NCCL_SOCKET_IFNAME names it."""

import fcntl
import socket

SIOCGIFADDR = 0x8915


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

    return [interface for interface in _with_address() if named(interface) != excluding]


def _with_address():
    """The names of the interfaces that have an IPv4 address: NCCL sees no other."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                fcntl.ioctl(asking, SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                found.append(name)
            except OSError:
                continue
    return found
