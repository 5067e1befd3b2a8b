"""The process of a local cloud: `python -m awsddp.local.daemon HOME LOCK`.

The daemon reads its settings (`settings.json`), loads an earlier run's state, sets up the network, serves the
endpoint and reports its address (`daemon.json`).

If the daemon is killed or crashes, its hosts and files stay: a new daemon resumes with them, and
`control.stop` removes them. A daemon that a command started automatically removes its hosts and files itself
once it is unused.
"""

from __future__ import annotations

import gc
import ipaddress
import json
import logging
import os
import pwd
import random
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.errors import AwsddpError, LocalCloudError
from awsddp.local import loopback_cleanup, network
from awsddp.local.control import REGION, hold_client_lock, read_report, sweep
from awsddp.local.hosts import Hosts, LoopbackHosts
from awsddp.local.machine import CloudPaths, write_json
from awsddp.local.nspawn import NspawnHosts
from awsddp.state import try_lock

if TYPE_CHECKING:
    from awsddp.local.http_server import EndpointApp

NO_HOSTS_BLOCK = ipaddress.IPv4Network("10.77.0.0/16")
S3_PORT = 9000  # at the metadata service's address
_PORTS = range(15_000, 29_000)
"""The endpoint's ports. Jobs use ports from 29400, and kernels assign higher ones to outgoing connections.
The same port must be free again when the daemon restarts."""
LOOK_S = 1.0  # the time between two checks whether the daemon is still used
QUIET_S = 5.0  # the time after its last call for which an EC2 client counts as connected


def main() -> None:
    paths = CloudPaths(Path(sys.argv[1]))
    # The parent process took the daemon lock. This process holds the lock until the process ends, and no
    # child process inherits the lock.
    lock = int(sys.argv[2])
    os.set_inheritable(lock, False)
    os.write(lock, str(os.getpid()).encode())
    # Kill an earlier daemon whose files were removed, and commands that a killed daemon left running. All of
    # these processes have this mark in AWSDDP_HOST.
    loopback_cleanup.kill_processes(paths.daemon_mark)
    try:
        serve(paths)
    except AwsddpError as error:
        write_json(paths.report, {**read_report(paths), **error.document()})
        sys.exit(error.exit_code)


def serve(paths: CloudPaths) -> None:
    """Serve requests until `_watch` ends this process.

    :raises AwsddpError: the network or an earlier run's state cannot be used.
    """
    settings = json.loads(paths.settings.read_text())
    mode = settings["mode"]
    earlier = read_report(paths)
    block = ipaddress.IPv4Network(earlier["block"]) if "block" in earlier else None
    if mode == "nspawn":
        block, _holder = network.open_switch(paths, block)
    elif mode == "loopback":
        block, _holder = network.take_block([block] if block else network.LOOPBACK_BLOCKS)
    hosts = {"nspawn": NspawnHosts, "loopback": LoopbackHosts, "records": Hosts}[mode](paths)
    block = block or NO_HOSTS_BLOCK

    gc.disable()  # each garbage collection would scan moto's large tables
    from werkzeug.serving import make_server

    from awsddp.local.emulator import Emulator, Store
    from awsddp.local.faults import Faults
    from awsddp.local.http_server import EndpointApp, serve_nodes
    from awsddp.local.lifecycle import Lifecycle
    from awsddp.local.s3_api import S3App
    from awsddp.local.serving import KeepAliveHandler

    gc.freeze()
    gc.enable()
    emulator = Emulator(block, image_tags=_image_tags(mode))
    faults = Faults(paths.faults)
    store = Store(paths.state, paths.live_mark, keeps_history=partial(faults.has_effect, "stale"))
    store.load()
    emulator.backend(REGION)
    key, secret = emulator.credentials()
    store.save()
    lifecycle = Lifecycle(emulator, store, hosts, faults)
    buckets = S3App(paths.buckets, paths.uploads, emulator, faults)
    app = EndpointApp(emulator, store, lifecycle, faults, secret=secret, mode=mode, buckets=buckets)
    if mode == "nspawn":
        serve_nodes(app.respond_metadata, paths.switch, 80)
        serve_nodes(buckets, paths.switch, S3_PORT)
    port = int(earlier.get("port") or _choose_port())
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # werkzeug logs each request
    try:
        server = make_server("127.0.0.1", port, app, threaded=True, request_handler=KeepAliveHandler)
    except (OSError, SystemExit) as error:  # werkzeug prints the error and exits
        raise LocalCloudError(
            f"the local cloud's port {port} is taken",
            why="another program took it while the daemon was not running; clients still use this port",
            next_step=f"end the other program (ss -tlnp 'sport = {port}'), or: awsddp local stop",
        ) from error
    lifecycle.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    node_s3 = {"nspawn": f"http://{network.METADATA_ADDRESS}:{S3_PORT}", "loopback": endpoint}.get(mode)
    report = {
        "pid": os.getpid(),
        "port": server.server_port,
        "endpoint": endpoint,
        "node_s3": node_s3,
        "region": REGION,
        "block": str(block),
        "caller_address": str(block[1]),
        "ssh_port": hosts.ssh_port,
        "access_key_id": key,
        "secret_access_key": secret,
    }
    write_json(paths.report, report)
    threading.Thread(target=_watch, args=(paths, app, server), daemon=True).start()
    server.serve_forever(poll_interval=0.1)


def _watch(paths: CloudPaths, app: EndpointApp, server: Any) -> None:
    """End this daemon and remove its hosts once it is unused or its files were removed.

    Clients stop a daemon that they started; this function ends a daemon whose client was killed.
    """
    used_at = time.monotonic()
    while True:
        time.sleep(LOOK_S)
        try:
            settings = json.loads(paths.settings.read_text())
        except FileNotFoundError:  # exec ends all threads, which might boot another host
            os.environ["AWSDDP_HOME"] = str(paths.home)
            os.execv(sys.executable, [sys.executable, "-m", "awsddp", "local", "stop"])
        if not settings["auto"] or _is_used(paths, app):
            used_at = time.monotonic()
        elif time.monotonic() - used_at >= settings["patience_s"]:
            with suppress(BlockingIOError), hold_client_lock(paths, wait=False):
                if not _is_used(paths, app):
                    try:
                        sweep(paths)
                    finally:
                        server.shutdown()
                    return


def _is_used(paths: CloudPaths, app: EndpointApp) -> bool:
    """Return True if an instance is alive or a client is connected. awsddp's own clients hold a shared lock;
    any other client counts as connected for QUIET_S after its last call."""
    if paths.live_mark.exists() or time.monotonic() - app.last_call_at < QUIET_S:
        return True
    with paths.presence_lock.open("a") as lock:
        return not try_lock(lock)


def _choose_port() -> int:
    """Return a free port in _PORTS, or 0 (any port) if 100 of them are taken."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    return 0


def _image_tags(mode: str) -> dict[str, str]:
    """Return the image tags that tell clients which kind of host this mode has."""
    if mode == "records":
        return {"awsddp:hosts": "none"}
    if mode == "loopback":
        return {"awsddp:ssh-user": pwd.getpwuid(os.getuid()).pw_name}
    return {}


if __name__ == "__main__":
    main()
