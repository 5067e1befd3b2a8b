"""The HTTP server of the metadata service, on 169.254.169.254 beside the nodes: in the switch's namespace.

Port 80 of the nodes themselves stays free. A socket belongs to the namespace in which it was made, whoever
accepts from it later; a node is known by its address.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from awsddp.local.network import METADATA_ADDRESS, NAMESPACES

CLONE_NEWNET = 0x40000000


def serve(application: Any, namespace: str) -> None:
    """Serve a WSGI application in a namespace until this process ends.

    :raises OSError: the address cannot be bound there.
    """
    from werkzeug.serving import make_server

    with ThreadPoolExecutor(1) as alone:  # a thread that ends in the namespace
        listening = alone.submit(_listen, namespace).result()
    server = make_server(METADATA_ADDRESS, 80, application, threaded=True, fd=listening.detach())
    threading.Thread(target=server.serve_forever, name="metadata", daemon=True).start()


def _listen(namespace: str) -> socket.socket:
    with (NAMESPACES / namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    return socket.create_server((METADATA_ADDRESS, 80))
