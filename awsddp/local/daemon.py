"""The process of a local cloud: `python -m awsddp.local.daemon HOME LOCK`.

It reads what was asked for (`settings.json`), takes up the state of an earlier run, opens the network, serves
the endpoint and says where (`daemon.json`). It ends on SIGTERM and leaves everything in place: `control.stop`
sweeps what it had, and a new start finds it again. One that nobody asked for by name and nobody needs any
more (`vigil`) sweeps for itself.
"""

from __future__ import annotations

import gc
import io
import ipaddress
import json
import os
import pwd
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from awsddp.cluster import read_numbers
from awsddp.errors import AwsddpError, LocalCloudError
from awsddp.local import cgroups, network, vigil
from awsddp.local.control import KEPT, REGION, write_json
from awsddp.local.hosts import Hosts, NoHosts
from awsddp.local.place import Place

NO_HOSTS_BLOCK = ipaddress.IPv4Network("10.77.0.0/16")
QUIET_S = 5.0  # so long after its last call an EC2 client still counts as there


def main() -> None:
    place = Place(Path(sys.argv[1]))
    # The home's lock, taken by who started us: held until this process ends, and by no child of it.
    lock = int(sys.argv[2])
    os.set_inheritable(lock, False)
    os.write(lock, str(os.getpid()).encode())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve(place)
    except AwsddpError as error:
        earlier = json.loads(place.report.read_text()) if place.report.exists() else {}
        write_json(place.report, {**earlier, **error.document()})
        sys.exit(error.exit_code)


def serve(place: Place) -> None:
    """Serves until SIGTERM.

    :raises AwsddpError: the network or the state of an earlier run cannot be used.
    """
    settings = json.loads(place.settings.read_text())
    mode = settings["mode"]
    earlier = json.loads(place.report.read_text()) if place.report.exists() else {}
    block = ipaddress.IPv4Network(earlier["block"]) if "block" in earlier else None
    ssh_port = 22
    if mode == "nspawn":
        cgroups.enter(place)
        block = network.open_switch(place, block)
    elif mode == "loopback":
        block, _holder = network.take_loopback(block)
        ssh_port = earlier.get("ssh_port") or network.free_port(block)
    block = block or NO_HOSTS_BLOCK

    gc.disable()  # moto's tables are read once and never dropped
    from werkzeug.serving import make_server

    from awsddp.local.emulator import Emulator
    from awsddp.local.faults import Faults
    from awsddp.local.front import Front
    from awsddp.local.lifecycle import Lifecycle
    from awsddp.local.store import Store

    gc.freeze()
    gc.enable()
    emulator = Emulator(block, image_tags=_image_tags(mode))
    store = Store(place.state, place.living)
    store.load()
    emulator.backend(REGION)
    key, secret = emulator.credentials()
    store.save()
    hosts: Hosts = NoHosts()
    if mode == "nspawn":
        from awsddp.local import inside, torchenv
        from awsddp.local.nspawn import NspawnHosts

        image = torchenv.describe(Path(settings["torch"]))
        inside.serve(partial(_metadata, emulator, store, secret), place.switch)
        hosts = NspawnHosts(place, image, share=lambda: _shared(place))
    elif mode == "loopback":
        from awsddp.local.loopback import LoopbackHosts

        hosts = LoopbackHosts(place, Path(settings["torch"]), port=ssh_port)
    faults = Faults(place.faults)
    lifecycle = Lifecycle(emulator, store, hosts, faults)
    front = Front(
        emulator,
        store,
        lifecycle,
        faults,
        secret=secret,
        status=lambda: status(emulator),
        mode=mode,
    )
    port = int(earlier.get("port", 0))
    try:
        server = make_server("127.0.0.1", port, front, threaded=True, request_handler=_quiet())
    except (OSError, SystemExit) as error:  # werkzeug prints the error and leaves
        raise LocalCloudError(
            f"the local cloud's port {port} is taken",
            why="another program took it while this one did not run, and its clients know it by it",
            next=f"end the other program (ss -tlnp 'sport = {port}'), or: awsddp local stop",
        ) from error
    report = {
        "pid": os.getpid(),
        "port": server.server_port,
        "block": str(block),
        "ssh_port": ssh_port,
        "access_key_id": key,
        "secret_access_key": secret,
    }

    def leave(*_: object) -> None:
        with suppress(OSError):  # who looks for us now waits until we are gone
            write_json(place.report, {key: report[key] for key in KEPT})
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, leave)
    lifecycle.start()
    write_json(place.report, report)

    def lives() -> bool:
        return place.living.exists() or time.monotonic() - front.asked_at < QUIET_S

    vigil.start(place, lives=lives, end=lambda: _leave(place, server), lost=lambda: _become_stop(place))
    server.serve_forever(poll_interval=0.1)


