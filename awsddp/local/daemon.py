"""The process of a local cloud: `python -m awsddp.local.daemon HOME LOCK`.

It reads what was asked for (`settings.json`), takes up the state of an earlier run, opens the network, serves
the endpoint and says where (`daemon.json`). However it ends, it leaves everything in place: `control.stop`
sweeps what it had, and a new start finds it again. One that nobody asked for by name and nobody needs any
more sweeps for itself.
"""

from __future__ import annotations

import gc
import ipaddress
import json
import logging
import os
import pwd
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from awsddp.errors import AwsddpError, LocalCloudError
from awsddp.local import loopback_cleanup, network
from awsddp.local.control import REGION, client_lock, read_report, sweep
from awsddp.local.hosts import Hosts, LoopbackHosts
from awsddp.local.machine import Place, write_json
from awsddp.local.nspawn import NspawnHosts
from awsddp.state import take

NO_HOSTS_BLOCK = ipaddress.IPv4Network("10.77.0.0/16")
S3_PORT = 9000  # beside the metadata service
LOOK_S = 1.0  # between two looks whether it is needed
QUIET_S = 5.0  # so long after its last call an EC2 client still counts as there


def main() -> None:
    place = Place(Path(sys.argv[1]))
    # The home's lock, taken by who started us: held until this process ends, and by no child of it.
    lock = int(sys.argv[2])
    os.set_inheritable(lock, False)
    os.write(lock, str(os.getpid()).encode())
    # One whose files were removed, and commands that a killed one left half done: AWSDDP_HOST is the mark
    # of this one and of what it starts.
    loopback_cleanup.end(place.daemon_mark)
    try:
        serve(place)
    except AwsddpError as error:
        write_json(place.report, {**read_report(place), **error.document()})
        sys.exit(error.exit_code)


def serve(place: Place) -> None:
    """Serve until nobody needs it.

    :raises AwsddpError: the network or the state of an earlier run cannot be used.
    """
    settings = json.loads(place.settings.read_text())
    mode = settings["mode"]
    earlier = read_report(place)
    block = ipaddress.IPv4Network(earlier["block"]) if "block" in earlier else None
    if mode == "nspawn":
        block, _holder = network.open_switch(place, block)
    elif mode == "loopback":
        block, _holder = network.take_block([block] if block else network.LOOPBACK_BLOCKS)
    hosts = {"nspawn": NspawnHosts, "loopback": LoopbackHosts, "records": Hosts}[mode](place)
    block = block or NO_HOSTS_BLOCK

    gc.disable()  # moto's tables are read once and never dropped
    from werkzeug.serving import make_server

    from awsddp.local.emulator import Emulator, Store
    from awsddp.local.faults import Faults
    from awsddp.local.http_server import Front, serve_nodes
    from awsddp.local.lifecycle import Lifecycle
    from awsddp.local.s3_api import Buckets
    from awsddp.local.serving import Handler

    gc.freeze()
    gc.enable()
    emulator = Emulator(block, image_tags=_image_tags(mode))
    faults = Faults(place.faults)
    store = Store(place.state, place.living, keeps=partial(faults.hold, "stale"))
    store.load()
    emulator.backend(REGION)
    key, secret = emulator.credentials()
    store.save()
    lifecycle = Lifecycle(emulator, store, hosts, faults)
    buckets = Buckets(place.buckets, place.uploads, emulator, faults)
    front = Front(emulator, store, lifecycle, faults, secret=secret, mode=mode, buckets=buckets)
    if mode == "nspawn":
        serve_nodes(front.respond_metadata, place.switch, 80)
        serve_nodes(buckets, place.switch, S3_PORT)
    port = int(earlier.get("port", 0))
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for each request
    try:
        server = make_server("127.0.0.1", port, front, threaded=True, request_handler=Handler)
    except (OSError, SystemExit) as error:  # werkzeug prints the error and leaves
        raise LocalCloudError(
            f"the local cloud's port {port} is taken",
            why="another program took it while this one did not run, and its clients know it by it",
            next=f"end the other program (ss -tlnp 'sport = {port}'), or: awsddp local stop",
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
    write_json(place.report, report)
    threading.Thread(target=_watch, args=(place, front, server), daemon=True).start()
    server.serve_forever(poll_interval=0.1)


def _watch(place: Place, front: Any, server: Any) -> None:
    """End this daemon and all that it has once nobody needs it, or its files were removed.

    A client that is killed while it starts one leaves it behind: its own end would have stopped it.
    """
    needed_at = time.monotonic()
    while True:
        time.sleep(LOOK_S)
        try:
            settings = json.loads(place.settings.read_text())
        except FileNotFoundError:  # no thread of this process may boot a host meanwhile
            os.environ["AWSDDP_HOME"] = str(place.home)
            os.execv(sys.executable, [sys.executable, "-m", "awsddp", "local", "stop"])
        if not settings["auto"] or _is_needed(place, front):
            needed_at = time.monotonic()
        elif time.monotonic() - needed_at >= settings["patience_s"]:
            with suppress(BlockingIOError), client_lock(place, wait=False):
                if not _is_needed(place, front):
                    try:
                        sweep(place)
                    finally:
                        server.shutdown()
                    return


def _is_needed(place: Place, front: Any) -> bool:
    """Tell whether an instance lives, or a client is there: each of ours holds a lock, shared."""
    if place.living.exists() or time.monotonic() - front.asked_at < QUIET_S:
        return True
    with place.presence.open("a") as lock:
        return not take(lock)


def _image_tags(mode: str) -> dict[str, str]:
    """What a client must know of the machines of this mode, and learns from the tags of their images."""
    if mode == "records":
        return {"awsddp:hosts": "none"}
    if mode == "loopback":
        return {"awsddp:ssh-user": pwd.getpwuid(os.getuid()).pw_name}
    return {}


if __name__ == "__main__":
    main()