def _leave(place: Place, server: Any) -> None:
    """Ends this daemon, and nothing of it stays."""
    from awsddp.local.sweep import sweep

    try:
        cgroups.leave(place)
        sweep(place)
    except AwsddpError:
        traceback.print_exc()
    server.shutdown()


def _become_stop(place: Place) -> None:
    """Becomes `awsddp local stop`: no thread of this process may boot a host meanwhile."""
    cgroups.leave(place)
    os.environ["AWSDDP_HOME"] = str(place.home)
    os.execv(sys.executable, [sys.executable, "-m", "awsddp", "local", "stop"])


def status(emulator: Any) -> dict[str, Any]:
    """What `local status` shows of the instances."""
    with emulator.lock:
        return {
            "instances": [
                {
                    "instance_id": one.id,
                    "state": one.state,
                    "instance_type": one.instance_type,
                    "region": one.region_name,
                    "private_ip": one.private_ip if one.state != "terminated" else None,
                    "name": (tags := {tag["key"]: tag["value"] for tag in one.get_tags()}).get("Name"),
                    "cluster": tags.get("awsddp:cluster"),
                    "node": _node(tags, one.ami_launch_index),
                    "reason": one.state_reason.message,
                }
                for one in emulator.instances()
            ]
        }


def _node(tags: dict[str, str], index: int) -> int | None:
    """The number that an instance has in its cluster; None where it is in none."""
    with suppress(KeyError, ValueError, IndexError):
        return int(read_numbers(tags["awsddp:nodes"])[index])
    return None


def _image_tags(mode: str) -> dict[str, str]:
    """What a client must know of the machines of this mode, and learns from the tags of their images."""
    if mode == "records":
        return {"awsddp:hosts": "none"}
    if mode == "loopback":
        return {"awsddp:ssh-user": pwd.getpwuid(os.getuid()).pw_name}
    return {}


def _metadata(
    emulator: Any, store: Any, secret: str, address: str, method: str, path: str, headers: Any
) -> tuple[int, bytes]:
    """Answer the metadata request of the instance with this address."""
    from awsddp.local import metadata

    with emulator.lock:
        alive = (one for one in emulator.instances() if one.state != "terminated")
        found = next((one for one in alive if one.private_ip == address), None)
        if found is None:
            return 404, b""
        if metadata.renew_role(found):
            store.save()
        return metadata.answer(found, method=method, path=path, headers=headers, secret=secret)


def _shared(place: Place) -> list[Path]:
    """Read when a node boots: a later `local start --share` adds to it."""
    return [Path(path) for path in json.loads(place.settings.read_text())["share"]]


def _quiet() -> Any:
    from moto.moto_server.werkzeug_app import MotoRequestHandler

    handler: Any = MotoRequestHandler

    class Quiet(handler):  # type: ignore[misc]
        """No line in the log for each request; connections are kept alive, as EC2's are."""

        protocol_version = "HTTP/1.1"
        rfile: Any
        disable_nagle_algorithm = True  # else the body waits 40 ms for the client's ACK of the headers
        _kept = False

        def run_wsgi(self) -> None:
            """Answer one request, whose body is read first, as the next request comes after it."""
            length: str = self.headers.get("Content-Length", "0")
            rfile = self.rfile
            unread = "Transfer-Encoding" in self.headers or "Expect" in self.headers
            self._kept = length.isdecimal() and not unread and not self.close_connection
            if self._kept:
                self.rfile = io.BytesIO(rfile.read(int(length)))
            try:
                super().run_wsgi()
            finally:
                self.rfile, self._kept = rfile, False

        def send_header(self, keyword: str, value: str) -> None:
            """Send a header, but not werkzeug's `Connection: close`, which it adds to each reply."""
            if not (self._kept and keyword == "Connection"):
                super().send_header(keyword, value)

        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            return None

    return Quiet


if __name__ == "__main__":
    main()
